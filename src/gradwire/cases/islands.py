"""Training over the internet: islands of GPUs that average their models every H steps (DiLoCo)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gradwire.cases.figure import CaseStudy, Figure
from gradwire.cases.volumes import Volume, step_volumes
from gradwire.core.errors import SpecError
from gradwire.core.grain import ParameterSpec
from gradwire.drivers.cost import cost
from gradwire.planning import ParallelLayout, Transformer, device_memory, hardware, step_time
from gradwire.reducers.step import PAST_WARM_UPS

INTELLECT = Transformer(
    "intellect-1",
    layers=42,
    hidden=4096,
    heads=32,
    vocabulary=128_256,
    sequence=8192,
    key_heads=8,
    inner=14_336,
    gated=True,
    tied=False,
)
"""Of the card of INTELLECT-1; key heads and the width of the feed-forward part are those of Llama 3."""
REPORT = "Jaghouar et al. 2024 (INTELLECT-1)"


def parameter_shapes(model: Transformer) -> list[ParameterSpec]:
    """Return the matrices of a transformer, for `gradwire.cost`: exact bytes without building the model.

    Norms and biases are left out, as in `Transformer.parameters`.

    Args:
        model: whose.

    >>> from gradwire.planning import model
    >>> sum(spec.numel for spec in parameter_shapes(model("llama2-7b"))) == model("llama2-7b").parameters
    True
    """
    h, q, k = model.hidden, model.heads * model.head, model.keys * model.head
    shapes: list[tuple[str, tuple[int, int]]] = [("embedding", (model.vocabulary, h))]
    for layer in range(model.layers):
        at = f"layer{layer}"
        attention = (("query", (q, h)), ("key", (k, h)), ("value", (k, h)), ("projection", (h, q)))
        shapes += [(f"{at}.{name}", shape) for name, shape in attention]
        if layer < model.layers - model.expert_layers:
            shapes += _feed_forward(at, h, model.dense_width, model.gated)
            continue
        shapes.append((f"{at}.router", (model.experts, h)))
        if model.shared_inner:
            shapes += _feed_forward(f"{at}.shared", h, model.shared_inner, model.gated)
        for expert in range(model.experts):
            shapes += _feed_forward(f"{at}.expert{expert}", h, model.width, model.gated)
    if not model.tied:
        shapes.append(("output", (model.vocabulary, h)))
    meta = torch.device("meta")
    return [ParameterSpec(f"{name}.weight", shape, torch.float32, meta) for name, shape in shapes]


def _feed_forward(at: str, hidden: int, inner: int, gated: bool) -> list[tuple[str, tuple[int, int]]]:
    up = [(f"{at}.gate", (inner, hidden))] if gated else []
    return [*up, (f"{at}.up", (inner, hidden)), (f"{at}.down", (hidden, inner))]


def window_bytes(model: Transformer | Sequence[ParameterSpec], islands: int, spec: str = "none") -> int:
    """Return the bytes that an island sends when all average their models: those of `gradwire.cost`.

    Args:
        model: what is averaged.
        islands: how many.
        spec: how the change of a window travels.

    Raises:
        SpecError, CompositionError: a method that cannot be built, or fewer than 2 islands.

    >>> from gradwire.planning import model
    >>> window_bytes(model("gpt2"), 2) == 4 * model("gpt2").parameters
    True
    """
    if islands < 2:
        raise SpecError(f"{islands} islands have nobody to average with: take 2 or more")
    shapes = parameter_shapes(model) if isinstance(model, Transformer) else model
    return cost(spec, shapes, islands, step=PAST_WARM_UPS).wire_bytes


def utilisation(step_s: float, every: int, nbytes: float, rate: float) -> float:
    """Return the share of time in which an island computes, where averages wait: H s / (H s + 8 B / r).

    Args:
        step_s: seconds of a step inside the island, s.
        every: steps between two averages, H.
        nbytes: that an island sends in an average, B.
        rate: of its line, in bits a second, r.

    Raises:
        SpecError: numbers that are not positive.

    >>> round(utilisation(step_s=20, every=100, nbytes=1e10, rate=1e9), 3)
    0.962
    """
    if not (step_s > 0 and every > 0 and nbytes >= 0 and rate > 0):
        raise SpecError("a step takes some time, a window has 1 step or more, and a line has a rate above 0")
    return every * step_s / (every * step_s + 8 * nbytes / rate)


def intellect() -> CaseStudy:
    """Return the study of INTELLECT-1: 10 G parameters on up to 14 islands of 8 H100 on three continents."""
    on, islands, every, batch = hardware("h100-80g"), 14, 100, 128
    layout = ParallelLayout(dp=8, batch=batch, sharding="parameters", recompute="full")
    step = step_time(INTELLECT, layout, on)
    shapes = parameter_shapes(INTELLECT)
    dense, coded = window_bytes(shapes, islands), window_bytes(shapes, islands, "int8")
    local = INTELLECT.model_flops(batch) / (step.total * layout.gpus * on.peak_tflops * 1e12)
    across, within = 0.83, 0.96
    figures = [
        Figure(
            "parameters", INTELLECT.parameters, "parameters",
            "L h d (2 heads + 2 key heads) + 3 L h f + 2 V h", 10e9, f"{REPORT}, abstract, rounded",
        ),
        Figure("DDP in float32, an island and step", dense, "bytes", "gradwire.cost: 2 (n - 1)/n 4 N"),
        Figure("DiLoCo with H=100 and int8, an island and average", coded, "bytes", "gradwire.cost of int8"),
        Figure(
            "less communication", dense / (coded / every), "times", "H 32 / (bits an element, scales included)", 400,
            f"{REPORT}, abstract",
        ),
        Figure("a step of an island", step.total, "seconds", "the sum of the parts of a step (docs/plan.md)"),
        Figure(
            "model FLOPs utilisation on one continent", local * within, "share",
            "3 tokens (2 N + 4 s L heads d) / (step time x GPUs x peak) x 0.96, the published share of time computing",
            0.414, f"{REPORT}, abstract",
        ),
        Figure(
            "model FLOPs utilisation on three continents", local * across, "share",
            "the same x 0.83, the published share of time computing", 0.362, f"{REPORT}, abstract",
        ),
    ]  # fmt: skip
    for share, where in ((within, "one continent"), (across, "three continents")):
        rate = 8 * coded / (every * step.total * (1 / share - 1))
        figures.append(
            Figure(f"line at which {share:.0%} of time is computing ({where})", rate, "bit/s", "8 B / (H s (1/u - 1))")
        )
    figures += [
        Figure(
            f"share of time computing at {rate / 1e9:g} Gbit/s, {how}", utilisation(step.total, h, nbytes, rate),
            "share", "H s / (H s + 8 B / r)",
        )
        for rate in (1e8, 1e9, 1e10)
        for how, h, nbytes in (("DDP in float32", 1, dense), ("DiLoCo with H=100 and int8", every, coded))
    ]  # fmt: skip
    return CaseStudy(
        name="islands",
        title="Training over the internet: INTELLECT-1, 10 G parameters, up to 14 islands of 8 H100, DiLoCo with H=100",
        model=INTELLECT,
        hardware=on,
        layout=layout,
        figures=tuple(figures),
        volumes=(
            Volume(
                "averages",
                coded / every,
                islands,
                True,
                "B / H of a whole island, between islands, the mean over a window",
            ),
            *step_volumes(INTELLECT, layout, on),
        ),
        memory=device_memory(INTELLECT, layout),
        time=step,
        assumptions=(
            "An island takes 128 samples of 8,192 tokens a step, one at a time on each GPU, shards all parameters "
            "(FSDP2) and computes layers anew: none of this was checked against the report.",
            "Averages wait: nothing of them is hidden. `delay=` of gradwire.sync hides them (docs/sync.md).",
            "The memory is that of training alone. DiLoCo keeps 8 bytes a parameter more on each island: the model at "
            "the window's beginning and the outer momentum, in float32.",
        ),
    )
