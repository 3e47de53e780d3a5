"""A model whose gradients come from N virtual ranks in one process: training without a network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from gradwire.core.grain import Grain
from gradwire.drivers.cost import model_specs
from gradwire.drivers.lockstep import VirtualEngines
from gradwire.drivers.plan import Plan, plan
from gradwire.reducers.base import Reducer

Gradients = Mapping[str, Tensor]
"""One rank's gradients by parameter name."""


class VirtualRanks(VirtualEngines):
    """The gradients' way from `world_size` virtual ranks to the model, by one reducer, grains and all.

    The same plan, engines and programs as under `gradwire.attach`, so the figures are those of a real run.

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
        planned = plan(model_specs(model), reducer, grain_numel)
        super().__init__(reducer, planned, world_size, seed)
        self.model = model

    @property
    def plan(self) -> Plan:
        """The grains of the model."""
        return self.engines[0].plan

    def step(self, gradients: Sequence[Gradients]) -> None:
        """Write what all ranks' gradients become into the model's; keep new states unless the step is bad."""
        grains = [unit.grain for unit in self.plan.units]
        self.run([[gathered(grain, own) for grain in grains] for own in gradients])
        for unit, grain in enumerate(grains):
            mean = self.engines[0].value(unit)
            for name, start, numel, offset in grain.segments:
                parameter = self.model.get_parameter(name)
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                parameter.grad.view(-1)[start : start + numel].copy_(mean[offset : offset + numel])


def gathered(grain: Grain, gradients: Gradients) -> Tensor:
    """One rank's gradients as the grain's tensor."""
    pieces = [gradients[name].view(-1)[start : start + numel] for name, start, numel, _ in grain.segments]
    return torch.cat(pieces).view(grain.shape)
