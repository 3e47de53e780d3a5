"""Write the tables of docs/cases.md, between marks, from the case studies, calculators and estimates themselves.

`python tools/cases_page.py` writes them anew; a test holds that the page and the code agree.
"""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from gradwire.cases import (
    ASSUMPTIONS,
    CALCULATORS,
    MEMORY,
    STUDIES,
    SYMBOLS,
    CaseStudy,
    case_study,
    compressed_steps,
    declared_delta,
    local_steps,
    savings,
    spoken,
)
from gradwire.core.figures import si_bytes, spoken_seconds
from gradwire.core.link import Link
from gradwire.planning import model
from marks import replaced

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "cases.md"
RESULTS = ROOT / "benchmarks" / "results"
QUALITY = RESULTS / "quality_2026-11-21.json"
TRAINED = RESULTS / "compare_bytes_100mbit_ten_methods_2026-11-21.csv"
PLAIN = RESULTS / "convergence_2026-11-25.json"
WORTH = 0.0013
"""Held-out loss that a step of byte-GPT is worth after 150 steps, of docs/building/log/synchronisation.md."""
WINDOWS = ((2, 165, 2.403), (4, 165, 2.416), (8, 165, 2.460))
"""Windows of `int4` on four ranks, steps and held-out loss, of the same table; fp32 ends at 2.403 after 150."""
FP32 = (150, 2.403)


def table(head: Sequence[str], rows: Iterable[Sequence[str]], right: Iterable[int] = ()) -> str:
    """A table of Markdown; columns named by their number are set to the right."""
    marks = ["--:" if place in tuple(right) else "---" for place in range(len(head))]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [head, marks, *rows])


def study(found: CaseStudy) -> str:
    """The tables of a case study."""
    figures: list[list[str]] = []
    for figure in found.figures:
        published, off = "", ""
        if figure.published is not None and figure.error is not None:
            published, off = spoken(figure.published, figure.unit), f"{figure.error:+.1%}"
        figures.append([figure.name, spoken(figure.value, figure.unit), published, off, figure.formula, figure.source])
    volumes = [
        [each.kind, si_bytes(each.nbytes), str(each.ranks), "network" if each.leaves else "node", each.formula]
        for each in found.volumes
    ]
    memory = [[name, f"{nbytes / 1e9:.1f}", MEMORY[name]] for name, nbytes in found.memory._asdict().items() if nbytes]
    memory.append(["total", f"{found.memory.total / 1e9:.1f}", f"of {found.hardware.memory_gb:g}; not published"])
    parts = [f"{name} {spoken_seconds(seconds)}" for name, seconds in found.time._asdict().items() if seconds]
    heading = ["figure", "by formula", "published", "off by", "formula", "published where"]
    blocks = [
        f"{found.title}. Volumes, memory and time below are those of {found.layout.gpus} {found.hardware.name}, "
        f"`{found.layout.says}`.",
        table(heading, figures, right=(1, 2, 3)),
        table(["sent by a GPU in a step", "bytes", "ranks", "over a", "formula"], volumes, right=(1, 2)),
        table(["memory of the fullest GPU", "GB", "formula"], memory, right=(1,)),
        f"Parts of the step (formulas: [plan](plan.md#step-time)): {', '.join(parts)}; total "
        f"{spoken_seconds(found.time.total)}.",
        "\n".join(f"- {assumption}" for assumption in found.assumptions),
    ]
    return "\n\n".join(blocks)


def symbols() -> str:
    """What the letters of formulas stand for."""
    return table(["symbol", "meaning"], SYMBOLS.items())


def calculators() -> str:
    """What each setting saves for GPT-2 on four ranks with links of 1 Gbit/s."""
    rows = [
        [row.setting, f"`{row.spec}`", si_bytes(row.nbytes), spoken_seconds(row.link_s), row.formula]
        for name in CALCULATORS
        for row in savings(name, model("gpt2"), 4, Link(1e-4, 8e-9))
    ]
    return table(["setting", "method", "bytes", "on the link", "formula of the bytes"], rows, right=(2, 3))


def compression() -> str:
    """Compressed SGD: the theorem with the declared and with the measured delta, beside runs of byte-GPT."""
    measured = json.loads(QUALITY.read_text(encoding="utf-8"))["tasks"]["bytes"]["methods"]
    with TRAINED.open(encoding="utf-8", newline="") as file:
        runs = {row["method"]: row for row in csv.DictReader(file)}
    base = _steps(runs["torch:fp32"])
    rows: list[list[str]] = []
    for spec in ("int4", "powersgd:8,factors=fp16", "int2:64", "sign:64", "topk:0.05+int8"):
        declared = declared_delta(spec)
        kept = measured.get(spec) or measured[spec.split(":")[0]]
        delta = min(kept[stage]["contraction"] for stage in ("early", "middle", "late"))
        assert declared is not None
        by_theory = [compressed_steps(each, round(base)).factor for each in (declared, delta)]
        took = runs[spec]
        reached = took["reached"] == "3"
        real = f"{_steps(took) / base:.2f}" if reached else f"above {150 / base:.2f}, not reached"
        rows.append(
            [f"`{spec}`", f"{declared:.2g}", f"{by_theory[0]:,.0f}", f"{delta:.2f}", f"{by_theory[1]:.2f}", real]
        )
    head = ["method", "delta declared", "times the steps", "delta measured", "times the steps", "measured"]
    return table(head, rows, right=range(1, 6))


def _steps(row: Mapping[str, str]) -> float:
    """Steps to the target of a comparison."""
    return float(row["target_s"]) / float(row["step_ms"]) * 1e3


def plain() -> str:
    """Both theorems beside runs of SGD without momentum, with the kappa that was measured."""
    found = json.loads(PLAIN.read_text(encoding="utf-8"))
    rows: list[list[str]] = []
    for row in found["rows"]:
        real = _measured(row["steps"], found["baselines"])
        delta = "" if row["delta"] is None else f"{row['delta']:.2f}"
        rows.append([f"`{row['what']}`", delta, f"{row['theory']:,.1f}", real])
    return table(["method", "delta measured", "times the steps, by theory", "measured"], rows, right=(1, 2, 3))


def _measured(steps: Sequence[int | None], bases: Sequence[Mapping[str, float]]) -> str:
    """Steps of a method over those of plain SGD with the same seed, the mean and the range over seeds."""
    ratios = [one / base["reached"] for one, base in zip(steps, bases, strict=True) if one is not None]
    if len(ratios) < len(bases):
        return f"not reached with {len(bases) - len(ratios)} seeds of {len(bases)}"
    return f"{sum(ratios) / len(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def windows() -> str:
    """Local SGD: the theorem beside runs of byte-GPT."""
    steps, end = FP32
    rows = [
        [
            f"`local:{every},outer=int4`",
            f"{local_steps(every, 4, steps).factor:.1f}",
            f"{(made + (loss - end) / WORTH) / steps:.2f}",
        ]
        for every, made, loss in WINDOWS
    ]
    return table(["method", "times the steps, by theory", "measured"], rows, right=(1, 2))


def assumptions() -> str:
    """What the estimates rest on."""
    return "\n".join(f"- {assumption}" for assumption in ASSUMPTIONS)


def blocks() -> Mapping[str, Callable[[], str]]:
    """What stands between each pair of marks."""
    tables = {
        "symbols": symbols,
        "calculators": calculators,
        "assumptions": assumptions,
        "compression": compression,
        "windows": windows,
        "plain": plain,
    }
    return {**tables, **{name: lambda name=name: study(case_study(name)) for name in STUDIES}}


def page(text: str) -> str:
    """The page with all that stands between marks written anew."""
    for mark, written in blocks().items():
        text = replaced(text, mark, written())
    return text


def main() -> int:
    """Write the page."""
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
