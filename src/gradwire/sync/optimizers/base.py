"""What these optimizers share: a session that carries messages, one state, and steps that all ranks keep or skip.

messages = what this rank has to say of each parameter
session.reduce_(messages)        # now the same bits on every rank
parameters = update(parameters, messages)
"""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, ClassVar, NamedTuple, Self, TypedDict, Unpack, overload

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import ParamsT

from gradwire import kernels
from gradwire.core import buffers
from gradwire.core.errors import AttachError, StateError, StepError
from gradwire.core.reshard import reshard
from gradwire.drivers.engine import Stats
from gradwire.reducers.base import Reducer
from gradwire.session import Session
from gradwire.session.figures import ReportOfSession
from gradwire.session.lane import Lane
from gradwire.session.names import TrainedParameters, named, require_whole
from gradwire.session.states import Unpacked, take_up, unpacked
from gradwire.sync.scaling import ScaledOptimizer, require_groups

Params = nn.Module | ParamsT
"""A model, whose parameters that require gradients count, or what any optimizer of PyTorch takes."""

COMMUNICATION = "communication"
"""The key of `state_dict` under which the session's memory stands."""


class SessionOptions(TypedDict, total=False):
    """What else a `gradwire.Session` may be told, see there."""

    group: dist.ProcessGroup | None
    seed: int
    deadline_s: float
    grain_numel: int | None
    checksum: bool
    lane: Lane | None


class NamedParameter(NamedTuple):
    """A parameter with its name and the options of its group."""

    name: str
    parameter: Tensor
    group: dict[str, Any]


class SharedOptimizer(ReportOfSession, ScaledOptimizer):
    """An optimizer for loops without DDP: every rank computes gradients of its own and calls `step` at the same place.

    The model must be alike on every rank when the optimizer is made, and stays so bit for bit. A parameter that has no
    gradient counts as zeros, since other ranks may have one. Where a gradient is not finite on any rank, or its
    `torch.amp.GradScaler` has found infinities, the step is skipped on all of them, and nothing is remembered of it. A
    step that raises ends communication, and the other ranks are told why.

    Args:
        params: a model, or parameters, named parameters or groups as PyTorch's optimizers take them. They must be
            float32; use `torch.autocast` for faster products.
        defaults: options of groups.
        method: what carries the messages.
        options: `group`, `seed`, `deadline_s`, `grain_numel`, `checksum` and `lane` of the session.

    Raises:
        AttachError: ranks that disagree, parameters of another dtype, or no process group.

    Attributes:
        session: carries the messages. `gradwire.save(folder, optimizer)` saves the whole state, for instance to go on
            with another number of ranks.
    """

    def __init__(
        self, params: Params, defaults: dict[str, Any], method: Reducer | str, **options: Unpack[SessionOptions]
    ) -> None:
        self._is_made = False
        if isinstance(params, nn.Module):
            require_whole(params, type(self).__name__)
        self._follows: tuple[nn.Module, TrainedParameters] | None = None
        if isinstance(params, nn.Module):
            self.follow(params)
        super().__init__(list(named(params).items()) if isinstance(params, nn.Module) else params, defaults)
        self._names = _names(self.param_groups)
        for entry in self.entries():
            name, parameter, _ = entry
            _require_float32(name, parameter)
            self.state[parameter] = self.fresh(entry)
        self.session = Session(self.tensors(), method, what=type(self).__name__, **options)
        self._is_made = True

    def follow(self, model: nn.Module) -> None:
        """Refuse steps, from now on, while the model trains a parameter that it does not train now.

        An optimizer that is given a model does so by itself; one that is given parameters knows of no others.
        """
        self._follows = model, TrainedParameters.of_now(type(self).__name__, model)

    def tensors(self) -> dict[str, Tensor]:
        """The parameters by name, as a session wants them."""
        return {entry.name: entry.parameter.detach() for entry in self.entries()}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, while the optimizer is made.

        Raises:
            StepError: afterwards, since what ranks exchange was agreed on.
        """
        if self._is_made:
            raise StepError("what ranks exchange was planned with the parameters given: make a new optimizer")
        super().add_param_group(param_group)

    def entries(self) -> Iterator[NamedParameter]:
        """Every parameter, in the order of the groups."""
        names = iter(self._names)
        for group in self.param_groups:
            for parameter in group["params"]:
                yield NamedParameter(next(names), parameter, group)

    # What an optimizer is made of --------------------------------------------------------------------------------

    @abstractmethod
    def fresh(self, entry: NamedParameter) -> dict[str, Tensor]:
        """Return what is remembered of a parameter before the first step."""

    def message(self, entry: NamedParameter, gradient: Tensor) -> Tensor:
        """Return what this rank contributes: a new tensor, made without changing what is remembered.

        By default it is the gradient, to which the session may add momentum that it keeps.
        """
        return buffers.copied(gradient)

    @abstractmethod
    def update(self, entry: NamedParameter, result: Tensor) -> None:
        """Change the parameter and what is remembered of it, given what all ranks received."""

    # Steps -------------------------------------------------------------------------------------------------------

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Combine what the gradients of all ranks say, and update the parameters alike on every rank.

        Args:
            closure: computes the loss and its gradients, where given, and returns the loss.

        Raises:
            StepError: a sparse gradient, a parameter that requires gradients and did not when this was made, or a
                session that is closed.
            CommunicationError: a rank failed or fell silent, by its number.
        """
        if self._follows is not None:
            model, trained = self._follows
            trained.of(model)
        loss = None
        with self.telling():
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            self.unscale_()
            self.make_step()
        return loss

    def telling(self) -> AbstractContextManager[None]:
        """Tell the other ranks what is raised inside, also before the session's step, where they would wait for it."""
        return self.session.lane.telling()

    def make_step(self) -> None:
        """Do one step with the gradients that are there."""
        self.combine(self.session)

    def combine(self, session: Session) -> None:
        """Send messages by a session, and update the parameters if what came is finite."""
        messages = {entry.name: self.message(entry, self.gradient(entry)) for entry in self.entries()}
        if self.exchanged(session, messages):
            self.count()
            for entry in self.entries():
                self.update(entry, messages[entry.name])

    def gradient(self, entry: NamedParameter) -> Tensor:
        """A parameter's gradient: zeros where it has none, and NaN where a scaler would skip this step.

        Raises:
            StepError: a sparse gradient.
        """
        gradient = entry.parameter.grad
        if self.scaler_skips():
            return buffers.like(entry.parameter).fill_(torch.nan)
        if gradient is None:
            return buffers.like(entry.parameter).zero_()
        if gradient.layout != torch.strided:
            raise StepError(f"the gradient of {entry.name!r} is {gradient.layout}, and only dense ones can be combined")
        return gradient

    def exchanged(self, session: Session, messages: Mapping[str, Tensor]) -> bool:
        """Replace messages by what all ranks received; return whether it is finite, alike on all of them."""
        session.non_finite.is_expected = self.has_scaler
        session.reduce_(messages)
        return bool(torch.stack([kernels.all_finite(message) for message in messages.values()]).all())

    def count(self) -> None:
        """Count a step that is kept."""
        for group in self.param_groups:
            group["step"] += 1

    # Figures, state, ending --------------------------------------------------------------------------------------

    def stats(self) -> Stats:
        """Return bytes and times of communication so far."""
        return self.session.stats()

    def state_dict(self) -> dict[str, Any]:
        """Return all that this rank remembers; save one file a rank, since ranks owe different things.

        Resuming with the same number of ranks is exact. For another number, pass all ranks' `["communication"]` to
        `gradwire.reshard`, and put each result in place of the old one.
        """
        return {**super().state_dict(), COMMUNICATION: self.session.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take up what `state_dict` of the same rank returned.

        Raises:
            StateError: the state of another optimizer, method, rank, number of ranks or model, or a damaged one.
                Nothing is changed then.
        """
        self.take_up(self.checked(state_dict))

    def checked(self, state: Mapping[str, Any]) -> tuple[dict[str, Any], Unpacked]:
        """Return a saved state for `take_up`; until then nothing is changed.

        Raises:
            StateError: as `load_state_dict`.
        """
        if COMMUNICATION not in state:
            raise StateError(f"the state has no {COMMUNICATION!r}: it is not that of a {type(self).__name__}")
        require_groups(self, state)
        return dict(state), unpacked(self.session, state[COMMUNICATION])

    def take_up(self, checked: tuple[dict[str, Any], Unpacked]) -> None:
        """Go on from what `checked` returned."""
        state, loaded = checked
        super().load_state_dict(state)
        take_up(self.session, loaded)

    @property
    def kind(self) -> str:
        """What must be alike in a run that goes on from a save."""
        return self.described()

    @property
    def steps(self) -> int:
        """Steps that were kept."""
        return self.param_groups[0]["step"]

    def resharded(self, states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """This rank's state from those of another number of ranks, where all had the same parameters.

        Raises:
            StateError: states that do not belong together.
        """
        transport = self.session.transport
        owed = reshard([state[COMMUNICATION] for state in states], transport.world_size)
        return {**states[0], COMMUNICATION: owed[transport.rank]}

    def sync(self) -> None:
        """Have all ranks end with the same model; they have it after every step, where an optimizer does not differ."""
        return

    averages_to_evaluate: ClassVar[bool] = False
    """All ranks have what is evaluated already."""

    def evaluating(self) -> AbstractContextManager[None]:
        """In a `with` block the model is the one that all ranks agreed on last."""
        return contextlib.nullcontext()

    def described(self) -> str:
        """What this is, in a line."""
        return f"{type(self).__name__} by {self.session.reducer!r}"

    def close(self) -> None:
        """Stop communicating, for good."""
        self.session.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.session.lane.failures.leave_word(error)
        self.close()


def _names(groups: Iterable[Mapping[str, Any]]) -> list[str]:
    """Names as given, or numbers."""
    found: list[str] = []
    for group in groups:
        given = group.get("param_names")
        found += given or [str(len(found) + i) for i in range(len(group["params"]))]
    return found


def _require_float32(name: str, parameter: Tensor) -> None:
    if parameter.dtype != torch.float32:
        raise AttachError(f"parameter {name!r} is {parameter.dtype}: train in float32, with torch.autocast for speed")
