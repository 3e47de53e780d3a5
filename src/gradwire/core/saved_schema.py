"""What a saved state must look like: every deviation is a `StateError` that says what is wrong and where.

The form is that of `gradwire.core.saved`. Nothing here knows a model; what a model needs is checked where it is loaded.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Annotated, Any, NoReturn, cast, get_args

import msgspec
import torch
from msgspec import Meta
from torch import Tensor

from gradwire.core.checked import checked, facts, shown, thread_safe
from gradwire.core.errors import StateError
from gradwire.core.record import Count
from gradwire.core.state import Kind

VERSION = 1

Saved = dict[str, Any]
Pieces = Sequence[Mapping[str, Any]]
Parameters = Mapping[str, Mapping[str, Pieces]]

SHARED = ("version", "reducer", "step", "seed", "scale", "world_size")
"""What is the same in the states of all ranks of a run at one step."""

TREE = "tree"
"""The key of a state that holds more than a session's: what `gradwire.core.tree` made of it, tensors aside."""

OVERLAP = "overlap"
"""The key of a state that says when its gradients travel, where that is not as by default; the same on all ranks."""

CHOICES = "choices"
"""The key of a state whose run had the method `auto`: what it has chosen so far; the same on all ranks."""

_KINDS = tuple(kind for kind in get_args(Kind) if kind != "scratch")
_REMEDY = ": pass what state_dict() returned"


def is_count(value: object) -> bool:
    """Whether it is a whole number of 0 or more."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


_HEAD = facts({
    "version": int, "reducer": str, "step": Count, "seed": int, "rank": Count, "parameters": Any,
    "world_size": Annotated[int, Meta(ge=1)], "scale": Annotated[float, Meta(gt=0, le=sys.float_info.max)],
})  # fmt: skip


def check_state(saved: object) -> Mapping[str, Any]:
    """Return what was given, if it is a state that `state_dict()` could have returned.

    Raises:
        StateError: with what is missing or wrong, and where.

    >>> check_state({"version": 1, "reducer": "AllReduceExchange"})
    Traceback (most recent call last):
        ...
    gradwire.core.errors.StateError: the saved state has no 'step': pass what state_dict() returned
    """
    if not isinstance(saved, Mapping):
        raise StateError(f"a saved state is a mapping, and this is {shown(saved)}{_REMEDY}")
    head = checked(saved, _HEAD, "the saved state", StateError, "'s ", _REMEDY)
    if head.version != VERSION:
        raise StateError(f"the saved state has version {head.version}, and this gradwire reads {VERSION}")
    if head.rank >= head.world_size:
        raise StateError(f"the saved state is that of rank {head.rank} of {head.world_size} ranks")
    check_parameters(head.parameters)
    return saved


def check_parameters(parameters: object) -> Parameters:
    """Return what was given, if it is the `parameters` of a saved state.

    Raises:
        StateError: with what is missing or wrong, and where.
    """
    if not isinstance(parameters, Mapping):
        raise StateError(f"the saved state's 'parameters' are {shown(parameters)} and must be a mapping by name")
    for name, leaves in parameters.items():
        if not isinstance(name, str) or not isinstance(leaves, Mapping):
            raise StateError(f"what is saved of parameter {shown(name)} must be a mapping, and is {shown(leaves)}")
        for path, pieces in leaves.items():
            _check_pieces(name, path, pieces)
    return parameters


def _check_pieces(name: str, path: object, pieces: object) -> None:
    """Refuse the pieces of one leaf that are none, or that no parameter could be cut into."""

    def refuse(problem: str) -> NoReturn:
        raise StateError(f"the saved {path!r} of parameter {name!r} {problem}")

    kind = path.partition(":")[0] if isinstance(path, str) else ""
    if kind not in _KINDS:
        raise StateError(f"parameter {name!r} has a saved {shown(path)}, which is none of {', '.join(_KINDS)}")
    if not isinstance(pieces, list | tuple) or len(pieces) == 0:
        refuse(f"is {shown(pieces)} and must be a list of pieces")
    for piece in pieces:
        if not isinstance(piece, Mapping) or not is_count(piece.get("start")):
            refuse("has a piece without a 'start', which is a whole number of 0 or more")
        if (problem := _problem_of(piece.get("values"), kind)) is not None:
            refuse(f"has a piece whose 'values' are {problem}")
    if kind == "matrix" and (len(pieces) > 1 or pieces[0]["start"]):
        refuse("must be one piece that starts at 0")
    end = 0
    for piece in sorted(pieces, key=itemgetter("start")):
        if piece["start"] < end:
            refuse(f"has pieces that overlap at element {piece['start']}")
        end = piece["start"] + piece["values"].numel()


def _problem_of(values: object, kind: str) -> str | None:
    """What is wrong with the values of a piece, if anything is."""
    if not isinstance(values, Tensor):
        return f"{shown(values)} and must be a tensor"
    if values.layout != torch.strided or values.is_meta or not values.is_floating_point():
        return f"{shown(values)} and must be a dense tensor of floating-point numbers"
    if kind == "segment" and values.shape != (1,):
        return f"{shown(values)} and must be one number"
    if kind in ("element", "owned") and (values.dim() != 1 or not values.numel()):
        return f"{shown(values)} and must have one dimension"
    return None


def check_together(saved: object) -> list[Mapping[str, Any]]:
    """Return the states in rank order, if they are those of all ranks of one run at one step.

    Raises:
        StateError: a damaged state, a rank that is missing or there twice, or states that differ in what a run shares.
    """
    if isinstance(saved, Mapping) or not isinstance(saved, Sequence) or not saved:
        raise StateError("this wants the states of all ranks of a run as a list, and was given none")
    states = sorted((check_state(state) for state in saved), key=lambda state: state["rank"])
    for key in SHARED:
        if len(values := sorted({repr(state[key]) for state in states})) > 1:
            raise StateError(
                f"the saved states differ in {key!r} ({', '.join(values)}): pass the states of all ranks of one run, "
                "saved at one step"
            )
    ranks, wanted = [state["rank"] for state in states], list(range(states[0]["world_size"]))
    if ranks != wanted:
        raise StateError(f"these are the states of ranks {ranks}, and all ranks of the run were {wanted}")
    return states


# Parts of a saved state -----------------------------------------------------------------------------------------------


def part_of(saved: object, name: str, kind: Any, what: str = "") -> Any:
    """Return the part of a saved state that has this name.

    Args:
        saved: a mapping, or what should be one.
        name: of the part.
        kind: the type that it must have, as msgspec knows types.
        what: it should be, for the error.

    Raises:
        StateError: there is no such part, or it is of another type.

    >>> part_of({"pushes": [3, 4]}, "pushes", list_of(int, 2))
    [3, 4]
    """
    try:
        return msgspec.convert(cast(Mapping[str, Any], saved)[name], thread_safe(kind))
    except (KeyError, TypeError, msgspec.ValidationError) as error:
        raise StateError(f"the saved state has no {what or repr(name)}: load what this server saved") from error


def list_of(kind: Any, length: int) -> Any:
    """The type of lists of so many values, for `part_of`."""
    return Annotated[list[kind], Meta(min_length=length, max_length=length)]


def tensors_like(saved: Mapping[str, Any], like: Mapping[str, Tensor], what: str) -> dict[str, Tensor]:
    """Return copies of saved tensors, each on the device of the one in whose place it comes.

    Args:
        saved: by name.
        like: what the names, shapes and dtypes must be those of.
        what: they belong to, for the error.

    Raises:
        StateError: other names, shapes or dtypes.
    """
    if saved.keys() != like.keys():
        raise StateError(f"the saved {what} has {sorted(saved)}, and here it has {sorted(like)}")
    for name, tensor in like.items():
        found = saved[name]
        if not isinstance(found, Tensor) or (found.shape, found.dtype) != (tensor.shape, tensor.dtype):
            wanted = f"{tuple(tensor.shape)} {tensor.dtype}"
            raise StateError(f"the saved {name!r} of {what} is none of {wanted}: it is another model's")
    return {name: saved[name].to(tensor.device, copy=True) for name, tensor in like.items()}
