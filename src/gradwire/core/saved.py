"""Saved state: keyed by parameter name and element, so that it outlives grains, buckets and world sizes.

    {"version": 1, "reducer": str, "step": int, "seed": int, "scale": float, "rank": int, "world_size": int,
     "parameters": {name: {path: [{"start": int, "values": Tensor}, ...]}}}

A piece says where in the parameter its values stand: in elements for residuals, 0 for whole factors. The dictionary
holds tensors, numbers and strings only, so `torch.load(weights_only=True)` reads it. `gradwire.core.saved_schema`
refuses whatever has another form, and this module what does not belong to the model and the reducer at hand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from gradwire.core.errors import ShardsElsewhereError, StateError
from gradwire.core.grain import Grain
from gradwire.core.renamed import same
from gradwire.core.saved_schema import VERSION, Parameters, Pieces, Saved, check_parameters, check_state, check_together
from gradwire.core.state import CARRIED, Leaf, State, carried_leaf, replace_leaves, walk

Grains = Sequence[tuple[Grain, State]]
"""Every grain of one rank with its state."""


class Member(NamedTuple):
    """One rank of a run: what a saved state must have in common with whoever loads it."""

    reducer: str
    rank: int
    world_size: int


class Loaded(NamedTuple):
    """What a saved state says, ready to be taken up.

    Attributes:
        step, seed, scale: as saved.
        states: in the order of the grains they were loaded for.
        reducer: the text of the one it was made with.
    """

    step: int
    seed: int
    scale: float
    states: list[State]
    reducer: str = ""


_REMEDIES = {
    "reducer": "attach with the spec it was saved with, load, and then call change(); or begin without it",
    "rank": "each rank loads what the same rank saved",
    "world_size": "pass all ranks' states to gradwire.reshard",
}
"""What to do about a saved state of another run, by what differs."""


def pack(grains: Grains, member: Member, *, step: int, seed: int, scale: float = 1.0) -> Saved:
    """Return the state of one rank in the form that the module's text describes. Tensors are copies."""
    head = {"version": VERSION, "step": step, "seed": seed, "scale": scale, **member._asdict()}
    return {**head, "parameters": save(grains, member.rank)}


def unpack(saved: object, grains: Grains, member: Member) -> Loaded:
    """Return what a saved state says of these grains, which are left as they are.

    Raises:
        StateError: a damaged state, or one of another version, reducer, rank, world size or model.
    """
    state = check_state(saved)
    for key, value in member._asdict().items():
        if not same(state[key], value):
            raise StateError(f"the saved state has {key} {state[key]!r}, this run {value!r}; {_REMEDIES[key]}")
    states = load_all(grains, state["parameters"], member.rank)
    return Loaded(int(state["step"]), int(state["seed"]), float(state["scale"]), states, state["reducer"])


def reducer_of(saved: object) -> str:
    """The text of the reducer that a saved state, or those of all ranks, were made with; empty where there is none."""
    first = next(iter(cast("Sequence[object]", saved)), None) if isinstance(saved, Sequence) else saved
    found = cast("Mapping[str, object]", first).get("reducer") if isinstance(first, Mapping) else None
    return found if isinstance(found, str) else ""


def pack_all(ranks: Sequence[Grains], reducer: object, *, step: int, seed: int) -> list[Saved]:
    """Return the states of all ranks of a run, of which `ranks` are the grains."""
    members = _members(ranks, reducer)
    return [pack(grains, member, step=step, seed=seed) for grains, member in zip(ranks, members, strict=True)]


def unpack_all(saved: object, ranks: Sequence[Grains], reducer: object) -> list[Loaded]:
    """Return what the states of all ranks of a run say, in rank order.

    Raises:
        StateError: as `unpack`, or states that are not those of all ranks at one step.
    """
    states, members = check_together(saved), _members(ranks, reducer)
    if len(states) != len(ranks):
        remedy = _REMEDIES["world_size"]
        raise StateError(f"these are the states of {len(states)} ranks, and this run has {len(ranks)}; {remedy}")
    return [unpack(*one_rank) for one_rank in zip(states, ranks, members, strict=True)]


def _members(ranks: Sequence[Grains], reducer: object) -> list[Member]:
    return [Member(repr(reducer), rank, len(ranks)) for rank in range(len(ranks))]


def save(states: Grains, rank: int) -> dict[str, dict[str, Pieces]]:
    """Return the states of one rank by parameter name. Tensors are copies."""
    parameters: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for grain, state in states:
        for path, leaf in walk(state):
            for name, start, values in cut(grain, leaf, rank):
                piece = {"start": start, "values": values.detach().clone()}
                parameters.setdefault(name, {}).setdefault(f"{leaf.kind}:{path}", []).append(piece)
    return {name: dict[str, Pieces](leaves) for name, leaves in parameters.items()}


@torch.inference_mode(False)  # a state that could be written to in that mode only would end the run
def load_all(grains: Grains, saved: object, rank: int) -> list[State]:
    """Return the states of all grains of a rank, filled from the saved pieces of exactly these parameters.

    Raises:
        StateError: where values are missing, have another form, or belong to nothing here.
    """
    parameters = check_parameters(saved)
    grains = [(grain, _with_carried(grain, state, parameters)) for grain, state in grains]
    here = _described(grains)
    for name, leaves in parameters.items():
        if name not in here:
            raise StateError(f"there is a saved state of parameter {name!r}, which this run does not train")
        for path, pieces in leaves.items():
            here[name].check(path, pieces)
    return [_load(grain, state, parameters, rank) for grain, state in grains]


@dataclass
class _Parameter:
    """What this run has of a parameter: its elements, where its segments start, and what is remembered of it."""

    name: str
    numel: int = 0
    starts: set[int] = field(default_factory=set[int])
    paths: set[str] = field(default_factory=set[str])

    def check(self, path: str, pieces: Pieces) -> None:
        """Refuse what would not be loaded: unknown leaves, elements beyond the end, and cuts that no run makes."""
        if path not in self.paths:
            raise StateError(f"there is a saved {path!r} of parameter {self.name!r}, and this run remembers none of it")
        if path.startswith("segment:"):
            starts = sorted(piece["start"] for piece in pieces)
            if starts != sorted(self.starts) and starts != _even_cut(self.numel, len(starts)):
                raise StateError(f"the saved {path!r} of {self.name!r} starts at {starts}, where no segment does")
        end = max(piece["start"] + piece["values"].numel() for piece in pieces)
        if end > self.numel and path.startswith(("element:", "owned:")):
            raise StateError(f"the saved {path!r} has {end} elements of {self.name!r}, and here it has {self.numel}")


def _even_cut(numel: int, parts: int) -> list[int]:
    """Where the segments of a parameter start that is cut into so many equal ones."""
    return list(range(0, max(1, numel), max(1, -(-numel // parts))))


def _described(grains: Grains) -> dict[str, _Parameter]:
    """Every parameter of the grains, by name."""
    here: dict[str, _Parameter] = {}
    for grain, state in grains:
        paths = [f"{leaf.kind}:{path}" for path, leaf in walk(state) if leaf.kind != "scratch"]
        for segment in grain.segments:
            found = here.setdefault(segment.name, _Parameter(segment.name))
            found.numel = max(found.numel, segment.start + segment.numel)
            found.starts.add(segment.start)
            found.paths.update(paths)
    return here


def _with_carried(grain: Grain, state: State, saved: Parameters) -> State:
    """The state with what is carried over from another method where that is saved, and without it elsewhere."""
    if all(f"element:{CARRIED}" not in saved.get(segment.name, {}) for segment in grain.segments):
        return State({name: node for name, node in state.items() if name != CARRIED})
    return State({**state, CARRIED: carried_leaf(grain)})


def _load(grain: Grain, state: State, saved: Parameters, rank: int) -> State:
    """Return `state` with new tensors, filled from saved pieces."""

    def fill(path: str, leaf: Leaf) -> Leaf:
        filled = replace(leaf, tensor=leaf.tensor.clone())
        for name, start, view in cut(grain, filled, rank):
            pieces = saved.get(name, {}).get(f"{leaf.kind}:{path}", [])
            if any(piece["values"].dtype != view.dtype for piece in pieces):
                raise StateError(f"the saved {path!r} of {name!r} is {pieces[0]['values'].dtype}, here {view.dtype}")
            if path == CARRIED and not pieces:  # of a grain's parameters some may have none
                continue
            _FILLS[leaf.kind](f"{path!r} of {name!r}", start, view, pieces)
        return filled

    return replace_leaves(state, fill)


def cut(grain: Grain, leaf: Leaf, rank: int) -> Iterable[tuple[str, int, Tensor]]:
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


def _fill_elements(what: str, start: int, view: Tensor, pieces: Pieces) -> None:
    filled = 0
    for piece in pieces:
        values: Tensor = piece["values"]
        begin, end = max(start, piece["start"]), min(start + view.numel(), piece["start"] + values.numel())
        if begin < end:
            view[begin - start : end - start].copy_(values[begin - piece["start"] : end - piece["start"]])
            filled += end - begin
    if filled != view.numel():
        raise StateError(
            f"the saved {what} covers {filled} of {view.numel()} elements that this rank needs: it was saved by "
            "another model, rank or world size; for the latter pass all ranks' states to gradwire.reshard"
        )


def _fill_owned(what: str, start: int, view: Tensor, pieces: Pieces) -> None:
    try:
        _fill_elements(what, start, view, pieces)
    except StateError:
        raise ShardsElsewhereError(
            f"the saved {what} is not of the shard that this rank owns: shards were cut otherwise, by a run of another "
            "world size, another grain_numel or another version of gradwire. Use gradwire.load on a folder with the "
            "files of all ranks, or pass all ranks' states to gradwire.reshard"
        ) from None


def _fill_matrix(what: str, start: int, view: Tensor, pieces: Pieces) -> None:
    if not pieces or pieces[0]["values"].shape != view.shape:
        found = f"of shape {tuple(pieces[0]['values'].shape)}" if pieces else "missing"
        raise StateError(f"the saved {what} is {found}, and here of shape {tuple(view.shape)}")
    view.copy_(pieces[0]["values"])


def _fill_segment(what: str, start: int, view: Tensor, pieces: Pieces) -> None:
    before = [piece for piece in pieces if piece["start"] <= start]
    if not before:
        raise StateError(f"nothing is saved of {what} at element {start}")
    view.copy_(max(before, key=lambda piece: piece["start"])["values"])  # of another cut, that in which this one starts


_FILLS: dict[str, Callable[[str, int, Tensor, Pieces], None]] = {
    "element": _fill_elements,
    "owned": _fill_owned,
    "matrix": _fill_matrix,
    "segment": _fill_segment,
}
