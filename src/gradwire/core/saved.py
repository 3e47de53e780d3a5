"""Saved state: keyed by parameter name and element, so that it outlives grains, buckets and world sizes.

    {"version": 1, "reducer": str, "step": int, "seed": int, "scale": float, "rank": int, "world_size": int,
     "parameters": {name: {path: [{"start": int, "values": Tensor}, ...]}}}

A piece says where in the parameter its values stand: in elements for residuals, 0 for whole factors. The dictionary
holds tensors, numbers and strings only, so `torch.load(weights_only=True)` reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from gradwire.core.errors import StateError
from gradwire.core.grain import Grain
from gradwire.core.state import Leaf, State, replace_leaves, walk

VERSION = 1

Saved = dict[str, Any]
_Pieces = list[dict[str, Any]]


def save(states: Iterable[tuple[Grain, State]], rank: int) -> dict[str, dict[str, _Pieces]]:
    """Return the states of one rank by parameter name. Tensors are copies."""
    parameters: dict[str, dict[str, _Pieces]] = {}
    for grain, state in states:
        for path, leaf in walk(state):
            for name, start, values in _cut(grain, leaf, rank):
                piece = {"start": start, "values": values.detach().clone()}
                parameters.setdefault(name, {}).setdefault(f"{leaf.kind}:{path}", []).append(piece)
    return parameters


def load(grain: Grain, state: State, saved: Mapping[str, Mapping[str, _Pieces]], rank: int) -> State:
    """Return `state` with its tensors filled from saved pieces.

    Raises:
        StateError: where values are missing or have another shape.
    """

    def fill(path: str, leaf: Leaf) -> Leaf:
        tensor = leaf.tensor.clone()
        for name, start, view in _cut(grain, replace(leaf, tensor=tensor), rank):
            pieces = saved.get(name, {}).get(f"{leaf.kind}:{path}", [])
            _fill(name, path, leaf.kind, start, view, pieces)
        return replace(leaf, tensor=tensor)

    return replace_leaves(state, fill)


def _cut(grain: Grain, leaf: Leaf, rank: int) -> Iterable[tuple[str, int, Tensor]]:
    """Yield (parameter, start, view) for every part of the grain's parameters in the leaf."""
    if leaf.kind == "scratch":
        return
    if leaf.kind == "segment":
        for i, segment in enumerate(grain.segments):
            yield segment.name, segment.start, leaf.tensor[i : i + 1]
        return
    if leaf.kind == "matrix":
        for i, segment in enumerate(grain.segments):
            yield segment.name, 0, leaf.tensor[i]
        return
    flat = leaf.tensor.view(-1)
    first = leaf.first(rank)
    for segment in grain.segments:
        begin, end = max(segment.offset, first), min(segment.offset + segment.numel, first + flat.numel())
        if begin < end:
            yield segment.name, segment.start + begin - segment.offset, flat[begin - first : end - first]


def _fill(name: str, path: str, kind: str, start: int, view: Tensor, pieces: _Pieces) -> None:
    if kind == "matrix":
        if len(pieces) != 1 or pieces[0]["values"].shape != view.shape:
            raise StateError(f"no saved {path!r} of shape {tuple(view.shape)} for parameter {name!r}")
        view.copy_(pieces[0]["values"])
        return
    if kind == "segment" and pieces:  # of another cut, the piece in which the segment starts
        before = [piece for piece in pieces if piece["start"] <= start] or pieces
        view.copy_(max(before, key=lambda piece: piece["start"])["values"])
        return
    filled = 0
    for piece in pieces:
        values: Tensor = piece["values"]
        begin, end = max(start, piece["start"]), min(start + view.numel(), piece["start"] + values.numel())
        if begin < end:
            view[begin - start : end - start].copy_(values[begin - piece["start"] : end - piece["start"]])
            filled += end - begin
    if filled != view.numel():
        raise StateError(
            f"the saved {path!r} covers {filled} of {view.numel()} elements of {name!r} that this rank needs: it was "
            "saved by another model, rank or world size; for the latter pass all ranks' states to gradwire.reshard"
        )


def reshard(saved: Sequence[Saved], world_size: int) -> list[Saved]:
    """Return states for `world_size` ranks from those of all ranks of another run, in rank order.

    The mean over ranks of every residual is conserved (the update still owed is sum e / n): each new rank gets the old
    ranks' mean. What shard owners owe is in units of the mean already, and goes to whoever owns the element now.

    Args:
        saved: `state_dict()` of every old rank.
        world_size: of the new run.

    Returns:
        One state for each new rank.

    Raises:
        StateError: states that do not belong together, or not all of them.
    """
    ranks = sorted(s["rank"] for s in saved)
    if not saved or ranks != list(range(saved[0]["world_size"])) or len({s["step"] for s in saved}) > 1:
        raise StateError(
            f"reshard wants the states of all ranks at one step; got {ranks} of {[s['world_size'] for s in saved]}"
        )
    names = {name for s in saved for name in s["parameters"]}
    merged = {name: _merge([s["parameters"].get(name, {}) for s in saved]) for name in sorted(names)}
    head = {key: saved[0][key] for key in ("version", "reducer", "step", "seed", "scale")}
    return [{**head, "rank": rank, "world_size": world_size, "parameters": merged} for rank in range(world_size)]


def _merge(by_rank: list[dict[str, _Pieces]]) -> dict[str, _Pieces]:
    merges: dict[str, Callable[[list[_Pieces]], _Pieces]] = {
        "element": _mean_pieces,
        "owned": lambda ranks: [piece for pieces in ranks for piece in pieces],
        "matrix": lambda ranks: ranks[0],
        "segment": _mean_pieces,
    }
    paths = {path for pieces in by_rank for path in pieces}
    return {p: merges[p.partition(":")[0]]([pieces[p] for pieces in by_rank if p in pieces]) for p in sorted(paths)}


def _mean_pieces(ranks: list[_Pieces]) -> _Pieces:
    stacks = zip(*ranks, strict=True)
    return [
        {"start": pieces[0]["start"], "values": torch.stack([p["values"] for p in pieces]).mean(0)} for pieces in stacks
    ]
