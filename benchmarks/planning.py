"""What `gradwire.planning` predicts against step times and memory that others have published.

python benchmarks/planning.py --save

The constants are fitted to `data/published_step_times.csv`, once to all rows and once for each row to the others, which
then predict that row. Settings that a row does not tell are those that the planner finds fastest among layouts that fit
into memory. With the constants of that file `data/published_layouts.csv` is predicted, of another cluster. Of rows to
which nothing was fitted `planning_elsewhere.py` tells.
"""

from __future__ import annotations

import argparse
import csv
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from common import save_result
from gradwire.core.errors import SpecError
from gradwire.planning import (
    Efficiencies,
    ParallelLayout,
    Transformer,
    device_memory,
    hardware,
    step_time,
)
from gradwire.planning.layout import divisors

DATA = Path(__file__).parent / "data"
A100, OMNI_PATH = hardware("a100-80g"), hardware("a100-80g-omnipath")
MICRO_BATCHES = (1, 2, 4, 8, 16)
HOST_S = 10e-3
"""Of each layer and micro-batch in the runs of `published_layouts.csv`. Their chronicle tells that kernels were started
one by one (CUDA_LAUNCH_BLOCKING=1), which cost 3.5 ms on 80 GPUs, and that the sharded optimizer took 13 ms more than
none (entries of 02-17 and 02-21, which are not among the rows). The script shows what other values would give."""


class PublishedStep(NamedTuple):
    """A published step time, and the layouts that it may have been measured with."""

    name: str
    model: Transformer
    layouts: tuple[ParallelLayout, ...]
    seconds: float

    def predicted(self, reached: Efficiencies) -> float:
        """Seconds, of the fastest layout."""
        return min(step_time(self.model, layout, A100, reached).total for layout in self.layouts)


class PublishedLayout(NamedTuple):
    """A layout with its published memory and step time; None where it did not fit or none was published."""

    model: Transformer
    layout: ParallelLayout
    memory_gb: float | None
    seconds: float | None
    fitted: bool


def published_steps(path: Path = DATA / "published_step_times.csv") -> list[PublishedStep]:
    """Rows of the file. Their software had no fused attention, no sharded optimizer, and sent gradients at the end."""
    found: list[PublishedStep] = []
    for row in table(path):
        sizes, dp, batch = transformer(row), int(row["dp"]), int(row["global_batch"])
        untold = not (row["micro_batch"] and row["interleave"])
        micros = (
            [int(row["micro_batch"])] if row["micro_batch"] else [m for m in MICRO_BATCHES if batch % (dp * m) == 0]
        )
        parts = [int(row["interleave"])] if row["interleave"] else divisors(sizes.layers // int(row["pp"]))
        layouts: list[ParallelLayout] = []
        for micro in micros:
            for interleave in parts:
                try:
                    layout = ParallelLayout(
                        dp=dp,
                        tp=int(row["tp"]),
                        pp=int(row["pp"]),
                        micro=micro,
                        batch=batch,
                        interleave=interleave,
                        sharding="none",
                        recompute=row["recompute"],
                        sequence_parallel=row["sequence_parallel"] == "yes",
                        flash=False,
                        dropout=True,
                        overlap=False,
                    )
                except SpecError:  # as many micro-batches as no interleaved schedule takes
                    continue
                if layout.unfit(sizes, A100) is None and not (
                    untold and device_memory(sizes, layout).total > A100.memory_gb * 1e9
                ):
                    layouts.append(layout)
        name = f"{sizes.name}, {row['recompute']}, {row['n_gpus']} GPUs"
        found.append(PublishedStep(name, sizes, tuple(layouts), float(row["step_time_s"])))
    return found


def published_layouts(path: Path = DATA / "published_layouts.csv") -> list[PublishedLayout]:
    """Rows of the file."""
    return [
        PublishedLayout(
            transformer(row),
            ParallelLayout(
                dp=int(row["dp"]),
                tp=int(row["tp"]),
                pp=int(row["pp"]),
                micro=int(row["micro_batch"]),
                batch=int(row["global_batch"]),
                sharding="optimizer",
                recompute=row["recompute"],
                sequence_parallel=False,
                flash=False,
                dropout=True,
                overlap=False,
                gradient_bytes=2,
                host_s=HOST_S,
            ),
            float(row["memory_gb"]) if row["memory_gb"] not in ("", "oom") else None,
            float(row["step_time_s"]) if row["step_time_s"] else None,
            row["memory_gb"] != "oom",
        )
        for row in table(path)
    ]


def table(path: Path) -> list[dict[str, str]]:
    """Rows of a file."""
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def transformer(row: dict[str, str]) -> Transformer:
    """The model of a row."""
    return Transformer(
        row["model"], int(row["layers"]), int(row["hidden"]), int(row["heads"]), int(row["vocab"]), int(row["seq"])
    )


def fitted(rows: Sequence[PublishedStep]) -> Efficiencies:
    """The two fractions with the least sum of squared logarithmic errors, by a grid that narrows five times."""
    matrix, memory, width = 0.8, 0.7, 0.16

    def loss(reached: Efficiencies) -> float:
        return sum(math.log(row.predicted(reached) / row.seconds) ** 2 for row in rows)

    for _ in range(5):
        steps = [width * i / 2 for i in range(-2, 3)]
        grid = [Efficiencies(min(1.0, matrix + i), min(1.0, memory + j)) for i in steps for j in steps]
        best = min(grid, key=loss)
        matrix, memory, width = best.matrix, best.memory, width / 2
    return Efficiencies(round(matrix, 3), round(memory, 3))


def without_each(
    rows: Sequence[PublishedStep], predict: Callable[[list[PublishedStep], PublishedStep], float]
) -> list[float]:
    """The relative error of each row, predicted by what was fitted to all others."""
    return [predict([other for other in rows if other is not row], row) / row.seconds - 1 for row in rows]


def constant_utilisation(others: Sequence[PublishedStep], row: PublishedStep) -> float:
    """The baseline: every step at the mean utilisation of the other rows."""
    mean = statistics.mean(_utilisation(other, other.seconds) for other in others)
    return row.seconds * _utilisation(row, row.seconds) / mean


def _utilisation(row: PublishedStep, seconds: float) -> float:
    layout = row.layouts[0]
    return row.model.model_flops(layout.batch) / (seconds * layout.gpus * A100.peak_tflops * 1e12)


def rank_correlation(one: Sequence[float], other: Sequence[float]) -> float:
    """Spearman's: the correlation of ranks, of values that are all different."""
    places = [[sorted(values).index(value) for value in values] for values in (one, other)]
    return statistics.correlation(*places)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", action="store_true", help="write a dated file into benchmarks/results")
    arguments = parser.parse_args()
    steps = published_steps()
    reached = fitted(steps)
    print(f"fitted to all rows: {reached}")
    errors = without_each(steps, lambda others, row: row.predicted(fitted(others)))
    baseline = without_each(steps, constant_utilisation)
    print(f"\n{'row':36} {'published':>9} {'fit':>8} {'left out':>9} {'constant MFU':>13}")
    for row, error, plain in zip(steps, errors, baseline, strict=True):
        fit = row.predicted(reached) / row.seconds - 1
        print(f"{row.name:36} {row.seconds:7.2f} s {fit:+8.1%} {error:+9.1%} {plain:+13.1%}")
    summary = {
        "left_out": {"mean": statistics.mean(map(abs, errors)), "worst": max(map(abs, errors))},
        "constant_mfu": {"mean": statistics.mean(map(abs, baseline)), "worst": max(map(abs, baseline))},
    }
    for name, figures in summary.items():
        print(f"{name}: mean absolute error {figures['mean']:.1%}, worst {figures['worst']:.1%}")
    layouts = layout_figures(reached)
    print(f"\n{'layout':60} {'s':>7} {'predicted':>9} {'GB':>5} {'predicted':>9}")
    for row in layouts.pop("rows"):
        measured = f"{row['seconds']:7.1f}" if row["seconds"] else "      –"
        memory = f"{row['memory_gb']:5.0f}" if row["memory_gb"] else ("    –" if row["fitted"] else "  oom")
        print(f"{row['layout']:60} {measured} {row['predicted_s']:9.1f} {memory} {row['predicted_gb']:9.1f}")
    for name, value in layouts.items():
        print(f"{name}: {value if isinstance(value, bool) else f'{value:.3f}'}")
    hosts = [
        {"host_ms": 1e3 * host_s, **{k: v for k, v in layout_figures(reached, host_s).items() if k.startswith("rank")}}
        for host_s in (0.0, 3.5e-3, HOST_S, 13e-3)
    ]
    for row in hosts:
        print(f"with {row['host_ms']:4.1f} ms for the host: rank correlation {row['rank_correlation']:.2f}")
    if arguments.save:
        rows = [
            {"row": row.name, "seconds": row.seconds, "left_out": error, "constant_mfu": plain}
            for row, error, plain in zip(steps, errors, baseline, strict=True)
        ]
        constants = {"matrix": reached.matrix, "memory": reached.memory, "links": reached.links}
        save_result(
            "planning",
            {
                "constants": constants,
                "steps": rows,
                "summary": summary,
                "layouts": layouts,
                "hosts": hosts,
            },
        )


def layout_figures(reached: Efficiencies, host_s: float = HOST_S) -> dict[str, Any]:
    """How the layouts of the other file are ranked, and what they are said to need."""
    rows: list[dict[str, Any]] = []
    for published in published_layouts():
        layout = replace(published.layout, host_s=host_s)
        rows.append(
            {
                "layout": layout.says,
                "seconds": published.seconds,
                "predicted_s": step_time(published.model, layout, OMNI_PATH, reached).total,
                "memory_gb": published.memory_gb,
                "predicted_gb": device_memory(published.model, layout).total / 1e9,
                "fitted": published.fitted,
                "batch": layout.batch,
            }
        )
    timed = [row for row in rows if row["seconds"]]
    a_sample = [(row["predicted_s"] / row["batch"], row["seconds"] / row["batch"]) for row in timed]
    memory = [abs(row["predicted_gb"] / row["memory_gb"] - 1) for row in rows if row["memory_gb"]]
    return {
        "rows": rows,
        "rank_correlation": rank_correlation([r["predicted_s"] for r in timed], [r["seconds"] for r in timed]),
        "rank_correlation_a_sample": rank_correlation(*zip(*a_sample, strict=True)),
        "ranked_first_against_best": min(a_sample)[1] / min(taken for _, taken in a_sample) - 1,
        "memory_median_error": statistics.median(memory),
        "memory_worst_error": max(memory),
        "out_of_memory_named": all((row["predicted_gb"] <= OMNI_PATH.memory_gb) == row["fitted"] for row in rows),
    }


if __name__ == "__main__":
    main()
