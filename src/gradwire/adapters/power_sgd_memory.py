"""What a `PowerSGDState` saves, read back: every deviation is a `StateError` that says what is wrong."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from gradwire.core.errors import StateError
from gradwire.core.saved_schema import Parameters, check_parameters, is_count

VERSION = 1

_TWISTER_WORDS = 624


class Memory(NamedTuple):
    """A saved state that has been looked through.

    Attributes:
        iter: finished steps.
        parameters: what is remembered of each parameter; empty before the first step.
        twister: state of the generator that seeds the drawing of factors, as NumPy names its parts.
        draw_order: parameters by bucket, in the order in which factors are drawn; None before the first drawing.
        numel: elements before and after compression, of all PowerSGD steps.
        next_stats_report: the step at which compression is logged next.
    """

    iter: int
    parameters: Parameters
    twister: dict[str, Any]
    draw_order: list[list[str]] | None
    numel: tuple[int, int]
    next_stats_report: int

    def check_drawn(self, names: Collection[str]) -> None:
        """Refuse an order in which other parameters are drawn than those of this model.

        Raises:
            StateError: with a name that differs.
        """
        drawn = {name for bucket in self.draw_order or () for name in bucket}
        if self.draw_order is not None and (other := sorted(drawn ^ set(names))):
            raise StateError(f"the saved draw_order is of another model: parameter {other[0]!r} is not in both")


def write_memory(
    iteration: int, parameters: Parameters, rng: np.random.RandomState, draw_order: list[list[str]] | None
) -> dict[str, Any]:
    """Return what `read_memory` reads, but for what PyTorch counts: tensors, numbers and strings."""
    twister = rng.get_state(legacy=False)["state"]
    key = torch.from_numpy(twister["key"].astype(np.int64))
    drawn = {"rng": {"key": key, "pos": int(twister["pos"])}, "draw_order": draw_order}
    return {"iter": iteration, "parameters": parameters, "version": VERSION, **drawn}


def read_memory(state: object) -> Memory:
    """Return what `PowerSGDState.state_dict` saved.

    Raises:
        StateError: something else, or a damaged state.
    """
    if not isinstance(state, Mapping):
        raise StateError(f"a saved PowerSGDState is a mapping, not a {type(state).__name__}: pass its state_dict()")
    if not is_count(version := state.get("version")) or version != VERSION:
        raise StateError(f"a PowerSGDState of version {version!r} cannot be read; this is {VERSION}")
    for key, (right, what) in _FORMS.items():
        if key not in state or not right(state[key]):
            found = "is not what was saved" if key in state else "is missing"
            raise StateError(f"{key!r} of the saved PowerSGDState {found}: it must be {what}")
    twister = {"key": state["rng"]["key"].cpu().numpy().astype(np.uint32), "pos": state["rng"]["pos"]}
    before, after = state["numel"]
    order = None if state["draw_order"] is None else [list(names) for names in state["draw_order"]]
    parameters = check_parameters(state.get("parameters"))
    return Memory(state["iter"], parameters, twister, order, (before, after), state["next_stats_report"])


def _is_rng(value: object) -> bool:
    if not isinstance(value, Mapping):
        return False
    key, pos = value.get("key"), value.get("pos")
    if not isinstance(key, Tensor) or key.dtype != torch.int64 or key.shape != (_TWISTER_WORDS,):
        return False
    if key.layout != torch.strided or key.is_meta or not bool(((key >= 0) & (key < 2**32)).all()):
        return False
    return is_count(pos) and int(pos or 0) <= _TWISTER_WORDS


def _is_order(value: object) -> bool:
    if value is None:
        return True
    if not isinstance(value, list | tuple) or not all(isinstance(names, list | tuple) for names in value):
        return False
    flat = [name for names in value for name in names]
    return all(isinstance(name, str) for name in flat) and len(set(flat)) == len(flat)


def _is_pair(value: object) -> bool:
    return isinstance(value, list | tuple) and len(value) == 2 and all(is_count(item) for item in value)


_FORMS: dict[str, tuple[Callable[[object], bool], str]] = {
    "iter": (is_count, "a whole number of 0 or more"),
    "rng": (_is_rng, f"the 'key' of {_TWISTER_WORDS} words and the 'pos' of a Mersenne twister"),
    "draw_order": (_is_order, "None, or lists of parameter names, each there once"),
    "numel": (_is_pair, "two whole numbers of 0 or more"),
    "next_stats_report": (is_count, "a whole number of 0 or more"),
}
