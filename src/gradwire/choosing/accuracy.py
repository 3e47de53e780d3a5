"""Classes of accuracy, and the methods of every step that may be chosen in each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from gradwire.core.errors import SpecError
from gradwire.core.grammar import name_of
from gradwire.core.nearest import meant
from gradwire.core.registry import table
from gradwire.core.uses import Recommended

ACCURACIES: Mapping[str, str] = {
    "lossless": "the mean of all gradients in fp32, and nothing else",
    "safe": "no gradient loses more than a quarter of its norm in coding, from the first steps on, and training ended "
    "within the spread of fp32's seeds",
    "bold": "whatever is recommended: training ended near fp32 where it was measured, and may not where it was not",
}
"""What each class promises, from the most careful one on. Each allows what the one before it allows."""

SAFE_ERROR = 0.25
"""|x - s| / |x| at most for a safe method, where s is what is sent of a gradient x without error feedback: at the
beginning, in the middle and at the end of training, on both tasks of docs/building/quality.md."""


class Candidate(NamedTuple):
    """A method of every step that may be chosen.

    Attributes:
        spec: the method.
        accuracy: the most careful class that allows it.
    """

    spec: str
    accuracy: str

    @property
    def loses(self) -> str:
        """What training ended at where it was measured."""
        if self.spec in _ENDED_AT:
            return _ENDED_AT[self.spec]
        return ended_at(name_of(self.spec))


CANDIDATES = (
    Candidate("none", "lossless"),
    Candidate("fp16", "safe"),
    Candidate("int4", "safe"),
    Candidate("powersgd:8,factors=fp16", "bold"),
)
"""Each loses more and sends less than the one before it."""

_ENDED_AT = {"none": "fp32 as it is", "fp16": "byte-GPT: the same held-out loss as fp32, 2.599"}


def ended_at(name: str) -> str:
    """Return what the table of methods says that a recommended method ended at.

    >>> ended_at("powersgd")[:32]
    'byte-GPT: held-out loss 2.414 ± '
    """
    use = table()[name].use
    assert isinstance(use, Recommended)
    return use.cost


def allowed(accuracy: str) -> tuple[Candidate, ...]:
    """Return the methods that a class of accuracy allows, in the order in which they lose more.

    Raises:
        SpecError: another word, with the nearest class.

    >>> [candidate.spec for candidate in allowed("safe")]
    ['none', 'fp16', 'int4']
    """
    if accuracy not in ACCURACIES:
        raise SpecError(f"{accuracy!r} is no class of accuracy: {meant(accuracy, list(ACCURACIES))}")
    return tuple(each for each in CANDIDATES if allows(accuracy, each.accuracy))


def allows(accuracy: str, other: str) -> bool:
    """Whether a class of accuracy allows what another one does.

    >>> allows("safe", "lossless"), allows("safe", "bold")
    (True, False)
    """
    classes = list(ACCURACIES)
    return classes.index(other) <= classes.index(accuracy)
