"""What the ranks of `test_moe.py` run, and the layer of experts written as loops over tokens."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import gradwire
from gradwire.core.axis import Axis
from gradwire.core.collective import AllToAllV, Collective
from gradwire.core.program import Program, asking
from gradwire.drivers.cost import asked_by
from gradwire.parallel.exchange import RowCoding
from gradwire.parallel.moe import (
    Capacity,
    DynamicCapacity,
    ExchangeAxis,
    Experts,
    MoE,
    NoisyTopK,
    Payloads,
    Router,
    SigmoidGroups,
    SoftmaxTopK,
    attach_experts,
    expert_parameters,
    expert_report,
    keep_choices,
    leave_experts_to_their_axis,
    switch_loss,
    z_loss,
)

ROUTERS: Mapping[str, Any] = {
    "softmax": SoftmaxTopK,
    "sigmoid": SigmoidGroups,
    "noisy": NoisyTopK,
}


def made(axis: ExchangeAxis, case: Mapping[str, Any], dtype: torch.dtype = torch.float64) -> MoE:
    """A layer for a case, whose weights do not depend on the number of ranks."""
    hidden, experts, seed = case["hidden"], case["experts"], case["seed"]
    router: Router = ROUTERS[case.get("router", "softmax")](
        hidden, experts, case["k"], seed=seed, **case.get("router_options", {})
    )
    of_rank = Experts(hidden, case["inner"], experts, axis, activation=case.get("activation", "gelu"), seed=seed)
    torch.manual_seed(seed)
    shared = nn.Linear(hidden, hidden) if case.get("shared") else None
    layer = MoE(
        router,
        of_rank,
        axis,
        shared=shared,
        capacity=Capacity(**case["capacity"]) if case.get("capacity") else None,
        payloads=Payloads(**case.get("payloads", {})),
        chunks=case.get("chunks", 1),
        near=case.get("near", 0.0),
    )
    return layer.to(dtype)


def content(case: Mapping[str, Any], rank: int, what: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Tokens of a rank (what = 0), or what its outputs are multiplied by to make a loss (what = 1)."""
    generator = torch.Generator().manual_seed(1000 * case["seed"] + 10 * rank + what)
    return torch.randn(case["tokens"][rank], case["hidden"], generator=generator, dtype=dtype)


def looped(layer: MoE, whole: Experts, x: Tensor) -> Tensor:
    """The layer without a capacity, a token and a choice at a time, with all experts at hand."""
    routing = layer.router(x, draw=1)
    rows: list[Tensor] = []
    for token in range(x.shape[0]):
        row = torch.zeros_like(x[token])
        for choice in range(layer.router.k):
            expert = int(routing.experts[token, choice])
            inner = x[token] @ whole.w_in[expert]
            if whole.activation == "gelu":
                inner = functional.gelu(inner)
            else:
                a, b = inner.chunk(2)
                inner = functional.silu(a) * b
            row = row + routing.weights[token, choice] * (inner @ whole.w_out[expert])
        rows.append(row)
    out = torch.stack(rows) if rows else x * 0
    return out if layer.shared is None else out + layer.shared(x)


def objective(layer: MoE, y: Tensor, weights: Tensor, routing: Any) -> Tensor:
    """A loss that all parts of a layer have a gradient of."""
    return (y * weights).sum() + z_loss(routing, 3) + switch_loss(routing)


def one_process() -> ExchangeAxis:
    """The axis of a twin, whose size is one though there are other ranks."""
    group = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    assert isinstance(group, dist.ProcessGroup)
    return ExchangeAxis(group)


def twin_errors(rank: int, world_size: int, cases: Sequence[Mapping[str, Any]], node: int | None = None) -> list[float]:
    """The largest difference of an output or a gradient from the loops over tokens, over all ranks, for each case."""
    axis, alone = ExchangeAxis(node=node), one_process()
    return [_twin_error(axis, alone, rank, world_size, case) for case in cases]


def _twin_error(axis: ExchangeAxis, alone: ExchangeAxis, rank: int, world_size: int, case: Mapping[str, Any]) -> float:
    layer, twin = made(axis, case), made(alone, {**case, "payloads": {}, "near": 0.0, "chunks": 1})
    x = content(case, rank, 0).requires_grad_()
    y = layer(x)
    objective(layer, y, content(case, rank, 1), layer.routing).backward()
    for parameter in [*layer.router.parameters(), *(layer.shared.parameters() if layer.shared else ())]:
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad)
        parameter.grad /= world_size
    # the twin, on every rank, with the tokens of all of them
    errors: list[float] = []
    for source in range(world_size):
        if isinstance(twin.router, NoisyTopK):
            twin.router.rank = source
        x_twin = content(case, source, 0).requires_grad_()
        assert isinstance(twin.experts, Experts)
        y_twin = looped(twin, twin.experts, x_twin)
        routing = twin.router(x_twin, draw=1)
        (objective(twin, y_twin, content(case, source, 1), routing) / world_size).backward()
        if source == rank:
            errors += [_off(y, y_twin), _off(x.grad, x_twin.grad * world_size if x_twin.grad is not None else None)]
    mine = slice(rank * experts_of(layer).local, (rank + 1) * experts_of(layer).local)
    others = dict(twin.named_parameters())
    for name, parameter in layer.named_parameters():
        grad = others[name].grad
        errors.append(_off(parameter.grad, grad[mine] if name.startswith("experts.") and grad is not None else grad))
    return max(errors)


def experts_of(layer: MoE) -> Experts:
    """The experts of a layer, as what they are."""
    assert isinstance(layer.experts, Experts)
    return layer.experts


def _off(a: Tensor | None, b: Tensor | None) -> float:
    """Relative to the largest element, if that is above 1; the twin has no gradient of what no token has met."""
    assert a is not None
    if b is None:
        b = torch.zeros_like(a)
    if not a.numel():
        return 0.0
    scale = max(1.0, float(b.abs().max()))
    return float((a - b).abs().max()) / scale


def faulty(rank: int, world_size: int, fault: str) -> str:
    """What a rank is told where rank 1 does something else than the others."""
    axis = ExchangeAxis(deadline_s=20)
    case: dict[str, Any] = {"hidden": 8, "inner": 4, "experts": 2 * world_size, "k": 2, "seed": 1}
    wrong = rank == 1
    if fault == "experts" and wrong:
        case["experts"] = 4 * world_size
    if fault == "capacity" and wrong:
        case["capacity"] = {"factor": 2.0}
    layer = made(axis, case, torch.float32)
    x = torch.ones(5, 8)
    if fault == "nan" and wrong:
        x[2, 3] = torch.nan
    if fault == "width" and wrong:
        x = torch.ones(5, 6)
    if fault == "dtype" and wrong:
        x = x.double()
    try:
        layer(x)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        with contextlib.suppress(RuntimeError):
            dist.barrier()
    return ""


CASE: dict[str, Any] = {"hidden": 8, "inner": 16, "experts": 8, "k": 2, "seed": 5, "tokens": [7, 0, 9, 4]}


def _passed(layer: MoE, x: Tensor, weights: Tensor) -> list[Tensor]:
    """Output and gradients of a pass."""
    x = x.clone().requires_grad_()
    y = layer(x)
    (y * weights).sum().backward()
    assert x.grad is not None
    return [y.detach(), x.grad, *(p.grad for p in layer.parameters() if p.grad is not None)]


def two_levels(rank: int, world_size: int) -> dict[str, Any]:
    """One level and two on two nodes of two ranks: bits, and messages and bytes of a rank between nodes in a pass."""
    layers = [made(ExchangeAxis(node=node), CASE) for node in (None, 2)]
    results = [_passed(layer, content(CASE, rank, 0), content(CASE, rank, 1)) for layer in layers]
    equal = all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    messages, sent = zip(*(_between_nodes(layer, rank, content(CASE, rank, 0)) for layer in layers), strict=True)
    return {"equal": equal, "messages": list(messages), "bytes": "equal" if sent[0] == sent[1] else list(sent)}


def _between_nodes(layer: MoE, rank: int, x: Tensor) -> tuple[int, int]:
    """Messages and bytes that leave the node of a rank for a dispatch."""
    asked: list[Collective] = []
    begin = layer.axis.begin

    def noted(program: Program[Any], traffic: Any = None) -> Any:
        return begin(asking(program, lambda request: asked.append(request) or request), traffic)

    layer.axis.begin = noted  # type: ignore[method-assign]
    layer(x)
    layer.axis.begin = begin  # type: ignore[method-assign]
    rows = [request for request in asked if isinstance(request, AllToAllV)]
    if rows[0].axis is None:
        others = [to for to in range(4) if to // 2 != rank // 2]
        return len(others), sum(rows[0].sends[to] for to in others)
    assert rows[0].axis == Axis(2, 2)
    return 1, rows[0].sends[1 - rank // 2]


def compressed(rank: int, world_size: int, codec: str) -> dict[str, float]:
    """Bytes of a forward and a backward pass by codec, by counters and by the cost of the programs."""
    case = {**CASE, "hidden": 256, "experts": 4, "tokens": [96, 64]}
    axis, found, outputs = ExchangeAxis(), dict[str, float](), dict[str, Tensor]()
    for name, spec, dtype in (
        ("fp32", None, torch.float32), ("bf16", None, torch.bfloat16), (codec, codec, torch.float32)
    ):  # fmt: skip
        names = ("dispatch", "combine", "dispatch_gradient", "combine_gradient")
        layer = made(axis, {**case, "payloads": dict.fromkeys(names, spec)}, dtype)
        layer(content(case, rank, 0, dtype)[:0])  # what is compared once is sent
        expert_report(layer, begin_anew=True)
        x = content(case, rank, 0, dtype)
        outputs[name] = _passed(layer, x, content(case, rank, 1, dtype))[0].float()
        found[name] = float(expert_report(layer)[0].wire_bytes)
    found["error"] = float((outputs[codec] - outputs["fp32"]).norm() / outputs["fp32"].norm())
    found["counted"], found["formula"] = found[codec], _formula(layer, rank, world_size)
    return found


def _formula(layer: MoE, rank: int, world_size: int) -> float:
    """Bytes that the docstring of the layer names, and those of its programs without data, which must be the same."""
    choices: list[Any] = []
    noted = layer._chosen  # pyright: ignore[reportPrivateUsage]
    layer._chosen = lambda *given: choices.append(noted(*given)) or choices[-1]  # type: ignore[method-assign]
    case = {**CASE, "hidden": 256, "experts": 4, "tokens": [96, 64]}
    layer(content(case, rank, 0, torch.float32))
    (rows,) = choices[0].rows
    coding = RowCoding(layer.codecs["dispatch"], 256, torch.float32)
    others = [j for j in range(world_size) if j != rank]
    passes = sum(coding.nbytes(rows.sends[j]) + coding.nbytes(rows.receives[j]) for j in others)
    blocks = torch.empty(sum(map(coding.nbytes, rows.sends)), dtype=torch.uint8, device="meta")
    asked = asked_by(rows.there(blocks, coding.nbytes), world_size, rank)
    assert [each.wire_bytes(world_size) for each in asked] == [sum(coding.nbytes(rows.sends[j]) for j in others)]
    counts = 8 * (5 + layer.router.experts // world_size) * (world_size - 1)
    return float(counts + 2 * passes)


def dropping(rank: int, world_size: int, drop: Any) -> dict[str, Any]:
    """All tokens choose expert 0: which of them come back, and what is counted."""
    axis = ExchangeAxis()
    experts = Experts(8, 16, 4, axis)
    layer = MoE(SoftmaxTopK(8, 4, 1), experts, axis, capacity=DynamicCapacity(1.0, drop))
    layer.router.bias[0] = 10.0
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(rank))
    y = layer(x)
    dropped = expert_report(layer)[0].dropped
    layer(x)  # the second pass is told what the first one dropped
    kept = [token for token in range(6) if bool(y[token].any())]
    return {"kept": kept, "dropped": dropped, "factor": float(layer.factor)}


def recomputed(rank: int, world_size: int) -> dict[str, bool]:
    """A layer by itself, and in a checkpoint whose router would choose otherwise the second time."""
    axis = ExchangeAxis()
    plain, layer = made(axis, CASE), made(axis, CASE)
    x, weights = content(CASE, rank, 0), content(CASE, rank, 1)
    wanted = _passed(plain, x, weights)
    x = x.clone().requires_grad_()
    y = checkpoint(layer, x, use_reentrant=False, context_fn=keep_choices)
    layer.router.bias[0] = 100.0
    (y * weights).sum().backward()
    got = [y.detach(), x.grad, *(p.grad for p in layer.parameters())]
    equal = all(b is not None and torch.equal(a, b) for a, b in zip(wanted, got, strict=True))
    (figures,) = expert_report(layer)
    counted = figures.passes == 1 and int(layer.router.load.sum()) == 2 * x.shape[0]
    return {"gradients": equal, "counted_once": counted, "announced_once": layer._draws == 1}  # pyright: ignore[reportPrivateUsage]


def layouts(rank: int, world_size: int) -> list[float]:
    """Gradients of 4 ranks on expert axes of 1, 2 and 4 ranks, and of two micro-batches, against those of one axis."""
    case = {**CASE, "tokens": [6, 6, 6, 6]}
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "expert"))
    axes = {1: one_process(), 2: ExchangeAxis(mesh["expert"]), 4: ExchangeAxis()}
    found = [_whole_gradients(axis, case, rank, parts) for axis in axes.values() for parts in (1, 2, 3)]
    return [_off(a, b) for each in found[1:] for a, b in zip(each, found[0], strict=True)]


def _whole_gradients(axis: ExchangeAxis, case: dict[str, Any], rank: int, parts: int) -> list[Tensor]:
    """Gradients of the mean loss of all ranks, those of experts as of all of them."""
    layer = made(axis, case)
    for x, weights in zip(content(case, rank, 0).chunk(parts), content(case, rank, 1).chunk(parts), strict=True):
        y = layer(x)
        assert layer.routing is not None
        ((y * weights).sum() + z_loss(layer.routing, 6)).backward()
    whole: list[Tensor] = []
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None
        grad = parameter.grad
        if name.startswith("experts."):
            first = axis.place * experts_of(layer).local
            grad = torch.zeros(case["experts"], *grad.shape[1:], dtype=grad.dtype)
            grad[first : first + experts_of(layer).local] = parameter.grad * axis.size
        dist.all_reduce(grad)
        whole.append(grad / dist.get_world_size())
    return whole


class Net(nn.Module):
    """A dense layer, and one of experts."""

    def __init__(self, axis: ExchangeAxis, case: Mapping[str, Any]) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.dense = nn.Linear(case["hidden"], case["hidden"])
        self.feed = made(axis, case, torch.float32)

    def forward(self, x: Tensor) -> Tensor:
        return self.feed(self.dense(x).tanh())


def _expected(rank: int, case: dict[str, Any]) -> tuple[Net, dict[str, Tensor]]:
    """The model with all experts on each rank, and its mean gradients."""
    net = Net(one_process(), case)
    x, weights = content(case, rank, 0, torch.float32), content(case, rank, 1, torch.float32)
    (net(x) * weights).sum().backward()
    grads = {name: p.grad for name, p in net.named_parameters() if p.grad is not None}
    for grad in grads.values():
        dist.all_reduce(grad)
        grad /= dist.get_world_size()
    return net, grads


def _compared(found: Mapping[str, Tensor | None], wanted: Mapping[str, Tensor], first: int, local: int) -> Any:
    """The largest error of dense parameters, and of experts, relative to the largest element."""
    errors = {"dense": 0.0, "experts": 0.0}
    for name, grad in found.items():
        is_expert = ".experts." in name
        want = wanted[name][first : first + local] if is_expert else wanted[name]
        kind = "experts" if is_expert else "dense"
        assert grad is not None, name
        errors[kind] = max(errors[kind], float((grad - want).abs().max() / wanted[name].abs().max()))
    return errors


def beside_ddp(rank: int, world_size: int, method: str) -> dict[str, float]:
    """Two ranks an expert axis, two that hold the same experts: DDP for the rest, and a method for experts."""
    case = {**CASE, "tokens": [6, 5, 0, 8]}
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "expert"))
    axis = ExchangeAxis(mesh["expert"])
    _, wanted = _expected(rank, case)
    net = Net(axis, case)
    ddp = DistributedDataParallel(leave_experts_to_their_axis(net))
    dense = gradwire.attach(ddp, "none")
    experts = attach_experts(net, method, mesh["data"])
    x, weights = content(case, rank, 0, torch.float32), content(case, rank, 1, torch.float32)
    (ddp(x) * weights).sum().backward()
    assert len(expert_parameters(ddp)) == 2
    found = {name: p.grad for name, p in net.named_parameters()}
    errors = _compared(found, wanted, axis.place * 4, 4)
    experts.close()
    dense.close()
    return errors


def sharded(rank: int, world_size: int) -> dict[str, float]:
    """FSDP2: experts over the ranks that hold the same ones, the rest over all."""
    case = {**CASE, "tokens": [6, 5, 0, 8]}
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "expert"))
    axis = ExchangeAxis(mesh["expert"])
    _, wanted = _expected(rank, case)
    net = Net(axis, copy.deepcopy(case))
    fully_shard(net.feed.experts, mesh=mesh["data"])
    fully_shard(net, mesh=init_device_mesh("cpu", (4,)))
    x, weights = content(case, rank, 0, torch.float32), content(case, rank, 1, torch.float32)
    (net(x) * weights).sum().backward()
    found: dict[str, Tensor | None] = {}
    for name, parameter in net.named_parameters():
        grad: Any = parameter.grad
        found[name] = grad.full_tensor()
    return _compared(found, wanted, axis.place * 4, 4)
