"""Queries, keys and values that fit each other, the layout, and those of other ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from gradwire.core.errors import CompositionError
from gradwire.drivers.interpreter import Traffic
from gradwire.parallel.exchange import ExchangeAxis
from gradwire.parallel.sequences.layouts import SequenceLayout
from gradwire.parallel.sequences.masks import AttentionMask


def require_inputs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    axis: ExchangeAxis,
    layout: SequenceLayout,
    mask: AttentionMask | None,
    options: object,
    traffic: Traffic | None,
) -> None:
    """Compare the inputs of attention among ranks, before an exchange that would hang or mix them up.

    A rank sends 48 (P - 1) bytes.

    Args:
        q, k, v: (B, H, S, D), (B, G, S, D) and (B, G, S, E) with the positions S of this rank.
        axis: the ranks.
        layout: which positions each of them has.
        mask: who sees whom; None where a function of the caller decides it.
        options: all else that must be alike; compared by its repr.
        traffic: is told what was sent.

    Raises:
        CompositionError: on every rank. The one whose inputs do not fit is told what is wrong, others who it is.
    """
    fault = _fault(q, k, v, axis, layout, mask)
    alike: dict[str, object] = {
        "sizes of batches": q.shape[:1],
        "heads": (q.shape[1:2], k.shape[1:2]),
        "sizes of a head": (k.shape[-1:], v.shape[-1:]),
        "dtypes": k.dtype,
        "layouts, masks or codecs": (layout, mask, options),
    }
    require_alike(axis, alike, fault, q.device, traffic)


def require_alike(
    axis: ExchangeAxis, alike: dict[str, object], fault: str | None, device: torch.device, traffic: Traffic | None
) -> None:
    """Compare what ranks were given. A rank sends 8 (P - 1) bytes for each name, and for the fault.

    Args:
        axis: the ranks.
        alike: what must be alike, by its name.
        fault: what is wrong on this rank, in a sentence; None where nothing is.
        device: of the tensor that travels.
        traffic: is told what was sent.

    Raises:
        CompositionError: on every rank, where one has a fault or they differ; the one with a fault is told it.
    """
    of_faults: dict[str, object] = {"numbers of faulty inputs": 0 if fault is None else 1}
    try:
        axis.require_agreement(of_faults | alike, "have", "give the same on all ranks", device, traffic)
    finally:
        if fault is not None:
            raise CompositionError(fault)


def layout_fault(axis: ExchangeAxis, layout: SequenceLayout) -> str | None:
    """What is wrong with a layout for an axis, in a sentence."""
    if layout.ranks == axis.size:
        return None
    return f"the layout is of {layout.ranks} ranks, and the axis has {axis.size}: make it with ranks={axis.size}"


def dtype_of_sums(of: torch.dtype) -> torch.dtype:
    """What numbers are added up in: float32, or float64 for float64.

    >>> dtype_of_sums(torch.bfloat16)
    torch.float32
    """
    return torch.promote_types(of, torch.float32)


def _fault(
    q: Tensor, k: Tensor, v: Tensor, axis: ExchangeAxis, layout: SequenceLayout, mask: AttentionMask | None
) -> str | None:
    """What is wrong with the inputs of a rank, in a sentence."""
    if not q.dtype == k.dtype == v.dtype or not q.is_floating_point():
        return f"q, k and v are {q.dtype}, {k.dtype} and {v.dtype}: give one floating-point dtype"
    if {q.dim(), k.dim(), v.dim()} != {4}:
        return f"q, k and v have {q.dim()}, {k.dim()} and {v.dim()} dimensions: give (batch, heads, positions, size)"
    if k.shape[:3] != v.shape[:3] or q.shape[0] != k.shape[0] or q.shape[2:] != k.shape[2:]:
        return (
            f"q, k and v of {tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)} do not fit each other: k has the "
            "batch, the positions and the size of q, and v has the heads of k"
        )
    if min(*q.shape[:2], k.shape[1], q.shape[3], v.shape[3]) < 1:
        return f"q and k of {tuple(q.shape)} and {tuple(k.shape)}: only the positions of a rank may be none"
    if q.shape[1] % k.shape[1]:
        nearest = [heads for heads in range(1, q.shape[1] + 1) if q.shape[1] % heads == 0]
        legal = min(nearest, key=lambda heads: abs(heads - k.shape[1]))
        return f"{q.shape[1]} query heads do not divide among {k.shape[1]} key heads: take {legal} key heads"
    if (of_layout := layout_fault(axis, layout)) is not None:
        return of_layout
    if q.shape[2] != layout.count(axis.place):
        return (
            f"rank {axis.place} has {q.shape[2]} positions, and {layout.count(axis.place)} of the layout's "
            f"{layout.length}: take what layout.shard(x, place) gives"
        )
    if mask is not None and mask.lengths is not None and sum(mask.lengths) != layout.length:
        return (
            f"packed sequences of {sum(mask.lengths)} positions in all, and a layout of {layout.length}: count padding "
            "as a sequence of its own"
        )
    return None
