"""What keeps the ranks of a comparison together: PyTorch's hooks, gradwire's, or optimizers that speak seldom or never
wait."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Generator
from contextlib import AbstractContextManager
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from typing_extensions import override

import gradwire
from gradwire.compare.torch_hooks import attach_torch, predicted_bytes
from gradwire.network.slow import SlowProcessor
from gradwire.session import Session


class Side(ABC):
    """One method, as the worker sees it.

    Attributes:
        model: what is called in training.
        optimizer: what is stepped.
        label: what the spec became.
    """

    label: str

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    @abstractmethod
    def codec_cpu_s(self) -> float:
        """CPU seconds spent on coding so far."""

    def exposed_encode_s(self, exposed_s: float) -> float:
        """How much of the `exposed_s` seconds that were not hidden was spent on coding: at most all of it."""
        return min(self.codec_cpu_s(), exposed_s)

    def exposed_in_steps_s(self) -> float:
        """Seconds that the optimizer's steps so far have spent on communication."""
        return 0.0

    @abstractmethod
    def predicted_bytes(self) -> float:
        """Payload that this rank has sent so far, by arithmetic, without buffers."""

    def buffer_bytes(self, steps: int) -> float:
        """What this rank has sent of the model's buffers in `steps` steps, by arithmetic."""
        return 0.0

    def residual_norm(self) -> float | None:
        """Norm of what error feedback still owes, where there is any and it is known."""
        return None

    def report(self) -> dict[str, Any] | None:
        """What the method says of itself: `session.report().as_dict()`, where there is a session."""
        return None

    def link_changed(self) -> None:
        """The link has got its rate; every rank calls this."""
        return

    def slow_down(self, processor: SlowProcessor) -> None:
        """Have coding take as long as on an emulated processor, where it would not be noticed otherwise."""
        return

    def begin(self) -> None:
        """Training begins: what was sent until now is not counted."""
        return

    def weigh(self, examples: int) -> None:
        """The step at hand has so many examples on this rank."""
        return

    def step_done(self) -> None:
        """A training step is over."""
        return

    reduces_behind_gradients = True
    """Whether a gradient comes first and is reduced afterwards, so that what follows the last one is communication."""

    averages_to_evaluate = False
    """Whether ranks have to communicate for `evaluating`."""

    def evaluating(self) -> AbstractContextManager[nn.Module]:
        """The model to evaluate, meanwhile: the one that all ranks agreed on last. Every rank calls this."""
        return contextlib.nullcontext(self.model)

    def finish(self) -> None:
        """Training is over: all ranks have the same model afterwards."""
        return

    def close(self) -> None:
        """Let go of threads and groups."""
        return


class DDPSide(Side):
    """A hook on DDP."""

    def __init__(self, ddp: DistributedDataParallel, optimizer: Optimizer) -> None:
        super().__init__(ddp, optimizer)
        self.ddp = ddp

    def evaluating(self) -> AbstractContextManager[nn.Module]:
        """Without DDP, which would communicate."""
        return contextlib.nullcontext(self.ddp.module)

    def buffer_bytes(self, steps: int) -> float:
        """A broadcast delivers the buffers to n - 1 ranks, whoever passes them on: the mean rank sends (n - 1) / n."""
        ranks = dist.get_world_size()
        return steps * sum(b.numel() * b.element_size() for b in self.ddp.module.buffers()) * (ranks - 1) / ranks


class TorchSide(DDPSide):
    """One of PyTorch's own hooks, which keep their residuals and say nothing of themselves."""

    def __init__(self, ddp: DistributedDataParallel, optimizer: Optimizer, spec: str) -> None:
        super().__init__(ddp, optimizer)
        self._method = gradwire.parse(spec)
        self.label = self._method.label
        self._clock = attach_torch(ddp, self._method)
        self._steps = 0
        self._sent = 0.0

    def codec_cpu_s(self) -> float:
        """CPU seconds of the hook and its callbacks."""
        return self._clock.seconds

    def predicted_bytes(self) -> float:
        """Sum over the steps made."""
        return self._sent

    def step_done(self) -> None:
        """Add this step's payload."""
        self._sent += predicted_bytes(self._method, self.ddp.module, self._steps, dist.get_world_size())
        self._steps += 1


def label_of(session: Session, label: str) -> str:
    """What `auto` chose in a session, and when; the label where it has chosen nothing."""
    choices = session.automatic.choices if session.automatic else []
    return ", ".join(f"{choice.spec} from step {choice.step}" for choice in choices) or label


class GradwireSide(DDPSide):
    """A gradwire method on DDP."""

    def __init__(self, ddp: DistributedDataParallel, optimizer: Optimizer, spec: str) -> None:
        super().__init__(ddp, optimizer)
        self._handle = gradwire.attach(ddp, spec)
        self.label = repr(self._handle.reducer)

    @override
    def finish(self) -> None:
        """Say what `auto` chose, and when."""
        self.label = label_of(self._handle.session, self.label)

    @override
    def weigh(self, examples: int) -> None:
        if self._handle.engine.weighs:
            self._handle.weigh(examples)

    def codec_cpu_s(self) -> float:
        """CPU seconds of encoding and decoding."""
        return self._handle.stats().encode_s

    def predicted_bytes(self) -> float:
        """What the payloads and their exchange add up to."""
        return float(self._handle.stats().wire_bytes)

    def residual_norm(self) -> float | None:
        """Norm of this rank's residual."""
        return self._handle.residual_norm()

    @override
    def report(self) -> dict[str, Any]:
        return self._handle.report().as_dict()

    def link_changed(self) -> None:
        """Measure again: paced connections were not slow yet when the handle was made."""
        self._handle.measure_link()

    @override
    def slow_down(self, processor: SlowProcessor) -> None:
        processor.watch_coding(self._handle.session.engine)

    def close(self) -> None:
        """Join its thread before the group goes away."""
        self._handle.close()


class SyncSide(Side):
    """An optimizer of `gradwire.sync`, on a model without DDP. Gradients are clipped by each rank's own norm."""

    def __init__(self, model: nn.Module, inner: Optimizer, spec: str) -> None:
        self._synchronised = gradwire.wrap(inner, model, spec)
        super().__init__(model, self._synchronised)
        self.averages_to_evaluate = self._synchronised.averages_to_evaluate
        self._not_trained = 0
        self.label = self._synchronised.described()

    def codec_cpu_s(self) -> float:
        """CPU seconds of encoding and decoding."""
        return self._synchronised.stats().encode_s

    def exposed_in_steps_s(self) -> float:
        """What steps took beyond the update itself."""
        return self._synchronised.stats().exposed_s

    def predicted_bytes(self) -> float:
        """What payloads add up to, averaged buffers among them."""
        return float(self._synchronised.stats().wire_bytes - self._not_trained)

    @contextlib.contextmanager
    def evaluating(self) -> Generator[nn.Module]:
        """The global copy, where ranks have other models in mid-window."""
        before = self._synchronised.stats()
        with self._synchronised.evaluating():
            self._not_trained += self._synchronised.stats().wire_bytes - before.wire_bytes
            yield self.model

    def finish(self) -> None:
        """Average what is left of the last window."""
        self._synchronised.sync()

    def close(self) -> None:
        """Join its thread before the group goes away."""
        self._synchronised.close()


class UnwaitingSide(Side):
    """An optimizer of `gradwire.asynchronous`, without DDP. Gradients are clipped by each rank's own norm."""

    def __init__(self, model: nn.Module, inner: Optimizer, spec: str) -> None:
        recipe = gradwire.parse(spec)
        self._pushed, self._steps_a_push = gradwire.wrap(inner, model, recipe), recipe.options.get("H", 1)
        super().__init__(model, self._pushed)
        self.label = self._pushed.described()
        self._sent_before = 0

    def begin(self) -> None:
        """Leave out the parameters that were handed over at first."""
        self._sent_before = self._pushed.sent_bytes

    @property
    def made(self) -> int:
        """Steps that all ranks have made together, as far as this one knows."""
        return self._pushed.version * self._steps_a_push

    def codec_cpu_s(self) -> float:
        """CPU seconds of coding pushes; what servers spend on decoding them is not told apart."""
        return self._pushed.coded_s

    @override
    def exposed_in_steps_s(self) -> float:
        return self._pushed.waited_s

    def predicted_bytes(self) -> float:
        """Payloads of pushes, and parameters sent to others."""
        return float(self._pushed.sent_bytes - self._sent_before)

    def finish(self) -> None:
        """Wait for all ranks."""
        self._pushed.finish()

    def close(self) -> None:
        """Let go of servers."""
        self._pushed.close()
