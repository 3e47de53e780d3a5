"""A part of a model that ranks average at once, with what they agreed on and what the outer step remembers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gradwire.core import buffers
from gradwire.core.errors import CompositionError
from gradwire.session import Session, SessionStep
from gradwire.session.states import Unpacked, take_up, unpacked
from gradwire.sync.buffers import require_alike
from gradwire.sync.global_copy import GlobalCopy, not_finite, require_finite, wide
from gradwire.sync.outer import Outer, Rates
from gradwire.sync.shards import local


def layers_of(names: Sequence[str]) -> list[list[str]]:
    """Names of parameters by the module that they belong to, in order.

    >>> layers_of(["a.weight", "a.bias", "b.weight"])
    [['a.weight', 'a.bias'], ['b.weight']]
    """
    layers: dict[str, list[str]] = {}
    for name in names:
        layers.setdefault(name.rpartition(".")[0], []).append(name)
    return list(layers.values())


def split(nbytes: Mapping[str, int], fragments: int) -> list[list[str]]:
    """Deal layers out to fragments so that these have about equally many bytes.

    The largest layer comes first, and each goes to the fragment that has the fewest bytes so far (Graham 1969, "Bounds
    on multiprocessing timing anomalies", theorem 3). So the largest fragment has at most 4/3 - 1/(3 n) times the bytes
    that it has in the best of all ways to deal them out to n. Blocks that are alike are dealt out in turn, which is the
    strided pattern of Streaming DiLoCo (Douillard et al. 2025, section 2.2).

    Args:
        nbytes: of each parameter, by name.
        fragments: how many there shall be.

    Raises:
        CompositionError: more fragments than layers, or none.

    >>> split({"a.weight": 8, "a.bias": 1, "b.weight": 4, "c.weight": 6}, 2)
    [['a.weight', 'a.bias'], ['b.weight', 'c.weight']]
    """
    if fragments == 1:
        return [list(nbytes)]
    layers = layers_of(list(nbytes))
    if not 1 <= fragments <= len(layers):
        raise CompositionError(
            f"fragments={fragments}: the model has {len(layers)} modules with trained parameters of their own, and a "
            "fragment has one of them at least"
        )
    sizes = [max(sum(nbytes[name] for name in layer), 1) for layer in layers]
    dealt, filled = [list[int]() for _ in range(fragments)], [0] * fragments
    for number in sorted(range(len(layers)), key=lambda number: -sizes[number]):
        lightest = filled.index(min(filled))
        dealt[lightest].append(number)
        filled[lightest] += sizes[number]
    return [[name for number in sorted(numbers) for name in layers[number]] for numbers in dealt]


class Fragment(GlobalCopy):
    """Averages named parameters of all ranks.

    What travels is what a rank's window changed: x_H - x_0 in 32 bits or more, where x_0 is what the parameters were at
    the window's beginning. So error feedback works: what was not sent is added to the change of the next window.

    Args:
        parameters: those of the model, alive.
        outer: what the global copy becomes.
        session: over `travelling(parameters | moments)`.
        moments: what of an optimizer travels too, by name, each with the parameter that it is like.

    Attributes:
        copies: the global copy of each tensor, the same bits on all ranks.
        rates: inner learning rates by parameter, of the average that is under way.
        rates_before: those of the average before; a rate of 0 is left out.
        deltas: of an average that is under way or has not been taken up yet, else empty.
        sent: what this rank had when that average began, where its progress since then is to be kept; else empty.
        due: after which step it is taken up.
    """

    def __init__(
        self, parameters: Mapping[str, Tensor], outer: Outer, session: Session, moments: Mapping[str, Tensor]
    ) -> None:
        super().__init__(parameters, outer)
        self.session = session
        self.copies.update({name: torch.zeros_like(wide(like)) for name, like in moments.items()})
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
            moments: of this rank, by the names under which they travel, those of other fragments too; what is missing
                counts as zeros.
            rates: inner learning rates by parameter, alike on all ranks.
            keeps_progress: whether `merge_progress` will take it up, and not `merge`.
        """
        deltas = self.changes()
        for name, copy in self.copies.items():
            if name not in self.parameters:
                mine = wide(moments[name]) if name in moments else buffers.like(copy).zero_()
                deltas[name] = mine.sub_(copy)
        if keeps_progress:
            self.sent = {name: wide(tensor) for name, tensor in self._here(moments).items()}
        step = self.session.step()
        with contextlib.ExitStack() as told:
            told.enter_context(step)
            step.deliver_all(deltas)
            step.go_on()
            told.pop_all()  # it ends in `wait`
        self._step, self.deltas, self.due, self.rates = step, deltas, due, dict(rates)

    def wait(self) -> None:
        """Wait for the mean of what was sent."""
        if self._step is not None:
            step, self._step = self._step, None
            step.__exit__(None, None, None)

    def drop(self, is_owed: bool) -> None:
        """Forget an average that is under way; what was sent for it is owed still, if so."""
        self.deltas = {}
        if is_owed:
            self.session.lane.call(self.session.feed.drop, self.session.feed.where())

    @torch.no_grad()
    def end(self, plainly: bool) -> None:
        """Take the mean up into the global copy, after `require_finite_means`.

        Args:
            plainly: whether the mean itself is taken, without the outer step.
        """
        deltas, self.deltas = self.deltas, {}
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
            moments: as `begin` takes them; those that are not among them are left alone.
            own: 0 where nothing stays.
        """
        for name, tensor in self._here(moments).items():
            copy = self.copies[name]
            tensor.copy_(wide(tensor).mul_(own).add_(buffers.times(copy, 1 - own)) if own else copy)

    @torch.no_grad()
    def merge_progress(self, moments: Mapping[str, Tensor]) -> None:
        """Write the global copy over what this rank has, and add what this rank has changed since the average began.

        Args:
            moments: as `merge` takes them.
        """
        for name, tensor in self._here(moments).items():
            mine = wide(tensor)
            if name in self.sent:  # a first moment that there was none of has changed from zeros
                mine.sub_(self.sent[name])
            tensor.copy_(mine.add_(self.copies[name]))
        self.sent = {}

    def _here(self, moments: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What this rank has of all that travels: parameters, and moments of any fragment that are among them."""
        mine = {name: moment for name, moment in moments.items() if name in self.copies}
        return {name: local(tensor) for name, tensor in (dict(self.parameters) | mine).items()}

    def moved(self) -> tuple[float, float]:
        """|x - x_0|^2 and |x_0|^2 over what this rank holds."""
        moved = whole = 0.0
        for name, parameter in self.parameters.items():
            start = self.start(name).double()
            moved += float((local(parameter.detach()).double() - start).square().sum())
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

    def unpacked(self, saved: Mapping[str, Any]) -> Unpacked:
        """Refuse what belongs to another model; return what `take_up` wants of the session.

        Raises:
            StateError: with what differs.
        """
        require_alike("global copy of", self.copies, saved["copies"])
        for name, memory in self.memory.items():
            require_alike(f"outer state of {name!r},", memory, saved["memory"].get(name, {}))
        if saved["deltas"]:
            require_alike("mean change of", self.copies, saved["deltas"])
        return unpacked(self.session, saved["session"])

    @torch.no_grad()
    def take_up(self, saved: Mapping[str, Any], loaded: Unpacked) -> None:
        """Go on from what `unpacked` has accepted."""
        self.wait()
        take_up(self.session, loaded)
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


def require_finite_means(parts: Sequence[Fragment], of_copy: Callable[[str | None], str | None]) -> None:
    """Wait for means that are under way, and refuse all of them where one is not finite.

    Args:
        parts: whose means are taken up together.
        of_copy: given the first mean of this rank that is not finite, returns the first one of its whole copy.

    Raises:
        StepError: on every rank, where a mean is not finite. Global copies are left as they were.
    """
    for part in parts:
        part.wait()
    mine = not_finite({name: delta for part in parts for name, delta in part.deltas.items()})
    found = of_copy(mine)
    if found is not None:
        for part in parts:
            part.drop(is_owed=mine is None)  # nobody takes this mean
    require_finite(found)


def travelling(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors like those that are sent, for a session."""
    held = {name: local(tensor) for name, tensor in tensors.items()}
    return {name: torch.empty_like(t, dtype=torch.promote_types(t.dtype, torch.float32)) for name, t in held.items()}


def _cloned(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}
