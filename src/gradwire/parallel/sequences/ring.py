"""Attention over a sequence that is spread over the ranks of an axis: keys and values go round a ring."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gradwire.codecs.base import Codec
from gradwire.core.key import Key
from gradwire.drivers.interpreter import Begun, Traffic
from gradwire.parallel.exchange import ExchangeAxis, RowCoding, row_codec
from gradwire.parallel.sequences.blocks import block_attention, block_gradients, merged
from gradwire.parallel.sequences.dropout import AttentionDropout
from gradwire.parallel.sequences.inputs import dtype_of_sums, require_inputs
from gradwire.parallel.sequences.layouts import SequenceLayout
from gradwire.parallel.sequences.masks import EVERYTHING, AttentionMask, Seen


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    axis: ExchangeAxis,
    layout: SequenceLayout,
    mask: AttentionMask = EVERYTHING,
    *,
    scale: float | None = None,
    dropout: AttentionDropout | None = None,
    codec: Codec | str | None = None,
    key: Key | None = None,
    traffic: Traffic | None = None,
) -> Tensor:
    """Attention of this rank's queries to the keys of all ranks, and the gradients of all three.

        out_i = sum over j seen by i of softmax_j(scale q_i . k_j) v_j

    Keys and values go from rank to rank, P - 1 hops, while each rank attends to those that it has. Outputs of blocks
    are merged by their log-sum-exp. In the backward pass keys and values go round again, and their gradients follow
    them, P hops. What is added up is float32, or float64 for float64, whatever the inputs are: blocks are computed in
    it, and gradients travel in it. With a codec C every rank computes attention(q, C(k), C(v)), for its own keys too,
    and gradients pass C as if it changed nothing (straight-through, Bengio et al. 2013).

    All ranks of the axis call it in the same order, and run their backward passes so. With n = B G S (D + E) elements
    of k and v on each rank, a rank sends

        forward:   (P - 1) (n w + 48) bytes,    backward:  (P - 1) n w + P n a bytes    (0 for P = 1)

    where w is the size of an element as it travels, and a that of float32 or float64.

    Args:
        q: (B, H, S, D), the queries of this rank in the order of `layout`.
        k: (B, G, S, D); H must be a multiple of G.
        v: (B, G, S, E).
        axis: the ranks that the sequence is spread over.
        layout: which positions each rank has; `Zigzag` balances a causal mask.
        mask: who sees whom.
        scale: of scores; None for 1 / sqrt(D).
        dropout: of weights, the same one on all ranks; None for none. Blocks are matrix products then.
        codec: of keys and values, e.g. "int8:64"; None sends them as they are.
        key: of a codec that draws.
        traffic: is told what was sent.

    Returns:
        (B, H, S, E), of the dtype of q.

    Raises:
        CompositionError: shapes that do not fit each other or the layout, heads that do not divide, or inputs that
            differ among ranks; each rank is told.

    References:
        Liu et al. 2023, "Ring attention with blockwise transformers for near-infinite context", section 3.

    >>> from gradwire.parallel.sequences import Zigzag
    >>> axis = ExchangeAxis()
    >>> layout = Zigzag(6, axis.size)
    >>> q = torch.randn(1, 4, 6, 8, requires_grad=True)
    >>> ring_attention(q, q[:, :2], q[:, :2], axis, layout, AttentionMask(causal=True)).shape
    torch.Size([1, 4, 6, 8])
    """
    ring = _Ring.checked(q, k, v, axis, layout, mask, scale, dropout, codec, key or Key(), traffic)
    return _RingAttention.apply(q, k, v, ring)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class _Ring:
    """One call: the ranks, what they attend to, and how keys and values travel."""

    axis: ExchangeAxis
    layout: SequenceLayout
    mask: AttentionMask
    scale: float
    dropout: AttentionDropout | None
    codecs: tuple[RowCoding, RowCoding]
    key: Key
    traffic: Traffic | None
    heads: tuple[int, int]
    """Sequences of a batch, and key heads."""
    query_heads: int
    sums: torch.dtype
    """What is added up."""

    @classmethod
    def checked(
        cls,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        axis: ExchangeAxis,
        layout: SequenceLayout,
        mask: AttentionMask,
        scale: float | None,
        dropout: AttentionDropout | None,
        codec: Codec | str | None,
        key: Key,
        traffic: Traffic | None,
    ) -> _Ring:
        """Compare the inputs with each other, and with those of other ranks."""
        require_inputs(q, k, v, axis, layout, mask, (scale, dropout, codec), traffic)
        coded = tuple(RowCoding(row_codec(codec, x.shape[-1], "codec"), x.shape[-1], x.dtype) for x in (k, v))
        return cls(
            axis,
            layout,
            mask,
            1 / math.sqrt(q.shape[-1]) if scale is None else scale,
            dropout,
            (coded[0], coded[1]),
            key,
            traffic,
            (k.shape[0], k.shape[1]),
            q.shape[1],
            dtype_of_sums(q.dtype),
        )

    # Blocks ------------------------------------------------------------------------------------------------------

    def pieces(self, place: int, device: torch.device) -> Iterator[tuple[slice, slice, Seen, Tensor | None]]:
        """Which queries of this rank see which keys of another: parts of both, how, and the factors of dropout."""
        mine, theirs = (_parts(self.layout.ranges(each)) for each in (self.axis.place, place))
        for queries, rows in mine:
            for keys, columns in theirs:
                seen = self.mask.seen(queries, keys)
                if not isinstance(seen, str) or seen != "none":
                    yield rows, columns, seen, self._factors(queries, keys, device)

    def _factors(self, queries: range, keys: range, device: torch.device) -> Tensor | None:
        if self.dropout is None:
            return None
        return self.dropout.factors(self.heads[0], self.query_heads, queries, keys, device).to(self.sums)

    # Travelling --------------------------------------------------------------------------------------------------

    def wire(self, k: Tensor, v: Tensor) -> Tensor:
        """Keys and values as bytes."""
        packed = list[Tensor]()
        for coding, x, stage in zip(self.codecs, (k, v), "kv", strict=True):
            rows = x.detach().reshape(-1, coding.width)
            key = self.key.with_(stage=f"{self.key.stage}{stage}", rank=self.axis.place)
            packed.append(coding.encode(rows, (len(rows),), key))
        return torch.cat(packed)

    def block(self, wire: Tensor, place: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the bytes of a rank, in the dtype of sums."""
        rows = self._rows(place)
        parts = wire.split([coding.nbytes(rows) for coding in self.codecs])
        k, v = (
            coding.decode(part, (rows,)).view(*self.heads, -1, coding.width).to(self.sums)
            for coding, part in zip(self.codecs, parts, strict=True)
        )
        return k, v

    def blocks(self, k: Tensor, v: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
        """The place, keys and values of each rank, this one's first. The next ones travel meanwhile."""

        def nbytes(place: int) -> int:
            return sum(coding.nbytes(self._rows(place)) for coding in self.codecs)

        for place, wire in self.axis.passed_round(self.wire(k, v), nbytes, self.traffic):
            yield place, *self.block(wire, place)

    def zeros(self, place: int, device: torch.device) -> Tensor:
        """Memory for the gradients of a rank's keys and values, end to end, as they travel."""
        return torch.zeros(self._rows(place) * self._width, dtype=self.sums, device=device)

    def pass_sums(self, flat: Tensor, place: int) -> Begun[Tensor]:
        """Send the gradients of a rank's block after it, and begin to receive those of the next block."""
        arrives = self._rows((place - 1) % self.axis.size) * self._width * self.sums.itemsize
        return self.axis.pass_on(flat.view(torch.uint8), arrives, self.traffic)

    def of_keys_and_values(self, flat: Tensor, place: int) -> tuple[Tensor, Tensor]:
        """The gradients of a rank's keys, and those of its values, over the same memory."""
        rows = self._rows(place)
        parts = flat.split([rows * coding.width for coding in self.codecs])
        dk, dv = (part.view(*self.heads, -1, coding.width) for part, coding in zip(parts, self.codecs, strict=True))
        return dk, dv

    def _rows(self, place: int) -> int:
        batch, heads = self.heads
        return batch * heads * self.layout.count(place)

    @property
    def _width(self) -> int:
        return sum(coding.width for coding in self.codecs)


class _RingAttention(torch.autograd.Function):
    """The passes of `ring_attention`. What travels is begun before a block is computed, and waited for after it."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, ring: _Ring) -> Tensor:
        queries = q.detach().to(ring.sums)
        out = queries.new_zeros((*q.shape[:3], v.shape[-1]))
        lse = queries.new_full(q.shape[:3], -math.inf)
        for place, keys, values in ring.blocks(k, v):
            for rows, columns, seen, factors in ring.pieces(place, q.device):
                part = block_attention(
                    queries[:, :, rows], keys[:, :, columns], values[:, :, columns], ring.scale, seen, factors
                )
                out[:, :, rows], lse[:, :, rows] = merged(out[:, :, rows], lse[:, :, rows], *part)
        ctx.ring = ring
        ctx.save_for_backward(q, k, v, out, lse)
        return out.to(q.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        ring: _Ring = ctx.ring
        q, k, v, out, lse = ctx.saved_tensors
        queries, grad = q.detach().to(ring.sums), grads[0].to(ring.sums)
        dq, flat = torch.zeros_like(queries), queries.new_empty(0)
        arriving: Begun[Tensor] | None = None
        for place, keys, values in ring.blocks(k, v):
            flat = ring.zeros(place, q.device)
            dk, dv = ring.of_keys_and_values(flat, place)
            for rows, columns, seen, factors in ring.pieces(place, q.device):
                share = block_gradients(
                    grad[:, :, rows],
                    queries[:, :, rows],
                    keys[:, :, columns],
                    values[:, :, columns],
                    out[:, :, rows],
                    lse[:, :, rows],
                    ring.scale,
                    seen,
                    factors,
                )
                dq[:, :, rows] += share[0]
                dk[:, :, columns] += share[1]
                dv[:, :, columns] += share[2]
            del keys, values  # memory for what arrives
            if arriving is not None:
                flat += arriving.end().view(ring.sums)
            arriving = None if ring.axis.size == 1 else ring.pass_sums(flat, place)
        if arriving is not None:
            flat = arriving.end().view(ring.sums)
        dk, dv = ring.of_keys_and_values(flat, ring.axis.place)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None


def _parts(ranges: tuple[range, ...]) -> list[tuple[range, slice]]:
    """Ranges of positions, each with where it lies among the positions of a rank."""
    begin, parts = 0, list[tuple[range, slice]]()
    for positions in ranges:
        parts.append((positions, slice(begin, begin + len(positions))))
        begin += len(positions)
    return parts
