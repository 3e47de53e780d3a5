"""What the ranks of `test_moe.py` run, and the layer of experts written as loops over tokens."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from gradwire.parallel.moe import (
    Capacity,
    ExchangeAxis,
    Experts,
    MoE,
    NoisyTopK,
    Payloads,
    Router,
    SigmoidGroups,
    SoftmaxTopK,
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
    return ExchangeAxis(dist.new_group([dist.get_rank()], use_local_synchronization=True))


def twin_errors(rank: int, world_size: int, cases: Sequence[Mapping[str, Any]], node: int | None = None) -> list[float]:
    """The largest difference of an output or a gradient from the loops over tokens, over all ranks, for each case."""
    axis, alone = ExchangeAxis(node=node), one_process()
    return [_twin_error(axis, alone, rank, world_size, case) for case in cases]


def _twin_error(axis: ExchangeAxis, alone: ExchangeAxis, rank: int, world_size: int, case: Mapping[str, Any]) -> float:
    layer, twin = made(axis, case), made(alone, case | {"payloads": {}, "near": 0.0, "chunks": 1})
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
