"""Attention over a sequence that is spread over ranks: each rank gets all positions of some heads."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from gradwire.codecs.base import Codec
from gradwire.core.errors import CompositionError
from gradwire.core.key import Key
from gradwire.drivers.interpreter import Traffic
from gradwire.parallel.exchange import ExchangeAxis, Passage, Way, row_codec
from gradwire.parallel.rows import FlatRows
from gradwire.parallel.sequences.blocks import block_attention
from gradwire.parallel.sequences.dropout import AttentionDropout
from gradwire.parallel.sequences.inputs import dtype_of_sums, require_inputs
from gradwire.parallel.sequences.layouts import SequenceLayout, even_piece
from gradwire.parallel.sequences.masks import EVERYTHING, AttentionMask

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Of q (B, H, T, D), k (B, G, T, D) and v (B, G, T, E) the outputs (B, H, T, E); H is a multiple of G."""


def ulysses_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    axis: ExchangeAxis,
    layout: SequenceLayout,
    attention: Attention | AttentionMask = EVERYTHING,
    *,
    dropout: AttentionDropout | None = None,
    codec: Codec | str | None = None,
    gradient_codec: Codec | str | None = None,
    key: Key | None = None,
    traffic: Traffic | None = None,
) -> Tensor:
    """Attention by heads: one all-to-all brings each rank all positions of some heads, another one brings them back.

        out = A(attention(A^T q, A^T k, A^T v))

    where A^T brings the positions of all ranks together for the heads of one, and A, its transpose, brings them back.
    Each rank gets an even piece of the query heads, so their numbers differ by at most one, and the key heads that
    these look at. So any numbers of heads and ranks will do: a key head goes to several ranks where its query heads do,
    and a rank without a head takes part in the exchanges alone.

    With B sequences, S of T positions and h of H query heads on this rank, g of all key heads here and g_j on rank j,
    and elements of w bytes as they travel, a rank sends

        forward:   B w (S ((H - h) D + sum over other ranks j of g_j (D + E)) + (T - S) h E) + 48 (P - 1) bytes
        backward:  B w ((T - S) (h D + g (D + E)) + S (H - h) E) bytes

    Args:
        q: (B, H, S, D), the queries of this rank in the order of `layout`.
        k: (B, G, S, D); H must be a multiple of G.
        v: (B, G, S, E).
        axis: the ranks that the sequence is spread over.
        layout: which positions each rank has. The attention gets them in ascending order.
        attention: who sees whom, for PyTorch's attention; or a function of its own, such as `ring_attention` over
            another axis.
        dropout: of weights, the same one on all ranks; None for none. A function is given its own instead.
        codec: of what travels forward, e.g. "int8:64"; None sends it as it is. Gradients pass it as if it changed
            nothing.
        gradient_codec: of what travels backward.
        key: of codecs that draw.
        traffic: is told what was sent.

    Returns:
        (B, H, S, E).

    Raises:
        CompositionError: shapes that do not fit each other or the layout, heads that do not divide, or inputs that
            differ among ranks; each rank is told.

    References:
        Jacobs et al. 2023, "DeepSpeed Ulysses", section 3.

    >>> from gradwire.parallel.sequences import Contiguous
    >>> axis = ExchangeAxis()
    >>> q = torch.randn(1, 4, 6, 8)
    >>> ulysses_attention(q, q, q, axis, Contiguous(6, axis.size), AttentionMask(causal=True)).shape
    torch.Size([1, 4, 6, 8])
    """
    mask = attention if isinstance(attention, AttentionMask) else None
    require_inputs(q, k, v, axis, layout, mask, (dropout, codec, gradient_codec), traffic)
    if dropout is not None and mask is None:
        raise CompositionError(
            f"{dropout} beside an attention of your own: give it to that function, with the first head of this rank as "
            "first_head"
        )
    heads, key_heads = q.shape[1], k.shape[1]
    mine = [even_piece(heads, axis.size, place) for place in range(axis.size)]
    of_keys = [_shared(piece, heads // key_heads) for piece in mine]
    turns = _Turns(axis, layout, codec, gradient_codec, key or Key(), traffic)
    started = [
        turns.to_heads(x, pieces, stage) for x, pieces, stage in ((q, mine, "q"), (k, of_keys, "k"), (v, of_keys, "v"))
    ]
    whole_q, whole_k, whole_v = (finish() for finish in started)
    looks_at = [head // (heads // key_heads) - of_keys[axis.place].start for head in mine[axis.place]]
    if not looks_at:
        # attention of no heads ends a process of PyTorch 2.13 on a CPU; all three stay in the graph, since their
        # gradients take part in exchanges
        out = whole_v + whole_q.sum() + whole_k.sum()
    else:
        whole_k, whole_v = _per_query_head(looks_at, whole_k, whole_v)
        attend = attention
        if isinstance(attend, AttentionMask):
            attend = _attention(attend, dropout, mine[axis.place].start)
        out = attend(whole_q, whole_k, whole_v)
    return turns.to_positions(out, mine, "out")


@dataclass(frozen=True)
class _Turns:
    """Exchanges between positions of all heads and heads of all positions."""

    axis: ExchangeAxis
    layout: SequenceLayout
    codec: Codec | str | None
    gradient_codec: Codec | str | None
    key: Key
    traffic: Traffic | None

    def to_heads(self, x: Tensor, pieces: list[range], stage: str) -> Callable[[], Tensor]:
        """Send (B, heads, S, D); what is returned waits for (B, heads of this rank, T, D)."""
        batch, width, own = x.shape[0], x.shape[3], len(pieces[self.axis.place])
        passage = self._passage(pieces, batch, width, "there", stage)
        chosen = torch.tensor([head for piece in pieces for head in piece], device=x.device)
        started = passage.start(x.index_select(1, chosen).transpose(0, 1).reshape(-1, width))

        def finish() -> Tensor:
            rows = passage.finish(started).split(passage.rows.receives)
            parts = [part.view(own, batch, count, width) for part, count in zip(rows, self._counts, strict=True)]
            return self.layout.join(parts, 2).transpose(0, 1)

        return finish

    def to_positions(self, x: Tensor, pieces: list[range], stage: str) -> Tensor:
        """Bring (B, heads of this rank, T, E) back to (B, heads, S, E)."""
        batch, width = x.shape[0], x.shape[3]
        passage = self._passage(pieces, batch, width, "back", stage)
        by_head = x.transpose(0, 1)
        parts = [self.layout.shard(by_head, place, 2).reshape(-1, width) for place in range(self.axis.size)]
        rows = passage.finish(passage.start(torch.cat(parts)))
        heads = sum(map(len, pieces))
        return rows.view(heads, batch, self._counts[self.axis.place], width).transpose(0, 1)

    @property
    def _counts(self) -> list[int]:
        """How many positions each rank has."""
        return [self.layout.count(place) for place in range(self.axis.size)]

    def _passage(self, pieces: list[range], batch: int, width: int, way: Way, stage: str) -> Passage:
        place = self.axis.place
        sends = tuple(len(piece) * batch * self._counts[place] for piece in pieces)
        receives = tuple(len(pieces[place]) * batch * count for count in self._counts)
        codec = row_codec(self.codec, width, "codec")
        gradient_codec = row_codec(self.gradient_codec, width, "gradient_codec")
        key = self.key.with_(stage=f"{self.key.stage}{stage}")
        return Passage(self.axis, FlatRows(sends, receives, place), way, codec, gradient_codec, key, self.traffic)


def _shared(heads: range, group: int) -> range:
    """The key heads that some query heads look at."""
    return range(heads[0] // group, heads[-1] // group + 1) if heads else range(0)


def _per_query_head(looks_at: list[int], *xs: Tensor) -> Iterable[Tensor]:
    """Key heads, repeated where query heads do not share them evenly."""
    group, rest = divmod(len(looks_at), looks_at[-1] + 1)
    if not rest and looks_at == [head // group for head in range(len(looks_at))]:
        return xs
    return [x.index_select(1, torch.tensor(looks_at, device=x.device)) for x in xs]


def _attention(mask: AttentionMask, dropout: AttentionDropout | None, first_head: int) -> Attention:
    """Attention of one process for the query heads from `first_head`: PyTorch's own, or a block with dropout."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        positions = range(q.shape[2])
        seen = mask.seen(positions, positions)
        if dropout is not None:
            here = replace(dropout, first_head=dropout.first_head + first_head)
            sums = dtype_of_sums(q.dtype)
            factors = here.factors(q.shape[0], q.shape[1], positions, positions, q.device).to(sums)
            scale = 1 / math.sqrt(q.shape[-1])
            return block_attention(q.to(sums), k.to(sums), v.to(sums), scale, seen, factors)[0].to(q.dtype)
        table = seen.to(q.device) if isinstance(seen, Tensor) else None
        return functional.scaled_dot_product_attention(
            q, k, v, attn_mask=table, is_causal=table is None and seen == "causal", enable_gqa=q.shape[1] != k.shape[1]
        )

    return attend
