"""What messages and reports call a method: the spec that it was read from."""

from __future__ import annotations

from typing import TypeVar

from typing_extensions import override

_SPEC = "_spec"

M = TypeVar("M", bound="Spoken")


class Spoken:
    """Something that a spec can name. Its `str` is that spec; made by hand, which no spec names, its `repr`.

    What ranks compare and saves hold is the `repr`, which says all; two specs may mean the same.
    """

    @override
    def __str__(self) -> str:
        return vars(self).get(_SPEC) or repr(self)


def called(made: M, spec: str) -> M:
    """Return what was made of a spec, which remembers it. The spec has no part in `==` and `repr`.

    >>> from gradwire.spec import parse
    >>> from gradwire.reducers.guard import Guard
    >>> str(parse("topk:0.01,ef=off")), str(Guard(parse("fp16")))
    ('topk:0.01,ef=off', 'Guard(inner=AllReduceExchange(codec=FP16()))')
    """
    object.__setattr__(made, _SPEC, spec)  # most of what is made is frozen
    return made


def called_as(made: M, like: Spoken) -> M:
    """Return what was made to stand in the place of `like`, and is called the same."""
    spec = vars(like).get(_SPEC)
    return called(made, spec) if spec else made
