"""What the ranks of `test_sequences.py` run, and attention written out in one process."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from gradwire.codecs.base import Codec
from gradwire.core.key import Key
from gradwire.drivers.interpreter import Traffic
from gradwire.parallel.exchange import RowCoding
from gradwire.parallel.sequences import (
    AttentionDropout,
    AttentionMask,
    Contiguous,
    ExchangeAxis,
    SequenceLayout,
    Zigzag,
    ring_attention,
    ulysses_attention,
)
from gradwire.spec import as_codec

LAYOUTS: Mapping[str, type[SequenceLayout]] = {"contiguous": Contiguous, "zigzag": Zigzag}


def inputs(case: Mapping[str, Any], dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    """q, k and v of the whole sequence, and what the output is multiplied by to make a loss."""
    generator = torch.Generator().manual_seed(case["seed"])
    batch, heads, length, size = case["batch"], case["heads"], case["length"], case["size"]
    key_heads, value_size = case.get("key_heads", heads), case.get("value_size", size)
    shapes = (
        (batch, heads, length, size),
        (batch, key_heads, length, size),
        (batch, key_heads, length, value_size),
        (batch, heads, length, value_size),
    )
    scale = case.get("spread", 1.0)
    return tuple((scale * torch.randn(shape, generator=generator, dtype=torch.float64)).to(dtype) for shape in shapes)


def dropout_of(case: Mapping[str, Any], first_head: int = 0) -> AttentionDropout | None:
    key = Key(seed=case["seed"], layer="attention")
    return AttentionDropout(case["dropout"], key, first_head) if case.get("dropout") is not None else None


def written_out(
    q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, dropout: AttentionDropout | None = None
) -> Tensor:
    """Attention of one process, by its definition."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    whole = range(q.shape[2])
    scores = q.matmul(k.mT) / math.sqrt(q.shape[-1])
    weights = scores.masked_fill(~mask.table(whole, whole), -math.inf).softmax(-1)
    return (weights if dropout is None else weights * dropout.factors(q.shape[0], q.shape[1], whole, whole)).matmul(v)


def attended(
    case: Mapping[str, Any], axis: ExchangeAxis, layout: SequenceLayout, parts: tuple[Tensor, ...], traffic: Traffic
) -> Tensor:
    q, k, v = parts
    mask = AttentionMask(**case.get("mask", {}))
    attend = ring_attention if case["way"] == "ring" else ulysses_attention
    options = {"dropout": dropout_of(case), "codec": case.get("codec"), "key": Key(seed=case["seed"])}
    return attend(q, k, v, axis, layout, mask, traffic=traffic, **options)  # type: ignore[arg-type]


def twin_errors(
    rank: int, world_size: int, cases: list[Mapping[str, Any]], dtype: str = "float64", device: str = "cpu"
) -> list[float]:
    """For each case, the largest difference of output and gradients of this rank from those of one process on a CPU."""
    axis, errors = ExchangeAxis(), list[float]()
    for case in cases:
        layout = LAYOUTS[case["layout"]](case["length"], world_size)
        whole = inputs(case)
        leaves = [x.clone().requires_grad_() for x in whole[:3]]
        mask = AttentionMask(**case.get("mask", {}))
        expected = written_out(*leaves, mask, dropout_of(case))  # type: ignore[arg-type, misc]
        wanted = [expected.detach(), *torch.autograd.grad(expected, leaves, whole[3])]
        made = inputs(case, getattr(torch, dtype))
        parts = tuple(layout.shard(x, rank, 2).to(device).requires_grad_() for x in made[:3])
        out = attended(case, axis, layout, parts, Traffic())
        found = [out.detach(), *torch.autograd.grad(out, parts, layout.shard(made[3], rank, 2).to(device))]
        worst = 0.0
        for one, other in zip(found, wanted, strict=True):
            scale = float(other.abs().max()) or 1.0
            difference = one.double().cpu() - layout.shard(other, rank, 2)
            worst = max(worst, float(difference.abs().max()) / max(1.0, scale) if difference.numel() else 0.0)
        errors.append(worst)
    return errors


def coded(x: Tensor, codec: Codec, layout: SequenceLayout, key: Key, stage: str) -> Tensor:
    """The whole of what ranks get of keys or values that travel by a codec."""
    parts = list[Tensor]()
    for place in range(layout.ranks):
        part = layout.shard(x, place, 2)
        coding, rows = RowCoding(codec, part.shape[-1], part.dtype), part.numel() // part.shape[-1]
        wire = coding.encode(part.reshape(rows, -1), (rows,), key.with_(stage=stage, rank=place))
        parts.append(coding.decode(wire, (rows,)).view(part.shape))
    return layout.join(parts, 2)


def through_codec(rank: int, world_size: int, case: Mapping[str, Any]) -> list[float]:
    """How far a ring with a codec is from one process that attends to coded keys and values."""
    axis, layout = ExchangeAxis(), LAYOUTS[case["layout"]](case["length"], world_size)
    q, k, v, factor = inputs(case, torch.float32)
    codec, key, mask = as_codec(case["codec"]), Key(seed=case["seed"]), AttentionMask(**case.get("mask", {}))
    whole = [q, coded(k, codec, layout, key, "k"), coded(v, codec, layout, key, "v")]
    leaves = [x.double().requires_grad_() for x in whole]
    expected = written_out(*leaves, mask)  # type: ignore[arg-type]
    wanted = [expected, *torch.autograd.grad(expected, leaves, factor.double())]
    parts = tuple(layout.shard(x, rank, 2).requires_grad_() for x in (q, k, v))
    out = attended(case, axis, layout, parts, Traffic())
    found = [out, *torch.autograd.grad(out, parts, layout.shard(factor, rank, 2))]
    return [
        float((one.double() - layout.shard(other, rank, 2)).abs().max() / other.abs().max())
        for one, other in zip(found, wanted, strict=True)
    ]


def sent(rank: int, world_size: int, case: Mapping[str, Any], dtype: str) -> tuple[int, int]:
    """Bytes that this rank sends in the forward pass and in the backward pass, by the traffic of the exchange."""
    axis, layout = ExchangeAxis(), LAYOUTS[case["layout"]](case["length"], world_size)
    made, traffic = inputs(case, getattr(torch, dtype)), Traffic()
    parts = tuple(layout.shard(x, rank, 2).requires_grad_() for x in made[:3])
    out = attended(case, axis, layout, parts, traffic)
    forward = traffic.wire_bytes
    out.backward(layout.shard(made[3], rank, 2))
    return forward, traffic.wire_bytes - forward


def two_dimensions(rank: int, world_size: int, case: Mapping[str, Any]) -> list[float]:
    """Ulysses among the two ranks of a node, and a ring over the nodes: how far from one process."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (world_size // 2, 2), mesh_dim_names=("ring", "ulysses"))
    ring, inside = ExchangeAxis(mesh["ring"]), ExchangeAxis(mesh["ulysses"])
    outer = Zigzag(case["length"], ring.size)
    inner = Contiguous(outer.count(ring.place), inside.size)
    mask = AttentionMask(**case.get("mask", {}))

    def part(x: Tensor) -> Tensor:
        return inner.shard(outer.shard(x, ring.place, 2), inside.place, 2)

    def around(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        first_head = inside.place * case["heads"] // inside.size
        return ring_attention(q, k, v, ring, outer, mask, dropout=dropout_of(case, first_head))

    whole = inputs(case)
    leaves = [x.clone().requires_grad_() for x in whole[:3]]
    expected = written_out(*leaves, mask, dropout_of(case))  # type: ignore[arg-type, misc]
    wanted = [expected, *torch.autograd.grad(expected, leaves, whole[3])]
    q, k, v = (part(x).requires_grad_() for x in whole[:3])
    out = ulysses_attention(q, k, v, inside, inner, around)
    found = [out, *torch.autograd.grad(out, (q, k, v), part(whole[3]))]
    return [float((one - part(other)).abs().max()) for one, other in zip(found, wanted, strict=True)]


def faulty(rank: int, world_size: int, fault: str, way: str) -> str:
    """What this rank is told where rank 1 does something wrong."""
    axis, length, heads, key_heads, size = ExchangeAxis(), 8, 4, 2, 4
    mask, ranks = AttentionMask(causal=True), world_size
    if rank == 1:
        size = 5 if fault == "size" else size
        heads, key_heads = (6, 4) if fault == "heads" else (heads, key_heads)
        mask = AttentionMask() if fault == "mask" else mask
        mask = AttentionMask(lengths=(3, 4)) if fault == "lengths" else mask
        ranks = 3 if fault == "ranks" else ranks
    layout = Contiguous(length, ranks)
    rows = 4 if fault != "rows" or rank == 0 else 3
    q, k = torch.randn(1, heads, rows, size), torch.randn(1, key_heads, rows, size)
    attend = ring_attention if way == "ring" else ulysses_attention
    try:
        attend(q, k, k, axis, layout, mask)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"
