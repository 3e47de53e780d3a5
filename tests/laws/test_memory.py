"""What memory of past steps delivers of a constant gradient is what the rule says of that gradient.

Every pair that a spec can name is built: each method of the registry, each rule over each codec, with each memory.
What the constructors accept must hold the law; what cannot hold it, they have to refuse.

One step has other gradients, so that there is something to correct; then they are constant. With t(x) what the rule
says of them, and m_s the result of step s, the shortfall

    S(T) = | T t(x) - sum of m_s over s <= T |

is what memory still owes after T steps. It stays below a bound that follows from the declared contraction, and it
levels off, so that the average result tends to t(x) as 1/T.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import gradwire
from gradwire.codecs import Codec
from gradwire.composition import EXCHANGES, RESIDUALS
from gradwire.core.errors import CompositionError, SpecError
from gradwire.core.grain import Grain, flat_grain, matrix_grain
from gradwire.core.registry import Method
from gradwire.drivers.lockstep import Lockstep
from gradwire.reducers import DGC, MomentumCorrection, Reducer, WorkerMomentum, Wrapper
from gradwire.reducers.aggregate import Rule

from . import checks
from .subjects import codecs_of, normal, parts, ranks_for, specs

STEPS = 300
LOSSLESS_STEPS = 30  # nothing waits there, so every step shows all there is to see
SIDE = 8
RESIDUAL_OPTIONS = [*(f"residual={kind}" for kind in RESIDUALS), f"residual=factored:{SIDE}"]
MEMORIES = ["", *(f"ef=on,{option}" for option in RESIDUAL_OPTIONS), "ef=ef21"]
MOMENTUM = 0.5
MEAN_AS_A_RULE = "trimmed:0"  # the one rule whose results of parts add up


class Pair(NamedTuple):
    """A reducer with memory, and the same without memory and codec: the rule by itself."""

    reducer: Reducer
    rule: Reducer


def heads() -> list[str]:
    """Each method of the registry as its first examples write it, and each rule over each codec and chain of codecs."""
    written = dict.fromkeys(spec.split(",")[0] for spec in specs())
    first = {tuple(part.partition(":")[0] for part in head.split("+")): head for head in reversed(written)}
    alone = list(reversed(first.values()))
    rules, coded = ([head for head in alone if issubclass(built_by(head), kind)] for kind in (Rule, Codec))
    return [*alone, *(f"{rule}+{codec}" for rule in rules for codec in coded)]


def built_by(head: str) -> type:
    """What the first method of a head is."""
    method: Method = gradwire.methods()[head.split("+")[0].partition(":")[0]]
    assert isinstance(method.build, type)
    return method.build


def parsed(*options: str) -> Reducer | None:
    """The reducer of a spec made of these parts, or None where it is refused."""
    try:
        return gradwire.parse(",".join(option for option in options if option))
    except (CompositionError, SpecError):
        return None


def spelled() -> Iterator[tuple[str, ...]]:
    """The parts of every spec that is tried."""
    for head in heads():
        yield from ((head, memory) for memory in MEMORIES)
        yield head, f"worker_momentum={MOMENTUM}"
    yield heads()[0], "ef=ef21", f"worker_momentum={MOMENTUM}"
    coded = [head for head in heads() if issubclass(built_by(head), Codec)]
    ways = [*(f"exchange={name}" for name in EXCHANGES), "node=2"]
    crossed = [(head, way) for way in ways for head in coded if parsed(head, way, "ef=on")]
    crossed += [(f"{MEAN_AS_A_RULE}+{head}", "") for head in coded if parsed(head, "ef=on")]
    # How payloads travel and what remembers them know nothing of each other: a third of what there is, memory by turns.
    yield from ((*pair, MEMORIES[1 + i % (len(MEMORIES) - 1)]) for i, pair in enumerate(crossed[::3]))


@functools.cache
def pairs() -> dict[str, Pair]:
    """What parses, remembers, and promises to lose nothing in the end; of equal ones the first."""
    found: dict[str, Pair] = {}
    seen: set[Reducer] = set()
    for head, *options in spelled():
        reducer = parsed(head, *options, "guard=off")
        if reducer is None or not reducer.keeps_input or not reducer.repeatable or reducer in seen:
            continue
        inner = reducer.inner if isinstance(reducer, WorkerMomentum) else reducer
        if not (inner.keeps_input or inner.lossless):
            continue  # nobody keeps what its codec loses
        rule = parsed(head.split("+")[0], "ef=off", "guard=off")
        assert rule is not None or inner.averages
        seen.add(reducer)
        mean = gradwire.parse("none")
        found[",".join(filter(None, (head, *options)))] = Pair(reducer, mean if inner.averages else rule or mean)
    return found


def gradients(grain: Grain, ranks: int, seed: int) -> list[Tensor]:
    """Half of the elements alike on all ranks, half of each rank's own."""
    half = grain.numel // 2
    alike = normal((half,), seed)
    own = [normal((grain.numel - half,), seed + 1 + rank) for rank in range(ranks)]
    return [torch.cat([alike, each]).view(grain.shape) for each in own]


def check_delivers(pair: Pair) -> None:
    """The law."""
    reducer = pair.reducer
    # The median of two is their mean, as is much else: what is no mean shows it from three ranks on.
    ranks = ranks_for(reducer, 2 * reducer.rank_multiple if pair.rule.averages else 5)
    grain = matrix_grain(SIDE, SIDE) if reducer.scope == "tensor" else flat_grain(SIDE * SIDE)
    other, xs = gradients(grain, ranks, seed=90), gradients(grain, ranks, seed=0)
    size = max(checks.norm(x) for x in (*other, *xs))
    steps = LOSSLESS_STEPS if lossless(reducer) else STEPS
    delivered = sums(reducer, grain, other, xs, steps)
    least, most = said(pair, grain, other, xs, steps)
    short = [checks.norm(d - d.clamp(low, high)) for d, low, high in zip(delivered, least, most, strict=True)]
    bound = size * owed_at_most(reducer, grain, ranks, size)
    rounding = size * steps * rounding_error(reducer, ranks)
    assert max(short) <= bound + rounding, f"short by {max(short)} within {steps} steps, declared {bound}"
    second, last = max(short[steps // 4 : steps // 2]), max(short[3 * steps // 4 :])
    # Half way between a shortfall that has levelled off and one that grows with the steps, which doubles.
    assert last <= 1.5 * second + rounding, f"short by {second}, then by {last}: it grows"


def sums(reducer: Reducer, grain: Grain, other: list[Tensor], xs: list[Tensor], steps: int) -> list[Tensor]:
    """What is delivered of `xs` after a step of `other` gradients, up to each step."""
    ranks = Lockstep(reducer, grain, len(xs))
    ranks.step(other)
    results = (ranks.step(xs)[0].double() for _ in range(steps))
    return list(itertools.accumulate(results))


def said(
    pair: Pair, grain: Grain, other: list[Tensor], xs: list[Tensor], steps: int
) -> tuple[list[Tensor], list[Tensor]]:
    """What the rule says of the gradients, summed up to each step: the least and the most that momentum makes of it."""
    gain = momentum_gain(pair.reducer)
    if gain == 1.0:
        wanted = sums(pair.rule, grain, other, xs, steps)
        return wanted, wanted
    low = torch.stack([torch.minimum(x.double(), gain * x.double()) for x in xs]).mean(0)
    high = torch.stack([torch.maximum(x.double(), gain * x.double()) for x in xs]).mean(0)
    return [low * (step + 1) for step in range(steps)], [high * (step + 1) for step in range(steps)]


def momentum_gain(reducer: Reducer) -> float:
    """Momentum that is added up and not averaged makes 1 / (1 - m) of a constant gradient, less where masked."""
    added = [part.momentum for part in parts(reducer) if isinstance(part, DGC | MomentumCorrection)]
    return math.prod(1.0 / (1.0 - momentum) for momentum in added)


def owed_at_most(reducer: Reducer, grain: Grain, ranks: int, size: float) -> float:
    """The largest shortfall that what is declared allows, in norms of a rank's gradient (`size`).

    With q = sqrt(1 - delta), a residual of ||e'|| <= q (||e|| + G) stays below G q / (1 - q), and the errors of an
    estimate, q G, q^2 G ..., add up to as much. Drawn codecs contract in the mean over keys, so theirs are root mean
    squares, allowed threefold. The owner of a second shot is given what is sent, at most G and two residuals. A
    moving average is late by m / (1 - m) gradients. The step of other gradients before leaves a residual of one of
    them, an estimate or an average that is off by three at most: hence three times all that.
    """
    within = [part for part in parts(reducer) if isinstance(part, Reducer)]
    late = sum(part.momentum / (1 - part.momentum) for part in within if isinstance(part, WorkerMomentum))
    kept = next((part for part in within if not part.keeps_input), reducer)
    drawn = 3.0 if kept.keyed or any(codec.keyed for codec in codecs_of(kept)) else 1.0
    residual = residual_at_most(kept, grain, size)
    seconds = [second for part in within if isinstance(second := getattr(part, "second", None), Codec)]
    shard = -(-grain.numel // ranks)
    owner = sum((1 + 2 * residual) * sums_to(codec.contraction(shard)) for codec in seconds if not codec.unbiased)
    return 3.0 * (late + momentum_gain(reducer) * drawn * (residual + owner))


def residual_at_most(kept: Reducer, grain: Grain, size: float) -> float:
    """A residual's largest norm, in those of a gradient."""
    absolute = kept.absolute_error(grain)
    if absolute is None:
        return sums_to(kept.contraction(grain))
    fits = min(getattr(codec, "cap", 1.0) for codec in codecs_of(kept))  # of the rest, as a contraction
    return max(absolute * grain.numel**0.5 / size, sums_to(int(fits * grain.numel) / grain.numel))


def sums_to(delta: float | None) -> float:
    """q + q^2 + q^3 ... = q / (1 - q)."""
    assert delta
    q = (1 - delta) ** 0.5
    return q / (1 - q)


def lossless(reducer: Reducer) -> bool:
    """Whether nothing inside loses anything."""
    return all(part.lossless for part in parts(reducer) if isinstance(part, Reducer) and not part.keeps_input)


def rounding_error(reducer: Reducer, ranks: int) -> float:
    """Relative, a step: sums, factors and estimates in float32, or sums in 16 bits, which no residual knows of."""
    return (ranks + 16) * (2.0**-9 if reducer.sums_in_16_bits else 2.0**-24)


PAIRS = pairs()


@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS.keys())
@pytest.mark.draw(3)
def test_what_memory_delivers_is_what_the_rule_says(pair: Pair) -> None:
    check_delivers(pair)


def memories() -> set[type[Wrapper]]:
    """Every wrapper that declares to keep what it is given."""
    found, waiting = set[type[Wrapper]](), [Wrapper]
    while waiting:
        kind = waiting.pop()
        waiting += kind.__subclasses__()
        if kind.__module__.startswith("gradwire.") and kind.keeps_input is True:
            found.add(kind)
    return found


def test_every_memory_is_tried() -> None:
    tried = {type(part) for pair in PAIRS.values() for part in parts(pair.reducer)}
    reached_by_dgc = {MomentumCorrection}
    assert memories() - tried == reached_by_dgc
