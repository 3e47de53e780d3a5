"""A unit of a plan with its state, the buffer of its gradient, and how much of that is here."""

from __future__ import annotations

import torch
from torch import Tensor

from gradwire import kernels
from gradwire.core import buffers
from gradwire.core.grain import Grain
from gradwire.core.state import CARRIED, Leaf, State, carried_leaf, walk
from gradwire.drivers.host_memory import HostMemory, Residuals
from gradwire.drivers.plan import Unit
from gradwire.reducers.guard import Guard, flagged_by_result
from gradwire.reducers.step import Program, Step


class Slot:
    """What an engine keeps of one unit.

    Args:
        unit: a grain and its reducer.
        state: on the grain's device.
        host: where what is owed lies between programs; None: where the grain is.

    Attributes:
        unit: as given.
        state: as the last good step left it.
        x: the gradient's buffer, 1-d, empty before `take_buffer` and after `let_go`.
        missing: how many elements of the gradient are still to come.
    """

    def __init__(self, unit: Unit, state: State, host: HostMemory | None = None) -> None:
        self.unit, self._residuals = unit, Residuals(host) if host else None
        self.state = self.kept(state)
        self.x = self._nothing()
        self.missing = 0

    @property
    def grain(self) -> Grain:
        """The grain of the slot's unit."""
        return self.unit.grain

    def send_for_residuals(self) -> None:
        """Start to bring what lies on the host, for the program that runs soon."""
        if self._residuals is not None:
            self._residuals.send_for(self.state)

    def kept(self, new: State) -> State:
        """A state with what it owes where that lies between programs."""
        return new if self._residuals is None else self._residuals.kept(new)

    def forget_residuals(self) -> None:
        """Forget what is on its way from the host, for a step that broke off."""
        if self._residuals is not None:
            self._residuals.forget()

    def _nothing(self) -> Tensor:
        return torch.empty(0, device=self.grain.device)

    def take_buffer(self) -> None:
        """Have memory for a gradient. Residuals are float32 whatever gradients are, so what becomes one begins so."""
        if not self.x.numel():
            grain, reducer = self.unit
            keeps = reducer.keeps_input and grain.dtype != torch.float64
            self.x = buffers.empty((grain.numel,), torch.float32 if keeps else grain.dtype, grain.device)

    def let_go(self, new: State) -> None:
        """Hold memory for a gradient no longer, unless a new state is in it."""
        if all(leaf.tensor.data_ptr() != self.x.data_ptr() for _, leaf in walk(new)):
            self.x = self._nothing()

    def deliver(self, offset: int, gradient: Tensor) -> None:
        """Copy `gradient`, 1-d, to `offset` in the buffer."""
        self.x[offset : offset + gradient.numel()].copy_(gradient)
        self.missing -= gradient.numel()

    def first_not_finite(self) -> str | None:
        """The first parameter whose gradient has a value that is not finite. On a GPU None: it would be waited for."""
        if self.grain.device.type != "cpu" or bool(kernels.all_finite(self.x)):
            return None
        for segment in self.grain.segments:
            if not bool(self.x[segment.offset : segment.offset + segment.numel].isfinite().all()):
                return segment.name
        return self.grain.name

    def program(self, step: Step, guards: bool) -> Program:
        """The program of the gradient in the buffer, and of what is carried over from another method."""
        grain, reducer = self.unit
        state = self.state if self._residuals is None else self._residuals.brought(self.state)
        carried = state.get(CARRIED)
        if isinstance(carried, Leaf):
            self.x.add_(carried.tensor)
            state = State({name: node for name, node in state.items() if name != CARRIED})
        # A step that the optimizer skips must not be taken for the one in which what is carried arrived. Rules leave
        # out what is not finite on one rank, and go on doing so.
        if (guards or carried is not None) and reducer.averages and not isinstance(reducer, Guard):
            reducer = Guard(reducer)
        program = reducer.reduce(grain, self.x.view(grain.shape), state, step)
        return program if reducer.averages or not guards else flagged_by_result(program, reducer.scatters)

    def settle(self, new: State) -> None:
        """Take up the state that a good step has left."""
        self.x, self.state = self._spare_buffer(new), new

    def _spare_buffer(self, new: State) -> Tensor:
        """The buffer for the next gradient: that of this one, or where a state kept it, what that took the place of."""
        before, x = dict(walk(self.state)), self.x
        for path, leaf in walk(new):
            if leaf.tensor.data_ptr() == x.data_ptr() and leaf.tensor.numel() == x.numel():
                was = before.get(path)
                fits = was is not None and was.tensor.numel() == x.numel() and was.tensor.dtype == x.dtype
                return was.tensor.view(-1) if fits and was is not None else buffers.like(x)
        return x

    def rescale(self, factor: float) -> None:
        """Multiply what is in the gradients' units."""
        for _, leaf in walk(self.state):
            if leaf.owed or leaf.scaled:
                leaf.tensor.mul_(factor)

    def take_back(self, before: State, names: set[str], rank: int) -> None:
        """Owe again what the state `before` the last step owed of some parameters."""
        if self.state is before:
            return
        if CARRIED in before:  # gone by now, and for these it arrived nowhere
            self.state = State({**self.state, **self.kept(State({CARRIED: carried_leaf(self.grain)}))})
        for path, leaf in walk(self.state):
            was = dict(walk(before)).get(path)
            if was is not None and leaf.owed and leaf.kind in ("element", "owned"):
                for segment in self.grain.segments:
                    if segment.name in names:
                        leaf.of_segment(segment, rank).copy_(was.of_segment(segment, rank))
