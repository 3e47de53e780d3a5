"""What a method costs and saves in the run at hand: `session.report()`.

The figures of a `Window` of steps become a `Report` here, without processes and without communication.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from gradwire.core.collective import ring_bytes
from gradwire.core.figures import milliseconds, si_bits_per_s, si_bytes, significant
from gradwire.core.state import walk
from gradwire.drivers.engine import Engine
from gradwire.drivers.window import START_UP, Window
from gradwire.session.estimate import Times, summarise
from gradwire.session.memory import HeldMemory, held_memory
from gradwire.session.module_figures import ModuleFigures
from gradwire.session.pace import WindowPace
from gradwire.session.step_times import ToldSteps
from gradwire.topology.reduction_times import ReductionTimes

FEWEST_STEPS = 5
"""Steps that a verdict is given for at least."""
MARGIN = 0.05
"""Part of a step that two methods must differ by: below that the estimate does not tell them apart."""
LARGE_RESIDUAL = 3.0
"""Times the norm of a gradient from which on a report says a word about what is owed."""
SAME_BYTES = 0.02
"""What flags and headers add to a method that sends whole or half gradients, at most, as a part of them."""

_SHORT = {torch.float32: "fp32", torch.float64: "fp64", torch.float16: "fp16", torch.bfloat16: "bf16"}


@dataclass(frozen=True)
class Report:
    """What a method costs and saves on this rank, over the last steps and without start-up.

    `str(report)` is for people, `report.as_dict()` for programs, `report.verdict` is the conclusion in one sentence.

    The uncompressed step is an estimate. `attach` times all-reduces of b bytes on the idle link, t(b), up to all
    gradients where a few seconds allow for it, in the buckets that DDP makes, and after a pause too. Each bucket of the
    step is then assumed to be reduced after the one before it, and not before its gradients are there. What then ends
    after the last gradient takes the place of what communication takes now. The rest of the step is assumed to stay as
    it is, but for coding: where it wants the cores of computing, computing is shorter without it by all it took, and
    else by nothing, so half of it is assumed:

        end_i = t(bytes of buckets 1 to i)               while buckets follow each other without a break
        dense step = median(step - communication) - coding / 2 + (end_last - ready_last)

    Waiting for slower ranks is no communication. What it took in a step is the least exposed time over ranks, which
    tell each other of their steps through the store that they met at; the buckets are those of the slowest rank.

    How far t(b) may be from the truth follows from how much its repetitions differ, and from how far it had to be drawn
    out beyond the sizes that were timed. Where the uncompressed step may be a tenth longer or shorter, by that and by
    coding, or where other ranks have told nothing, the verdict says that it cannot tell.

    Attributes:
        method: spec or reducer.
        rank: whose figures these are.
        ranks: of how many.
        first_step: of the window, counted from 0.
        steps: in the window.
        bad_steps: since `attach`, whose mean was not finite, so that what they would have kept was forgotten. With
            `on_non_finite="skip"` the optimizer has skipped them.
        sent_bytes: a step, as payloads and the algorithm of each collective predict.
        dense_bytes: a step, that a ring all-reduce of the uncompressed gradients sends.
        dense_name: the type of uncompressed gradients, such as "fp32".
        times: of a step; None before there are steps, with one rank, and on a GPU, where nothing waits for the device.
        link_bits_per_s: what each rank sends in a second while all gradients are all-reduced uncompressed, latency and
            lost frames included; None with one rank.
        link_latency_ms: of the smallest all-reduce.
        residual_norm: of all that this rank owes; None for a method that owes nothing.
        gradient_norm: of this rank's gradient, in one of the last steps; None before it was taken.
        memory: what the method holds between steps, by kind.
        averages: whether the method computes a mean, as uncompressed training does, and not another rule.
        period: "step" where gradients are combined; "window" or "round" where models are, every few steps. Bytes and
            times are those of a step of training then, and DDP, which combines gradients in each, is what they are
            compared with (see `gradwire.session.pace`); `first_step` and `steps` count windows.
        steps_a_period: steps of training in a window, the mean.
        uncounted: what is sent beside the method and not counted, as the end of a sentence; empty if nothing is.
        chosen: what `auto` has chosen, why, and what takes its place without it; empty for another method.
        modules: figures of modules that communicate by themselves, see `Session.add_to_report`. Their bytes are not in
            `sent_bytes`.
    """

    method: str
    rank: int
    ranks: int
    first_step: int
    steps: int
    bad_steps: int
    sent_bytes: float
    dense_bytes: float
    dense_name: str
    times: Times | None
    link_bits_per_s: float | None
    link_latency_ms: float | None
    residual_norm: float | None
    gradient_norm: float | None
    memory: HeldMemory
    averages: bool = True
    period: str = "step"
    steps_a_period: float = 1.0
    uncounted: str = ""
    chosen: str = ""
    modules: tuple[ModuleFigures, ...] = ()

    @property
    def replaces_ddp(self) -> bool:
        """Whether models are combined, where DDP would combine gradients."""
        return self.period != "step"

    @property
    def dense(self) -> str:
        """Uncompressed training, as sentences call it."""
        return f"DDP in {self.dense_name}" if self.replaces_ddp else self.dense_name

    @property
    def state_bytes(self) -> int:
        """Memory of residuals, factors and whatever else is remembered between steps."""
        return self.memory.state_bytes

    @property
    def buffer_bytes(self) -> int:
        """Memory that gradients are copied to."""
        return self.memory.buffer_bytes

    @property
    def saved_bytes(self) -> float:
        """Bytes a step that are sent less than by an uncompressed all-reduce; below 0 where more are sent."""
        return self.dense_bytes - self.sent_bytes

    @property
    def saved_ms(self) -> float | None:
        """Milliseconds a step that the method saves; below 0 if it costs some; None where times are not known."""
        return self.times.dense_step_ms - self.times.step_ms if self.times else None

    @property
    def residual_ratio(self) -> float | None:
        """Norm of what is owed by the norm of the gradient."""
        if self.residual_norm is None or not self.gradient_norm:
            return None
        return self.residual_norm / self.gradient_norm

    @property
    def verdict(self) -> str:
        """Whether the method pays here, in one sentence, and what to use where it does not."""
        if self.ranks == 1:
            return "there is one rank: nothing is sent, and nothing can be saved"
        if self.steps < FEWEST_STEPS:
            return f"it is too early to say: ask again after {START_UP + FEWEST_STEPS} {self.period}s"
        if self.sent_bytes > (1 + SAME_BYTES) * self.dense_bytes:
            return self._sends_more()
        if self.times is None and _about(self.sent_bytes, self.dense_bytes):
            return f"saves nothing: it sends what {self.dense} sends{self._without}"
        if self.times is None:
            less = f"sends {_factor(self.dense_bytes, self.sent_bytes)} less than {self.dense}{self._without}"
            return f"{less}; {_NO_TIMES_OF_MODELS if self.replaces_ddp else _NO_TIMES}"
        return _judged(self, self.times)

    @property
    def _without(self) -> str:
        return f" (not counted: {self.uncounted})" if self.uncounted else ""

    @property
    def advice(self) -> str | None:
        """What a large residual means, and what to do; None where it is not large."""
        ratio = self.residual_ratio
        if ratio is None or ratio < LARGE_RESIDUAL:
            return None
        what = f"what a {self.period} changes" if self.replaces_ddp else "a gradient"
        return (
            f"the residual is {significant(ratio, 2)} times as large as {what}, so what is sent is that many "
            f"{self.period}s late, and comes in bursts. Where training is worse than without compression, send more (a "
            "larger k, more bits), begin with warmup=, forget with decay=0.9, or clip gradients"
        )

    def _sends_more(self) -> str:
        sent, dense = si_bytes(self.sent_bytes), si_bytes(self.dense_bytes)
        said = f"saves nothing: it sends {sent} a step where {self.dense} sends {dense}{self._without}"
        if self.replaces_ddp:
            return f"{said}; use DDP"
        return f"{said}; use none" if self.averages else said

    def as_dict(self) -> dict[str, Any]:
        """The same as plain numbers and strings, `times` and `memory` among the rest; what is not known is None."""
        plain: dict[str, Any] = asdict(self) | self.memory.as_dict()
        del plain["memory"]
        plain["modules"] = list(plain["modules"])
        times = plain.pop("times") or dict.fromkeys(Times.__dataclass_fields__)
        if times["dense_high_ms"] == math.inf:
            times["dense_high_ms"] = None
        derived = {
            "saved_bytes": self.saved_bytes,
            "saved_ms": self.saved_ms,
            "residual_ratio": self.residual_ratio,
            "verdict": self.verdict,
            "advice": self.advice,
        }
        return plain | times | derived

    def __str__(self) -> str:
        return _text(self)


_NO_TIMES = "what time that saves is not estimated on a GPU, with FSDP2, or where the link was not timed"
_NO_TIMES_OF_MODELS = (
    "what time that saves is not estimated on a GPU, with shards, fragments, levels, averaged moments, a delay, or "
    "where the link was not timed"
)


def observed(
    engine: Engine,
    window: Window,
    link: ReductionTimes | None,
    others: Sequence[ToldSteps] | None,
    method: str,
    averages: bool,
    residual_norm: float,
    pace: WindowPace | None = None,
    uncounted: str = "",
) -> Report:
    """Return the report of an engine that a window has watched.

    Args:
        engine, window: of this rank.
        link: as `reduction_times` found it.
        others: what the other ranks have told of their steps; None if that is not known.
        method, averages: of the session.
        residual_norm: without the loss scale.
        pace: of a session that combines models, and not gradients.
        uncounted: see `Report`.
    """
    samples, world_size = list(window.samples), engine.transport.world_size
    grains, leaves = [u.grain for u in engine.plan.units], [leaf for _, s in engine.states() for _, leaf in walk(s)]
    on_cpu = all(grain.device.type == "cpu" for grain in grains)
    first = engine.index - len(samples)
    times_of = pace.times if pace else summarise
    return Report(
        method=method,
        rank=engine.transport.rank,
        ranks=world_size,
        first_step=first,
        steps=len(samples),
        bad_steps=engine.stats.bad_steps,
        sent_bytes=pace.sent_bytes(samples) if pace else _mean([sample.sent_bytes for sample in samples]),
        dense_bytes=ring_bytes(pace.gradient_bytes, world_size) if pace else _mean([s.dense_bytes for s in samples]),
        dense_name=_dtype_name(pace.dtypes if pace else {grain.dtype for grain in grains}),
        times=times_of(samples, first, link, others) if link and samples and on_cpu else None,
        link_bits_per_s=8 * ring_bytes(link.nbytes, world_size) / link.seconds if link else None,
        link_latency_ms=1000 * link.least_s if link else None,
        residual_norm=residual_norm if any(leaf.owed for leaf in leaves) else None,
        gradient_norm=None if window.found_bad() else window.gradient_norm(),
        memory=held_memory(engine),
        averages=averages,
        period=pace.period if pace else "step",
        steps_a_period=pace.steps_a_period if pace else 1.0,
        uncounted=uncounted,
    )


def _mean(values: Sequence[int]) -> float:
    return statistics.fmean(values) if values else 0.0


def _dtype_name(dtypes: Collection[torch.dtype]) -> str:
    """What gradients are when nothing is done to them."""
    (dtype,) = dtypes if len(dtypes) == 1 else (None,)
    return _SHORT.get(dtype, "uncompressed") if dtype else "uncompressed"


def _judged(report: Report, times: Times) -> str:
    """The verdict where all times are known: against the uncompressed step, then against half of its bytes."""
    dense, saved_ms = report.dense, times.dense_step_ms - times.step_ms
    none, half = ("DDP", "DDP in fp16 or bf16") if report.replaces_ddp else ("none", "fp16")
    margin_ms = MARGIN * min(times.step_ms, times.dense_step_ms)
    to_halve = report.dense_name == "fp32" and report.averages and not _about(report.sent_bytes, report.dense_bytes / 2)
    by_half_ms = times.dense_step_ms - times.half_step_ms if to_halve else -math.inf
    better = (
        f"use {half}, which saves about {_rounded(by_half_ms)} ms a step" if by_half_ms > margin_ms else f"use {none}"
    )
    if _about(report.sent_bytes, report.dense_bytes):
        said = f"saves nothing: it sends what {dense} sends"
        return f"{said}; {better}" if by_half_ms > margin_ms and times.tells else said
    if not times.tells:
        return _unsure(f"step of {dense}" if report.replaces_ddp else f"{dense} step", times, margin_ms)
    if saved_ms <= margin_ms:
        how = f"its step is as long as that of {dense}"
        if saved_ms < -margin_ms:
            how = f"its step is about {_rounded(-saved_ms)} ms longer than that of {dense}"
        return f"does not pay on this link: {how}" + (f"; {better}" if report.averages else "")
    said = f"saves about {_rounded(saved_ms)} ms a step"
    if by_half_ms >= saved_ms - margin_ms:
        return f"{said}, but {half} saves as much and loses less: use {half}"
    return f"{said}: {_factor(times.dense_step_ms, times.step_ms)} as many steps as {dense} in the same time"


def _unsure(step: str, times: Times, margin_ms: float) -> str:
    """The verdict where the uncompressed step is not known well enough."""
    said = "cannot tell what it saves"
    if times.dense_low_ms > times.step_ms + margin_ms:
        said = "pays on this link, but cannot tell how much it saves"
    elif times.dense_high_ms < times.step_ms - margin_ms:
        said = "does not pay on this link, but cannot tell what it costs"
    return f"{said}: the {step} is estimated at {_between(times)}; measure it with gradwire compare"


def _between(times: Times) -> str:
    low, high = milliseconds(times.dense_low_ms), milliseconds(times.dense_high_ms)
    return f"{low} to {high} ms" if math.isfinite(times.dense_high_ms) else f"{low} ms or more"


def _about(value: float, other: float) -> bool:
    return abs(value - other) <= SAME_BYTES * other


def _rounded(value: float) -> str:
    """A number of two significant digits: an estimate deserves no more."""
    return f"{float(f'{value:.2g}'):,.10g}" if math.isfinite(value) else ""


def _factor(larger: float, smaller: float) -> str:
    return f"{significant(larger / smaller, 2)} times" if smaller else "infinitely"


# ------------------------------------------------------------------------------------------------ text

Row = tuple[str, str, str]
"""A name, a number with its unit, and what it means."""


def _text(report: Report) -> str:
    last = report.first_step + report.steps - 1
    window = f"{report.period}s {report.first_step} to {last}" if report.steps else f"no {report.period} measured yet"
    if report.replaces_ddp and report.steps:
        window += f" of {report.steps_a_period:.3g} steps"
    rows = [*_time_rows(report), *_byte_rows(report), *_norm_rows(report), *_memory_rows(report)]
    rows += [module.row for module in report.modules]
    names, numbers, units = (
        max((len(column) for column in columns), default=0)
        for columns in ([r[0] for r in rows], [_number(r[1]) for r in rows], [_unit(r[1]) for r in rows])
    )
    lines = [f"gradwire report: {report.method}, rank {report.rank} of {report.ranks}, {window}", ""]
    for name, value, meaning in rows:
        line = f"  {name:{names}}  {_number(value):>{numbers}} {_unit(value):{units}}  {meaning}"
        lines.append(line.rstrip())
    said = [f"  {text[0].upper()}{text[1:]}." for text in (report.chosen, report.verdict, report.advice) if text]
    return "\n".join([*lines, "", *said])


def _number(value: str) -> str:
    return value.partition(" ")[0]


def _unit(value: str) -> str:
    return value.partition(" ")[2]


def _time_rows(report: Report) -> list[Row]:
    times = report.times
    if times is None:
        return []
    link = f"{si_bits_per_s(report.link_bits_per_s or 0.0)}, {milliseconds(report.link_latency_ms)} ms a call"
    estimated = "estimated" if times.tells else f"estimated, {_between(times)}"
    if report.replaces_ddp:
        rows = [
            ("step", times.step_ms, f"the mean over a {report.period}, as the next three"),
            ("  exposed", times.exposed_ms, f"{_whole(report, times.exposed_ms)} at the end of a {report.period}"),
            ("  encoding", times.encode_ms, "CPU time"),
            ("  waiting", times.wait_ms, "for the link and slower ranks"),
            (f"{report.dense_name} DDP step", times.dense_step_ms, f"{estimated}, half hidden: gradients at {link}"),
        ]
    else:
        rows = [
            ("step", times.step_ms, ""),
            ("  exposed", times.exposed_ms, "from the last gradient to the end of the step"),
            ("  encoding", times.encode_ms, "CPU time, partly beside the backward pass"),
            ("  waiting", times.wait_ms, "for the link and slower ranks, partly beside the backward pass"),
            (f"{report.dense_name} step", times.dense_step_ms, f"{estimated}: gradients at {link}"),
        ]
    if report.dense_name == "fp32":
        name = "fp16, bf16 DDP step" if report.replaces_ddp else "fp16 step"
        rows.append((name, times.half_step_ms, "estimated likewise"))
    return [(name, f"{milliseconds(ms)} ms", meaning) for name, ms, meaning in rows]


def _byte_rows(report: Report) -> list[Row]:
    if not report.steps or report.ranks == 1:
        return []
    what = f"a step; {report.dense} sends {si_bytes(report.dense_bytes)}"
    if report.replaces_ddp:
        whole = si_bytes(report.sent_bytes * report.steps_a_period)
        what = f"a step, {whole} a {report.period}; {report.dense} sends {si_bytes(report.dense_bytes)} in every step"
    rows = [("sent", si_bytes(report.sent_bytes), what)]
    if report.uncounted:
        rows.append(("", "", f"not counted: {report.uncounted}"))
    if report.saved_bytes > 0:
        less = f"a step: {_factor(report.dense_bytes, report.sent_bytes)} less"
        rows.append(("saved", si_bytes(report.saved_bytes), less))
    return rows


def _whole(report: Report, ms: float) -> str:
    """What a step's share of a window's milliseconds is of the whole window."""
    return f"{milliseconds(ms * report.steps_a_period)} ms"


def _norm_rows(report: Report) -> list[Row]:
    rows: list[Row] = []
    whose = f"a {report.period}'s change's" if report.replaces_ddp else "the gradient's"
    if report.residual_norm is not None and report.residual_ratio is not None:
        norms = f"{significant(report.residual_norm, 3)} against {significant(report.gradient_norm or 0.0, 3)}"
        rows.append(("residual", f"{significant(report.residual_ratio, 2)} x", f"{whose} norm: {norms}"))
    elif report.residual_norm is not None:
        rows.append(("residual", significant(report.residual_norm, 3), f"its norm; {whose} is not known yet"))
    if report.bad_steps:
        rows.append(("not finite", f"{report.bad_steps}", "steps whose mean was NaN: nothing of them is remembered"))
    return rows


def _memory_rows(report: Report) -> list[Row]:
    return [("memory", si_bytes(report.memory.total_bytes), str(report.memory))]
