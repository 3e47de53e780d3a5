"""Case studies of models whose training was published: what the planner's formulas give, and what was reported."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

from gradwire.cases.figure import CaseStudy, Figure
from gradwire.cases.islands import intellect
from gradwire.cases.volumes import step_volumes
from gradwire.core.errors import SpecError
from gradwire.core.nearest import meant
from gradwire.planning import ParallelLayout, Transformer, device_memory, hardware, model, step_time

DAY_S = 86_400
STEP_FORMULA = "the sum of the parts of a step (docs/plan.md)"
PARAMETER_FORMULA = "L h d (2 heads + 2 key heads) + L experts matrices h f + L experts h + V h, twice where untied"


@functools.cache
def case_study(name: str) -> CaseStudy:
    """Return a case study by its name.

    Every number has the formula that it comes from, and the published number beside it where there is one.

    Args:
        name: one of `STUDIES`.

    Raises:
        SpecError: an unknown name, with the nearest.

    >>> found = case_study("gpt3-175b")
    >>> [(figure.name, f"{figure.error:+.1%}") for figure in found.figures if figure.name.startswith("384")]
    [('384 GPUs, 300 G tokens', '+0.1%'), ('384 GPUs, a GPU', '+0.8%')]
    """
    if name not in STUDIES:
        raise SpecError(f"there is no case study {name!r}: {meant(name, STUDIES)}")
    return STUDIES[name]()


def _days(step_s: float, tokens: float, batch: int, trained: Transformer) -> float:
    return step_s * tokens / (batch * trained.sequence) / DAY_S


def _recomputed_flops(trained: Transformer, batch: int) -> float:
    """Operations of a step in which every layer is computed anew: Equation 3 of Narayanan et al. 2021."""
    h, s, layers = trained.hidden, trained.sequence, trained.layers
    return 96 * batch * s * layers * h**2 * (1 + s / (6 * h) + trained.vocabulary / (16 * layers * h))


def _gpt3() -> CaseStudy:
    trained, on = model("gpt3-175b"), hardware("a100-80g")

    def layout(gpus: int) -> ParallelLayout:
        return ParallelLayout(
            dp=gpus // 96, tp=8, pp=12, batch=1536, sharding="none", recompute="full", sequence_parallel=False,
            flash=False, dropout=True, overlap=False,
        )  # fmt: skip

    tokens, table = 300e9, "Narayanan et al. 2021, Table 2"
    figures = [
        Figure(
            "parameters", trained.parameters, "parameters", PARAMETER_FORMULA, 174.6e9,
            "Brown et al. 2020, Table D.1",
        ),
        Figure(
            "operations for 300 G tokens", 6 * trained.parameters * tokens, "FLOP", "6 N D", 3.14e23,
            "Brown et al. 2020, Table D.1",
        ),
    ]  # fmt: skip
    for gpus, days, rate in ((384, 84, 153), (768, 43, 149), (1536, 23, 141)):
        step_s = step_time(trained, layout(gpus), on).total
        achieved = _recomputed_flops(trained, 1536) / step_s / gpus / 1e12
        formula = "step time x tokens / (samples x s)"
        figures += [
            Figure(f"{gpus} GPUs, 300 G tokens", _days(step_s, tokens, 1536, trained), "days", formula, days, table),
            Figure(
                f"{gpus} GPUs, a GPU", achieved, "TFLOP/s",
                "96 B s L h² (1 + s/(6 h) + V/(16 L h)) / step time / GPUs (Narayanan et al. 2021, Equation 3)",
                rate, table,
            ),
        ]  # fmt: skip
    newer = ParallelLayout(tp=8, pp=8, batch=64, interleave=3, sharding="none", flash=False, dropout=True)
    figures.append(
        Figure(
            "64 GPUs, a step with selective recomputation", step_time(trained, newer, on).total, "seconds",
            STEP_FORMULA, 13.75, "Korthikanti et al. 2022, Table 5; one of the nine that constants are fitted to",
        )
    )  # fmt: skip
    return _study(
        "gpt3-175b",
        "GPT-3 175B by Megatron-LM on 384 to 1,536 A100, 1,536 samples of 2,048 tokens a step",
        trained,
        on.name,
        layout(384),
        figures,
        "OpenAI told neither the hardware's rates nor the time of its own run. So the rows are those of Megatron-LM.",
        "Tensor parallelism 8 in pipelines of 12 stages: the table tells their product, 96. No interleaving.",
        "Software of 2021: attention that is not fused, dropout, full recomputation, gradients sent in 4 bytes after "
        "the backward pass, the optimizer not sharded.",
    )


def _llama2() -> CaseStudy:
    trained, on = model("llama2-70b"), hardware("a100-80g")
    gpus, batch, tokens = 2048, 1024, 2e12
    layout = ParallelLayout(dp=256, tp=8, batch=batch)
    pipelined = ParallelLayout(dp=128, tp=4, pp=4, micro=2, interleave=10, batch=batch, recompute="none")
    steps = tokens / (batch * trained.sequence)
    published, table = 1_720_320, "Touvron et al. 2023 (Llama 2), Table 2"
    operations = trained.model_flops(batch) * steps
    figures = [
        Figure(
            "parameters", trained.parameters, "parameters", PARAMETER_FORMULA, 70e9,
            "Touvron et al. 2023 (Llama 2), Table 1, rounded",
        ),
    ]  # fmt: skip
    for each in (layout, pipelined):
        hours = step_time(trained, each, on).total * steps * gpus / 3600
        figures += [
            Figure(
                f"GPU hours for 2 T tokens, tp={each.tp} pp={each.pp}", hours, "GPU hours",
                "step time x GPUs x tokens / (samples x s)", published, table,
            ),
            Figure(
                f"model FLOPs utilisation, tp={each.tp} pp={each.pp}",
                operations / (hours * 3600 * on.peak_tflops * 1e12), "share",
                "3 tokens (2 N + 4 s L heads d) / (GPU seconds x peak)",
                operations / (published * 3600 * on.peak_tflops * 1e12), f"follows from {table}",
            ),
        ]  # fmt: skip
    return _study(
        "llama2-70b",
        "Llama 2 70B on A100, 4 M tokens a step",
        trained,
        on.name,
        layout,
        figures,
        "2,048 GPUs: the paper tells GPU hours, links of 200 Gbit/s and runs of up to 2,000 GPUs, and no layout.",
        "Two layouts enclose the published figure: tensor parallelism 8, as the checkpoint is cut, and the one with a "
        "pipeline that `gradwire plan` finds fastest. The optimizer is sharded in both.",
        "Published GPU hours are those of the whole run: what failures and restarts took is in them, and not in the "
        "predictions.",
    )


def _mixtral() -> CaseStudy:
    trained, on = model("mixtral-8x7b"), hardware("h100-80g")
    layout = ParallelLayout(dp=16, pp=4, ep=8, batch=256, interleave=8, recompute="none")
    step_s = step_time(trained, layout, on).total
    source = "Megatron-Core, README of its experts: reference mapping and TFLOPS of v0.8"
    figures = (
        Figure(
            "parameters", trained.parameters, "parameters", PARAMETER_FORMULA, 47e9,
            "Jiang et al. 2024, abstract, rounded",
        ),
        Figure(
            "parameters that a token passes through", trained.active_parameters, "parameters",
            "the same with 2 experts in place of 8", 13e9, "Jiang et al. 2024, abstract, rounded",
        ),
        Figure("a step of 256 samples of 4,096 tokens", step_s, "seconds", STEP_FORMULA),
        Figure(
            "a GPU", trained.model_flops(256) / step_s / layout.gpus / 1e12, "TFLOP/s",
            "3 tokens (2 N_active + 4 s L heads d) / step time / GPUs", 438, source,
        ),
    )  # fmt: skip
    return _study(
        "mixtral-8x7b",
        "Mixtral 8x7B by Megatron-Core on 64 H100",
        trained,
        on.name,
        layout,
        figures,
        "Mistral AI told neither hardware nor time of its own run. So the rows are those of Megatron-Core.",
        "Experts get equally many tokens. No recomputation: the source tells none.",
    )


def _study(
    name: str,
    title: str,
    trained: Transformer,
    on: str,
    layout: ParallelLayout,
    figures: list[Figure] | tuple[Figure, ...],
    *assumptions: str,
) -> CaseStudy:
    machine = hardware(on)
    return CaseStudy(
        name=name,
        title=title,
        model=trained,
        hardware=machine,
        layout=layout,
        figures=tuple(figures),
        volumes=step_volumes(trained, layout, machine),
        memory=device_memory(trained, layout),
        time=step_time(trained, layout, machine),
        assumptions=assumptions,
    )


STUDIES: Mapping[str, Callable[[], CaseStudy]] = {
    "gpt3-175b": _gpt3,
    "llama2-70b": _llama2,
    "mixtral-8x7b": _mixtral,
    "islands": intellect,
}
"""By name."""
