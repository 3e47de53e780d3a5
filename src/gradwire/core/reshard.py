"""States for another number of ranks: what is owed is conserved in the mean over ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gradwire.core.errors import StateError
from gradwire.core.saved_schema import (
    CHOICES,
    OVERLAP,
    SHARED,
    TREE,
    Pieces,
    Saved,
    check_parameters,
    check_together,
    is_count,
)


def reshard(saved: Sequence[Mapping[str, Any]], world_size: int) -> list[Saved]:
    """Return states for `world_size` ranks from those of all ranks of another run.

    The mean over ranks of every residual is conserved (the update still owed is sum e / n): each new rank gets the old
    ranks' mean. What shard owners owe is in units of the mean already, and goes to whoever owns the element now.

    Args:
        saved: `state_dict()` of every old rank, in any order.
        world_size: of the new run.

    Returns:
        One state for each new rank, in rank order. They share tensors.

    Raises:
        StateError: states that do not belong together (another version, reducer, step, seed or loss scale), not all of
            them, a damaged one, a parameter that is missing on a rank, or a world size below 1.

    >>> import gradwire
    >>> from gradwire.core.grain import flat_grain
    >>> old = gradwire.Lockstep(gradwire.parse("topk:0.5"), flat_grain(2), world_size=2)
    >>> _ = old.step([torch.tensor([4.0, 1.0]), torch.tensor([2.0, 3.0])])
    >>> [old.states[rank].tensor("residual").tolist() for rank in (0, 1)]
    [[0.0, 1.0], [2.0, 0.0]]
    >>> new = gradwire.Lockstep(gradwire.parse("topk:0.5"), flat_grain(2), world_size=3)
    >>> new.load_state_dicts(gradwire.reshard(old.state_dicts(), 3))
    >>> [new.states[rank].tensor("residual").tolist() for rank in (0, 1, 2)]
    [[1.0, 0.5], [1.0, 0.5], [1.0, 0.5]]
    """
    if not is_count(world_size) or world_size < 1:
        raise StateError(f"world_size {world_size!r} is no number of ranks: give 1 or more")
    states = check_together(saved)
    if any(TREE in state for state in states):
        raise StateError(
            "these are states of gradwire.sync: gradwire.load brings them to another number of ranks itself"
        )
    merged = _merged([state["parameters"] for state in states])
    shared = [key for key in (*SHARED, OVERLAP, CHOICES) if key in states[0] and key != "world_size"]
    head = {key: states[0][key] for key in shared}
    return [{**head, "rank": rank, "world_size": world_size, "parameters": merged} for rank in range(world_size)]


def with_all_owned(saved: Sequence[Mapping[str, Any]], rank: int) -> Saved:
    """Return a rank's state with what the owners of all shards owe, for a run that cuts shards otherwise.

    Nothing else is changed, so unlike `reshard` this leaves every rank its own residual.

    Args:
        saved: `state_dict()` of every rank, in any order.
        rank: whose.

    Raises:
        StateError: as `reshard`.
    """
    states = sorted(check_together(saved), key=lambda state: state["rank"])
    own: dict[str, dict[str, Pieces]] = {name: {**leaves} for name, leaves in states[rank]["parameters"].items()}
    for name in {name for state in states for name in state["parameters"]}:
        by_rank = [state["parameters"].get(name, {}) for state in states]
        for path in {path for leaves in by_rank for path in leaves if path.startswith("owned:")}:
            own.setdefault(name, {})[path] = _all_pieces(by_rank, path)
    check_parameters(own)
    return {**states[rank], "parameters": own}


def _merged(by_rank: list[Mapping[str, Mapping[str, Pieces]]]) -> dict[str, dict[str, Pieces]]:
    """What every new rank gets, checked again, since pieces of several ranks may overlap."""
    names = sorted({name for parameters in by_rank for name in parameters})
    merged = {name: _merged_leaves(name, [parameters.get(name, {}) for parameters in by_rank]) for name in names}
    check_parameters(merged)
    return merged


def _merged_leaves(name: str, by_rank: list[Mapping[str, Pieces]]) -> dict[str, Pieces]:
    merged: dict[str, Pieces] = {}
    for path in sorted({path for leaves in by_rank for path in leaves}):
        kind = path.partition(":")[0]
        if kind == "owned":  # of some parameters a rank owns nothing
            merged[path] = _all_pieces(by_rank, path)
            continue
        for rank, leaves in enumerate(by_rank):
            if path not in leaves:
                raise StateError(f"rank {rank} saved no {path!r} of parameter {name!r}, and other ranks did")
        ranks = [leaves[path] for leaves in by_rank]
        if any(_form(pieces) != _form(ranks[0]) for pieces in ranks):
            raise StateError(f"the ranks saved {path!r} of parameter {name!r} in different pieces, shapes or dtypes")
        merged[path] = _MERGES[kind](ranks)
    return merged


def _all_pieces(by_rank: list[Mapping[str, Pieces]], path: str) -> Pieces:
    """What all ranks saved of a leaf, rank after rank."""
    return [piece for leaves in by_rank for piece in leaves.get(path, [])]


def _form(pieces: Pieces) -> list[tuple[int, torch.Size, torch.dtype]]:
    return [(piece["start"], piece["values"].shape, piece["values"].dtype) for piece in pieces]


def _means(ranks: list[Pieces]) -> Pieces:
    return [{"start": pieces[0]["start"], "values": _mean(pieces)} for pieces in zip(*ranks, strict=True)]


def _mean(pieces: Sequence[Mapping[str, Any]]) -> Tensor:
    return torch.stack([piece["values"] for piece in pieces]).mean(0)


_MERGES: dict[str, Callable[[list[Pieces]], Pieces]] = {
    "element": _means,
    "segment": _means,
    "matrix": lambda ranks: ranks[0],
}
