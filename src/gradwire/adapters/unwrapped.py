"""Models that nobody wraps: a session fed by hooks that autograd calls once a gradient has been accumulated.

In the first step nothing travels before the backward pass has ended: rank 0 notes in which order its gradients become
ready, and all ranks cut their grains by that order, in this step and in all that follow. A save has it, so a run that
goes on cuts them alike and is exact.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import sys
from collections.abc import Callable, Generator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.checkpoint import CheckpointFunction
from torch.utils.hooks import RemovableHandle

from gradwire.adapters.attached import bind
from gradwire.adapters.communication import queue_callback, watch_pass
from gradwire.adapters.models import check_unwrapped
from gradwire.adapters.overlapped_optimizer import OverlappedOptimizer, require_plain_steps
from gradwire.core.collective import AllReduce
from gradwire.core.errors import AttachError, StepError
from gradwire.core.roles import roles_of
from gradwire.drivers.interpreter import ask
from gradwire.drivers.window import DDP_CAPS
from gradwire.reducers.base import Reducer
from gradwire.session import Session, SessionStep
from gradwire.session.agreement import is_alike
from gradwire.session.form import Alike
from gradwire.session.names import TrainedParameters, named

WHAT = "gradwire.attach"


def attach_unwrapped(
    model: nn.Module, reducer: Reducer | str, optimizer: Optimizer | None, **options: Any
) -> HookedSession:
    """Let `reducer` combine the gradients of a model that nobody wraps, see `gradwire.attach`.

    Args:
        model: with the same parameters on all ranks.
        reducer: the method.
        optimizer: that steps parameters as their means come; None where the script steps after the backward pass.
        options: of the session.
    """
    check_unwrapped(model)
    require_plain_steps(optimizer, options.get("scaler"), options.get("on_non_finite", "warn"))
    parameters, known = named(model), roles_of(model)
    roles = {name: known[parameter] for name, parameter in parameters.items() if parameter in known}
    form = HookedForm(DDP_CAPS, roles)
    session = HookedSession(parameters, reducer, what=WHAT, form=form, **options)
    try:
        _require_same_parameters(session, model)
        session.feed_by(model, optimizer)
    except BaseException:
        session.close(at_once=True)
        raise
    return session


class HookedForm(Alike):
    """Whole tensors, which replicas of a model are trained by."""

    fed_by = "the backward pass of its model"


def _require_same_parameters(session: Session, model: nn.Module) -> None:
    """Refuse replicas that begin with different parameters: nobody has made them equal, as DDP does.

    Raises:
        AttachError: on every rank.
    """
    digest = hashlib.blake2b(digest_size=7)
    for parameter in model.parameters():
        digest.update(parameter.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    number = int.from_bytes(digest.digest(), "little")
    device = next(iter(named(model).values())).device
    if not session.lane.call(lambda: is_alike(number, session.transport, device), f" in {WHAT}"):
        raise AttachError(
            "ranks begin with different parameters: seed all ranks alike before the model is made, or load one "
            "checkpoint on all of them, then attach"
        )


class HookedSession(Session):
    """The session of a model that nobody wraps. After `close` its backward pass communicates no more.

    Gradients hold their means when `backward()` returns. A parameter that a rank has not used in a pass counts as a
    gradient of zeros there. Buffers, such as the statistics of batch normalisation, stay each rank's own.
    """

    _port: _Port | None = None

    def feed_by(self, model: nn.Module, optimizer: Optimizer | None = None) -> None:
        """Take gradients from the backward pass of a model."""
        bind(self, model)
        self._port = _Port(self, model, optimizer, self._step_ended)

    @contextlib.contextmanager
    def no_sync(self) -> Generator[None]:
        """Passes inside of it communicate nothing: gradients add up until a pass outside, which reduces their sums.

        Example:
            with session.no_sync():
                loss_of(model(first)).backward()
            loss_of(model(second)).backward()  # reduces what both have given
        """
        port = self._port
        assert port is not None, "the session has no model yet"
        before, port.is_on = port.is_on, False
        try:
            yield
        finally:
            port.is_on = before

    def close(self, at_once: bool = False) -> None:
        """Take the hooks away, and stop, see `Session.close`."""
        if self._port is not None:
            self._port.remove()
        super().close(at_once)


class _Port:
    """Passes of a model as the steps of a session.

    Args:
        session: over the trained parameters.
        model: whose passes these are.
        optimizer: that steps parameters as their means come, or None.
        ended: called once all gradients of a step hold their means.

    Attributes:
        is_on: whether passes reduce.
    """

    def __init__(
        self, session: HookedSession, model: nn.Module, optimizer: Optimizer | None, ended: Callable[[], None]
    ) -> None:
        self.is_on = True
        self._session, self._model, self._step_ended = session, model, ended
        parameters = named(model)
        self._parameters = parameters
        self._names: dict[Tensor, str] = {parameter: name for name, parameter in parameters.items()}
        self._trained = TrainedParameters(WHAT, dict(parameters))
        self._early = None if optimizer is None else OverlappedOptimizer(optimizer, parameters)
        if self._early is not None:
            session.feed.arrived = self._arrived
        self._step: SessionStep | None = None
        self._end_of_step = contextlib.ExitStack()
        self._pass = -1  # the number that autograd gives it
        self._came: dict[str, Tensor] = {}
        self._waits = False
        self._hooks: list[RemovableHandle] = [p.register_post_accumulate_grad_hook(self._ready) for p in self._names]

    def remove(self) -> None:
        """Look at no pass any more."""
        while self._hooks:
            self._hooks.pop().remove()
        if self._early is not None:
            self._early.remove()

    def _ready(self, parameter: Tensor) -> None:
        """Autograd has accumulated a gradient: hand it over and return at once."""
        if not self.is_on:
            return
        if self._step is None:
            self._begin()
        name = self._names[parameter]
        self._require_plain_pass(name)
        gradient = parameter.grad
        assert gradient is not None, "autograd calls these hooks once it has accumulated a gradient"
        self._came[name] = gradient
        if not self._waits:
            assert self._step is not None
            self._step.deliver(name, gradient)

    def _require_plain_pass(self, name: str) -> None:
        """Refuse a gradient that comes from a pass inside of this one: others of it may be still to come."""
        if self._pass != _number_of_pass() or name in self._came:
            raise StepError(
                f"the gradient of {name!r} comes from a backward pass inside of another one, as of "
                "torch.utils.checkpoint: pass use_reentrant=False to checkpoint, or wrap the model in "
                "DistributedDataParallel"
            )

    # A step ------------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Begin a step with the first gradient of a pass."""
        session = self._session
        self._trained.all_of(self._model)
        session.before_step()
        step = SessionStep(session.feed, session.lane, lambda: session.is_open, self._step_ended)
        self._end_of_step.enter_context(step)
        self._step, self._pass, self._came = step, -1 if _is_inside_of_another() else _number_of_pass(), {}
        self._waits = not session.overlap.order and session.engine.index == 0
        if self._early is not None:
            self._early.begin()
        watch_pass(self._broken_off)
        queue_callback(self._end)

    def _broken_off(self) -> None:
        """End a step whose backward pass an exception has ended, on all ranks."""
        if self._step is None:
            return
        self._step, self._came = None, {}
        error = StepError("an exception ended the backward pass, as the output of this rank shows")
        self._end_of_step.__exit__(type(error), error, None)

    def _end(self) -> None:
        """End the step at the end of the pass: what no gradient came for counts as zeros."""
        step = self._step
        if step is None:
            return
        try:
            with self._end_of_step:
                if self._waits:
                    self._agree_on_order()
                self._deliver_rest(step)
        finally:
            self._step, self._came = None, {}
        self._session.repeated.exchanged(self._names, self._session.stats)
        if self._session.skipped:
            for parameter in self._names:
                parameter.grad = None

    def _deliver_rest(self, step: SessionStep) -> None:
        """Deliver what has waited, and zeros for what was not used."""
        given = dict(self._came) if self._waits else {}
        for parameter, name in self._names.items():
            if name not in self._came:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                given[name] = parameter.grad
        for name, gradient in given.items():
            step.deliver(name, gradient)

    def _agree_on_order(self) -> None:
        """Plan grains in the order in which rank 0's gradients became ready; those that did not come follow."""
        session, names = self._session, list(self._names.values())
        late = [name for name in reversed(names) if name not in self._came]
        places = {name: place for place, name in enumerate([*self._came, *late])}
        mine = torch.tensor([places[name] if session.transport.rank == 0 else 0 for name in names])
        device = next(iter(self._names)).device

        def agree() -> list[int]:
            return ask(AllReduce(mine.to(device), "max"), session.transport).tolist()

        agreed = dict(zip(names, session.lane.do(agree, session.feed.where()), strict=True))
        overlap = dataclasses.replace(session.overlap, order=tuple(sorted(names, key=agreed.__getitem__)))
        # Made anew where the plan stays as well, so that what it costs does not depend on the model.
        session.adopt(overlap, session.remade(overlap))

    def _arrived(self, whole: list[str]) -> None:
        """Means have come: their parameters are stepped while others' are on their way."""
        step = self._step
        if step is None or self._early is None:  # the pass has broken off
            return
        step.write_back(whole)
        gradients: Mapping[str, Tensor | None] = {name: self._parameters[name].grad for name in whole}
        self._early.step({name: gradient for name, gradient in gradients.items() if gradient is not None})


def _number_of_pass() -> int:
    """What autograd calls the backward pass now running in this thread."""
    return torch._C._current_graph_task_id()  # pyright: ignore[reportPrivateUsage]


def _is_inside_of_another() -> bool:
    """Whether the pass now running is that of a reentrant checkpoint: its function is on this thread's stack then."""
    wanted = CheckpointFunction.backward.__code__
    frame = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    while frame is not None:
        if frame.f_code is wanted:
            return True
        frame = frame.f_back
    return False
