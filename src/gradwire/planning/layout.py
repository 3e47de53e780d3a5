"""How a model is spread over GPUs."""

from __future__ import annotations

import math
from dataclasses import dataclass

from gradwire.core.errors import CompositionError, SpecError
from gradwire.core.nearest import meant
from gradwire.planning.gradients import method_of, shard_method_of
from gradwire.planning.hardware import Hardware
from gradwire.planning.transformer import Transformer

SHARDINGS = ("none", "optimizer", "gradients", "parameters")
"""What data-parallel ranks split and not copy: ZeRO's stages 0 to 3 (Rajbhandari et al. 2020)."""
RECOMPUTATIONS = ("none", "selective", "full")
"""What the backward pass computes anew: nothing, the core of attention, or whole layers (Korthikanti et al. 2022)."""
DISPATCHES = ("all_to_all", "once_a_node")
"""Once for each of its experts, or once for each node that has some of them and copied there, as by DeepEP."""


@dataclass(frozen=True)
class ParallelLayout:
    """Sizes of the axes of a mesh, and what each rank keeps and sends.

    Ranks are numbered with `tp` innermost, then `cp`, `dp` and `pp`. Experts are spread over `ep` of the tp x cp x dp
    ranks of a stage. Where `ep` is above 1 an expert is whole; with `ep` of 1 experts are split over `tp` like other
    matrices.

    Args:
        dp: data-parallel ranks.
        tp: tensor-parallel ranks.
        pp: stages of the pipeline.
        cp: ranks that share a sequence (context parallelism by a ring).
        ep: ranks that share the experts of a layer.
        micro: samples of a micro-batch.
        batch: samples of a step, over all ranks.
        interleave: parts of each stage, v of an interleaved schedule; 1: plain 1F1B.
        sharding: one of `SHARDINGS`.
        recompute: one of `RECOMPUTATIONS`.
        sequence_parallel: whether norms and dropout are split over `tp` too.
        flash: whether attention is one fused kernel that keeps no matrix of scores.
        dropout: whether the model has dropout, whose masks are kept.
        fused_loss: whether the loss is one fused kernel that keeps no logits in float32. It counts for memory only.
        overlap: whether gradients and parameters are sent during the backward and forward pass.
        gradient_bytes: of one element of the gradient that is accumulated and sent.
        method: the spec of what data-parallel gradients are sent by; "none": as they are, in `gradient_bytes`. With
            another one they are coded, and sharded gradients are sent by the half of it that ends with shards.
        every: steps after which replicas are averaged, by `method`; 1: gradients are, in every step. Both change what
            is trained.
        dispatch: one of `DISPATCHES`: how often a token travels to experts on other nodes.
        host_s: seconds in each layer and micro-batch in which a GPU waits for its host; 0 where the host runs ahead.

    Raises:
        SpecError: sizes below 1, a batch that micro-batches do not make up, unknown words.

    >>> ParallelLayout(dp=16, tp=8, pp=8, batch=1536).gpus
    1024
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    micro: int = 1
    batch: int = 1
    interleave: int = 1
    sharding: str = "optimizer"
    recompute: str = "selective"
    sequence_parallel: bool = True
    flash: bool = True
    dropout: bool = False
    fused_loss: bool = False
    overlap: bool = True
    gradient_bytes: int = 4
    host_s: float = 0.0
    method: str = "none"
    every: int = 1
    dispatch: str = "all_to_all"

    def __post_init__(self) -> None:
        for what in ("dp", "tp", "pp", "cp", "ep", "micro", "batch", "interleave", "every"):
            if (size := getattr(self, what)) < 1:
                raise SpecError(f"{what}={size} is below 1: write a positive number, or leave it out")
        if not 0 <= self.host_s < math.inf:
            raise SpecError(f"host_s={self.host_s} is no time: write seconds, 0 or more")
        if self.gradient_bytes not in (2, 4):
            raise SpecError(f"gradient_bytes={self.gradient_bytes}: gradients have 2 or 4 bytes an element")
        for what, value, known in (
            ("sharding", self.sharding, SHARDINGS),
            ("recompute", self.recompute, RECOMPUTATIONS),
            ("dispatch", self.dispatch, DISPATCHES),
        ):
            if value not in known:
                raise SpecError(f"{what}={value} is not known: {meant(value, known)}")
        if self.every > 1 and self.sharding != "none":
            raise SpecError(
                f"every={self.every} and sharding={self.sharding} exclude each other: between averages each replica "
                "has parameters of its own, of which no other one can hold a shard; take sharding=none"
            )
        if self.every > 1 and self.ep > 1 and (self.tp * self.cp) % self.ep:
            raise SpecError(
                f"every={self.every} and ep={self.ep} exclude each other: experts that replicas share are trained in "
                "every step; take ep=1, or one that divides tp x cp"
            )
        if self.method != "none":
            (method_of if self.sharding == "none" else shard_method_of)(self.method)
        if self.batch % (self.dp * self.micro):
            raise SpecError(
                f"a batch of {self.batch} is not made of micro-batches of {self.micro} on {self.dp} data-parallel "
                f"ranks: take a multiple of {self.dp * self.micro}"
            )
        if self.interleave > 1 and (self.pp == 1 or self.micro_batches % self.pp):
            raise SpecError(
                f"interleave={self.interleave} needs two stages or more, and as many micro-batches as a multiple of "
                f"them: {self.micro_batches} micro-batches and pp={self.pp} do not fit; take interleave=1"
            )
        if (self.tp * self.cp * self.dp) % self.ep:
            ranks = self.tp * self.cp * self.dp
            raise SpecError(f"ep={self.ep} does not divide the {ranks} ranks of tp x cp x dp: take one that does")

    @property
    def gpus(self) -> int:
        """How many the layout uses."""
        return self.dp * self.tp * self.pp * self.cp

    @property
    def micro_batches(self) -> int:
        """Of one step, on each data-parallel rank."""
        return self.batch // (self.dp * self.micro)

    @property
    def replicas(self) -> int:
        """Ranks that hold copies of the same dense parameters: dp x cp."""
        return self.dp * self.cp

    @property
    def in_flight(self) -> float:
        """Micro-batches whose activations the first stage holds at once, in whole stages.

        p of 1F1B, and p (1 + (p - 1)/(p v)) of an interleaved schedule (Korthikanti et al. 2022, Section 4.2.3).
        """
        if self.interleave == 1:
            return min(self.pp, self.micro_batches)
        return min(self.pp + (self.pp - 1) / self.interleave, self.micro_batches)

    @property
    def in_flight_of_last(self) -> float:
        """Micro-batches whose activations the last stage holds at once, in whole stages.

        1 of 1F1B, and p - (p - 1)/v of an interleaved schedule: the last rank begins with (v - 1) p forward passes
        through parts of its stage, and makes one more before its first backward pass.
        """
        return min(self.pp - (self.pp - 1) / self.interleave, self.micro_batches)

    @property
    def says(self) -> str:
        """The layout in one line."""
        axes = [f"tp={self.tp}", f"pp={self.pp}", f"dp={self.dp}"]
        axes += [f"{name}={size}" for name, size in (("cp", self.cp), ("ep", self.ep)) if size > 1]
        axes += [f"micro={self.micro}"]
        axes += [f"interleave={self.interleave}"] if self.interleave > 1 else []
        kinds = [f"sharding={self.sharding}", f"recompute={self.recompute}"]
        kinds += [f"dispatch={self.dispatch}"] if self.dispatch != "all_to_all" else []
        kinds += [f"method={self.method}"] if self.method != "none" else []
        kinds += [f"every={self.every}"] if self.every > 1 else []
        return " ".join([*axes, *kinds])

    def require(self, model: Transformer, on: Hardware) -> None:
        """Refuse a layout that the model or the nodes cannot have.

        Raises:
            SpecError: with the size that does not fit.
        """
        if why := self.unfit(model, on):
            raise SpecError(f"{model.name} cannot be laid out as {self.says}: {why}")

    def unfit(self, model: Transformer, on: Hardware) -> str | None:
        """Why the model or the nodes cannot have this layout; None: they can."""
        if self.tp > on.node:
            return f"tp={self.tp} is more than the {on.node} GPUs of a node; tensor parallelism sends in every layer"
        if model.heads % self.tp:
            return f"tp={self.tp} does not divide {model.heads} heads"
        if max(self.tp, model.keys) % min(self.tp, model.keys):
            return f"tp={self.tp} and {model.keys} key heads do not divide each other"
        if model.layers % (self.pp * self.interleave):
            return f"{self.pp * self.interleave} parts of the pipeline do not divide {model.layers} layers"
        if self.ep > 1 and (not model.experts or model.experts % self.ep):
            return f"ep={self.ep} does not divide {model.experts} experts"
        if model.sequence % (2 * self.cp if self.cp > 1 else 1):
            return f"cp={self.cp} does not divide a sequence of {model.sequence} into two parts for each rank"
        if self.sharding in ("gradients", "parameters") and self.pp > 1:
            return f"sharding={self.sharding} would send in every micro-batch of a pipeline"
        return self._unserved()

    def _unserved(self) -> str | None:
        """Why the method cannot serve the ranks that hold copies."""
        if self.method == "none":
            return None
        sizes = {self.dp if self.every > 1 else self.replicas, self.expert_replicas}
        try:
            for size in sizes - {1}:
                method_of(self.method).require_ranks(size)
        except CompositionError as error:
            return str(error)
        return None

    @property
    def expert_replicas(self) -> int:
        """Ranks that hold copies of the same experts."""
        return self.tp * self.cp * self.dp // self.ep if self.ep > 1 else self.replicas

    @property
    def expert_split(self) -> int:
        """Ranks over which the experts of a layer are spread, or each of them is split."""
        return self.ep if self.ep > 1 else self.tp


def divisors(number: int) -> list[int]:
    """All divisors, in rising order.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    small = [i for i in range(1, math.isqrt(number) + 1) if number % i == 0]
    return sorted({*small, *(number // i for i in small)})
