"""Saved states: tensors by name, looked at before anything is changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from torch import Tensor

from gradwire.core.errors import StateError
from gradwire.core.renamed import same

Group = Mapping[str, Tensor]
Filled = dict[str, dict[str, Tensor]]


def cloned(group: Group) -> dict[str, Tensor]:
    """Copies of tensors by name."""
    return {name: tensor.clone() for name, tensor in group.items()}


def filled(
    saved: Mapping[str, Any], settings: Mapping[str, str], like: Mapping[str, Group], numbers: Sequence[str]
) -> Filled:
    """Return copies of the saved tensors, group by group, on the devices of those that they replace.

    Args:
        saved: from `state_dict`.
        settings: of this run, which must be those of the saved one.
        like: what there is, by group and name.
        numbers: names of the whole numbers beside the tensors.

    Raises:
        StateError: other settings, another model, or what is no saved state.
    """
    theirs = _mapping(saved, "settings")
    for name, value in settings.items():
        if not same(theirs.get(name), value):
            raise StateError(
                f"the saved state is of a server with {name} {_short(theirs.get(name))}, and here it is {_short(value)}"
            )
    for name in numbers:
        if not isinstance(saved.get(name), int):
            raise StateError(f"the saved state has no {name!r}: it is none of a server's")
    require_pairs(saved.get("seen"), "seen")
    return {name: group_like(_mapping(saved, name), group, name) for name, group in like.items()}


def require_pairs(saved: object, what: str) -> None:
    """Refuse a saved value that is no list of pairs of a client and a number.

    Raises:
        StateError: it is something else.
    """
    pairs = cast(list[Any], saved) if isinstance(saved, list) else [None]
    whole = [isinstance(pair, list) and [type(n) for n in cast(list[Any], pair)] == [int, int] for pair in pairs]
    if not all(whole):
        raise StateError(f"the saved {what!r} are no pairs of a client and a whole number")


def group_like(found: Mapping[str, Any], like: Group, what: str) -> dict[str, Tensor]:
    """Return copies of tensors that have the names, shapes and dtypes of `like`.

    Raises:
        StateError: they have others.
    """
    if found.keys() != like.keys():
        raise StateError(f"the saved {what} has {sorted(found)}, and here it has {sorted(like)}")
    for name, tensor in like.items():
        theirs = found[name]
        if not isinstance(theirs, Tensor) or (theirs.shape, theirs.dtype) != (tensor.shape, tensor.dtype):
            raise StateError(f"the saved {name!r} of {what} is none of {tuple(tensor.shape)} {tensor.dtype}")
    return {name: found[name].to(tensor.device, copy=True) for name, tensor in like.items()}


def _mapping(saved: object, name: str) -> Mapping[str, Any]:
    group = cast(Mapping[str, Any], saved).get(name) if isinstance(saved, Mapping) else None
    if not isinstance(group, Mapping):
        raise StateError(f"the saved state has no {name!r}: it is none of a server's")
    return cast(Mapping[str, Any], group)


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 80 else text[:80] + "..."
