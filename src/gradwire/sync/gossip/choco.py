"""CHOCO-SGD: gossip by compressed messages, by any codec that is a contraction."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire.codecs.base import Codec, layout_of
from gradwire.codecs.error_memory import PROBE_NUMEL, require_bounded
from gradwire.codecs.scaled import contracting
from gradwire.core import buffers
from gradwire.core.errors import CompositionError
from gradwire.core.grain import Grain
from gradwire.core.payload import Payload
from gradwire.core.state import Leaf, State
from gradwire.reducers.step import Step
from gradwire.spec import as_codec
from gradwire.sync.gossip.checks import require_averaging
from gradwire.sync.gossip.graphs import Graph, RoundLinks
from gradwire.sync.gossip.method import GossipMethod, Mixed, add_differences_, received


@dataclass(frozen=True)
class CHOCO(GossipMethod):
    """CHOCO-SGD (Koloskova, Stich & Jaggi 2019, Algorithm 2).

    Every rank i has an x_hat_i that its neighbours know: the sum of all that it has sent. After a local step

        q_i = C(x_i - x_hat_i),    x_hat_i <- x_hat_i + q_i,
        x_i <- x_i + gamma * sum over neighbours j of W[i, j] (x_hat_j - x_hat_i)

    with q_i sent to each neighbour. What C loses is not lost: it stays in x_i - x_hat_i, and so the ranks come to the
    exact mean, at a linear rate for a small enough gamma. Mixing C(x_j) without memory ends at the size of C's error.

    A rank keeps x_hat_i and d_i = the sum above, which is updated by what travels: d_i += sum of W[i, j] (q_j - q_i).
    So memory is two copies of the model, however many neighbours there are.

    Where it deviates: in the paper every x_hat_i is 0 at first, so the first rounds send the model itself, and until
    x_hat_i has caught up most of it is missing there. Here all ranks begin with the same model and know it, so
    x_hat_i = x_i and d_i = 0 at first, and only what local steps have changed is ever sent. The paper's form with
    little memory keeps the sum of W[i, j] x_hat_j in place of d_i, which is as large as the model: its rounding errors
    add up, and x_i follows them. Those of d_i are as small as the differences between ranks.

    The graph must be fixed, symmetric, doubly stochastic and connected.

    Args:
        codec: a contraction, or a spec such as `"topk:0.01+int8"`; an unbiased codec is scaled to a contraction.
        gamma: the gossip step size, in (0, 1]. The more a codec loses, the smaller: at too large a gamma ranks move
            apart (`docs/gossip.md` has some that were measured).

    Raises:
        SpecError: a spec that names no codec.
        CompositionError: a codec that is no contraction, or a gamma out of range.

    References:
        Koloskova, Stich & Jaggi 2019, "Decentralized stochastic optimization and gossip algorithms with compressed
        communication".
    """

    codec: Codec | str
    gamma: float

    def __post_init__(self) -> None:
        if not 0 < self.gamma <= 1:
            raise CompositionError(f"gamma={self.gamma}: a gossip step size is above 0 and at most 1")
        codec = contracting(as_codec(self.codec))
        bounds = codec.contraction(PROBE_NUMEL), codec.absolute_error(PROBE_NUMEL)
        require_bounded(*bounds, f"what {codec} leaves of the differences x - x_hat", "take D-PSGD")
        object.__setattr__(self, "codec", codec)

    def require(self, graph: Graph) -> None:
        """Symmetric and doubly stochastic."""
        require_averaging(graph, "CHOCO-SGD")

    def begin(self, grain: Grain, x: Tensor) -> State:
        """All x_hat are `x`."""
        return _state(x.clone(), torch.zeros_like(x))

    def mix(self, links: RoundLinks, grain: Grain, x: Tensor, state: State, step: Step) -> Mixed:
        """One round of payloads."""
        codec, key = as_codec(self.codec), step.key(grain)
        layout = layout_of(codec, x.numel(), x.dtype)
        wire = layout.empty(x.device)
        codec.encode_into(torch.sub(x, state.tensor("known"), out=buffers.like(x)), key, layout.views(wire))
        wires = yield from received(links, wire)

        def decoded(payload: Payload, rank: int) -> Tensor:
            return codec.decode(payload, like=x, key=key.with_(rank=rank))

        own = decoded(layout.views(wire), step.rank)
        theirs = (decoded(layout.views(its), rank) for its, (rank, _) in zip(wires, links.sources, strict=True))
        apart = add_differences_(buffers.copied(state.tensor("apart")), own, links, theirs)
        return buffers.times(apart, self.gamma).add_(x), _state(own.add_(state.tensor("known")), apart)


def _state(known: Tensor, apart: Tensor) -> State:
    """x_hat, which neighbours know, and d, by how far theirs are from it."""
    return State(known=Leaf(known, "element"), apart=Leaf(apart, "element"))
