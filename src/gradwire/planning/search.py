"""Which layouts of a model on so many GPUs take the least time, and why others lose."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

from gradwire.core.errors import SpecError
from gradwire.planning.gradients import method_of, shard_method_of
from gradwire.planning.hardware import Hardware
from gradwire.planning.layout import ParallelLayout, divisors
from gradwire.planning.memory import device_memory
from gradwire.planning.rates import Efficiencies
from gradwire.planning.reasons import Neighbour, PlannedLayout, helps, neighbours
from gradwire.planning.step_time import step_time
from gradwire.planning.transformer import Transformer

CONTEXTS = (1, 2, 4, 8, 16)
"""Sizes of context parallelism that are tried where a rank has at least `SHORTEST` tokens of a sample left."""
SHORTEST = 2048
MOST = 65_536
"""GPUs up to which the search says how many a model would fit on."""
KINDS = (("optimizer", "none"), ("optimizer", "full"), ("parameters", "none"), ("parameters", "full"))
"""What is sharded and recomputed, together: fused attention leaves nothing for selective recomputation to save."""


@dataclass(frozen=True)
class ScalingPlan:
    """What a search found.

    Attributes:
        model, hardware, gpus, batch: what was asked for.
        best: the fastest layouts, the fastest first.
        tried: layouts that were looked at.
        fitting: of these, how many fit into memory.
        neighbours: those of the fastest, each with its reason.
        helps: what would shorten the step of the fastest, with the seconds that it would save, the most first.
    """

    model: Transformer
    hardware: Hardware
    gpus: int
    batch: int
    best: tuple[PlannedLayout, ...]
    tried: int
    fitting: int
    neighbours: tuple[Neighbour, ...]
    helps: tuple[tuple[str, float], ...]

    @property
    def utilisation(self) -> float:
        """Model FLOPs of the fastest layout as a share of the peak (MFU): what is recomputed does not count."""
        peak = self.gpus * self.hardware.peak_tflops * 1e12
        return self.model.model_flops(self.batch) / (self.best[0].time.total * peak)

    @property
    def tokens_per_s(self) -> float:
        """Of the fastest layout, on all GPUs."""
        return self.batch * self.model.sequence / self.best[0].time.total

    def hours(self, tokens: float) -> float:
        """Hours that the fastest layout takes for so many tokens, without failures and pauses.

        Raises:
            SpecError: no positive number.
        """
        if not 0 < tokens < math.inf:
            raise SpecError(f"{tokens:g} tokens cannot be trained on: write a number above 0")
        return tokens / self.tokens_per_s / 3600


def plan(
    model: Transformer,
    on: Hardware,
    gpus: int,
    batch: int,
    reached: Efficiencies | None = None,
    show: int = 5,
    methods: Sequence[str] = ("none",),
    every: Sequence[int] = (1,),
    suits: Callable[[ParallelLayout], bool] | None = None,
) -> ScalingPlan:
    """Search the layouts of a model on `gpus` GPUs for those that take the least time and fit into memory.

    It tries dp x tp x pp x cp x ep, micro-batches of 1, 2, 4, ... samples, interleaving, sharding and recomputation.
    Attention is fused, and gradients are accumulated and sent in float32, overlapped with the backward pass.

    Args:
        model: what is trained.
        on: the hardware.
        gpus: how many, whole nodes or part of one.
        batch: samples of a step.
        reached: fractions of the hardware's rates; None: those that were fitted.
        show: how many layouts to return.
        methods: specs by which data-parallel gradients may be sent. All but "none" change what is trained.
        every: after how many steps replicas may be averaged. All but 1 change what is trained; replicas then share
            nothing, so the whole optimizer is on each.
        suits: which layouts may be taken, such as `written_by("deepspeed")`; None: all.

    Raises:
        SpecError: numbers that make no cluster or no batch, methods that are unknown, and a model that fits nowhere,
            with what would make it fit.

    >>> from gradwire.planning import hardware, model
    >>> found = plan(model("gpt3-22b"), hardware("a100-80g"), gpus=8, batch=16)
    >>> found.best[0].layout.gpus, found.best[0].memory.total < 85e9
    (8, True)
    """
    _require_cluster(on, gpus, batch, show)
    _require_allowed(methods, every)
    found: list[PlannedLayout] = []
    larger: list[ParallelLayout] = []
    smallest: PlannedLayout | None = None
    tried, room = 0, on.memory_gb * 1e9
    for layout in filter(suits, layouts(model, on, gpus, batch, methods, every)):
        tried += 1
        memory = device_memory(model, layout)
        if memory.total > room:
            if smallest is None or memory.total < smallest.memory.total:
                smallest = PlannedLayout(layout, memory, step_time(model, layout, on, reached))
            if memory.total <= 2 * room:
                larger.append(layout)
            continue
        found.append(PlannedLayout(layout, memory, step_time(model, layout, on, reached)))
    if not found:
        raise SpecError(_fits_nowhere(model, on, gpus, batch, smallest, suits))
    found.sort(key=lambda one: one.time.total)
    best = found[0]
    return ScalingPlan(
        model=model,
        hardware=on,
        gpus=gpus,
        batch=batch,
        best=tuple(found[:show]),
        tried=tried,
        fitting=len(found),
        neighbours=tuple(neighbours(model, on, best, reached, methods, every)),
        helps=tuple(helps(model, on, best, reached, larger)),
    )


def scale(
    model: Transformer,
    on: Hardware,
    first: int,
    last: int,
    batch: int,
    reached: Efficiencies | None = None,
    methods: Sequence[str] = ("none",),
    every: Sequence[int] = (1,),
) -> Iterator[tuple[int, ScalingPlan | str]]:
    """Yield plans for `first` GPUs, twice as many, and so on to `last`, each with the same batch.

    Args:
        model, on, batch, reached, methods, every: as for `plan`.
        first, last: how many GPUs.

    Yields:
        How many GPUs, and the plan, or why there is none.

    Raises:
        SpecError: a range that is empty.

    >>> from gradwire.planning import hardware, model
    >>> [gpus for gpus, _ in scale(model("gpt3-1.7b"), hardware("a100-80g"), 8, 32, batch=512)]
    [8, 16, 32]
    """
    if not 1 <= first <= last:
        raise SpecError(f"{first}..{last} GPUs are no range: write the smaller number first, such as 8..16384")
    gpus = first
    while gpus <= last:
        try:
            yield gpus, plan(model, on, gpus, batch, reached, 1, methods, every)
        except SpecError as error:
            yield gpus, str(error)
        gpus *= 2


def layouts(
    model: Transformer,
    on: Hardware,
    gpus: int,
    batch: int,
    methods: Sequence[str] = ("none",),
    every: Sequence[int] = (1,),
) -> Iterator[ParallelLayout]:
    """Yield every layout that the search looks at, whether or not it fits into memory."""
    kinds = list(_kinds(methods, every))
    for tp, pp, cp in product(divisors(on.node), divisors(model.layers), CONTEXTS):
        dp = gpus // (tp * pp * cp)
        if gpus % (tp * pp * cp) or batch % dp or (cp > 1 and model.sequence // cp < SHORTEST):
            continue
        micros = [each for each in divisors(batch // dp) if each.bit_count() == 1]  # powers of two
        for ep in _expert_axes(model, tp * cp * dp):
            for micro, interleave in product(micros, divisors(model.layers // pp) if pp > 1 else [1]):
                if interleave > 1 and batch // (dp * micro) % pp:
                    continue
                for kind in kinds:
                    if kind.sharding == "parameters" and pp > 1:
                        continue
                    if (kind.every > 1 and (dp == 1 or tp * cp % ep)) or (kind.method != "none" and dp * cp == 1):
                        continue
                    layout = ParallelLayout(
                        dp=dp,
                        tp=tp,
                        pp=pp,
                        cp=cp,
                        ep=ep,
                        micro=micro,
                        batch=batch,
                        interleave=interleave,
                        **kind._asdict(),
                    )
                    if layout.unfit(model, on) is None:
                        yield layout


class _Kind(NamedTuple):
    """What is sharded, recomputed and sent how often by which method."""

    sharding: str
    recompute: str
    method: str = "none"
    every: int = 1


def _kinds(methods: Sequence[str], every: Sequence[int]) -> Iterator[_Kind]:
    """With a method or with averages, gradients that are not sharded too, which save the gather of parameters."""
    for method, steps in product(dict.fromkeys(methods), dict.fromkeys(every)):
        whole = (("none", "none"), ("none", "full"))
        sharded = KINDS if steps == 1 and (method == "none" or _has_shards(method)) else ()
        for sharding, recompute in (*sharded, *(() if method == "none" and steps == 1 else whole)):
            yield _Kind(sharding, recompute, method, steps)


def _has_shards(method: str) -> bool:
    try:
        shard_method_of(method)
    except SpecError:
        return False
    return True


def _expert_axes(model: Transformer, ranks: int) -> list[int]:
    if not model.experts:
        return [1]
    return [ep for ep in divisors(model.experts) if ranks % ep == 0]


def _require_allowed(methods: Sequence[str], every: Sequence[int]) -> None:
    if not methods or not every:
        raise SpecError("the search needs a method and a number of steps: leave methods and every out, or name some")
    for method in methods:
        method_of(method)
    for steps in every:
        if isinstance(steps, bool) or steps < 1:
            raise SpecError(f"every={steps} is below 1: write after how many steps replicas are averaged, or 1")


def _require_cluster(on: Hardware, gpus: int, batch: int, show: int) -> None:
    for what, value in (("gpus", gpus), ("batch", batch), ("show", show)):
        if isinstance(value, bool) or value < 1:
            raise SpecError(f"{what}={value} is below 1: write a positive number")
    if gpus > on.node and gpus % on.node:
        raise SpecError(
            f"{gpus} GPUs are no whole nodes of {on.node}: take {gpus // on.node * on.node} or "
            f"{-(-gpus // on.node) * on.node}, or describe nodes of another size in a file"
        )


def _fits_nowhere(
    model: Transformer,
    on: Hardware,
    gpus: int,
    batch: int,
    least: PlannedLayout | None,
    suits: Callable[[ParallelLayout], bool] | None,
) -> str:
    """The sentence about a model for which no layout is left."""
    if least is None:
        return (
            f"no layout of {model.name} uses {gpus} GPUs for a batch of {batch}: take a larger batch with more "
            f"divisors, or a number of GPUs that has more divisors in common with its {model.layers} layers"
        )
    need = least.memory.total / 1e9
    message = (
        f"{model.name} fits into no layout on {gpus} {on.name}: the smallest, {least.layout.says}, needs {need:,.0f} "
        f"GB a GPU, and there are {on.memory_gb:g}"
    )
    for factor in (2**i for i in range(1, 15)):
        more = gpus * factor if gpus * factor <= on.node else -(-gpus * factor // on.node) * on.node
        if more > MOST:
            break
        for samples in (batch, batch * factor):
            found = filter(suits, layouts(model, on, more, samples))
            if any(device_memory(model, layout).total <= on.memory_gb * 1e9 for layout in found):
                return f"{message}; it fits on {more} GPUs with a batch of {samples}, or on GPUs of {need:,.0f} GB"
    return f"{message}; take GPUs with more memory or a smaller model"
