"""What a request costs over each carrier: `python benchmarks/carriers.py [--before PATH] [--rounds 7] [--save]`.

A request is a push of one worker and the grant that it gets, the server's arithmetic included. One worker and one
server, in two processes of this machine, but for `local`. Printed is the median time of a request in microseconds, as
a median over rounds, and in brackets the fastest and the slowest round:

local      in one process
tcp        over the loopback interface
unix       over a Unix socket
shared     over a Unix socket, where long records lie in shared memory: as `processes.run` has it
ray        an actor; left out where Ray is not installed

With --before, PATH/src is measured too, in turns with this tree: its TCP (`Host`, `RemoteServers`) and its processes
(`shared`). Ratios are medians over rounds of this tree's time to the other's. Codec: none, float32.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

from common import save_result
from pages import markdown, write

HERE = Path(__file__).parent
SIZES = {8: 1500, 10**4: 1500, 10**6: 60}
"""Pushes of a round, by parameters."""
NOW, BEFORE = "now", "before"
CARRIERS = {NOW: ["local", "tcp", "unix", "shared", "ray"], BEFORE: ["tcp", "shared"]}


class Case(NamedTuple):
    """What is measured."""

    tree: str
    carrier: str
    numel: int


class Side:
    """A process that measures one tree."""

    def __init__(self, tree: str, source: Path) -> None:
        command = [sys.executable, str(HERE / f"carriers_{tree}.py")]
        environment = {**os.environ, "PYTHONPATH": str(source.resolve()), "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def microseconds(self, case: Case) -> float:
        """Have it measure."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{case.carrier} {case.numel} {SIZES[case.numel]}\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("microseconds "):
                return float(line.split()[1])
        raise RuntimeError(f"{case} failed: see above")

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)


def measure(before: Path | None, carriers: list[str], rounds: int) -> dict[Case, list[float]]:
    """Return the figure of each round; trees take turns within a round."""
    sides = {NOW: Side(NOW, HERE.parent / "src")}
    if before is not None:
        sides[BEFORE] = Side(BEFORE, before / "src")
    cases = [
        Case(tree, carrier, numel)
        for numel in SIZES
        for carrier in carriers
        for tree in sides
        if carrier in CARRIERS[tree]
    ]
    found: dict[Case, list[float]] = {case: [] for case in cases}
    for turn in range(rounds):
        for case in cases if turn % 2 else cases[::-1]:
            found[case].append(sides[case.tree].microseconds(case))
    for side in sides.values():
        side.close()
    return found


def ratio(found: dict[Case, list[float]], case: Case) -> float | None:
    """This tree's time to the other's; None where the other was not measured."""
    other = found.get(case._replace(tree=BEFORE))
    if case.tree == BEFORE or other is None:
        return None
    return statistics.median(now / then for now, then in zip(found[case], other, strict=True))


def rows(found: dict[Case, list[float]]) -> list[dict[str, Any]]:
    return [
        {
            **case._asdict(),
            "median_us": round(statistics.median(times), 1),
            "least_us": round(min(times), 1),
            "most_us": round(max(times), 1),
            "ratio": ratio(found, case),
        }
        for case, times in found.items()
    ]


def show(found: list[dict[str, Any]]) -> None:
    print(f"{'carrier':8s} {'parameters':>10s} {'tree':8s} {'microseconds':>12s} {'rounds':>20s} {'ratio':>6s}")
    for row in found:
        spread = f"({row['least_us']:,.0f} to {row['most_us']:,.0f})"
        told = "" if row["ratio"] is None else f"{row['ratio']:6.2f}"
        print(
            f"{row['carrier']:8s} {row['numel']:10,d} {row['tree']:8s} {row['median_us']:12,.0f} {spread:>20s} {told}"
        )


NAMES = {"local": "one process", "tcp": "TCP", "unix": "Unix socket", "shared": "shared memory", "ray": "Ray"}


def page_table(found: list[dict[str, Any]]) -> str:
    """What docs/asynchronous.md has."""
    lines: list[list[str]] = []
    for carrier, name in NAMES.items():
        own = [row for row in found if (row["carrier"], row["tree"]) == (carrier, NOW)]
        if own:
            lines.append([name, *(f"{row['median_us']:,.0f}" for row in own)])
        if any(row["ratio"] for row in own):
            lines.append([f"{name}, to version 0.2", *(f"{row['ratio']:.2f}x" for row in own)])
    return markdown(["", *(f"{numel:,}" for numel in SIZES)], lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="a checkout of the tree before")
    parser.add_argument("--carriers", nargs="+", choices=CARRIERS[NOW], default=CARRIERS[NOW])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--save", action="store_true", help="write a dated file, and what docs/ has of it")
    options = parser.parse_args()
    carriers = [name for name in options.carriers if name != "ray" or importlib.util.find_spec("ray")]
    load = os.getloadavg()[0]
    found = rows(measure(options.before, carriers, options.rounds))
    show(found)
    if options.save:
        path = save_result("carriers", {"rounds": options.rounds, "load_before": load, "requests": found})
        write("asynchronous.md", "carriers", f"{page_table(found)}\n\nFigures: `benchmarks/results/{path.name}`.")


if __name__ == "__main__":
    main()
