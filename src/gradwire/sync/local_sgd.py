"""`LocalSGD`: an optimizer around any other one, which averages the model of all ranks every few steps."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Self, Unpack, cast

from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from gradwire.core.errors import StateError, StepError
from gradwire.drivers.engine import Stats
from gradwire.reducers.base import Reducer
from gradwire.session import Session
from gradwire.session.checkpoint import HasSeveralGroups, Savable
from gradwire.session.report import Report
from gradwire.session.together import Together
from gradwire.sync.averager import Averager
from gradwire.sync.averaging import Averaging
from gradwire.sync.averaging_options import Options
from gradwire.sync.scaling import require_groups
from gradwire.sync.schedules import Schedule
from gradwire.sync.shards import held_state, reshard_, sharded_state
from gradwire.sync.wrapper import ModelWrapper

_KEY = "sync"
"""Where the state of averaging lies in the optimizer's state."""


class AveragingOptimizer(ModelWrapper):
    """Steps an inner optimizer, and has an averager do its part after each step.

    A real optimizer: parameter groups and state are those of the inner one, so schedulers, hooks and closures work as
    ever. A `torch.amp.GradScaler` hands it steps that it would skip elsewhere; the inner optimizer does not see those,
    and they count, so ranks that skip different steps stay in step.

    Args:
        inner: the optimizer that this rank trains with, of whatever kind. From now on only this one steps it.
        averaging: an `Averaging`, a `Hierarchical` or another averager of the model whose parameters `inner` trains.
            It is this object's from now on.

    Attributes:
        averaging: as given.

    Raises:
        AttachError: a parameter of the optimizer that the model has not.

    Example:
        averaging = gradwire.sync.Hierarchical.over(mesh, model, {"place": 4, "site": 32})
        optimizer = gradwire.sync.AveragingOptimizer(torch.optim.AdamW(model.parameters()), averaging)
    """

    def __init__(self, inner: Optimizer, averaging: Averager) -> None:
        self._averager = averaging
        reshard_(averaging.model)
        super().__init__(inner, averaging.model)
        self._steps_inner = False
        self._exposed_s = 0.0
        self._guard = inner.register_step_pre_hook(self._require_own_step)

    @property
    def averaging(self) -> Averager:
        """What averages the models of all ranks."""
        return self._averager

    @property
    def averages_to_evaluate(self) -> bool:
        """Whether ranks communicate for `evaluating`."""
        return self.averaging.averages_to_evaluate

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.inner!r}, {self.averaging!r})"

    def _require_own_step(self, *_: object) -> None:
        if not self._steps_inner:
            raise StepError(
                "the inner optimizer was stepped on its own, which windows would not count, and nothing was changed: "
                f"call step() of {type(self).__name__}, or close() it before the inner one goes on alone"
            )

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Step the inner optimizer, and average where a window ends; return what it returns.

        Raises:
            StepError: a parameter requires gradients that did not when this was made, and as `Averaging.step`. For a
                parameter that was unfrozen nothing is changed.
            CommunicationError: as `Averaging.step`.
        """
        return super().step(closure)

    def step_inner(self, closure: Callable[[], Any] | None) -> Any:
        """The inner optimizer's step, which it may not make on its own."""
        self._steps_inner = True
        try:
            return super().step_inner(closure)
        finally:
            self._steps_inner = False

    @override
    def after_step(self) -> None:
        begun = time.perf_counter()
        self.averaging.step()
        self._exposed_s += time.perf_counter() - begun

    @override
    def require_planned(self) -> None:
        reshard_(self.averaging.model)
        super().require_planned()

    def sync(self) -> None:
        """Average now: afterwards all ranks have the same model. See `Averaging.sync`."""
        self.averaging.sync()

    def evaluating(self) -> AbstractContextManager[None]:
        """In a `with` block the model is the global copy. See `Averaging.evaluating`."""
        return self.averaging.evaluating()

    def stats(self) -> Stats:
        """Return bytes and times so far; `exposed_s` is what steps took beyond those of the inner optimizer."""
        return dataclasses.replace(self.averaging.stats(), exposed_s=self._exposed_s)

    def report(self) -> Report:
        """Return what communication costs and saves in a step of training on this rank, see `Report`.

        Example:
            print(optimizer.report())
        """
        return self.averaging.report()

    def described(self) -> str:
        """What this is, in a line."""
        return f"{type(self.inner).__name__} in {self.averaging!r}"

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's state, and under "sync" that of averaging; save one a rank, with its model.

        Of a sharded model it has what this rank holds, in plain tensors.
        """
        inner = self.inner.state_dict()
        return {**inner, "state": held_state(inner["state"], self._in_order()), _KEY: self.averaging.state_dict()}

    def _in_order(self) -> list[Tensor]:
        return [parameter for group in self.inner.param_groups for parameter in group["params"]]

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on exactly where `state_dict` was called. Load this rank's model too.

        Raises:
            StateError: as `Averaging.load_state_dict`, or a state of another optimizer; nothing is changed then.
        """
        self.take_up(self.checked(state_dict))

    def checked(self, state: Mapping[str, Any]) -> tuple[dict[str, Any], Any]:
        """Return a saved state for `take_up`; until then nothing is changed.

        Raises:
            StateError: as `load_state_dict`.
        """
        if _KEY not in state:
            raise StateError(
                'the saved state has no "sync", so it is that of an optimizer that averages nothing: load it into '
                "the inner optimizer before this one is made, or pass what its own state_dict() returned"
            )
        inner = {key: value for key, value in state.items() if key != _KEY}
        require_groups(self.inner, inner)
        return inner, self.averaging.checked(state[_KEY])

    def take_up(self, checked: tuple[dict[str, Any], Any]) -> None:
        """Go on from what `checked` returned."""
        inner, averaging = checked
        self.inner.load_state_dict({**inner, "state": sharded_state(inner["state"], self._in_order())})
        self.averaging.take_up(averaging)
        self._share()

    @property
    def _savable(self) -> Savable:
        if not isinstance(self.averaging, Savable):
            raise StateError(f"gradwire.save knows no {type(self.averaging).__name__}: save state_dict() of each rank")
        return self.averaging

    @property
    def session(self) -> Session:
        """One of the averager's, over all ranks."""
        session = self._savable.session
        assert isinstance(session, Session)  # averagers have one
        return session

    @property
    def kind(self) -> str:
        """What must be alike in a run that goes on from a save."""
        return f"{type(self.inner).__name__} in {self._savable.kind}"

    @property
    def steps(self) -> int:
        """Those of the run so far."""
        return self._savable.steps

    def resharded(self, states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """This rank's state from those of another number of ranks, see `gradwire.load`.

        Raises:
            StateError: as the averager's.
        """
        synced = [state[_KEY] for state in states]
        whole = self._savable.resharded(synced)
        of = self.averaging.same_shard(synced) if isinstance(self.averaging, Averaging) else range(len(states))
        return {**states[of[self.session.transport.rank % len(of)]], _KEY: whole}

    def together(self, call: str) -> Together:
        """All ranks that have a part in this."""
        averaging = self._savable
        return (
            averaging.together(call)
            if isinstance(averaging, HasSeveralGroups)
            else Together(call, self.session.lane, StateError)
        )

    def close(self) -> None:
        """Stop communicating and let go of the inner optimizer; a second call does nothing."""
        self._guard.remove()
        self.averaging.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._guard.remove()
        self.averaging.__exit__(kind, error, trace)


class LocalSGD(AveragingOptimizer):
    """Steps an inner optimizer, and averages the parameters of all ranks at the end of each window.

    It is an `AveragingOptimizer` around an `Averaging`, see there for the arguments and for what is computed, and
    `docs/sync.md` for where schedulers, EMA and evaluation belong.

    Args:
        inner: the optimizer that this rank trains with, of whatever kind. From now on only this one steps it.
        model: whose trained parameters are averaged; those of `inner` are among them.
        every, method: as `Averaging` takes them.
        options: `outer`, `warmup`, `fragments`, `delay`, `merge`, `buffers`, `moments`, `group`, `seed` and
            `deadline_s` of `Averaging`.

    Raises:
        AttachError: a parameter of the optimizer that the model has not, and as `Averaging`.
        CompositionError, SpecError, CommunicationError: as `Averaging`.

    Example:
        optimizer = gradwire.sync.LocalSGD(torch.optim.AdamW(model.parameters()), model, every=8)
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss_of(model(inputs), targets).backward()
            optimizer.step()
        optimizer.sync()  # all ranks have the same model now
        optimizer.close()
    """

    def __init__(
        self,
        inner: Optimizer,
        model: nn.Module,
        every: int | Schedule = 8,
        method: Reducer | str = "none",
        **options: Unpack[Options],
    ) -> None:
        averaging = Averaging(model, every, method, optimizer=inner, what="gradwire.sync.LocalSGD", **options)
        super().__init__(inner, averaging)

    @property
    def averaging(self) -> Averaging:
        """The averages of all ranks' models."""
        return cast(Averaging, self._averager)

    def change(self, method: Reducer | str) -> None:
        """Have what changed travel by another method, see `Averaging.change`."""
        self.averaging.change(method)
