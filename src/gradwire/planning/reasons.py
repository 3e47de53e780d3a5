"""Why the neighbours of the fastest layout lost, and what would shorten its step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from gradwire.core.errors import CompositionError, SpecError
from gradwire.core.figures import spoken_seconds
from gradwire.planning.hardware import Hardware
from gradwire.planning.layout import ParallelLayout
from gradwire.planning.memory import DeviceMemory, device_memory
from gradwire.planning.rates import Efficiencies
from gradwire.planning.step_time import StepTime, step_time
from gradwire.planning.transformer import Transformer

EVERY = 8
"""Steps between averages that the search tells the worth of where they were not allowed."""


@dataclass(frozen=True)
class PlannedLayout:
    """A layout with what it needs and takes."""

    layout: ParallelLayout
    memory: DeviceMemory
    time: StepTime


@dataclass(frozen=True)
class Neighbour:
    """A layout that differs from the best in one thing, and why it lost, or that it is faster and was not searched."""

    change: str
    why: str


CHANGES: tuple[tuple[str, dict[str, float]], ...] = (
    ("half the tensor parallelism, twice the data parallelism", {"tp": 0.5, "dp": 2}),
    ("twice the tensor parallelism, half the data parallelism", {"tp": 2, "dp": 0.5}),
    ("half the stages, twice the data parallelism", {"pp": 0.5, "dp": 2}),
    ("twice the stages, half the data parallelism", {"pp": 2, "dp": 0.5}),
    ("half the stages, twice the tensor parallelism", {"pp": 0.5, "tp": 2}),
    ("twice the stages, half the tensor parallelism", {"pp": 2, "tp": 0.5}),
    ("twice the micro-batch", {"micro": 2}),
    ("half the micro-batch", {"micro": 0.5}),
    ("twice the interleaving", {"interleave": 2}),
    ("half the interleaving", {"interleave": 0.5}),
    ("twice the context parallelism, half the data parallelism", {"cp": 2, "dp": 0.5}),
    ("twice the expert parallelism", {"ep": 2}),
    ("half the expert parallelism", {"ep": 0.5}),
)
"""One step away from a layout, as factors of its sizes."""


def neighbours(
    model: Transformer,
    on: Hardware,
    best: PlannedLayout,
    reached: Efficiencies | None,
    methods: Sequence[str],
    every: Sequence[int],
) -> Iterator[Neighbour]:
    """Yield each layout one step away from the best, and why it is not that."""
    for says, factors in CHANGES:
        sizes = {name: getattr(best.layout, name) * factor for name, factor in factors.items()}
        if any(size != int(size) or size < 1 for size in sizes.values()):
            continue
        if ("ep" in factors and not model.experts) or ("interleave" in factors and best.layout.pp == 1):
            continue
        yield Neighbour(says, _why(model, on, best, {name: int(size) for name, size in sizes.items()}, reached))
    other = "full" if best.layout.recompute == "none" else "none"
    yield Neighbour(f"recompute={other}", _why(model, on, best, {"recompute": other}, reached))
    for method in dict.fromkeys(methods):
        if method != best.layout.method:
            yield Neighbour(f"method={method}", _why(model, on, best, {"method": method}, reached))
    for steps in dict.fromkeys(every):
        if steps != best.layout.every:
            changes = {"every": steps} | ({"sharding": "none"} if steps > 1 else {})
            yield Neighbour(f"every={steps}", _why(model, on, best, changes, reached))


def _why(
    model: Transformer, on: Hardware, best: PlannedLayout, changes: dict[str, int | str], reached: Efficiencies | None
) -> str:
    try:
        layout = replace(best.layout, **changes)  # pyright: ignore[reportArgumentType]
    except SpecError as error:
        return f"impossible: {error}"
    if why := layout.unfit(model, on):
        return f"impossible: {why}"
    memory = device_memory(model, layout)
    if memory.total > on.memory_gb * 1e9:
        return f"does not fit: {memory.total / 1e9:,.0f} GB of {on.memory_gb:g}"
    time = step_time(model, layout, on, reached)
    slower = time.total - best.time.total
    if slower < 0:
        return f"{spoken_seconds(-slower)} faster, but was not searched"
    if slower == 0:
        return "takes as long"
    more, worst = max((now - before, name) for name, now, before in zip(time._fields, time, best.time, strict=True))
    return f"{spoken_seconds(slower)} slower: {worst} takes {spoken_seconds(more)} more"


def helps(
    model: Transformer,
    on: Hardware,
    best: PlannedLayout,
    reached: Efficiencies | None,
    larger: Iterable[ParallelLayout] = (),
) -> list[tuple[str, float]]:
    """Return the seconds that better hardware would save, and what would change training.

    Args:
        model, on, best, reached: what is trained, on which hardware, by which layout, at which fractions of rates.
        larger: layouts that fit into twice the memory of a GPU, and not into what there is. All but memory helps the
            same layout.
    """
    kinds = (
        ("twice the rate of matrix products", {"peak_tflops": 2 * on.peak_tflops}),
        ("twice the rate of the GPUs' memory", {"memory_gb_per_s": 2 * on.memory_gb_per_s}),
        ("links of twice the rate in a node", {"node_gb_per_s": 2 * on.node_gb_per_s}),
        ("links of twice the rate between nodes", {"network_gbit_per_s": 2 * on.network_gbit_per_s}),
    )
    saved = [
        (says, best.time.total - step_time(model, best.layout, replace(on, **changes), reached).total)
        for says, changes in kinds
    ]
    faster = min(((step_time(model, each, on, reached).total, each.says) for each in larger), default=None)
    if faster is not None:
        saved.append((f"twice the memory of the GPUs, into which {faster[1]} fits", best.time.total - faster[0]))
    saved += _changed_training(model, on, best, reached)
    return sorted((each for each in saved if each[1] > 0), key=lambda pair: -pair[1])


def _changed_training(
    model: Transformer, on: Hardware, best: PlannedLayout, reached: Efficiencies | None
) -> Iterator[tuple[str, float]]:
    """Seconds that 4-bit gradients, and averages every few steps, would save; nothing where they would not."""
    if best.layout.method == "none" and best.layout.every == 1:
        inside = min(best.layout.replicas, on.node // best.layout.tp)
        specs = ["int4", *([f"int4,node={inside}"] if 1 < inside < best.layout.replicas else [])]
        found = [
            (saved, spec)
            for spec, sharding in product(specs, {best.layout.sharding: 0, "none": 0})
            if (saved := _saved(model, on, best, {"method": spec, "sharding": sharding}, reached)) > 0
        ]
        if found:
            saved, spec = max(found)
            yield f"gradients by {spec}, which changes training (--methods none {spec})", saved
    if best.layout.every == 1:
        saved = _saved(model, on, best, {"every": EVERY, "sharding": "none"}, reached)
        if saved > 0:
            yield f"replicas averaged every {EVERY} steps, which changes training (--every 1 {EVERY})", saved


def _saved(
    model: Transformer, on: Hardware, best: PlannedLayout, changes: dict[str, int | str], reached: Efficiencies | None
) -> float:
    """Seconds that a step is shorter by; 0 where the model cannot be laid out so, or does not fit."""
    try:
        layout = replace(best.layout, **changes)  # pyright: ignore[reportArgumentType]
        if layout.unfit(model, on) or layout.replicas == 1 or (layout.every > 1 and layout.dp == 1):
            return 0.0
        if device_memory(model, layout).total > on.memory_gb * 1e9:
            return 0.0
        return best.time.total - step_time(model, layout, on, reached).total
    except (SpecError, CompositionError):
        return 0.0
