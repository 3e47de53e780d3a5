"""What a comparison measured, how it is stored, and the figures that follow from it.

`Run` holds what one method did with one seed; `Comparison` all runs with the conditions they ran under. Both are
plain data that round-trip through JSON. Everything else here is derived from them and can be derived again:
`summarise` gives a `Row` a method, which the table on the terminal, the CSV and the report all show.
"""

from __future__ import annotations

import csv
import dataclasses
import json
import math
import os
import statistics
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from gradwire.core.errors import GradwireError

SCHEMA = 1

FP32 = "torch:fp32"
FLOOR = "torch:noop"
SIXTEEN_BIT = ("torch:fp16", "torch:bf16")


class ResultsError(GradwireError, ValueError):
    """Stored results that cannot be read, or that belong to another comparison."""


class Evaluation(NamedTuple):
    """The metric on held-out data after `steps` steps, `time_s` seconds of training in."""

    steps: int
    time_s: float
    value: float


@dataclass(frozen=True)
class Wire:
    """Bytes that one rank sent over a whole run, the mean over ranks.

    Attributes:
        total: everything the wire carried during training, framing included.
        framing: packet headers and acknowledgements, 66 bytes a packet.
        payload: what the method's payloads and exchange predict, by arithmetic.
        buffers: what DDP predicts to send of its own: the model's buffers, every step.
        other: what the counters saw beyond that: control messages, and whatever the prediction missed.
        setup: payload sent before the first step (DDP's check and broadcast of the weights); not in `total`.
    """

    total: float = 0.0
    framing: float = 0.0
    payload: float = 0.0
    buffers: float = 0.0
    other: float = 0.0
    setup: float = 0.0

    @property
    def surprise(self) -> float | None:
        """Bytes seen beyond the prediction, as a fraction of it; None where nothing was predicted."""
        expected = self.payload + self.buffers
        return self.other / expected if expected else None


@dataclass(frozen=True)
class Split:
    """Where the seconds of a run went, the mean over ranks.

    Attributes:
        compute_s: from the start of a step until its last gradient, and the optimizer.
        encode_s: after the last gradient: codec work that the backward pass did not hide (at most: the codec's
            CPU time where it is shorter than the whole rest).
        wait_s: after the last gradient: what is left, which is waiting for the network and the other ranks.
        codec_cpu_s: all CPU time of the codec, hidden or not.
        cpu_s: all CPU time of the rank's process.
    """

    compute_s: float = 0.0
    encode_s: float = 0.0
    wait_s: float = 0.0
    codec_cpu_s: float = 0.0
    cpu_s: float = 0.0


@dataclass(frozen=True)
class Run:
    """One method with one seed.

    Attributes:
        method: its spec.
        seed: which seed.
        status: whether it finished.
        reason: why it failed, with the last lines of the rank that did.
        label: what the spec became.
        losses: training loss of each step, the mean over ranks.
        times_s: seconds of training after each step, by the slowest rank; evaluation and set-up are off the clock.
        tx_bytes: bytes sent after each step, framing included, the mean over ranks.
        evaluations: the metric along the way; the last one is at the end.
        wire: itemised bytes.
        split: itemised seconds.
        residual_norm: norm of what error feedback still owes at the end, where there is any.
        conditions: the options and versions it ran under, compared before it is reused.
    """

    method: str
    seed: int
    status: Literal["finished", "failed"] = "finished"
    reason: str = ""
    label: str = ""
    losses: list[float] = field(default_factory=list[float])
    times_s: list[float] = field(default_factory=list[float])
    tx_bytes: list[float] = field(default_factory=list[float])
    evaluations: list[Evaluation] = field(default_factory=list[Evaluation])
    wire: Wire = Wire()
    split: Split = Split()
    residual_norm: float | None = None
    conditions: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def steps(self) -> int:
        """How many steps were made."""
        return len(self.losses)

    @property
    def has_accuracy(self) -> bool:
        """False for a method whose ranks train alone: its losses say nothing."""
        return self.method != FLOOR


@dataclass(frozen=True)
class Comparison:
    """Every run of a comparison, and the conditions they share.

    Attributes:
        task: name, description, metric_name, higher_is_better.
        options: as given on the command line, defaults filled in.
        environment: hardware, versions, network.
        smoothing: steps in the trailing moving average of every loss.
        target: None (the loss fp32 ends at), a number, "metric:NUMBER" or "method:SPEC".
        runs: in the order they are to be shown.
        tolerance: how near, relatively, a run must come to the loss that another method ended at. Without one, a run
            that is the baseline's equal in all but the last bit would count as never having got there.
        schema: version of this layout.
    """

    task: dict[str, Any]
    options: dict[str, Any]
    environment: dict[str, Any]
    smoothing: int
    target: str | None
    runs: list[Run]
    tolerance: float = 0.005
    schema: int = SCHEMA

    @property
    def methods(self) -> list[str]:
        """Specs in the order they are shown."""
        return list(dict.fromkeys(run.method for run in self.runs))

    def finished(self, method: str) -> list[Run]:
        """Finished runs of a method, by seed."""
        mine = [run for run in self.runs if run.method == method and run.status == "finished" and run.steps]
        return sorted(mine, key=lambda run: run.seed)

    def run(self, method: str, seed: int) -> Run | None:
        """The finished run of a method with a seed, or None."""
        return next((run for run in self.finished(method) if run.seed == seed), None)


# -------------------------------------------------------------------------------------------- storing


def run_to_json(run: Run) -> dict[str, Any]:
    """Plain data of a run; non-finite numbers become None, since JSON has no NaN."""
    data = dataclasses.asdict(run)
    return {key: _finite(value) for key, value in data.items()}


def run_from_json(data: Mapping[str, Any]) -> Run:
    """Rebuild a run from its plain data."""
    known = {f.name for f in dataclasses.fields(Run)}
    values = {key: value for key, value in data.items() if key in known}
    values["losses"] = [_number(x) for x in values.get("losses", [])]
    values["evaluations"] = [Evaluation(int(n), t, _number(v)) for n, t, v in values.get("evaluations", [])]
    values["wire"] = Wire(**values.get("wire", {}))
    values["split"] = Split(**values.get("split", {}))
    return Run(**values)


def save(comparison: Comparison, path: Path) -> None:
    """Write `results.json`."""
    data = {f.name: getattr(comparison, f.name) for f in dataclasses.fields(comparison) if f.name != "runs"}
    data["runs"] = [run_to_json(run) for run in comparison.runs]
    write_atomically(path, json.dumps(_finite(data), indent=1))


def load(path: Path) -> Comparison:
    """Read `results.json`.

    Raises:
        ResultsError: there is none, it is damaged, or a newer gradwire wrote it.
    """
    try:
        data = json.loads(path.read_text())
        if data["schema"] > SCHEMA:
            raise ResultsError(f"{path} has schema {data['schema']}, newer than {SCHEMA}: update gradwire")
        data["runs"] = [run_from_json(run) for run in data["runs"]]
        return Comparison(**data)
    except FileNotFoundError as error:
        raise ResultsError(f"{path} does not exist: run gradwire compare --out {path.parent} first") from error
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ResultsError(f"{path} is no results file of gradwire compare: {error!r}") from error


def write_atomically(path: Path, text: str) -> None:
    """Write a file so that a reader sees all of it or what was there before, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)


# ------------------------------------------------------------------------------------------- deriving


def smooth(values: Sequence[float], window: int) -> list[float]:
    """Trailing moving average: of the last `window` values, or of as many as there are yet.

    Example:
        >>> smooth([4.0, 2.0, 0.0], 2)
        [4.0, 3.0, 1.0]
    """
    means: list[float] = []
    for end in range(1, len(values) + 1):
        recent = values[max(0, end - window) : end]
        means.append(math.fsum(recent) / len(recent))
    return means


def final_loss(run: Run, window: int) -> float:
    """Smoothed training loss at the end of a run."""
    return smooth(run.losses, window)[-1]


def time_to_loss(run: Run, target: float, window: int) -> float | None:
    """Seconds of training until the smoothed loss first is at or below `target`; None if it never is."""
    losses = smooth(run.losses, window)
    return next((t for t, loss in zip(run.times_s, losses, strict=True) if loss <= target), None)


def time_to_metric(run: Run, target: float, *, higher_is_better: bool) -> float | None:
    """Seconds of training until an evaluation first is as good as `target`; None if none is."""
    sign = 1 if higher_is_better else -1
    return next((e.time_s for e in run.evaluations if sign * e.value >= sign * target), None)


def target_loss(comparison: Comparison, seed: int) -> float | None:
    """The training loss to be reached with this seed; None if the method that sets it has not finished.

    A method's own end differs a little from seed to seed, and so does the target it sets: seeds are paired.
    """
    target = comparison.target
    if target is not None and not target.startswith("method:"):
        return None if target.startswith("metric:") else float(target)
    setter = comparison.run(FP32 if target is None else target.removeprefix("method:"), seed)
    return None if setter is None else final_loss(setter, comparison.smoothing) * (1 + comparison.tolerance)


def time_to_target(comparison: Comparison, run: Run) -> float | None:
    """Seconds of training until a run reaches the comparison's target; None if it does not, or none is set."""
    if not run.has_accuracy:
        return None
    target = comparison.target
    if target is not None and target.startswith("metric:"):
        value = float(target.removeprefix("metric:"))
        return time_to_metric(run, value, higher_is_better=comparison.task["higher_is_better"])
    loss = target_loss(comparison, run.seed)
    return None if loss is None else time_to_loss(run, loss, comparison.smoothing)


def check_target(target: str | None) -> str | None:
    """Refuse a target that is neither a number, nor `metric:NUMBER`, nor `method:SPEC`."""
    if target is None or target.startswith("method:"):
        return target
    try:
        float(target.removeprefix("metric:"))
    except ValueError:
        raise ResultsError(
            f"--target {target!r}: give a training loss (2.1), metric:NUMBER (metric:98), "
            "or method:SPEC (the loss that method ends at)"
        ) from None
    return target


class Spread(NamedTuple):
    """A mean over seeds, with the extremes and the standard deviation."""

    mean: float
    low: float
    high: float
    std: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread | None:
        """Summarise values; None if there are none."""
        numbers = list(values)
        if not numbers:
            return None
        std = statistics.stdev(numbers) if len(numbers) > 1 else 0.0
        return cls(statistics.fmean(numbers), min(numbers), max(numbers), std)


@dataclass(frozen=True)
class Row:
    """The figures of one method: means over its finished seeds; None where a figure does not apply.

    Attributes:
        method: its spec.
        label: what the spec became.
        seeds: how many finished.
        failure: why a seed failed, empty if none did.
        bytes_per_step: sent by a rank in a step, framing included.
        ratio: fp32's bytes per step over this method's.
        step_ms: compute_ms + encode_ms + wait_ms.
        compute_ms: see `Split`, as for the next two.
        encode_ms: codec work that was not hidden.
        wait_ms: waiting for the network.
        overhead_percent: the codec's CPU seconds over the compute seconds.
        metric: at the end, on held-out data.
        metric_gap: minus fp32's, over paired seeds.
        loss: smoothed, at the end.
        target_s: seconds to the target, over the seeds that reached it.
        reached: how many seeds reached the target.
        speed_up: fp32's time to the target over this method's, over paired seeds.
        speed_up_16bit: the same against the 16-bit baseline.
        wire: itemised bytes of a step.
    """

    method: str
    label: str
    seeds: int
    failure: str
    bytes_per_step: float | None = None
    ratio: float | None = None
    step_ms: float | None = None
    compute_ms: float | None = None
    encode_ms: float | None = None
    wait_ms: float | None = None
    overhead_percent: float | None = None
    metric: Spread | None = None
    metric_gap: float | None = None
    loss: Spread | None = None
    target_s: Spread | None = None
    reached: int = 0
    speed_up: Spread | None = None
    speed_up_16bit: Spread | None = None
    wire: Wire = Wire()


def summarise(comparison: Comparison) -> list[Row]:
    """One row a method, in the order they are shown."""
    return [_row(comparison, method) for method in comparison.methods]


def _row(comparison: Comparison, method: str) -> Row:
    failed = [run for run in comparison.runs if run.method == method and run.status == "failed"]
    runs = comparison.finished(method)
    row = Row(method, runs[0].label if runs else "", len(runs), failed[0].reason if failed else "")
    if not runs:
        return row
    row = dataclasses.replace(row, **_costs(comparison, runs))
    return dataclasses.replace(row, **_accuracy(comparison, runs)) if runs[0].has_accuracy else row


def _costs(comparison: Comparison, runs: list[Run]) -> dict[str, Any]:
    def per_step_ms(seconds: str) -> float:
        return statistics.fmean(1000 * getattr(run.split, seconds) / run.steps for run in runs)

    sent = bytes_per_step(runs)
    step_ms = statistics.fmean(1000 * run.times_s[-1] / run.steps for run in runs)
    encode_ms = per_step_ms("encode_s")
    dense = bytes_per_step(comparison.finished(FP32))
    compute_ms = per_step_ms("compute_s")
    return {
        "bytes_per_step": sent,
        # a method that sends nothing still acknowledges and agrees: its ratio would be noise
        "ratio": dense / sent if dense and sent and runs[0].has_accuracy else None,
        "step_ms": step_ms,
        "compute_ms": compute_ms,
        "encode_ms": encode_ms,
        # a step lasts as long as its slowest rank: what the mean rank did not do itself, it waited for
        "wait_ms": max(0.0, step_ms - compute_ms - encode_ms),
        "overhead_percent": 100 * per_step_ms("codec_cpu_s") / compute_ms if compute_ms else None,
        "wire": _wire_per_step(runs),
    }


def bytes_per_step(runs: list[Run]) -> float | None:
    """Mean over runs of the bytes a rank sends in a step."""
    return statistics.fmean(run.wire.total / run.steps for run in runs) if runs else None


def _wire_per_step(runs: list[Run]) -> Wire:
    def mean(name: str) -> float:
        return statistics.fmean(getattr(run.wire, name) / (1 if name == "setup" else run.steps) for run in runs)

    return Wire(**{f.name: mean(f.name) for f in dataclasses.fields(Wire)})


def _accuracy(comparison: Comparison, runs: list[Run]) -> dict[str, Any]:
    times = [time_to_target(comparison, run) for run in runs]
    gaps = [
        run.evaluations[-1].value - base.evaluations[-1].value
        for run in runs
        if (base := comparison.run(FP32, run.seed)) and base.evaluations and run.evaluations
    ]
    return {
        "metric": Spread.of(run.evaluations[-1].value for run in runs if run.evaluations),
        "metric_gap": statistics.fmean(gaps) if gaps else None,
        "loss": Spread.of(final_loss(run, comparison.smoothing) for run in runs),
        "target_s": Spread.of(t for t in times if t is not None),
        "reached": sum(t is not None for t in times),
        "speed_up": speed_up(comparison, runs, FP32),
        "speed_up_16bit": speed_up(comparison, runs, sixteen_bit(comparison)),
    }


def sixteen_bit(comparison: Comparison) -> str | None:
    """The method that serves as the 16-bit baseline, or None if none was run."""
    return next((method for method in SIXTEEN_BIT if comparison.finished(method)), None)


def speed_up(comparison: Comparison, runs: list[Run], baseline: str | None) -> Spread | None:
    """Iso-accuracy speed-up: the baseline's time to the target over a method's, for each seed that both reached."""
    ratios: list[float] = []
    for run in runs:
        base = comparison.run(baseline, run.seed) if baseline else None
        base_s = time_to_target(comparison, base) if base else None
        mine_s = time_to_target(comparison, run)
        if base_s and mine_s:
            ratios.append(base_s / mine_s)
    return Spread.of(ratios)


# ------------------------------------------------------------------------------------------- exporting


def write_tables(comparison: Comparison, folder: Path) -> None:
    """Write `results.csv` (a row a method) and `curves.csv` (a row a step)."""
    write_atomically(folder / "results.csv", _csv(_result_lines(comparison)))
    write_atomically(folder / "curves.csv", _csv(_curve_lines(comparison)))


def _result_lines(comparison: Comparison) -> Iterable[list[Any]]:
    flat = [f.name for f in dataclasses.fields(Row) if f.name not in ("wire", "failure")]
    items = [f.name for f in dataclasses.fields(Wire)]
    yield [*flat, *(f"wire_{name}_bytes" for name in items), "failure"]
    for row in summarise(comparison):
        values = [getattr(row, name) for name in flat]
        means = [value.mean if isinstance(value, Spread) else value for value in values]
        yield [*means, *(getattr(row.wire, name) for name in items), row.failure]


def _curve_lines(comparison: Comparison) -> Iterable[list[Any]]:
    yield ["method", "seed", "step", "time_s", "tx_bytes", "loss"]
    for run in comparison.runs:
        for step, point in enumerate(zip(run.times_s, run.tx_bytes, run.losses, strict=True), start=1):
            yield [run.method, run.seed, step, *point]


def _csv(lines: Iterable[list[Any]]) -> str:
    class Text(list[str]):
        write = list[str].append

    text = Text()
    csv.writer(text, lineterminator="\n").writerows(lines)
    return "".join(text)
