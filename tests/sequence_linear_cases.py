"""What the ranks of `test_sequence_linear.py` run: a feed-forward layer that is split, beside one process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from gradwire.core.key import Key
from gradwire.drivers.interpreter import Traffic
from gradwire.parallel.exchange import RowCoding
from gradwire.parallel.sequences import (
    Contiguous,
    ExchangeAxis,
    OverlappedColwiseParallel,
    OverlappedRowwiseParallel,
    gathered_linear,
    scattered_linear,
)
from gradwire.parallel.sequences.layouts import even_piece
from gradwire.spec import as_codec


def made(case: Mapping[str, Any], dtype: torch.dtype) -> list[Tensor]:
    """The input, both weights and biases, and the factor of the loss."""
    generator = torch.Generator().manual_seed(case["seed"])
    batch, length, width, inner = case["batch"], case["length"], case["width"], case["inner"]
    shapes = ((batch, length, width), (inner, width), (inner,), (width, inner), (width,), (batch, length, width))
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def written_out(x: Tensor, up: Tensor, up_bias: Tensor, down: Tensor, down_bias: Tensor) -> Tensor:
    return functional.linear(functional.gelu(functional.linear(x, up, up_bias)), down, down_bias)


def part_of(case: Mapping[str, Any], whole: list[Tensor], axis: ExchangeAxis, layout: Contiguous) -> list[Tensor]:
    """What this rank has of the input, the weights, the biases, and the factor."""
    mine = even_piece(case["inner"], axis.size, axis.place)
    columns = slice(mine.start, mine.stop)
    x, up, up_bias, down, down_bias, factor = whole
    return [
        layout.shard(x, axis.place),
        up[columns],
        up_bias[columns],
        down[:, columns],
        down_bias,
        layout.shard(factor, axis.place),
    ]


def on_ranks(
    case: Mapping[str, Any], parts: list[Tensor], axis: ExchangeAxis, layout: Contiguous, traffic: Traffic | None = None
) -> list[Tensor]:
    """Output and gradients of this rank."""
    leaves = [part.clone().requires_grad_() for part in parts[:5]]
    x, up, up_bias, down, down_bias = leaves
    codec, key = case.get("codec"), Key(seed=case["seed"])
    hidden = gathered_linear(x, up, up_bias, axis, layout, codec=codec, key=key, traffic=traffic)
    out = scattered_linear(functional.gelu(hidden), down, down_bias, axis, layout, traffic=traffic)
    return [out.detach(), *torch.autograd.grad(out, leaves, parts[5])]


def twin_errors(
    rank: int, world_size: int, cases: list[Mapping[str, Any]], dtype: str = "float64", device: str = "cpu"
) -> list[float]:
    """For each case, the largest relative difference of output and gradients of this rank from a process on a CPU."""
    axis, errors = ExchangeAxis(), list[float]()
    for case in cases:
        layout = Contiguous(case["length"], world_size)
        whole = made(case, torch.float64)
        leaves = [each.clone().requires_grad_() for each in whole[:5]]
        expected = written_out(*leaves)
        grads = list(torch.autograd.grad(expected, leaves, whole[5]))
        wanted = part_of(case, [*grads, expected.detach()], axis, layout)
        wanted = [wanted[5], *wanted[:5]]
        scales = [float(each.abs().max()) for each in (expected, *grads)]
        parts = [part.to(device) for part in part_of(case, made(case, getattr(torch, dtype)), axis, layout)]
        found = on_ranks(case, parts, axis, layout)
        errors.append(
            max(
                float((one.double().cpu() - other).abs().max()) / max(1.0, scale) if other.numel() else 0.0
                for one, other, scale in zip(found, wanted, scales, strict=True)
            )
        )
    return errors


def alone_in_bfloat16(rank: int, world_size: int, case: Mapping[str, Any]) -> float:
    """The same error of one process whose layers are PyTorch's."""
    whole, rounded = made(case, torch.float64), made(case, torch.bfloat16)
    outputs = list[list[Tensor]]()
    for each in (whole, rounded):
        leaves = [x.clone().requires_grad_() for x in each[:5]]
        out = written_out(*leaves)
        outputs.append([out.detach(), *torch.autograd.grad(out, leaves, each[5])])
    return max(
        float((one.double() - other).abs().max()) / max(1.0, float(other.abs().max()))
        for other, one in zip(*outputs, strict=True)
    )


def sent(rank: int, world_size: int, case: Mapping[str, Any], dtype: str) -> tuple[int, int, int, int]:
    """Bytes that this rank sends forward and backward: of the gathered layer, then of the scattered one."""
    axis, layout = ExchangeAxis(), Contiguous(case["length"], world_size)
    parts = part_of(case, made(case, getattr(torch, dtype)), axis, layout)
    x, up, _, down, _ = (part.clone().requires_grad_() for part in parts[:5])
    gathering, scattering = Traffic(), Traffic()
    hidden = gathered_linear(x, up, None, axis, layout, codec=case.get("codec"), traffic=gathering)
    out = scattered_linear(
        hidden, down, None, axis, layout, gradient_codec=case.get("gradient_codec"), traffic=scattering
    )
    forward = gathering.wire_bytes, scattering.wire_bytes
    out.backward(parts[5])
    return (
        forward[0],
        gathering.wire_bytes - forward[0],
        forward[1],
        scattering.wire_bytes - forward[1],
    )


def through_codec(rank: int, world_size: int, case: Mapping[str, Any]) -> float:
    """How far a gathered layer with a codec is from one process that multiplies the coded positions of all ranks."""
    axis, layout = ExchangeAxis(), Contiguous(case["length"], world_size)
    parts = part_of(case, made(case, torch.float32), axis, layout)
    x, weight = (part.clone().requires_grad_() for part in parts[:2])
    out = gathered_linear(x, weight, None, axis, layout, codec=case["codec"])
    whole = list[Tensor]()
    for place in range(world_size):
        piece = layout.shard(made(case, torch.float32)[0], place)
        coding, rows = RowCoding(as_codec(case["codec"]), case["width"], torch.float32), piece.shape[0] * piece.shape[1]
        key = Key().with_(rank=place, direction="forward")
        wire = coding.encode(piece.reshape(rows, -1), (rows,), key)
        whole.append(coding.decode(wire, (rows,)).view(piece.shape))
    coded, copy = torch.cat(whole, 1), weight.detach().clone().requires_grad_()
    expected = functional.linear(coded, copy)
    out.sum().backward()
    expected.sum().backward()
    assert weight.grad is not None
    assert copy.grad is not None
    return max(
        float((out - expected).abs().max()), float((weight.grad - copy.grad).abs().max() / copy.grad.abs().max())
    )


def recipe(rank: int, world_size: int, overlapped: bool) -> float:
    """How far a block under styles for Megatron's sequence parallelism is from one process."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        ParallelStyle,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    torch.manual_seed(0)
    width, length = 8, 4 * world_size
    twin, model = (
        nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 16), nn.GELU(), nn.Linear(16, width)).double()
        for _ in range(2)
    )
    model.load_state_dict(twin.state_dict())
    x = torch.randn(2, length, width, dtype=torch.float64)
    expected = twin(x)
    expected.square().sum().backward()
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("tp",))
    layout = Contiguous(length, world_size)
    plan: dict[str, ParallelStyle] = {
        "0": SequenceParallel(),
        "1": ColwiseParallel(input_layouts=Shard(1)),
        "3": RowwiseParallel(output_layouts=Shard(1)),
    }
    if overlapped:
        axis = ExchangeAxis(mesh["tp"])
        plan |= {"1": OverlappedColwiseParallel(axis, layout), "3": OverlappedRowwiseParallel(axis, layout)}
    parallelize_module(model, mesh["tp"], plan)
    out = model(layout.shard(x, rank))
    out.square().sum().backward()
    out = out.to_local() if isinstance(out, DTensor) else out
    errors = [float((out - layout.shard(expected, rank)).abs().max())]
    for parameter, other in zip(model.parameters(), twin.parameters(), strict=True):
        grad = parameter.grad
        assert isinstance(grad, DTensor)
        assert other.grad is not None
        errors.append(float((grad.redistribute(placements=[Replicate()]).to_local() - other.grad).abs().max()))
    return max(errors)


def faulty(rank: int, world_size: int, fault: str, way: str) -> str:
    """What this rank is told where rank 1 does something wrong."""
    axis, length, width, ranks, dtype = ExchangeAxis(), 8, 4, world_size, torch.float32
    codec: str | None = None
    columns, positions = width, 4
    if rank == 1:
        columns = 5 if fault == "columns" else columns
        width = 5 if fault == "width" else width
        columns = width if fault == "width" else columns
        positions = 3 if fault == "positions" else positions
        ranks = 3 if fault == "ranks" else ranks
        dtype = torch.float64 if fault == "dtype" else dtype
        codec = "int8:4" if fault == "codec" else codec
    layout = Contiguous(length, ranks)
    try:
        if way == "gathered":
            x, weight = torch.randn(1, positions, width, dtype=dtype), torch.randn(3, columns, dtype=dtype)
            gathered_linear(x, weight, None, axis, layout, codec=codec)
        else:
            x = torch.randn(1, length if positions == 4 else 7, 3, dtype=dtype)
            weight = torch.randn(width, 3 if fault != "columns" or rank == 0 else 2, dtype=dtype)
            scattered_linear(x, weight, None, axis, layout, gradient_codec=codec)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"
