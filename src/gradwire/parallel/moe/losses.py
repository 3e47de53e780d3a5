"""Losses that keep routers balanced and their logits small, and balance without a loss."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from gradwire.core.errors import CompositionError
from gradwire.parallel.exchange import ExchangeAxis
from gradwire.parallel.moe.routers import Router, Routing


def switch_loss(routing: Routing, over: ExchangeAxis | None = None) -> Tensor:
    """The auxiliary loss of Switch: 1 where choices are spread evenly, E where all go to one expert.

        L = E sum_i f_i P_i,    f_i = choices of expert i / all choices,    P_i = mean over tokens of its score

    Scores are divided by their sum first where that is not 1 (sigmoids). f has no gradient. It is a product of two
    means, so the mean of the losses of parts is not the loss of the whole. With `over`, f is that of all ranks of an
    axis, and then the mean of their losses is the loss of all their tokens, if they have equally many.

    Args:
        routing: of T tokens; none at all have the loss 0.
        over: whose choices f counts; None: those of this rank and this micro-batch.

    References:
        Fedus et al. 2021, "Switch Transformers", equations 4 to 6.

    >>> even = Routing(torch.zeros(2, 2), torch.full((2, 2), 0.5), torch.tensor([[0], [1]]), torch.ones(2, 1))
    >>> float(switch_loss(even))
    1.0
    """
    tokens, experts = routing.scores.shape
    counts = torch.bincount(routing.experts.flatten(), minlength=experts)
    if over is not None:
        counts = over.sum(counts)
    shares = counts.to(routing.scores) / counts.sum().clamp(min=1)
    scores = routing.scores / routing.scores.sum(-1, keepdim=True)
    return experts * (shares * scores.sum(0) / max(tokens, 1)).sum()


def z_loss(routing: Routing, tokens: int | None = None) -> Tensor:
    """Mean over tokens of logsumexp(logits)^2, which keeps logits small.

    Args:
        routing: of T tokens.
        tokens: what the sum is divided by; None: T. Give the mean number a rank and micro-batch has, where numbers
            differ: then the mean over ranks and micro-batches is that over all tokens.

    References:
        Zoph et al. 2022, "ST-MoE", equation 5.

    >>> routing = Routing(torch.zeros(1, 2), torch.ones(1, 2) / 2, torch.tensor([[0]]), torch.ones(1, 1))
    >>> round(float(z_loss(routing)), 4)  # log(2)^2
    0.4805
    """
    divisor = max(routing.logits.shape[0] if tokens is None else tokens, 1)
    return routing.logits.logsumexp(-1).square().sum() / divisor


def balance(model: nn.Module, over: ExchangeAxis | None = None, rate: float = 1e-3) -> None:
    """Move the bias of each router towards experts with fewer choices; call it once an optimizer step.

        b_i <- b_i + rate sign(mean of counts - count_i)

    Counts are those of training since the last call, over all micro-batches; recomputed passes do not count. They are
    summed over `over`, in one all-reduce for all routers of the model, so that the bias stays the same on all ranks.

    Args:
        model: with routers in it.
        over: the ranks whose choices count: all that train the model; None: this one alone.
        rate: of change.

    Raises:
        CompositionError: a model without a router.

    References:
        Wang et al. 2024, "Auxiliary-loss-free load balancing strategy for mixture-of-experts", algorithm 1.

    >>> from gradwire.parallel.moe import SoftmaxTopK
    >>> router = SoftmaxTopK(4, 2, 1)
    >>> router.count(torch.tensor([0, 0, 1]))
    >>> balance(router, rate=0.5)
    >>> router.bias.tolist()
    [-0.5, 0.5]
    """
    found = list(routers(model))
    if not found:
        raise CompositionError(f"{type(model).__name__} has no router whose bias could be moved")
    loads = torch.cat([router.load for router in found])
    if over is not None:
        loads = over.sum(loads)
    for router, load in zip(found, loads.split([router.experts for router in found]), strict=True):
        router.bias += rate * (load.double().mean() - load).sign().to(router.bias)
        router.load.zero_()


def routers(model: nn.Module) -> Iterable[Router]:
    """The routers of a model."""
    return (module for module in model.modules() if isinstance(module, Router))
