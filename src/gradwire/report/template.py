"""Pages of templates: one file each, which loads nothing from anywhere. Whatever is put into one is escaped."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined


@cache
def _environment() -> Environment:
    loader = PackageLoader("gradwire.report", "")
    made = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    made.filters["unbroken"] = unbroken
    return made


def unbroken(text: str) -> str:
    """A text in which no line ends between a number and the word after it.

    >>> unbroken("it takes 17.91 s")
    'it takes 17.91\\xa0s'
    """
    return re.sub(r"(?<=\d) (?=\w)", "\u00a0", text)


def rendered(name: str, **parts: Any) -> str:
    """The page that a template of this folder makes of its parts.

    >>> "<h1>a &lt;b&gt;</h1>" in rendered(
    ...     "frame.html", command="compare", task="toy", headline="a <b>", lede="", findings=[], conditions=[]
    ... )
    True
    """
    return _environment().get_template(name).render(**parts)
