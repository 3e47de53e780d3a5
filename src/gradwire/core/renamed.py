"""Classes that had other names: saved states name reducers by their `repr`, and those of old names are read.

The table is the only place that knows an old name. Whoever renames a class whose `repr` stands in saved states adds a
line, and nothing else has to be done: every comparison with what was saved goes through `same`.
"""

from __future__ import annotations

import re

FORMER_NAMES = {
    "AllGather": "AllGatherExchange",
    "AllGatherV": "AllGatherVExchange",
    "AllReduce": "AllReduceExchange",
    "WarmUp": "CompressionWarmUp",
}
"""What each class is called today, by what it was called before."""

_CALL = re.compile(r"\b(" + "|".join(FORMER_NAMES) + r")(?=\()")


def with_names_of_today(text: str) -> str:
    """Return a text of nested `repr`s in which every class has its name of today.

    >>> with_names_of_today("ErrorFeedback(inner=AllGather(codec=TopK(density=0.01)), decay=1.0)")
    'ErrorFeedback(inner=AllGatherExchange(codec=TopK(density=0.01)), decay=1.0)'
    """
    return _CALL.sub(lambda found: FORMER_NAMES[found[1]], text)


def with_former_names(text: str) -> str:
    """Return the same text as it was saved before these classes had their names of today.

    >>> with_former_names("AllReduceExchange(codec=Identity())")
    'AllReduce(codec=Identity())'
    """
    for former, today in FORMER_NAMES.items():
        text = re.sub(rf"\b{today}(?=\()", former, text)
    return text


def same(saved: object, here: object) -> bool:
    """Whether a saved value is that of this run, where texts may name classes as they were called before.

    >>> same("AllReduce(codec=Identity())", "AllReduceExchange(codec=Identity())"), same(3, 4)
    (True, False)
    """
    return saved == here or (isinstance(saved, str) and with_names_of_today(saved) == here)
