"""FSDP2's reductions as the steps of a session: a step is a backward pass, and a part is a group of parameters."""

from __future__ import annotations

import hashlib
import sys
import time
from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ReduceOp  # pyright: ignore[reportPrivateImportUsage]
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from gradwire.adapters.communication import queue_callback, watch_pass
from gradwire.adapters.fsdp2.comm import GradientScatter
from gradwire.adapters.fsdp2.groups import Group, ShardedParameter, held_groups, root_state
from gradwire.adapters.fsdp2.rows import Rows, by_unit
from gradwire.adapters.uncompiled import uncompiled
from gradwire.core.collective import ring_bytes
from gradwire.core.errors import StepError
from gradwire.drivers.parts import PartPlan
from gradwire.session import Session
from gradwire.session.agreement import is_alike
from gradwire.session.names import unplanned


class GradientPort(ABC):
    """Takes the place of one of the collectives that a model's gradients go through.

    Args:
        session: over the trained parameters, in a form with these groups as parts.
        model: that all of it belongs to.
        groups: its parameter groups.
        rows: of each buffer: one for each rank of the session, or a single one, all of which is reduced.
    """

    def __init__(self, session: Session, model: nn.Module, groups: list[Group], rows: int) -> None:
        self._session, self._model, self._groups, self._rows = session, model, groups, rows
        self._watched = [WatchedGroup(group) for group in groups]
        self._is_open = False  # a step, from the first group of a backward pass to its end
        self._hooks: list[RemovableHandle] = []
        self._is_left, self._is_ended = False, True  # of the pass that a forward pass of the root began last
        self._arrived: list[tuple[int, tuple[str, ...]]] = []
        self._checked = False

    @abstractmethod
    def take(self, part: int, group: Group) -> None:
        """Have FSDP2 reduce a group by this port."""

    @abstractmethod
    def give_back(self, group: Group) -> None:
        """Have FSDP2 reduce a group as it did before."""

    def install(self) -> None:
        """Have FSDP2 reduce by this port."""
        for part, (group, watched) in enumerate(zip(self._groups, self._watched, strict=True)):
            self.take(part, group)
            watched.begin()
        self._hooks = [
            self._model.register_forward_pre_hook(uncompiled(self._before_forward)),
            self._model.register_forward_hook(uncompiled(self._after_forward), always_call=True),
        ]

    def remove(self) -> None:
        """Have FSDP2 reduce as it did before."""
        for group, watched in zip(self._groups, self._watched, strict=True):
            if watched.end():
                self.give_back(group)
        while self._hooks:
            self._hooks.pop().remove()

    def reduce(self, part: int, output: Tensor, given: Tensor, factor: float) -> None:
        """Reduce the gradients of a group.

        Args:
            part: which one.
            output: gets the result, 1-d: a row.
            given: all rows, 1-d.
            factor: by which the mean is multiplied.
        """
        began, session, engine = time.perf_counter(), self._session, self._session.engine
        if not session.is_open:
            raise StepError("this session is closed while a backward pass is under way")
        self._begin()
        present = self._watched[part].present
        layout = Rows(given, output, [(p.name, p.chunk) for p in present], self._rows)
        if unknown := next((p for p in present if not p.trained), None):
            raise self._failed(unplanned(unknown.name, "gradwire.attach"))
        layout.require_whole(self._failed)
        self._arrived.append((part, tuple(layout.begins)))
        plan = engine.plan
        assert isinstance(plan, PartPlan)
        columns, widths = by_unit(plan.columns[part]), plan.widths

        def fill(unit: int, x: Tensor) -> None:
            layout.fill(x.view(-1, widths[unit]), columns[unit])

        def write(unit: int, mean: Tensor) -> None:
            layout.write(mean, columns[unit], factor)

        session.feed.ready(given.nbytes)
        session.lane.do(lambda: session.feed.put_part(part, given, fill, write), session.feed.where())
        engine.count_dense(given.nbytes, self.dense_wire_bytes(given.nbytes))
        engine.stats.exposed_s += time.perf_counter() - began

    @abstractmethod
    def dense_wire_bytes(self, nbytes: int) -> int:
        """What a rank would send of a buffer without a method."""

    # A step ------------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Begin a step with the first group of a backward pass. One inside of it, of a checkpoint, is a part of it."""
        session = self._session
        if self._is_open:
            return
        self._require_same_model()
        session.feed.occupy()
        try:
            session.lane.begin()
            session.feed.open()
        except BaseException:
            session.feed.vacate()
            raise
        self._is_open, self._arrived = True, []
        watch_pass(self._broken_off)
        queue_callback(self._end)

    def _before_forward(self, module: nn.Module, inputs: object) -> None:
        """Enter another pass, as all ranks do: where an exception ended the last one, once all of them have left it.

        Else FSDP2 would pair its collectives of this pass with theirs of that one.
        """
        if torch._C._current_graph_task_id() != -1 or not torch.is_grad_enabled():  # pyright: ignore[reportPrivateUsage]
            return
        board = self._session.lane.failures
        if self._is_left:
            board.wait_for_leaving()
        elif not self._is_ended:  # as where gradients are accumulated, and where an exception came between passes
            board.leave_pass(StepError("another forward pass began before a backward pass had reduced gradients"))
        board.enter_pass()
        self._is_left = self._is_ended = False
        self._session.before_step()  # here nothing of FSDP2's is under way

    def _after_forward(self, module: nn.Module, inputs: object, output: object) -> None:
        """Notice where the forward pass was ended by an exception."""
        error = sys.exc_info()[1]
        if error is not None and output is None and torch.is_grad_enabled():
            self._leave_pass(error)

    def _broken_off(self) -> None:
        """Forget a step whose backward pass an exception ended."""
        if self._is_open:
            self._session.feed.drop()
            self._leave()
            self._leave_pass(StepError("an exception ended the backward pass, as the output of this rank shows"))

    def _leave_pass(self, error: BaseException) -> None:
        self._is_left = True
        self._session.lane.failures.leave_pass(error)

    def _leave(self) -> None:
        self._is_open = False
        self._session.lane.failures.end()
        self._session.feed.vacate()

    def _end(self) -> None:
        """End the step at the end of the backward pass."""
        session = self._session
        try:
            alike = session.lane.do(self._finish, session.feed.where())
            if not alike:
                raise self._failed(
                    StepError(
                        "ranks used different parameters in this backward pass, so gradients are wrong: call "
                        "model.set_reduce_scatter_unused_params(True), which counts unused ones as zeros"
                    )
                )
            self._is_ended = True
            session.lane.failures.end_pass()
        finally:
            self._leave()
        session.warn_of_non_finite()
        session.repeated.exchanged((p.shard for group in self._groups for p in group.trained), session.stats)
        if session.skipped:
            for group in self._groups:
                for parameter in group.trained:
                    parameter.shard.grad = None

    def _finish(self) -> bool:
        """End the engine's step; return whether all ranks reduced the same."""
        device = self._groups[0].device
        text = repr(self._arrived).encode()
        digest = int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "little")
        alike = is_alike(digest, self._session.transport, device)
        self._session.feed.end()
        if left := self._left_out():  # what was sent of these was dropped by all, and is owed still
            self._session.engine.take_back(left)
        return alike

    def _left_out(self) -> set[str]:
        """Parameters of groups that were reduced without them."""
        came: dict[int, set[str]] = {}
        for part, names in self._arrived:
            came.setdefault(part, set()).update(names)
        return {p.name for part, names in came.items() for p in self._groups[part].trained if p.name not in names}

    def _failed(self, error: StepError) -> BaseException:
        """Tell the other ranks, which would wait, and return what to raise here."""
        return self._session.lane.fail(error, self._session.feed.where())

    def _require_same_model(self) -> None:
        """Refuse, once and for all, a model that is sharded otherwise than at `attach`."""
        if self._checked:
            return
        if root_state(self._model)._is_root is False:
            raise self._failed(StepError("attach to the root, the module that forward is called on: close, and attach"))
        if held_groups(self._model) != {id(group.held) for group in self._groups}:
            raise self._failed(StepError("fully_shard was called after attach: call it before, then attach"))
        self._checked = True


class ScatterPort(GradientPort):
    """Takes the place of reduce-scatters: each rank gets its row of the mean."""

    def __init__(self, session: Session, model: nn.Module, groups: list[Group]) -> None:
        super().__init__(session, model, groups, session.transport.world_size)
        self._before: dict[int, Any] = {}

    def take(self, part: int, group: Group) -> None:
        """By a custom reduce-scatter."""
        self._before[id(group)] = group.scatter

        def reduce(output: Tensor, given: Tensor, op: Any) -> None:
            self.reduce(part, output, given, self._factor(group, op))

        group.module.set_custom_reduce_scatter(GradientScatter(reduce))

    def give_back(self, group: Group) -> None:
        """By the one that was there."""
        group.module.set_custom_reduce_scatter(self._before.pop(id(group)))

    @override
    def dense_wire_bytes(self, nbytes: int) -> int:
        return nbytes * (self._rows - 1) // self._rows

    def _factor(self, group: Group, op: Any) -> float:
        """By what a mean must be multiplied to be what FSDP2 asks for."""
        if op == ReduceOp.AVG:
            return 1.0
        if op == ReduceOp.SUM:
            return float(self._rows)
        return self._rows / (group.divisor or 1.0)  # a sum with a factor, which cannot be read from it


class ReplicaPort(GradientPort):
    """Averages what reduce-scatters have left, over ranks that have the same shard."""

    def __init__(self, session: Session, model: nn.Module, groups: list[Group]) -> None:
        super().__init__(session, model, groups, rows=1)

    def take(self, part: int, group: Group) -> None:
        """By a hook that FSDP2 calls behind its reduce-scatter."""
        replicas = self._session.transport.world_size

        def reduce(shard: Tensor) -> None:
            self.reduce(part, shard, shard, 1.0 if group.divisor is None else float(replicas))

        group.module.set_all_reduce_hook(reduce)

    @override
    def give_back(self, group: Group) -> None:
        group.module.set_all_reduce_hook(None)

    @override
    def dense_wire_bytes(self, nbytes: int) -> int:
        return ring_bytes(nbytes, self._session.transport.world_size)


class AlonePort(ReplicaPort):
    """Reduces where one rank has the whole model: FSDP2 leaves its reduce-scatter out there, and what is owed stays."""

    @override
    def take(self, part: int, group: Group) -> None:
        def reduce(shard: Tensor) -> None:
            divisor = group.divisor or 1.0  # FSDP2 has divided by it already, and what is owed is of whole gradients
            self.reduce(part, shard, shard.mul_(divisor), 1.0 / divisor)

        group.module.set_all_reduce_hook(reduce)


class WatchedGroup:
    """A group that says which parameters lie in what it hands over."""

    def __init__(self, group: Group) -> None:
        self._group, self._is_on = group, False
        self.present: list[ShardedParameter] = []

    def begin(self) -> None:
        """Look each time before FSDP2 collects gradients."""
        held, after = self._group.held, self._group.held.post_backward

        def post_backward(*unused: Any) -> None:
            self.present = self._group.about_to_reduce()
            after(*unused)

        held.post_backward = post_backward  # on this object alone
        self._is_on = True

    def end(self) -> bool:
        """Look no more; return whether this had begun."""
        was, self._is_on = self._is_on, False
        if was:
            del self._group.held.post_backward
        return was
