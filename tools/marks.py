"""Parts of pages that tools write, each between `<!-- name -->` and `<!-- end of name -->`."""

from __future__ import annotations


def replaced(text: str, name: str, part: str) -> str:
    """Return a page with one of its parts written anew.

    >>> replaced("<!-- a -->\\n\\nold\\n\\n<!-- end of a -->", "a", "new")
    '<!-- a -->\\n\\nnew\\n\\n<!-- end of a -->'
    """
    begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
    before, rest = text.split(begin)
    _, after = rest.split(end)
    return f"{before}{begin}\n{part}\n\n{end}{after}"
