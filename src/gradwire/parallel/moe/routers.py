"""Routers: which experts each token goes to, and with which weights.

Shapes: T tokens, H elements of a token (hidden), E experts, K choices a token.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

from gradwire.core.errors import CompositionError
from gradwire.core.key import Key


@dataclass(frozen=True, eq=False)
class Routing:
    """What a router makes of tokens.

    Attributes:
        logits: (T, E), in fp32, or fp64 where tokens are; noise included.
        scores: (T, E), what they become: a softmax, or sigmoids.
        experts: (T, K) int64: the choice.
        weights: (T, K): of the experts' outputs.
        noise: what was added to logits, or None.
    """

    logits: Tensor
    scores: Tensor
    experts: Tensor
    weights: Tensor
    noise: Tensor | None = None


class Router(nn.Module, ABC):
    """Scores each expert for each token by a linear layer in fp32, and chooses K of them, all of which are routed.

        logits = x W^T,    choice = the K largest of scores + bias

    The bias moves the choice only, never the weights: `balance` sets it.

    Args:
        hidden: elements of a token, H.
        experts: how many, E.
        k: choices a token, K.
        seed: of the weight, the same on every rank.

    Attributes:
        bias: (E,), added to scores for the choice; `balance` moves it.
        load: (E,), choices of each expert since the last `balance`, in training.

    Raises:
        CompositionError: more choices than experts, or none.
    """

    bias: Tensor

    def __init__(self, hidden: int, experts: int, k: int, *, seed: int = 0) -> None:
        super().__init__()
        if not 1 <= k <= experts:
            raise CompositionError(f"{k} choices among {experts} experts: a token has at least one, and each once")
        self.hidden, self.experts, self.k, self.seed = hidden, experts, k, seed
        self.weight = nn.Parameter(normal((experts, hidden), hidden**-0.5, Key(seed, name="router")))
        self.register_buffer("bias", torch.zeros(experts))
        self.load = torch.zeros(experts, dtype=torch.int64)  # no buffer: DDP would send that of rank 0 to all

    def forward(
        self, x: Tensor, near: Tensor | None = None, chosen: tuple[Tensor, Tensor | None] | None = None, draw: int = 0
    ) -> Routing:
        """Route tokens.

        Args:
            x: (T, H).
            near: (E,), added to scores for the choice beside the bias.
            chosen: experts and noise of an earlier pass, which are taken instead of another choice.
            draw: the number of this pass, for routers that draw.
        """
        with torch.autocast(x.device.type, enabled=False):
            wide = torch.promote_types(x.dtype, torch.float32)
            logits = functional.linear(x.to(wide), self.weight.to(wide))
            noise = self.noise(x.to(wide), draw) if chosen is None else chosen[1]
            logits = self.noised(logits, x.to(wide), noise)
            scores = self.scores(logits)
            if chosen is not None:
                experts = chosen[0]
            else:
                moved = scores.detach() + self.bias.to(wide)
                experts = self.choose(moved if near is None else moved + near.to(moved))
            return Routing(logits, scores, experts, self.weights(scores, logits, experts), noise)

    def noise(self, x: Tensor, draw: int) -> Tensor | None:
        """Normal noise (T, E) for a pass, or None."""
        return None

    def noised(self, logits: Tensor, x: Tensor, noise: Tensor | None) -> Tensor:
        """Logits with the noise in them."""
        return logits

    @abstractmethod
    def scores(self, logits: Tensor) -> Tensor:
        """Scores (T, E) of logits."""

    @abstractmethod
    def weights(self, scores: Tensor, logits: Tensor, experts: Tensor) -> Tensor:
        """Weights (T, K) of the chosen experts."""

    def choose(self, scores: Tensor) -> Tensor:
        """The K experts (T, K) of each token, of scores with all that moves the choice."""
        return scores.topk(self.k, dim=-1).indices

    def count(self, experts: Tensor) -> None:
        """Add a choice to the load."""
        self.load = self.load.to(experts.device) + torch.bincount(experts.flatten(), minlength=self.experts)


class SoftmaxTopK(Router):
    """p = softmax(logits); the K largest, with weights p_i, or p_i over their sum.

    The softmax comes before the choice: weights that are a softmax of one chosen logit would be 1, without a gradient.
    With `renormalised` they equal a softmax over the chosen logits.

    Args:
        hidden: elements of a token.
        experts: how many.
        k: choices a token; 1 is the router of Switch.
        renormalised: whether weights add up to 1.
        seed: of the weight.

    Raises:
        CompositionError: `renormalised` with one choice, whose weight is always 1.

    References:
        Fedus et al. 2021, "Switch Transformers", equations 1 and 2. Jiang et al. 2024, "Mixtral of experts", 2.1.

    >>> router = SoftmaxTopK(4, 8, 2)
    >>> routing = router(torch.ones(3, 4))
    >>> routing.experts.shape, bool(torch.allclose(routing.weights.sum(1), torch.ones(3)))
    (torch.Size([3, 2]), True)
    """

    def __init__(
        self, hidden: int, experts: int, k: int = 2, *, renormalised: bool | None = None, seed: int = 0
    ) -> None:
        super().__init__(hidden, experts, k, seed=seed)
        if renormalised and k == 1:
            raise CompositionError("one choice whose weight is made 1 gives the router no gradient: renormalised=False")
        self.renormalised = k > 1 if renormalised is None else renormalised

    @override
    def scores(self, logits: Tensor) -> Tensor:
        return logits.softmax(-1)

    @override
    def weights(self, scores: Tensor, logits: Tensor, experts: Tensor) -> Tensor:
        chosen = scores.gather(-1, experts)
        return chosen / chosen.sum(-1, keepdim=True) if self.renormalised else chosen


GroupScore = Literal["best two", "best share"]


class SigmoidGroups(Router):
    """s = sigmoid(logits); the K largest of s + bias within the best groups, with weights scale s_i / sum of s.

    Experts are cut into groups, of which each token may use `chosen_groups`. A group is scored by the sum of its best
    experts, and there are two published forms of how many: always two, or K / chosen_groups. They are the same where
    that ratio is 2, as in DeepSeek-V3.

    Args:
        hidden: elements of a token.
        experts: how many.
        k: choices a token.
        groups: of experts; 1 limits nothing.
        chosen_groups: that each token may use.
        group_score: "best two" or "best share" (K / chosen_groups).
        scale: of the weights.
        seed: of the weight.

    Raises:
        CompositionError: groups that do not divide the experts, or that have too few experts for K choices.

    References:
        DeepSeek-AI 2024, "DeepSeek-V3 technical report", section 2.1.2, equations 12 to 16.

    >>> router = SigmoidGroups(4, 8, 2, groups=4, chosen_groups=1)
    >>> experts = router(torch.randn(5, 4)).experts // 2
    >>> bool((experts[:, 0] == experts[:, 1]).all())
    True
    """

    def __init__(
        self,
        hidden: int,
        experts: int,
        k: int,
        *,
        groups: int = 1,
        chosen_groups: int = 1,
        group_score: GroupScore = "best two",
        scale: float = 1.0,
        seed: int = 0,
    ) -> None:
        super().__init__(hidden, experts, k, seed=seed)
        self.groups, self.chosen_groups, self.scale = groups, chosen_groups, scale
        if groups < 1 or experts % groups or not 1 <= chosen_groups <= groups:
            raise CompositionError(
                f"{chosen_groups} of {groups} groups of {experts} experts: groups divide the experts, and a token uses "
                "at least one of them"
            )
        of_group = experts // groups
        if chosen_groups * of_group < k:
            raise CompositionError(f"{chosen_groups} groups of {of_group} experts have no {k} choices: choose more")
        if group_score not in ("best two", "best share"):
            raise CompositionError(f"group_score {group_score!r} is unknown: use 'best two' or 'best share'")
        if group_score == "best share" and k % chosen_groups:
            raise CompositionError(f"{k} choices have no equal share in {chosen_groups} groups: use 'best two'")
        self.best = min(of_group, 2 if group_score == "best two" else k // chosen_groups)

    @override
    def scores(self, logits: Tensor) -> Tensor:
        return logits.sigmoid()

    @override
    def choose(self, scores: Tensor) -> Tensor:
        if self.groups == 1:
            return super().choose(scores)
        grouped = scores.unflatten(-1, (self.groups, -1))
        group_scores = grouped.topk(self.best, dim=-1).values.sum(-1)
        best = group_scores.topk(self.chosen_groups, dim=-1).indices
        out = torch.ones_like(group_scores, dtype=torch.bool).scatter(-1, best, False)
        return super().choose(grouped.masked_fill(out.unsqueeze(-1), -torch.inf).flatten(-2))

    @override
    def weights(self, scores: Tensor, logits: Tensor, experts: Tensor) -> Tensor:
        chosen = scores.gather(-1, experts)
        if self.k > 1:
            chosen = chosen / (chosen.sum(-1, keepdim=True) + 1e-20)
        return self.scale * chosen


class NoisyTopK(Router):
    """h = x W^T + n softplus(x V^T) with normal noise n in training; weights are a softmax over the K largest h.

    Noise is drawn from a key of the pass and the rank, and no global generator is touched.

    Args:
        hidden: elements of a token.
        experts: how many.
        k: choices a token, at least 2: one alone has the weight 1.
        seed: of the weight and the noise.

    Attributes:
        rank: whose noise; a layer of experts sets it.

    Raises:
        CompositionError: one choice, which would give the router no gradient.

    References:
        Shazeer et al. 2017, "Outrageously large neural networks", equations 3 to 5.

    >>> NoisyTopK(4, 8, 2).eval()(torch.ones(3, 4)).noise is None
    True
    """

    def __init__(self, hidden: int, experts: int, k: int = 2, *, seed: int = 0) -> None:
        super().__init__(hidden, experts, k, seed=seed)
        if k == 1:
            raise CompositionError("a softmax over one choice is 1 and gives the router no gradient: take k=2")
        self.noise_weight = nn.Parameter(torch.zeros(experts, hidden))
        self.rank = 0

    @override
    def noise(self, x: Tensor, draw: int) -> Tensor | None:
        if not self.training:
            return None
        key = Key(self.seed, draw, "router", "noise", self.rank)
        return normal((x.shape[0], self.experts), 1.0, key).to(x)

    @override
    def noised(self, logits: Tensor, x: Tensor, noise: Tensor | None) -> Tensor:
        if noise is None:
            return logits
        return logits + noise * functional.softplus(functional.linear(x, self.noise_weight.to(x.dtype)))

    @override
    def scores(self, logits: Tensor) -> Tensor:
        return logits.softmax(-1)

    @override
    def weights(self, scores: Tensor, logits: Tensor, experts: Tensor) -> Tensor:
        return logits.gather(-1, experts).softmax(-1)


def normal(shape: tuple[int, ...], deviation: float, key: Key) -> Tensor:
    """Normal numbers of a key, drawn on the CPU, so that every device and every rank gets the same."""
    generator = torch.Generator().manual_seed(key.stream_seed & (2**63 - 1))
    return torch.randn(shape, generator=generator) * deviation
