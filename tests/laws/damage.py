"""A saved state, damaged in every place that it has."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from .subjects import bits

Place = tuple[Any, ...]
WRONG: tuple[object, ...] = (None, "nonsense", [], {}, -1, 0.5, math.nan, True, b"", object(), torch.zeros(3, 2))


def places(tree: object, here: Place = ()) -> Iterator[Place]:
    """Yield where everything in a tree of mappings and lists stands."""
    if isinstance(tree, Mapping):
        children = list(cast("Mapping[object, object]", tree).items())
    elif isinstance(tree, list):
        children = list(enumerate(cast("list[object]", tree)))
    else:
        return
    for key, child in children:
        yield (*here, key)
        yield from places(child, (*here, key))


def at(tree: Any, place: Place) -> Any:
    """What stands at a place."""
    for key in place:
        tree = tree[key]
    return tree


def changed(tree: Any, place: Place, value: object) -> Any:
    """A copy with another value at a place; tensors are shared."""
    if not place:
        return value
    copy = dict(tree) if isinstance(tree, Mapping) else list(tree)
    copy[place[0]] = changed(copy[place[0]], place[1:], value)
    return copy


def without(tree: Any, place: Place) -> Any:
    """A copy in which nothing stands at a place."""
    parent = at(tree, place[:-1])
    kept = dict(parent) if isinstance(parent, Mapping) else list(parent)
    del kept[place[-1]]
    return changed(tree, place[:-1], kept)


def renamed(tree: Any, place: Place) -> Any:
    """A copy in which a key has another name."""
    parent = at(tree, place[:-1])
    return changed(tree, place[:-1], {f"{k}x" if k == place[-1] else k: v for k, v in parent.items()})


def of_another_form(x: Tensor) -> list[Tensor]:
    """Tensors that cannot take the place of `x`."""
    longer = torch.cat([x, x[:1]]) if x.numel() else torch.zeros(3)
    other = torch.float16 if x.dtype == torch.float64 else torch.float64
    shapes = [longer, x[:-1], x.unsqueeze(0), x.reshape(-1)[0]]
    return [*shapes, x.to(other), x.to(torch.int64), x.to("meta"), x.to_sparse()]


def damages(state: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield (what was done, a state that must be refused), for every place of a state that was saved."""
    yield from ((f"all of it is {value!r}", value) for value in WRONG)
    for place in places(state):
        value = at(state, place)
        wrong = [w for w in WRONG if not _fits(place, w, value)]
        yield f"{place} is gone", without(state, place)
        yield from ((f"{place} is {w!r}", changed(state, place, w)) for w in wrong)
        if isinstance(place[-1], str):
            yield f"{place} has another name", renamed(state, place)
        if isinstance(value, Tensor):
            yield from (
                (f"{place} has shape {w.shape} {w.dtype}", changed(state, place, w)) for w in of_another_form(value)
            )
        elif place[-1] == "start":
            yield from ((f"{place} is shifted by {by}", changed(state, place, value + by)) for by in (-1, 1, 10**6))
        elif isinstance(value, list) and value:
            yield f"{place} has its first twice", changed(state, place, [*value, value[0]])
    others: dict[str, Any] = state["parameters"]
    strangers = {**others, "stranger": next(iter(others.values()), {})}
    yield "a stranger among the parameters", {**state, "parameters": strangers}


def _fits(place: Place, value: object, before: Any) -> bool:
    """Whether a value from `WRONG` is right at a place."""
    if isinstance(value, Tensor):
        return False
    return (place, value) in ((("seed",), -1), (("scale",), 0.5)) or (before == {} and value == {})


def difference(a: Any, b: Any, here: Place = ()) -> Place | None:
    """Where two saved states first differ, in bits, shapes, dtypes, keys or types; None where they do not."""
    if type(a) is not type(b):
        return here
    if isinstance(a, Tensor):
        return None if a.shape == b.shape and a.dtype == b.dtype and torch.equal(bits(a), bits(b)) else here
    if isinstance(a, Mapping):
        if list(a) != list(b):
            return here
        children = [(key, a[key], b[key]) for key in a]
    elif isinstance(a, Sequence) and not isinstance(a, str):
        if len(a) != len(b):
            return here
        children = [(i, *pair) for i, pair in enumerate(zip(a, b, strict=True))]
    else:
        return None if a == b else here
    found = (difference(x, y, (*here, key)) for key, x, y in children)
    return next((place for place in found if place is not None), None)
