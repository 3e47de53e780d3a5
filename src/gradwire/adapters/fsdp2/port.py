"""FSDP2's reduce-scatters as the steps of a session: a step is a backward pass, and a part is a group of parameters."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ReduceOp  # pyright: ignore[reportPrivateImportUsage]

from gradwire.adapters.communication import queue_callback
from gradwire.adapters.fsdp2.comm import GradientScatter
from gradwire.adapters.fsdp2.groups import Group, ShardedParameter, held_groups, root_state
from gradwire.core.errors import StepError
from gradwire.drivers.parts import Columns, InParts
from gradwire.session import Session
from gradwire.session.agreement import is_alike


class ScatterPort:
    """Takes the place of a model's reduce-scatters.

    Args:
        session: over the trained parameters, in the form of a sharded model.
        model: that all of it belongs to.
        groups: its parameter groups.
    """

    def __init__(self, session: Session, model: nn.Module, groups: list[Group]) -> None:
        self._session, self._model, self._groups = session, model, groups
        self._watched = [_Watched(group, self._comm(part)) for part, group in enumerate(groups)]
        self._step: int | None = None  # the backward pass that is under way
        self._arrived: list[tuple[int, tuple[str, ...]]] = []
        self._checked = False

    def _comm(self, part: int) -> GradientScatter:
        return GradientScatter(lambda output, given, op: self.reduce(part, output, given, op))

    def install(self) -> None:
        """Have FSDP2 reduce by this port."""
        for watched in self._watched:
            watched.install()

    def remove(self) -> None:
        """Have FSDP2 reduce as it did before."""
        for watched in self._watched:
            watched.remove()

    @property
    def _engine(self) -> InParts:
        engine = self._session.engine  # another one after `change`
        assert isinstance(engine, InParts)
        return engine

    def reduce(self, part: int, output: Tensor, given: Tensor, op: Any) -> None:
        """Reduce the gradients of a group.

        Args:
            part: which one.
            output: gets this rank's chunks, 1-d.
            given: all ranks' chunks, 1-d, those of rank 0 first.
            op: what FSDP2 asks for: their mean, their sum, or a sum that is divided by its own factor.
        """
        began, session, engine = time.perf_counter(), self._session, self._engine
        if not session.is_open:
            raise StepError("this handle is closed while a backward pass is under way")
        self._begin()
        present = self._watched[part].present
        layout = _Rows(given, output, [(p.name, p.chunk) for p in present], session.transport.world_size)
        if unknown := next((p for p in present if not p.trained), None):
            raise self._failed(
                StepError(f"{unknown.name!r} requires a gradient now, and did not at attach: close, and attach again")
            )
        layout.require_whole(self._failed)
        self._arrived.append((part, tuple(layout.begins)))
        columns = _by_unit(engine.parts.columns[part])
        widths, factor = engine.parts.widths, self._factor(part, op)

        def fill(unit: int, x: Tensor) -> None:
            layout.fill(x.view(-1, widths[unit]), columns[unit])

        def write(unit: int, mean: Tensor) -> None:
            layout.write(mean, columns[unit], factor)

        session.window.ready(time.perf_counter(), given.nbytes)
        if session.window.wants_norm:
            session.window.gradient(given, len(self._arrived) == 1, session.scale)
        session.lane.do(lambda: engine.run(part, fill, write), session.where())
        ranks = session.transport.world_size
        engine.count_dense(given.nbytes, given.nbytes * (ranks - 1) // ranks)
        engine.stats.exposed_s += time.perf_counter() - began

    def _factor(self, part: int, op: Any) -> float:
        """By what a mean must be multiplied to be what FSDP2 asks for."""
        if op == ReduceOp.AVG:
            return 1.0
        ranks = self._session.transport.world_size
        if op == ReduceOp.SUM:
            return float(ranks)
        return ranks / (self._groups[part].divisor or 1.0)  # a sum with a factor, which cannot be read from it

    # A step ------------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Begin a step with the first group of a backward pass."""
        here, session = _backward_pass(), self._session
        if self._step is not None and self._step == here:
            return
        if self._step is not None:  # that one broke off
            self._engine.forget()
            self._leave()
        self._require_same_model()
        session.occupy()
        try:
            session.lane.begin()
            session.begin()
            session.lane.do(self._engine.begin, session.where())
        except BaseException:
            session.vacate()
            raise
        self._step, self._arrived = here, []
        queue_callback(self._end)

    def _leave(self) -> None:
        self._step = None
        self._session.lane.failures.end()
        self._session.vacate()

    def _end(self) -> None:
        """End the step at the end of the backward pass."""
        session, engine = self._session, self._engine
        try:
            alike = session.lane.do(self._finish, session.where())
            if not alike:
                raise self._failed(
                    StepError(
                        "ranks used different parameters in this backward pass, so gradients are wrong: call "
                        "model.set_reduce_scatter_unused_params(True), which counts unused ones as zeros"
                    )
                )
            session.window.last_ready_s = time.perf_counter()
            session.window.end(time.perf_counter(), engine.stats)
        finally:
            self._leave()
        session.warn_of_non_finite()

    def _finish(self) -> bool:
        """End the engine's step; return whether all ranks reduced the same."""
        engine, device = self._engine, self._groups[0].device
        text = repr(self._arrived).encode()
        digest = int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "little")
        alike = is_alike(digest, self._session.transport, device)
        engine.finish()
        if left := self._left_out():  # what was sent of these was dropped by all, and is owed still
            engine.take_back(left)
        return alike

    def _left_out(self) -> set[str]:
        """Parameters of groups that were reduced without them."""
        came: dict[int, set[str]] = {}
        for part, names in self._arrived:
            came.setdefault(part, set()).update(names)
        return {p.name for part, names in came.items() for p in self._groups[part].trained if p.name not in names}

    def _failed(self, error: StepError) -> BaseException:
        """Tell the other ranks, which would wait, and return what to raise here."""
        return self._session.lane.fail(error, self._session.where())

    def _require_same_model(self) -> None:
        """Refuse, once and for all, a model that is sharded otherwise than at `attach`."""
        if self._checked:
            return
        if root_state(self._model)._is_root is False:
            raise self._failed(StepError("attach to the root, the module that forward is called on: close, and attach"))
        if held_groups(self._model) != {id(group.held) for group in self._groups}:
            raise self._failed(StepError("fully_shard was called after attach: call it before, then attach"))
        self._checked = True


class _Watched:
    """A group whose reduce-scatter is ours, and which says what lies in it."""

    def __init__(self, group: Group, comm: GradientScatter) -> None:
        self._group, self._comm = group, comm
        self.present: list[ShardedParameter] = []
        self._before: Any = None

    def install(self) -> None:
        """Take over."""
        held, after = self._group.held, self._group.held.post_backward

        def post_backward(*unused: Any) -> None:
            self.present = self._group.about_to_reduce()
            after(*unused)

        self._before = held._reduce_scatter_comm
        self._group.module.set_custom_reduce_scatter(self._comm)
        held.post_backward = post_backward  # on this object alone

    def remove(self) -> None:
        """Give back."""
        if self._before is not None:
            del self._group.held.post_backward
            self._group.module.set_custom_reduce_scatter(self._before)
            self._before = None


class _Rows:
    """The buffers of one reduce-scatter."""

    def __init__(self, given: Tensor, output: Tensor, chunks: list[tuple[str, int]], ranks: int) -> None:
        self.begins: dict[str, int] = {}
        at = 0
        for name, chunk in chunks:
            self.begins[name] = at
            at += chunk
        self._width, self._given, self._output, self._ranks = at, given, output, ranks

    def require_whole(self, failed: Callable[[StepError], BaseException]) -> None:
        """Refuse a buffer that holds something else than was seen to be on its way."""
        if self._given.numel() != self._width * self._ranks:
            raise failed(
                StepError(
                    f"FSDP2 reduces {self._given.numel()} elements where {self._width * self._ranks} were expected: "
                    "this version of PyTorch lays gradients out otherwise"
                )
            )

    def fill(self, x: Tensor, columns: list[Columns]) -> None:
        """Write a unit's gradient to `x`, one row a rank; zeros for what did not come."""
        rows = self._given.view(self._ranks, -1)
        for name, start, numel, _, offset in columns:
            into, begin = x[:, offset : offset + numel], self.begins.get(name)
            if begin is None:
                into.zero_()
            else:
                into.copy_(rows[:, begin + start : begin + start + numel])

    def write(self, mean: Tensor, columns: list[Columns], factor: float) -> None:
        """Write this rank's row of a unit's mean, `factor` times."""
        scaled = mean if factor == 1.0 else mean * factor
        for name, start, numel, _, offset in columns:
            if (begin := self.begins.get(name)) is not None:
                self._output[begin + start : begin + start + numel].copy_(scaled[offset : offset + numel])


def _by_unit(columns: tuple[Columns, ...]) -> dict[int, list[Columns]]:
    found: dict[int, list[Columns]] = {}
    for column in columns:
        found.setdefault(column.unit, []).append(column)
    return found


def _backward_pass() -> int:
    """A number of the backward pass that is under way."""
    return torch._C._current_graph_task_id()  # pyright: ignore[reportPrivateUsage]
