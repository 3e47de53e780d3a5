"""How a comparison is kept: `results.json`, one file for each run, and tables for other programs.

Whatever is read back is checked: a file that was cut short, edited by hand or never a results file is refused with
a sentence that names what is wrong, before anything is computed from it.
"""

from __future__ import annotations

import csv
import dataclasses
import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, cast, get_type_hints

from msgspec import Meta

from gradwire.compare.figures import Row, Spread, check_target, summarise
from gradwire.compare.results import SCHEMA, Amount, Comparison, Positive, ResultsError, Run, Split, Wire
from gradwire.compare.step_time import WARM_UP
from gradwire.core.atomic_file import write_atomically
from gradwire.core.checked import checked, facts
from gradwire.core.grammar import renamed

# ------------------------------------------------------------------------------------------- checking


TASK = facts({"name": str, "description": str, "metric_name": str, "higher_is_better": bool}, parameters=Positive)

OPTIONS = facts(
    {"hosts": Positive, "rate": str, "steps": Positive | None, "minutes": Amount | None, "bucket_mb": Amount},
    rates=list[str], delay=str, loss=str, slow=list[str], nodes=str | None,
)  # fmt: skip

ENVIRONMENT = facts(
    dict.fromkeys(("processor", "system", "python", "torch", "gradwire", "network", "created", "command"), str),
    network_mode=str,
)

_Timed = Annotated[int, Meta(ge=WARM_UP + 2)]

RUN = facts(
    {"status": str},
    report=facts({"verdict": str}) | None,
    timed_steps=_Timed | None,
    wire=facts(get_type_hints(Wire)),
    split=facts(get_type_hints(Split)),
)

COMPARISON = facts({"task": TASK, "options": OPTIONS, "environment": ENVIRONMENT, "runs": list[RUN]})
"""What the classes of results leave open: reports need some facts, and the others are kept as they are."""


def _sound(run: Run, where: str) -> Run:
    """The run under its name of today, if it has the same number of everything."""
    if not len(run.losses) == len(run.times_s) == len(run.tx_bytes):
        raise ResultsError(
            f"{where} has {len(run.losses)} losses, {len(run.times_s)} times and {len(run.tx_bytes)} byte counts; "
            "there should be one of each for every step"
        )
    if run.timed_steps is not None and run.timed_steps > run.steps:
        raise ResultsError(f"{where} has {run.timed_steps} timed steps of {run.steps}")
    return dataclasses.replace(run, method=renamed(run.method))


# -------------------------------------------------------------------------------------------- storing


def run_to_json(run: Run) -> dict[str, Any]:
    """Plain data of a run; numbers that are not finite become None, since JSON has no NaN."""
    return plain(dataclasses.asdict(run))


def run_from_json(data: object) -> Run:
    """Rebuild a run from its plain data.

    Raises:
        ResultsError: a field is missing, or is not what it should be.
    """
    checked(data, RUN, "run", ResultsError)
    return _sound(checked(data, Run, "run", ResultsError), "run")


def save(comparison: Comparison, path: Path) -> None:
    """Write `results.json` as a whole."""
    write_atomically(path, json.dumps(plain(dataclasses.asdict(comparison)), indent=1))


def load(path: Path) -> Comparison:
    """Read `results.json`.

    Raises:
        ResultsError: there is none, it is damaged, or a newer gradwire wrote it.
        OSError: it cannot be read.
    """
    try:
        data, _ = read_checked(path, COMPARISON, SCHEMA)
        found = checked(data, Comparison, "results", ResultsError)
        target = check_target(found.target)
        runs = [_sound(run, f"results.runs[{number}]") for number, run in enumerate(found.runs)]
        return dataclasses.replace(found, target=target and renamed(target), runs=runs)
    except FileNotFoundError as error:
        raise ResultsError(f"{path} does not exist: run gradwire compare --out {path.parent} first") from error
    except ResultsError as error:
        raise ResultsError(f"{path} cannot be used: {error}") from error


def read_checked(path: Path, kind: Any, newest: int) -> tuple[dict[str, Any], Any]:
    """Return the plain data of a results file, and the facts of it that a type names.

    Raises:
        ResultsError: they have another form, or a newer gradwire wrote them.
        OSError: it cannot be read.
    """
    data: Any = read_json(path)
    schema = checked(data, facts({"schema": Positive}), "results", ResultsError).schema
    if schema > newest:
        raise ResultsError(f"it has schema {schema}, newer than {newest}: update gradwire")
    return data, checked(data, kind, "results", ResultsError)


def read_json(path: Path) -> object:
    """The plain data that a file of JSON holds.

    Raises:
        ResultsError: it holds something else.
        OSError: it cannot be read.
    """
    try:
        data = json.loads(path.read_bytes())
        # Half a surrogate pair could not be written again.
        return json.loads(json.dumps(data, ensure_ascii=False).encode(errors="replace"))
    except RecursionError as error:
        raise ResultsError("it is nested too deeply to be a results file of gradwire compare") from error
    except ValueError as error:  # no JSON, no UTF-8, or a whole number of thousands of digits
        raise ResultsError(f"it is no JSON, or was cut short ({error})") from error


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
