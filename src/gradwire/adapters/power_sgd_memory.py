"""What a `PowerSGDState` saves, read back: every deviation is a `StateError` that says what is wrong."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Annotated, Any, NamedTuple, TypedDict

import numpy as np
import torch
from msgspec import Meta
from torch import Tensor

from gradwire.core.checked import checked, facts
from gradwire.core.errors import StateError
from gradwire.core.record import Count
from gradwire.core.saved_schema import Parameters, check_parameters

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
    found = checked(state, _SAVED, "the saved PowerSGDState", StateError, "'s ")
    if found.version != VERSION:
        raise StateError(f"a PowerSGDState of version {found.version} cannot be read; this is {VERSION}")
    drawn = [name for names in found.draw_order or () for name in names]
    if not _are_words(found.rng["key"]) or len(set(drawn)) < len(drawn):
        raise StateError("the saved PowerSGDState has a damaged 'rng', or draws a parameter twice in its 'draw_order'")
    twister = {"key": found.rng["key"].cpu().numpy().astype(np.uint32), "pos": found.rng["pos"]}
    parameters = check_parameters(found.parameters)
    return Memory(found.iter, parameters, twister, found.draw_order, found.numel, found.next_stats_report)


def _are_words(key: Tensor) -> bool:
    """Whether they are the words of a Mersenne twister."""
    right = key.dtype == torch.int64 and key.shape == (_TWISTER_WORDS,) and key.layout == torch.strided
    return right and not key.is_meta and bool(((key >= 0) & (key < 2**32)).all())


class _Twister(TypedDict):
    key: Tensor
    pos: Annotated[int, Meta(ge=0, le=_TWISTER_WORDS)]


_SAVED = facts({
    "version": int,
    "iter": Count, "numel": tuple[Count, Count], "next_stats_report": Count, "draw_order": list[list[str]] | None,
    "rng": _Twister, "parameters": Any,
})  # fmt: skip
