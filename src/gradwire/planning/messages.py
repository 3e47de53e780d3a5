"""What the parts of a split model send, as programs of collectives, which are priced as those of methods are.

Ranks of a layout are numbered with tensor parallelism innermost, then context and data parallelism, and stages
outermost. So an axis is its size, and how far its ranks are apart. Tensors have a shape and no data.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch

from gradwire.core.axis import Axis
from gradwire.core.collective import AllReduce, AllToAll, Collective
from gradwire.core.messages import Message, SendRecv
from gradwire.core.program import Program
from gradwire.drivers.cost import asked_by

Requests = tuple[Collective, ...]


def _asks(program: Callable[..., Program[None]]) -> Callable[..., Requests]:
    """Of a program for some sizes, what it asks for; equal sizes are run once."""

    @functools.lru_cache(maxsize=4096)
    def asked(*sizes: int) -> Requests:
        return tuple(asked_by(program(*sizes), 1 << 20))

    return functools.update_wrapper(asked, program)


@_asks
def layer_of_tensors(elements: int, blocks: int, tp: int) -> Program[None]:
    """All-reduces of activations in 16 bits, after each block that is split over `tp` ranks (Shoeybi et al. 2019).

    The forward pass of a layer asks for them, and so does the backward pass. With sequence parallelism each is an
    all-gather and a reduce-scatter, which are as many bytes (Korthikanti et al. 2022, Section 4.2.2).

    Args:
        elements: tokens times the hidden size.
        blocks: of a layer; 2: attention and the feed-forward part.
        tp: ranks.

    >>> [request.nbytes for request in layer_of_tensors(1000, 2, 4)]
    [2000, 2000]
    """
    for _ in range(blocks if tp > 1 else 0):
        yield AllReduce(_halves(elements), axis=Axis(tp))


@_asks
def layer_of_experts(tokens: int, hidden: int, chosen: int, experts: int, ep: int, node: int) -> Program[None]:
    """Two all-to-alls of tokens in 16 bits, to their experts and back; routing is balanced.

    With `node` of 0 each token travels once for each of its experts. With the ranks of a node it travels once for each
    node that has some of its experts, and is copied there, as DeepEP does: a node of N has one of k experts of E with
    the probability 1 - C(E - E/N, k) / C(E, k).

    Args:
        tokens: of one rank.
        hidden: elements of a token.
        chosen: experts of a token, k.
        experts: of a layer, E.
        ep: ranks that the experts are spread over.
        node: ranks of it that share a node, where a token travels once to each node.

    >>> [request.nbytes for request in layer_of_experts(10, 8, 2, 16, 4, 0)]
    [320, 320]
    >>> [(request.axis, request.nbytes) for request in layer_of_experts(10, 8, 2, 16, 4, 2)][:2]
    [(Axis(size=2, stride=2), 246), (Axis(size=2, stride=1), 320)]
    """
    whole = 2 * tokens * chosen * hidden
    for _ in range(2 if ep > 1 else 0):
        if not node or node >= ep:
            yield AllToAll(_rows(whole, ep), axis=Axis(ep))
            continue
        nodes = ep // node
        met = 1 - math.comb(experts - experts // nodes, chosen) / math.comb(experts, chosen)
        yield AllToAll(_rows(round(2 * tokens * hidden * nodes * met), nodes), axis=Axis(nodes, node))
        yield AllToAll(_rows(whole, node), axis=Axis(node))


@_asks
def hop_of_keys(elements: int, cp: int, tp: int) -> Program[None]:
    """A hop of the ring of keys and values in 16 bits, to the next rank that shares the sequence (Liu et al. 2023).

    Args:
        elements: tokens of a rank times the size of its keys; values are as many.
        cp: ranks that share the sequence.
        tp: ranks between two of them.

    >>> [request.nbytes for request in hop_of_keys(1000, 4, 8)]
    [4000]
    """
    if cp > 1:
        both = _halves(2 * elements)
        yield SendRecv(both, (Message(tp, both),), axis=Axis(cp, tp))


@_asks
def between_stages(elements: int, stages: int, ranks: int) -> Program[None]:
    """Activations in 16 bits to the next stage: a pair of ranks.

    Args:
        elements: of one rank's share.
        stages: of the pipeline.
        ranks: of a stage.
    """
    if stages > 1:
        share = _halves(elements)
        yield SendRecv(share, (Message(ranks, share),), axis=Axis(2, ranks))


def _halves(elements: int) -> torch.Tensor:
    return torch.empty(elements, dtype=torch.bfloat16, device="meta")


def _rows(nbytes: int, ranks: int) -> torch.Tensor:
    """As many bytes as make equal rows for all ranks, at least `nbytes`."""
    return torch.empty(ranks, -(-nbytes // ranks), dtype=torch.uint8, device="meta")
