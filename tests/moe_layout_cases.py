"""What the ranks of `test_moe_layouts.py` run: bytes of layers of experts, and what depends on their layout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from typing_extensions import override

import gradwire
from gradwire.core.axis import Axis
from gradwire.core.collective import AllToAll, AllToAllV, Collective
from gradwire.core.program import Program, asking
from gradwire.drivers.cost import asked_by
from gradwire.drivers.interpreter import sent_bytes
from gradwire.parallel.exchange import RowCoding
from gradwire.parallel.moe import (
    DynamicCapacity,
    ExchangeAxis,
    Experts,
    MoE,
    Payloads,
    Routing,
    SoftmaxTopK,
    attach_experts,
    expert_report,
    switch_loss,
    z_loss,
)
from gradwire.parallel.rows import RowCounts, TwoLevelRows, announce
from gradwire.planning.messages import layer_of_experts
from moe_cases import CASE, content, experts_of, made, one_process

HIDDEN, INNER, EXPERTS, CHOICES = 128, 16, 8, 2


class EvenTopK(SoftmaxTopK):
    """A router that gives all experts equally many tokens, as the planner assumes."""

    @override
    def choose(self, scores: Tensor) -> Tensor:
        choices = torch.arange(scores.shape[0] * self.k).view(-1, self.k)
        return choices % self.experts


class TurningTopK(EvenTopK):
    """A router that gives all tokens to the first experts until it is even."""

    even = False

    @override
    def choose(self, scores: Tensor) -> Tensor:
        return super().choose(scores) if self.even else torch.arange(self.k).expand(scores.shape[0], self.k)


def small(axis: ExchangeAxis, *, router: type[SoftmaxTopK] = SoftmaxTopK, **options: Any) -> MoE:
    """A layer in fp32."""
    return MoE(router(HIDDEN, EXPERTS, CHOICES), Experts(HIDDEN, INNER, EXPERTS, axis), axis, **options)


def asked_in(layer: MoE, x: Tensor, *, backward: bool = True) -> list[Collective]:
    """What the programs of a layer ask for in a pass."""
    asked, begin = list[Collective](), layer.axis.begin

    def noted(program: Program[Any], traffic: Any = None) -> Any:
        return begin(asking(program, lambda request: asked.append(request) or request), traffic)

    layer.axis.begin = noted  # type: ignore[method-assign]
    y = layer(x)
    if backward:
        y.sum().backward()
    layer.axis.begin = begin  # type: ignore[method-assign]
    return asked


# Grouped products -----------------------------------------------------------------------------------------------


def grouped_errors(rank: int, world_size: int, cases: list[Mapping[str, Any]]) -> list[float]:
    """Errors of layers in fp32 whose products are grouped, against experts one by one in fp64, on all ranks."""
    axis = ExchangeAxis()
    return [_grouped_error(axis, rank, case) for case in cases]


def _grouped_error(axis: ExchangeAxis, rank: int, case: Mapping[str, Any]) -> float:
    layer, twin = made(axis, case, torch.float32), made(axis, case, torch.float64)
    experts_of(layer).grouped, experts_of(twin).grouped = True, False
    found: list[list[Tensor | None]] = []
    x, weights = content(case, rank, 0, torch.float32), content(case, rank, 1, torch.float32)
    for each, dtype in ((layer, torch.float32), (twin, torch.float64)):
        given = x.detach().clone().to(dtype).requires_grad_()
        y = each(given)
        (y * weights.to(dtype)).sum().backward()
        found.append([y, given.grad, *(parameter.grad for parameter in each.parameters())])
    return max(relative_error(got, wanted) for got, wanted in zip(*found, strict=True))


def relative_error(got: Tensor | None, wanted: Tensor | None) -> float:
    """The largest difference by the largest element; 0 for what has no element."""
    assert got is not None
    assert wanted is not None
    if not wanted.numel():
        return 0.0
    return float((got - wanted).abs().max()) / max(float(wanted.abs().max()), 1e-30)


# Bytes ----------------------------------------------------------------------------------------------------------


def bytes_of_steps(rank: int, world_size: int, cases: list[Mapping[str, Any]]) -> list[dict[str, int]]:
    """Bytes of a forward and a backward pass: counted, by the cost driver, and by the docstring of the layer."""
    return [_bytes_of_a_step(rank, world_size, **case) for case in cases]


def _bytes_of_a_step(rank: int, world_size: int, codec: str | None, node: int | None, chunks: int) -> dict[str, int]:
    layer = small(ExchangeAxis(node=node), payloads=Payloads.all(codec) if codec else None, chunks=chunks)
    choices: list[Any] = []
    chosen = layer._chosen  # pyright: ignore[reportPrivateUsage]
    layer._chosen = lambda *given: choices.append(chosen(*given)) or choices[-1]  # type: ignore[method-assign]
    layer(torch.zeros(0, HIDDEN))  # what is compared once is sent
    expert_report(layer, begin_anew=True)
    choices.clear()
    x = torch.randn((13, 0, 7, 22)[rank], HIDDEN, generator=torch.Generator().manual_seed(rank))
    layer(x.requires_grad_()).sum().backward()
    coding = RowCoding(layer.codecs["dispatch"], HIDDEN, torch.float32)
    return {
        "counted": expert_report(layer)[0].wire_bytes,
        "cost": _by_cost(layer, choices[0].rows, coding, rank, world_size),
        "formula": _by_formula(layer, choices[0].rows, coding, rank, world_size),
    }


def _by_cost(layer: MoE, chunks: tuple[RowCounts, ...], coding: RowCoding, rank: int, world_size: int) -> int:
    """Bytes of the layer's programs with tensors that have a shape and no data."""
    words = torch.empty(world_size, 5 + EXPERTS // world_size, dtype=torch.int64, device="meta")
    asked = asked_by(announce(words, layer.axis.node), world_size, rank)
    for rows in chunks:
        there, back = (
            torch.empty(sum(map(coding.nbytes, counts)), dtype=torch.uint8, device="meta")
            for counts in (rows.sends, rows.receives)
        )
        for _ in range(2):  # rows, and their gradients
            asked += asked_by(rows.there(there, coding.nbytes), world_size, rank)
            asked += asked_by(rows.back(back, coding.nbytes), world_size, rank)
    return sum(sent_bytes(request, rank, world_size) for request in asked)


def _by_formula(layer: MoE, chunks: tuple[RowCounts, ...], coding: RowCoding, rank: int, world_size: int) -> int:
    """Bytes by the docstrings of `MoE`, and of `announce` and `TwoLevelRows` where there are two levels."""
    words, local = 5 + EXPERTS // world_size, layer.axis.node
    if local is None:
        counts = 8 * words * (world_size - 1)
    else:
        nodes = world_size // local
        counts = 8 * words * (local * (nodes - 1) + nodes * (local - 1))
    return counts + sum(2 * _of_rows(rows, coding, rank) for rows in chunks)


def _of_rows(rows: RowCounts, coding: RowCoding, rank: int) -> int:
    """Bytes of a dispatch and a combination."""
    sends, receives = ([coding.nbytes(count) for count in counts] for counts in (rows.sends, rows.receives))
    if not isinstance(rows, TwoLevelRows):
        return sum(size for sizes in (sends, receives) for other, size in enumerate(sizes) if other != rank)
    node, place = divmod(rank, rows.local)
    through = [[coding.nbytes(count) for count in row] for row in rows.through]
    to_nodes = sum(size for to, size in enumerate(sends) if to // rows.local != node)
    passed_on = sum(size for row in through for to, size in enumerate(row) if to != place)
    returned_inside = sum(size for to, size in enumerate(receives) if to % rows.local != place)
    returned_to_nodes = sum(size for of, row in enumerate(through) if of != node for size in row)
    return to_nodes + passed_on + returned_inside + returned_to_nodes


def planned_and_sent(rank: int, world_size: int, node: int | None, tokens: int) -> dict[str, Any]:
    """Sizes of the exchange of a layer in bf16 whose routing is balanced: as the planner says, and as they are."""
    layer = small(ExchangeAxis(node=node), router=EvenTopK).to(torch.bfloat16)
    asked = asked_in(layer, torch.ones(tokens, HIDDEN, dtype=torch.bfloat16), backward=False)
    sent = [request for request in asked if isinstance(request, AllToAllV)]
    planned = layer_of_experts(tokens, HIDDEN, CHOICES, EXPERTS, world_size, node or 0)
    return {
        "planned": [(_axis(request), request.nbytes, sent_bytes(request, rank, world_size)) for request in planned],
        "sent": [(_axis(request), request.nbytes, sent_bytes(request, rank, world_size)) for request in sent],
    }


def _axis(request: Collective) -> tuple[int, int] | None:
    """Size and stride; None for all ranks."""
    assert isinstance(request, AllToAll | AllToAllV)
    axis = request.axis
    if axis is None or axis == Axis(dist.get_world_size()):
        return None
    assert isinstance(axis, Axis)
    return axis.size, axis.stride


# What depends on the layout, and what does not ------------------------------------------------------------------


def losses_of_layouts(rank: int, world_size: int) -> dict[str, list[float]]:
    """Task loss, z-loss and the loss of Switch, as means over ranks, by expert-parallel degree and micro-batches.

    "whole" is the loss of Switch of all tokens in one process.
    """
    case = {**CASE, "tokens": [6] * world_size}
    mesh = init_device_mesh("cpu", (world_size // 2, 2), mesh_dim_names=("data", "expert"))
    alone, everyone = one_process(), ExchangeAxis()
    found: dict[str, list[float]] = {"task": [], "z": [], "switch": [], "switch over all": []}
    for axis in (alone, ExchangeAxis(mesh["expert"]), everyone):
        layer = made(axis, case)
        for parts in (1, 2, 3):
            sums = torch.zeros(len(found), dtype=torch.float64)
            pieces = zip(content(case, rank, 0).chunk(parts), content(case, rank, 1).chunk(parts), strict=True)
            for x, weights in pieces:
                task, routing = (layer(x) * weights).sum(), layer.routing
                assert routing is not None
                switch, over_all = (switch_loss(routing, over) / parts for over in (None, everyone))
                sums += torch.stack([task, z_loss(routing, 6), switch, over_all]).detach()
            dist.all_reduce(sums)
            for name, value in zip(found, (sums / world_size).tolist(), strict=True):
                found[name].append(value)
    everything = torch.cat([content(case, each, 0) for each in range(world_size)])
    whole = switch_loss(made(alone, case).router(everything))
    return {**found, "whole": [float(whole)]}


def reported(rank: int, world_size: int) -> dict[str, Any]:
    """What the reports of two sessions tell of a layer that they were told of, after two passes."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "expert"))
    layer = small(ExchangeAxis(mesh["expert"]))
    model = nn.ModuleDict({"feed": layer})
    experts = attach_experts(model, "int8", mesh["data"])
    rest = gradwire.Session({"router": layer.router.weight}, "none")
    rest.add_to_report(lambda: expert_report(model))
    for _ in range(2):
        layer(torch.randn(6, HIDDEN)).sum().backward()
    (figures,) = expert_report(model)
    reports = [session.report() for session in (experts, rest)]
    found = {
        "alike": all(report.modules == (figures,) for report in reports),
        "text": [str(report) for report in reports],
        "row": figures.row,
        "reported bytes": reports[0].as_dict()["modules"][0]["wire_bytes"],
        "wire_bytes": figures.wire_bytes,
        "passes": figures.passes,
        "load": sum(figures.load),
    }
    experts.close()
    rest.close()
    return found


# Capacity that follows, and experts that are near ---------------------------------------------------------------


def following(rank: int, world_size: int, capacities: list[Mapping[str, Any]], steps: int) -> list[Any]:
    """Capacities that follow: first all tokens want the same experts, then all experts equally."""
    axis = ExchangeAxis()
    return [_following(axis, rank, DynamicCapacity(**capacity), steps) for capacity in capacities]


def _following(axis: ExchangeAxis, rank: int, capacity: DynamicCapacity, steps: int) -> dict[str, Any]:
    """The factor of each step, and what all ranks have dropped and chosen there."""
    layer = small(axis, router=TurningTopK, capacity=capacity)
    router = layer.router
    assert isinstance(router, TurningTopK)
    x = torch.randn(8 + 4 * rank, HIDDEN, generator=torch.Generator().manual_seed(rank))
    found: dict[str, Any] = {"factor": [], "dropped": [], "chosen": []}
    for step in range(2 * steps):
        router.even = step >= steps
        expert_report(layer, begin_anew=True)
        layer(x)
        counted = torch.tensor([expert_report(layer)[0].dropped, x.shape[0] * CHOICES])
        dist.all_reduce(counted)
        found["factor"].append(float(layer.factor))
        found["dropped"].append(int(counted[0]))
        found["chosen"].append(int(counted[1]))
    layer.eval()
    layer(x)
    return {**found, "in evaluation": float(layer.factor)}


def near(rank: int, world_size: int, biases: list[float], node: int | None) -> list[dict[str, Any]]:
    """Where rows go for each bias towards experts that are near."""
    axis = ExchangeAxis(node=node)
    return [_near(axis, rank, bias) for bias in biases]


def _near(axis: ExchangeAxis, rank: int, bias: float) -> dict[str, Any]:
    """Choices in all, of experts on this rank and on its node; errors of weights and outputs; bytes."""
    layer = small(axis, near=bias)
    x = torch.randn(40, HIDDEN, generator=torch.Generator().manual_seed(rank))
    y = layer(x)
    routing = layer.routing
    assert routing is not None
    owners = routing.experts // experts_of(layer).local
    node = axis.node or 1
    whole = Experts(HIDDEN, INNER, EXPERTS, one_process())
    scores = routing.scores.gather(1, routing.experts)
    return {
        "choices": owners.numel(),
        "own": int((owners == rank).sum()),
        "of node": int((owners // node == rank // node).sum()),
        "weights": float((routing.weights - scores / scores.sum(1, keepdim=True)).abs().max()),
        "output": float((y - _one_by_one(whole, routing, x)).abs().max()),
        "bytes": expert_report(layer)[0].wire_bytes,
    }


def _one_by_one(whole: Experts, routing: Routing, x: Tensor) -> Tensor:
    """The output for a choice, with all experts at hand."""
    out = torch.zeros_like(x)
    for token, (experts, weights) in enumerate(zip(routing.experts.tolist(), routing.weights, strict=True)):
        for expert, weight in zip(experts, weights, strict=True):
            out[token] += weight * (nn.functional.gelu(x[token] @ whole.w_in[expert]) @ whole.w_out[expert])
    return out
