"""Classes that had other names: saved states name reducers by their `repr`, and those of old names are read.

The table is the only place that knows an old name. Whoever renames a class whose `repr` stands in saved states adds a
line, and nothing else has to be done: every comparison with what was saved goes through `same`.

A setting that means something else today has another form in texts: `clip=` of momentum correction was that of a sum
up to version 0.2.0, where `clip_of=` was not written. A save goes on with what it was made with, so texts that differ
in `clip_of` alone are `alike`, and `gradwire.reducers.as_saved` makes the reducer that a save means. The epsilon of
`AdaptiveDCASGD` was always 1e-7, and not written.
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
_CLIP = re.compile(r"(momentum=[^,()]+, clip=([^,()]+))(?=[,)])(?!, clip_of=)")
_EPSILON = re.compile(r"(?<=\bAdaptiveDCASGD)(\(lr=[^,()]+, strength=[^,()]+, decay=[^,()]+)\)")
_CLIP_OF = re.compile(r"(?<=, clip=)([^,()]+), clip_of='(mean|sum)'")


def with_names_of_today(text: str) -> str:
    """Return a text of nested `repr`s in which every class has its name of today, and says what `clip` is of.

    >>> with_names_of_today("ErrorFeedback(inner=AllGather(codec=TopK(density=0.01)), decay=1.0)")
    'ErrorFeedback(inner=AllGatherExchange(codec=TopK(density=0.01)), decay=1.0)'
    >>> with_names_of_today("DGC(density=0.01, momentum=0.9, clip=2.0, ramp=0)")
    "DGC(density=0.01, momentum=0.9, clip=2.0, clip_of='sum', ramp=0)"
    """
    text = _CALL.sub(lambda found: FORMER_NAMES[found[1]], text)
    text = _EPSILON.sub(r"\1, epsilon=1e-07)", text)
    return _CLIP.sub(lambda found: f"{found[1]}, clip_of='{'sum' if float(found[2]) else 'mean'}'", text)


def with_former_names(text: str) -> str:
    """Return the same text as it was saved before these classes had their names of today.

    >>> with_former_names("AllReduceExchange(codec=Identity())")
    'AllReduce(codec=Identity())'
    """
    for former, today in FORMER_NAMES.items():
        text = re.sub(rf"\b{today}(?=\()", former, text)
    text = re.sub(r"(\bAdaptiveDCASGD\([^()]*), epsilon=1e-07\)", r"\1)", text)
    return _CLIP_OF.sub(lambda found: found[0] if float(found[1]) and found[2] == "mean" else found[1], text)


def same(saved: object, here: object) -> bool:
    """Whether a saved value is that of this run, where texts may name classes as they were called before.

    >>> same("AllReduce(codec=Identity())", "AllReduceExchange(codec=Identity())"), same(3, 4)
    (True, False)
    """
    return saved == here or (isinstance(saved, str) and with_names_of_today(saved) == here)


def alike(saved: str, here: str) -> bool:
    """Whether a saved text is that of this run, but for what clips are of: that is taken from the save.

    >>> alike("DGC(momentum=0.9, clip=2.0)", "DGC(momentum=0.9, clip=2.0, clip_of='mean')")
    True
    """
    return saved == here or _CLIP_OF.sub(r"\1", with_names_of_today(saved)) == _CLIP_OF.sub(r"\1", here)
