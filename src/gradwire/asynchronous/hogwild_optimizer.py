"""Hogwild! for a training script: the ranks of one machine step one copy of the model in shared memory."""

from __future__ import annotations

import contextlib
import secrets
import socket
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from gradwire.asynchronous.standing_still import RunWithoutSession, StandingStill
from gradwire.asynchronous.together import together
from gradwire.asynchronous.unwaiting import UnwaitingOptimizer
from gradwire.core.errors import AttachError, StateError, StepError
from gradwire.core.flat_layout import FlatLayout
from gradwire.core.saved_schema import is_count
from gradwire.session.names import named, require_whole
from gradwire.sync.alike import require_same_start
from gradwire.sync.global_copy import not_finite

_MEMORY = Path("/dev/shm")


class HogwildOptimizer(UnwaitingOptimizer):
    """Steps an inner optimizer whose parameters all ranks of this machine share, without locks (Recht et al. 2011).

    Algorithm 1 of the paper is this for plain SGD with sparse gradients. Where it deviates: any optimizer makes the
    step, and dense gradients, which write all elements, are possible. Each of n ranks makes steps of lr / n, so n of
    them move as far as one synchronous step of the mean, and learning rates need no change. Nothing is sent. Each
    rank's optimizer has a state of its own. What is atomic and what is not is said at
    `gradwire.asynchronous.processes.hogwild`; it is for sparse updates, which seldom meet.

    `gradwire.save` and `gradwire.load` keep the shared parameters, each rank's steps and its inner optimizer's state;
    buffers are kept by your own checkpoint. Ranks call them when they get there, and meet (`standing_still`).

    Args:
        inner: the optimizer of this rank. From now on only this one steps it.
        model: alike on all ranks, on the CPU.
        group: the ranks; the default group by default.
        deadline_s: seconds to wait for the others at the beginning and the end.

    Attributes:
        version: steps that all ranks have made, as far as this one has seen.

    Raises:
        AttachError: ranks on several machines, a model that is not on the CPU, different models, or a parameter of the
            optimizer that the model has not.
        CommunicationError: a rank that does not come.

    References:
        Recht, Re, Wright & Niu 2011, "Hogwild!: a lock-free approach to parallelizing stochastic gradient descent".

    Example:
        optimizer = HogwildOptimizer(torch.optim.SGD(model.parameters(), 0.1), model)
    """

    def __init__(
        self, inner: Optimizer, model: nn.Module, group: dist.ProcessGroup | None = None, *, deadline_s: float = 600.0
    ) -> None:
        require_whole(model, "HogwildOptimizer")
        super().__init__(inner, model)
        self._parameters = named(model)
        if any(parameter.device.type != "cpu" for parameter in self._parameters.values()):
            raise AttachError("Hogwild! shares the memory of the CPU: have the model there, or push to servers (asgd)")
        self._together = together("HogwildOptimizer", group, deadline_s)
        self.rank = dist.get_rank(group)
        names = FlatLayout(self._parameters)
        self._require_one_machine()
        require_same_start("Hogwild!", self._parameters, self._together)
        not_finite(self._parameters)  # compiles what each step asks, so that all ranks begin to step together
        values, self._counts = self._mapped(names.flat(self._parameters), dist.get_world_size(group))
        for name, shared in names.named(values).items():
            self._parameters[name].data = shared
        self._shared = _SharedState(values, self._counts, self.rank)
        self._run = RunWithoutSession.of(model, self.described())

    def _require_one_machine(self) -> None:
        machines = {str(name) for name in self._together.gather(_machine())}
        if len(machines) > 1:
            raise AttachError(f"Hogwild! shares one machine's memory, and ranks are on {len(machines)} machines: push "
                              "to servers instead (asgd, ssp or dcasgd)")  # fmt: skip

    def _mapped(self, values: Tensor, ranks: int) -> tuple[Tensor, Tensor]:
        """One copy of the values, and of a count for each rank, in memory that all ranks map."""
        path = _MEMORY / f"gradwire-{self._together.gather(secrets.token_hex(8))[0]}"
        counts_at = -(-values.nbytes // 64) * 64  # counts begin in a cache line of their own
        nbytes = counts_at + 64 * ranks
        if self.rank == 0:
            path.touch(mode=0o600, exist_ok=False)
            torch.from_file(str(path), shared=True, size=nbytes, dtype=torch.uint8).zero_()
        self._together.gather("memory is made")
        memory = torch.from_file(str(path), shared=True, size=nbytes, dtype=torch.uint8)
        shared = memory[: values.nbytes].view(values.dtype)
        if self.rank == 0:
            shared.copy_(values)
        self._together.gather("memory is mapped")
        if self.rank == 0:
            path.unlink()  # it lives as long as a process maps it
        return shared, memory[counts_at:].view(torch.int64)[:: 64 // 8]

    def step_inner(self, closure: Any) -> Any:
        """The inner optimizer's step, with a share of its learning rates."""
        if closure is None:
            self._require_finite()
        rates = [group["lr"] for group in self.inner.param_groups]
        try:
            for group, rate in zip(self.inner.param_groups, rates, strict=True):
                group["lr"] = rate / self._counts.numel()
            return super().step_inner(None if closure is None else lambda: self._finite_after(closure))
        finally:
            for group, rate in zip(self.inner.param_groups, rates, strict=True):
                group["lr"] = rate

    def _finite_after(self, closure: Callable[[], Any]) -> Any:
        loss = closure()
        self._require_finite()
        return loss

    def _require_finite(self) -> None:
        """Nothing but finite gradients may change what all ranks share: nobody could take the change back."""
        gradients = {name: p.grad for name, p in self._parameters.items() if p.grad is not None}
        name = not_finite({name: g.coalesce().values() if g.is_sparse else g for name, g in gradients.items()})
        if name is not None:
            raise StepError(f"the gradient of {name!r} is not finite, and the model that all ranks share was left "
                            "as it is: lower the learning rates")  # fmt: skip

    @override
    def after_step(self) -> None:
        self._counts[self.rank] += 1

    @property
    def version(self) -> int:
        """Steps that all ranks have made."""
        return int(self._counts.sum())

    @contextlib.contextmanager
    def evaluating(self) -> Generator[None]:
        """In a `with` block the model is a copy of what is shared as it is now; others go on without it."""
        shared = {name: parameter.data for name, parameter in self._parameters.items()}
        try:
            self._own_copies()
            yield
        finally:
            for name, parameter in self._parameters.items():
                parameter.data = shared[name]

    def _own_copies(self) -> None:
        for parameter in self._parameters.values():
            parameter.data = parameter.data.clone()

    def described(self) -> str:
        """What this is, in a line."""
        return f"{type(self.inner).__name__} on shared memory"

    @contextlib.contextmanager
    def standing_still(self, call: str) -> Generator[StandingStill]:
        """In a `with` block all ranks have met, and none steps. `gradwire.save` and `gradwire.load` call it.

        Raises:
            StateError: it has finished.
            CommunicationError: a rank that does not come.
        """
        self._require_standing(call)
        ranks = self._together.during(call, StateError)
        ranks.gather("stands still")
        yield StandingStill(self.inner, self._run, ranks, self.version, "on shared memory", {}, self._shared)
        self._share()

    def finish(self) -> None:
        """End training on all ranks, each of which calls this: afterwards each has a copy of its own of one model.

        Raises:
            CommunicationError: a rank that does not come.
        """
        self.require_planned()
        self._together.gather("has stepped")
        self._own_copies()
        self.close()

    def close(self) -> None:
        """End the steps of this rank."""
        self._steps = self._run.is_open = False


class _CheckedShared(NamedTuple):
    made: int
    values: Tensor | None


class _SharedState:
    """What a rank saves of the shared memory: its own steps, and rank 0 the parameters."""

    def __init__(self, values: Tensor, counts: Tensor, rank: int) -> None:
        self._values, self._counts, self._rank = values, counts, rank

    def state_dict(self) -> dict[str, Any]:
        values = {"values": self._values.clone()} if self._rank == 0 else {}
        return {"count": int(self._counts[self._rank]), **values}

    def checked(self, saved: Mapping[str, Any]) -> _CheckedShared:
        count, values = saved.get("count"), saved.get("values")
        if not is_count(count) or (self._rank == 0) != isinstance(values, Tensor):
            raise StateError("the save does not say what ranks shared, and how many steps each has made: it is damaged")
        if values is not None and (values.shape, values.dtype) != (self._values.shape, self._values.dtype):
            raise StateError(f"the saved parameters have {tuple(values.shape)} {values.dtype}: another model's")
        return _CheckedShared(saved["count"], values)

    def take_up(self, checked: _CheckedShared) -> None:
        self._counts[self._rank] = checked.made
        if checked.values is not None:
            self._values.copy_(checked.values)


def _machine() -> str:
    """What tells one running system from another."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return boot.read_text() if boot.exists() else socket.gethostname()
