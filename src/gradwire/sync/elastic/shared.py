"""What all workers of a run have alike: the global copy, what the outer step remembers, and counts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gradwire.core.errors import StateError
from gradwire.reducers.base import Reducer
from gradwire.session.names import named, require_whole
from gradwire.spec import as_method
from gradwire.sync.buffers import persistent_buffers, require_alike
from gradwire.sync.elastic.messages import NO_COPY
from gradwire.sync.elastic.protocol import Decision
from gradwire.sync.global_copy import GlobalCopy
from gradwire.sync.outer import Mean, Outer

VERSION = 1
CPU = torch.device("cpu")
"""Where global copies lie, and what travels."""


@dataclass(frozen=True)
class Counts:
    """How far a run is.

    Attributes:
        copy: the round that gave the global copy.
        windows: that were averaged.
        depth: steps that lead from the first model to this one: the sum of the windows' lengths.
        steps: of all workers, in windows that were averaged.
        samples: likewise, as told to `step`.
    """

    copy: int = NO_COPY
    windows: int = 0
    depth: int = 0
    steps: int = 0
    samples: int = 0

    def after(self, decision: Decision, length: int) -> Counts:
        """The counts after a committed round; a window had `length` steps."""
        if decision.kind != "average":
            return replace(self, copy=decision.copy)
        return Counts(
            copy=decision.copy,
            windows=self.windows + 1,
            depth=self.depth + length,
            steps=self.steps + decision.steps,
            samples=self.samples + decision.samples,
        )


class SharedPart(NamedTuple):
    """Tensors that travel in one way, with their global copy on the CPU."""

    copy: GlobalCopy
    reducer: Reducer

    def changes(self) -> dict[str, Tensor]:
        """What this worker's window has changed; new tensors."""
        return {name: change.contiguous() for name, change in self.copy.changes().items()}


class SharedModel:
    """The model's trained parameters and its buffers, with counts.

    Args:
        model: its parameters that require gradients are averaged by `outer`, and buffers with a fraction plainly. What
            other buffers have a newcomer takes over.
        reducer: how parameters travel.
        outer: the outer step.
    """

    def __init__(self, model: nn.Module, reducer: Reducer, outer: Outer) -> None:
        require_whole(model, "gradwire.sync.Elastic")
        buffers = persistent_buffers(model)
        averaged = {name: buffer for name, buffer in buffers.items() if buffer.is_floating_point()}
        self.parts = [SharedPart(GlobalCopy(named(model), outer, CPU), reducer)]
        if averaged:
            self.parts.append(SharedPart(GlobalCopy(averaged, Mean(), CPU), as_method("none")))
        self._others = {name: buffer for name, buffer in buffers.items() if name not in averaged}
        self.counts = Counts()

    def described(self) -> list[str]:
        """What must be the same on all workers, one line a tensor."""
        return [f"{name!r} {tuple(tensor.shape)} {tensor.dtype}" for name, tensor in self.tensors().items()]

    def tensors(self) -> dict[str, Tensor]:
        """All of it, alive."""
        found: dict[str, Tensor] = {}
        for part in self.parts:
            found |= {f"copy of {name}": tensor for name, tensor in part.copy.copies.items()}
            for name, memory in part.copy.memory.items():
                found |= {f"{key} of {name}": tensor for key, tensor in memory.items()}
        return found | {f"buffer {name}": buffer for name, buffer in self._others.items()}

    def move_(self, parts: Sequence[Mapping[str, Tensor]], decision: Decision, length: int) -> None:
        """Take up the means of all parts, or none where there are none, and begin the next window."""
        for part, means in zip(self.parts, parts, strict=False):
            part.copy.move_(means)
        self.counts = self.counts.after(decision, length)
        self.write()

    def write(self) -> None:
        """Give the model the global copy."""
        for part in self.parts:
            part.copy.write()

    # On its way ---------------------------------------------------------------------------------------------------

    def words(self) -> dict[str, Any]:
        """What is no tensor."""
        return asdict(self.counts)

    @torch.no_grad()
    def take_up(self, words: Mapping[str, Any], tensors: Sequence[Tensor]) -> None:
        """Begin a window with what another worker has."""
        counts = Counts(**{key: int(value) for key, value in words.items()})
        for own, its in zip(self.tensors().values(), tensors, strict=True):
            own.copy_(its)
        self.counts = counts
        self.write()

    # State --------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """All of it, in tensors, numbers and strings; tensors are copies."""
        tensors = {name: tensor.detach().clone() for name, tensor in self.tensors().items()}
        return {"version": VERSION, **asdict(self.counts), "tensors": tensors}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Begin a window with a saved state; the copy is of no round of this run yet.

        Raises:
            StateError: a damaged state, or one of another model or outer step; nothing is changed then.
        """
        if state.get("version") != VERSION:
            raise StateError(f"the saved state has version {state.get('version')!r}, and {VERSION} is known here")
        words = {key: state.get(key) for key in asdict(Counts())}
        if not all(type(value) is int for value in words.values()) or not isinstance(state.get("tensors"), Mapping):
            raise StateError("the saved state is damaged: pass what state_dict() of an Elastic has returned")
        require_alike("tensor", self.tensors(), state["tensors"])
        self.take_up({**words, "copy": NO_COPY}, [state["tensors"][name] for name in self.tensors()])
