"""Which of the known names somebody means who has written another one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping


def nearest(name: str, meanings: Mapping[str, str]) -> str | None:
    """Return the meaning of the key that is nearest to `name`; None where none is near.

    A key that differs in case and punctuation only is nearest, then the one that is spelled most alike.

    >>> nearest("Top_K", {"topk": "largest", "randomk": "random"})
    'largest'
    >>> nearest("rndomk", {"topk": "largest", "randomk": "random"})
    'random'
    """
    folded = {fold(key): meaning for key, meaning in meanings.items()}
    wanted = fold(name)
    close = [wanted] if wanted in folded else difflib.get_close_matches(wanted, folded, n=1, cutoff=0.6)
    return folded[close[0]] if close else None


def meant(name: str, known: Iterable[str], synonyms: Mapping[str, str] | None = None) -> str:
    """Return which of a few names is meant, or all of them, as the end of an error.

    >>> meant("densty", ["density", "values"])
    "did you mean 'density'?"
    """
    names = list(known)
    others = {synonym: name for synonym, name in (synonyms or {}).items() if name in names}
    close = nearest(name, {**others, **{n: n for n in names}})
    return f"did you mean {close!r}?" if close else f"known are {', '.join(names)}"


def fold(name: str) -> str:
    """Return the letters and digits of a name, in lower case: names that agree in them are the same to a reader."""
    return "".join(c for c in name.lower() if c.isalnum())
