"""Attention over sequences that are spread over ranks, exact forward and backward, on a CPU too.

    layout = Zigzag(8192, axis.size)
    y = ring_attention(q, k, v, axis, layout, AttentionMask(causal=True))

| name | what it is |
|---|---|
| `ring_attention` | attention of a rank's queries to the keys of all ranks |
| `ulysses_attention` | attention of all positions for the heads of a rank |
| `AttentionMask` | causal, a sliding window, packed sequences |
| `SequenceLayout`, `Zigzag`, `Contiguous` | which positions a rank has |
| `ExchangeAxis` | the ranks that a sequence is spread over |
"""

from gradwire.parallel.exchange import ExchangeAxis
from gradwire.parallel.sequences.layouts import Contiguous, SequenceLayout, Zigzag
from gradwire.parallel.sequences.masks import AttentionMask
from gradwire.parallel.sequences.ring import ring_attention
from gradwire.parallel.sequences.ulysses import ulysses_attention

__all__ = [
    "AttentionMask",
    "Contiguous",
    "ExchangeAxis",
    "SequenceLayout",
    "Zigzag",
    "ring_attention",
    "ulysses_attention",
]
