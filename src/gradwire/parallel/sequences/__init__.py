"""Attention over sequences that are spread over ranks, exact forward and backward, on a CPU too.

    layout = Zigzag(8192, axis.size)
    y = ring_attention(q, k, v, axis, layout, AttentionMask(causal=True))

| name | what it is |
|---|---|
| `ring_attention` | attention of a rank's queries to the keys of all ranks |
| `ulysses_attention` | attention of all positions for the heads of a rank |
| `AttentionMask` | causal, a sliding window, packed sequences |
| `gathered_linear`, `scattered_linear` | layers whose weights are split over the ranks of a sequence |
| `OverlappedColwiseParallel`, `OverlappedRowwiseParallel` | these as styles of `parallelize_module` |
| `AttentionDropout` | drops the same weights under every layout |
| `SequenceLayout`, `Zigzag`, `Contiguous` | which positions a rank has |
| `ExchangeAxis` | the ranks that a sequence is spread over |
"""

from gradwire.parallel.exchange import ExchangeAxis
from gradwire.parallel.sequences.dropout import AttentionDropout
from gradwire.parallel.sequences.layouts import Contiguous, SequenceLayout, Zigzag
from gradwire.parallel.sequences.linear import gathered_linear, scattered_linear
from gradwire.parallel.sequences.masks import AttentionMask
from gradwire.parallel.sequences.ring import ring_attention
from gradwire.parallel.sequences.styles import OverlappedColwiseParallel, OverlappedRowwiseParallel
from gradwire.parallel.sequences.ulysses import ulysses_attention

__all__ = [
    "AttentionDropout",
    "AttentionMask",
    "Contiguous",
    "ExchangeAxis",
    "OverlappedColwiseParallel",
    "OverlappedRowwiseParallel",
    "SequenceLayout",
    "Zigzag",
    "gathered_linear",
    "ring_attention",
    "scattered_linear",
    "ulysses_attention",
]
