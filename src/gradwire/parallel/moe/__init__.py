"""Layers of experts that are spread over ranks, exact forward and backward.

    axis = ExchangeAxis(mesh["expert"])
    layer = MoE(SoftmaxTopK(512, 16, 2), Experts(512, 2048, 16, axis), axis)

| name | what it is |
|---|---|
| `MoE`, `Payloads` | the layer, and the codecs of its exchanges |
| `SoftmaxTopK`, `SigmoidGroups`, `NoisyTopK`, `Router`, `Routing` | routers, and what they make of tokens |
| `Experts` | the experts of a rank |
| `Capacity`, `DynamicCapacity` | what experts take; the rest is dropped |
| `switch_loss`, `z_loss`, `balance` | balanced routers |
| `keep_choices` | recomputation that repeats the choice |
| `expert_report`, `LayerFigures` | load, drops and bytes |
| `leave_experts_to_their_axis`, `attach_experts`, `expert_parameters` | experts beside data parallelism |
| `ExchangeAxis` | the ranks that experts are spread over |
"""

from gradwire.parallel.exchange import ExchangeAxis
from gradwire.parallel.moe.capacity import Capacity, DynamicCapacity
from gradwire.parallel.moe.choices import keep_choices
from gradwire.parallel.moe.experts import Experts
from gradwire.parallel.moe.figures import LayerFigures, expert_report
from gradwire.parallel.moe.layer import MoE, Payloads
from gradwire.parallel.moe.losses import balance, switch_loss, z_loss
from gradwire.parallel.moe.parameters import attach_experts, expert_parameters, leave_experts_to_their_axis
from gradwire.parallel.moe.routers import NoisyTopK, Router, Routing, SigmoidGroups, SoftmaxTopK

__all__ = [
    "Capacity",
    "DynamicCapacity",
    "ExchangeAxis",
    "Experts",
    "LayerFigures",
    "MoE",
    "NoisyTopK",
    "Payloads",
    "Router",
    "Routing",
    "SigmoidGroups",
    "SoftmaxTopK",
    "attach_experts",
    "balance",
    "expert_parameters",
    "expert_report",
    "keep_choices",
    "leave_experts_to_their_axis",
    "switch_loss",
    "z_loss",
]
