"""A part of a model that ranks average at once, with what they agreed on and what the outer step remembers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gradwire.core.errors import CompositionError
from gradwire.core.saved import Loaded
from gradwire.session import Session, SessionStep
from gradwire.sync.buffers import require_alike
from gradwire.sync.global_copy import GlobalCopy, not_finite, require_finite, wide
from gradwire.sync.outer import Outer, Rates
from gradwire.sync.shards import local

MOMENT = "first moment of "
"""What stands before a parameter's name in the name of its first moment."""


def layers_of(names: Sequence[str]) -> list[list[str]]:
    """Names of parameters by the module that they belong to, in order.

    >>> layers_of(["a.weight", "a.bias", "b.weight"])
    [['a.weight', 'a.bias'], ['b.weight']]
    """
    layers: dict[str, list[str]] = {}
    for name in names:
        layers.setdefault(name.rpartition(".")[0], []).append(name)
    return list(layers.values())


def split(names: Sequence[str], fragments: int) -> list[list[str]]:
    """Deal layers out to fragments in turn (the strided pattern of Streaming DiLoCo).

    Raises:
        CompositionError: more fragments than layers, or none.

    >>> split(["a.weight", "a.bias", "b.weight", "c.weight"], 2)
    [['a.weight', 'a.bias', 'c.weight'], ['b.weight']]
    """
    if fragments == 1:
        return [list(names)]
    layers = layers_of(names)
    if not 1 <= fragments <= len(layers):
        raise CompositionError(
            f"fragments={fragments}: the model has {len(layers)} modules with trained parameters of their own, and a "
            "fragment has one of them at least"
        )
    return [[name for layer in layers[i::fragments] for name in layer] for i in range(fragments)]


class Fragment(GlobalCopy):
    """Averages named parameters of all ranks.

    What travels is what a rank's window changed: x_H - x_0 in 32 bits or more, where x_0 is what the parameters were at
    the window's beginning. So error feedback works: what was not sent is added to the change of the next window.

    Args:
        parameters: those of the model, alive.
        outer: what the global copy becomes.
        session: over `travelling(parameters)`.
        with_moments: whether first moments travel too.

    Attributes:
        copies: the global copy of each tensor, the same bits on all ranks.
        rates: inner learning rates by parameter, of the average that is under way.
        rates_before: those of the average before; a rate of 0 is left out.
        deltas: of an average that is under way or has not been taken up yet, else empty.
        sent: what this rank had when that average began, where its progress since then is to be kept; else empty.
        due: after which step it is taken up.
    """

    def __init__(self, parameters: Mapping[str, Tensor], outer: Outer, session: Session, with_moments: bool) -> None:
        super().__init__(parameters, outer)
        self.session, self.with_moments = session, with_moments
        if with_moments:
            self.copies.update({MOMENT + name: torch.zeros_like(copy) for name, copy in self.copies.items()})
        self.rates: dict[str, float] = {}
        self.rates_before: dict[str, float] = {}
        self.deltas: dict[str, Tensor] = {}
        self.sent: dict[str, Tensor] = {}
        self.due = 0
        self._step: SessionStep | None = None

    @property
    def is_under_way(self) -> bool:
        """Whether an average was begun and not taken up."""
        return bool(self.deltas)

    # One average -------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def begin(
        self, due: int, moments: Mapping[str, Tensor], rates: Mapping[str, float], *, keeps_progress: bool = False
    ) -> None:
        """Send what changed; go on at once.

        Args:
            due: after which step of the run it is taken up.
            moments: the first moments of this rank, by parameter; what is missing counts as zeros.
            rates: inner learning rates by parameter, alike on all ranks.
            keeps_progress: whether `merge_progress` will take it up, and not `merge`.
        """
        deltas = self.changes()
        if self.with_moments:
            for name in self.parameters:
                copy = self.copies[MOMENT + name]
                mine = wide(moments[name]).to(copy.dtype) if name in moments else torch.zeros_like(copy)
                deltas[MOMENT + name] = mine.sub_(copy)
        if keeps_progress:
            self.sent = {name: wide(tensor) for name, tensor in self._here(moments).items()}
        step = self.session.step()
        step.__enter__()
        step.deliver_all(deltas)
        step.go_on()
        self._step, self.deltas, self.due, self.rates = step, deltas, due, dict(rates)

    def wait(self) -> None:
        """Wait for the mean of what was sent."""
        if self._step is not None:
            step, self._step = self._step, None
            step.__exit__(None, None, None)

    @torch.no_grad()
    def end(self, plainly: bool, of_copy: Callable[[str | None], str | None] = lambda name: name) -> None:
        """Take the mean up into the global copy.

        Args:
            plainly: whether the mean itself is taken, without the outer step.
            of_copy: given the first mean of this rank that is not finite, returns the first one of its whole copy.

        Raises:
            StepError: on every rank, where the mean is not finite. The global copy is left as it was.
        """
        self.wait()
        deltas, self.deltas = self.deltas, {}
        mine = not_finite(deltas)
        found = of_copy(mine)
        if found is not None and mine is None:  # nobody takes this mean, so what was sent of it is owed still
            self.session.lane.call(self.session.engine.forget, self.session.where())
        require_finite(found)
        if not plainly:
            self.move_(deltas, self._rates_of)
        for name, delta in deltas.items():
            if plainly or name not in self.parameters:
                self.copies[name].add_(delta)
        self.rates_before |= {name: rate for name, rate in self.rates.items() if rate}

    def _rates_of(self, name: str) -> Rates:
        now = self.rates.get(name, 1.0)  # what no optimizer trains does not change
        return Rates(now, self.rates_before.get(name, now))

    @torch.no_grad()
    def merge(self, moments: Mapping[str, Tensor], own: float) -> None:
        """Write the global copy over what this rank has, of which a share `own` stays.

        Args:
            moments: first moments by parameter, of any fragment.
            own: 0 where nothing stays.
        """
        for name, tensor in self._here(moments).items():
            copy = self.copies[name]
            tensor.copy_(wide(tensor).mul_(own).add_(copy.mul(1 - own)) if own else copy)

    @torch.no_grad()
    def merge_progress(self, moments: Mapping[str, Tensor]) -> None:
        """Write the global copy over what this rank has, and add what this rank has changed since the average began."""
        for name, tensor in self._here(moments).items():
            mine = wide(tensor)
            if name in self.sent:  # a first moment that there was none of has changed from zeros
                mine.sub_(self.sent[name])
            tensor.copy_(mine.add_(self.copies[name]))
        self.sent = {}

    def _here(self, moments: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What this rank has of all that travels: parameters, and first moments of any fragment that are among them."""
        mine = {MOMENT + name: moment for name, moment in moments.items() if name in self.parameters}
        return {name: local(tensor) for name, tensor in (dict(self.parameters) | mine).items()}

    def moved(self) -> tuple[float, float]:
        """|x - x_0|^2 and |x_0|^2 over what this rank holds."""
        moved = whole = 0.0
        for name, parameter in self.parameters.items():
            start = self.start(name).double()
            moved += float((local(parameter).double() - start).square().sum())
            whole += float(start.square().sum())
        return moved, whole

    # State -------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """All of it, in tensors, numbers and strings; tensors are copies."""
        self.wait()
        return {
            "session": self.session.state_dict(),
            "copies": _cloned(self.copies),
            "memory": {name: _cloned(memory) for name, memory in self.memory.items()},
            "rates": dict(self.rates),
            "rates_before": dict(self.rates_before),
            "deltas": _cloned(self.deltas),
            "sent": _cloned(self.sent),
            "due": self.due,
        }

    def unpacked(self, saved: Mapping[str, Any]) -> Loaded:
        """Refuse what belongs to another model; return what `take_up` wants of the session.

        Raises:
            StateError: with what differs.
        """
        require_alike("global copy of", self.copies, saved["copies"])
        for name, memory in self.memory.items():
            require_alike(f"outer state of {name!r},", memory, saved["memory"].get(name, {}))
        if saved["deltas"]:
            require_alike("mean change of", self.copies, saved["deltas"])
        return self.session.unpacked(saved["session"])

    @torch.no_grad()
    def take_up(self, saved: Mapping[str, Any], loaded: Loaded) -> None:
        """Go on from what `unpacked` has accepted."""
        self.wait()
        self.session.take_up(loaded)
        for name, copy in self.copies.items():
            copy.copy_(saved["copies"][name])
        for name, memory in self.memory.items():
            for key, tensor in memory.items():
                tensor.copy_(saved["memory"][name][key])
        devices = {name: copy.device for name, copy in self.copies.items()}
        self.deltas = {name: delta.to(devices[name], copy=True) for name, delta in saved["deltas"].items()}
        self.sent = {name: mine.to(devices[name], copy=True) for name, mine in saved["sent"].items()}
        self.rates, self.rates_before = dict(saved["rates"]), dict(saved["rates_before"])
        self.due = int(saved["due"])


def travelling(parameters: Mapping[str, Tensor], with_moments: bool) -> dict[str, Tensor]:
    """Tensors like those that are sent, for a session."""
    held = {name: local(parameter) for name, parameter in parameters.items()}
    sent = {name: torch.empty_like(p, dtype=torch.promote_types(p.dtype, torch.float32)) for name, p in held.items()}
    return sent | ({MOMENT + name: tensor for name, tensor in sent.items()} if with_moments else {})


def _cloned(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}
