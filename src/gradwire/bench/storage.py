"""How a comparison is kept: `results.json`, one file for each run, and tables for other programs.

Whatever is read back is checked: a file that was cut short, edited by hand or never a results file is refused with
a sentence that names what is wrong, before anything is computed from it.
"""

from __future__ import annotations

import csv
import dataclasses
import json
import math
import os
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

from gradwire.bench.figures import Row, Spread, check_target, summarise
from gradwire.bench.readers import (
    Read,
    amount,
    facts,
    fields,
    flag,
    listed,
    mapping,
    measured,
    number,
    optional,
    refuse,
    text,
    whole,
)
from gradwire.bench.results import SCHEMA, Comparison, Evaluation, ResultsError, Run, Split, Wire
from gradwire.bench.step_time import WARM_UP
from gradwire.core.grammar import renamed

# ------------------------------------------------------------------------------------------- checking


def _status(value: Any, where: str) -> str:
    if value not in ("finished", "failed"):
        raise refuse(where, "'finished' or 'failed'", value)
    return value


def _target(value: Any, where: str) -> str | None:
    target = check_target(optional(text)(value, where))
    return target and renamed(target)


def _method(value: Any, where: str) -> str:
    return renamed(text(value, where))


def _evaluation(value: Any, where: str) -> Evaluation:
    if not isinstance(value, list) or len(cast(list[Any], value)) != 3:
        raise refuse(where, "a list of steps, seconds and a value", value)
    steps, time_s, metric = cast(list[Any], value)
    return Evaluation(whole(0)(steps, where), amount(time_s, where), measured(metric, where))


def _wire(value: Any, where: str) -> Wire:
    # what the counters saw beyond the prediction, `other`, is negative where they saw less
    return Wire(**fields(value, where, {f.name: number for f in dataclasses.fields(Wire)}))


def _split(value: Any, where: str) -> Split:
    return Split(**fields(value, where, {f.name: amount for f in dataclasses.fields(Split)}))


RUN: Mapping[str, Read] = {
    "method": _method,
    "seed": whole(0),
    "status": _status,
    "reason": text,
    "label": text,
    "losses": listed(measured),
    "times_s": listed(amount),
    "tx_bytes": listed(amount),
    "evaluations": listed(_evaluation),
    "metric_values": listed(measured),
    "wire": _wire,
    "split": _split,
    "residual_norm": optional(number),
    "report": optional(facts({"verdict": text})),
    "conditions": mapping,
    "line_cores": optional(amount),
    "line_missed": whole(0),
    "timed_steps": optional(whole(WARM_UP + 2)),
}

TASK: Mapping[str, Read] = {
    "name": text, "description": text, "parameters": whole(1), "metric_name": text, "higher_is_better": flag,
}  # fmt: skip

OPTIONS: Mapping[str, Read] = {
    "hosts": whole(1), "rate": text, "steps": optional(whole(1)), "minutes": optional(amount),
    "bucket_mb": amount, "rates": listed(text), "delay": text, "loss": text, "slow": listed(text),
}  # fmt: skip

ENVIRONMENT: Mapping[str, Read] = dict.fromkeys(
    ("processor", "system", "python", "torch", "gradwire", "network", "network_mode", "created", "command"), text
)


def _run(value: Any, where: str) -> Run:
    run = Run(**fields(value, where, RUN, frozenset(RUN) - {"method", "seed", "status"}))
    if not len(run.losses) == len(run.times_s) == len(run.tx_bytes):
        raise ResultsError(
            f"{where} has {len(run.losses)} losses, {len(run.times_s)} times and {len(run.tx_bytes)} byte counts; "
            "there should be one of each for every step"
        )
    if run.timed_steps is not None and run.timed_steps > run.steps:
        raise ResultsError(f"{where} has {run.timed_steps} timed steps of {run.steps}")
    return run


COMPARISON: Mapping[str, Read] = {
    "task": facts(TASK, frozenset({"parameters"})),
    "options": facts(OPTIONS, frozenset({"rates", "delay", "loss", "slow"})),
    "environment": facts(ENVIRONMENT, frozenset({"network_mode"})),
    "smoothing": whole(1),
    "target": _target,
    "runs": listed(_run),
    "tolerance": amount,
    "schema": whole(1),
}

# -------------------------------------------------------------------------------------------- storing


def run_to_json(run: Run) -> dict[str, Any]:
    """Plain data of a run; numbers that are not finite become None, since JSON has no NaN."""
    return {key: plain(value) for key, value in dataclasses.asdict(run).items()}


def run_from_json(data: object) -> Run:
    """Rebuild a run from its plain data.

    Raises:
        ResultsError: a field is missing, or is not what it should be.
    """
    return _run(data, "run")


def save(comparison: Comparison, path: Path) -> None:
    """Write `results.json` as a whole."""
    data = {f.name: getattr(comparison, f.name) for f in dataclasses.fields(comparison) if f.name != "runs"}
    data["runs"] = [run_to_json(run) for run in comparison.runs]
    write_atomically(path, json.dumps(plain(data), indent=1))


def load(path: Path) -> Comparison:
    """Read `results.json`.

    Raises:
        ResultsError: there is none, it is damaged, or a newer gradwire wrote it.
        OSError: it cannot be read.
    """
    try:
        data = read_json(path)
        schema = whole(1)(mapping(data, "the file").get("schema"), "schema")
        if schema > SCHEMA:
            raise ResultsError(f"it has schema {schema}, newer than {SCHEMA}: update gradwire")
        return Comparison(**fields(data, "results", COMPARISON, frozenset({"tolerance"})))
    except FileNotFoundError as error:
        raise ResultsError(f"{path} does not exist: run gradwire compare --out {path.parent} first") from error
    except ResultsError as error:
        raise ResultsError(f"{path} cannot be used: {error}") from error


def read_json(path: Path) -> object:
    """The plain data that a file of JSON holds.

    Raises:
        ResultsError: it holds something else.
        OSError: it cannot be read.
    """
    try:
        return json.loads(path.read_bytes())
    except RecursionError as error:
        raise ResultsError("it is nested too deeply to be a results file of gradwire compare") from error
    except ValueError as error:  # no JSON, no UTF-8, or a whole number of thousands of digits
        raise ResultsError(f"it is no JSON, or was cut short ({error})") from error


def write_atomically(path: Path, text: str) -> None:
    """Write a file so that a reader sees all of it or what was there before, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8", errors="replace") as file:
            file.write(text)
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def plain(value: Any) -> Any:
    """Data that JSON can hold: numbers that are not finite become None, tuples lists."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in cast(Mapping[Any, Any], value).items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in cast(list[Any], value)]
    return value


# --------------------------------------------------------------------------------------------- tables


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
