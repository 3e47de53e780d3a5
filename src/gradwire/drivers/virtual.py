"""A model whose gradients come from N virtual ranks in one process: training without a network."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn
from typing_extensions import override

from gradwire.core import saved
from gradwire.core.grain import Grain
from gradwire.core.state import State
from gradwire.drivers.cost import parameter_specs
from gradwire.drivers.lockstep import VirtualStates, is_bad, run_ranks
from gradwire.drivers.plan import Unit, plan
from gradwire.reducers.base import Program, Reduced, Reducer

Gradients = Mapping[str, Tensor]
"""One rank's gradients by parameter name."""


class VirtualRanks(VirtualStates):
    """The gradients' way from `world_size` virtual ranks to the model, by one reducer, grains and all.

    The same plan and programs as under `gradwire.attach`, so the figures are those of a real run.

    Args:
        reducer: e.g. `gradwire.parse("topk:0.01")`.
        model: whose parameters are trained.
        world_size: how many ranks.
        seed: of all keys.
        grain_numel: elements of a grain, by default what `plan` chooses.

    >>> from gradwire.spec import parse
    >>> model = nn.Linear(2, 1, bias=False)
    >>> ranks = VirtualRanks(parse("median"), model, world_size=3)
    >>> ranks.step([{"weight": torch.tensor([[1.0, value]])} for value in (1.0, 2.0, 100.0)])
    >>> model.weight.grad
    tensor([[1., 2.]])
    """

    def __init__(
        self, reducer: Reducer, model: nn.Module, world_size: int, seed: int = 0, grain_numel: int | None = None
    ) -> None:
        self.reducer, self.model, self.world_size, self.seed, self.index = reducer, model, world_size, seed, 0
        self.plan = plan(parameter_specs(model.named_parameters()), reducer, grain_numel)
        self.units: tuple[Unit, ...] = self.plan.units
        self.states: list[list[State]] = [
            [unit.reducer.init(unit.grain, self._step(rank)) for rank in range(world_size)] for unit in self.units
        ]

    def step(self, gradients: Sequence[Gradients]) -> None:
        """Write what all ranks' gradients become into the model's; keep new states unless the step is bad."""
        ranks = run_ranks([self._waves(rank, own) for rank, own in enumerate(gradients)])
        if not is_bad(reduced for results in ranks for reduced in results):
            self.states = [[result.state for result in of_unit] for of_unit in zip(*ranks, strict=True)]
        for unit, reduced in zip(self.units, ranks[0], strict=True):
            self._write(unit.grain, reduced)
        self.index += 1

    def _waves(self, rank: int, gradients: Gradients) -> list[list[Program]]:
        """The programs of a rank."""
        step = self._step(rank)

        def program(i: int) -> Program:
            grain, reducer = self.units[i]
            return reducer.reduce(grain, gathered(grain, gradients), self.states[i][rank], step)

        return [[program(i) for i in wave] for wave in self.plan.unit_numbers]

    @override
    def _serve_by(self, made_of: Callable[[Reducer], Reducer]) -> None:
        super()._serve_by(made_of)
        self.units = tuple(unit._replace(reducer=made_of(unit.reducer)) for unit in self.units)

    def _take_up(self, states: Sequence[Sequence[State]]) -> None:
        self.states = [list(of_unit) for of_unit in zip(*states, strict=True)]

    def _grains(self) -> list[saved.Grains]:
        units = list(zip(self.units, self.states, strict=True))
        return [[(unit.grain, states[rank]) for unit, states in units] for rank in range(self.world_size)]

    def _write(self, grain: Grain, reduced: Reduced) -> None:
        mean = reduced.value.reshape(-1)
        for name, start, numel, offset in grain.segments:
            parameter = self.model.get_parameter(name)
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            parameter.grad.view(-1)[start : start + numel].copy_(mean[offset : offset + numel])


def gathered(grain: Grain, gradients: Gradients) -> Tensor:
    """One rank's gradients as the grain's tensor."""
    pieces = [gradients[name].view(-1)[start : start + numel] for name, start, numel, _ in grain.segments]
    return torch.cat(pieces).view(grain.shape)
