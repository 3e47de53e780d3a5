"""Workers that do not wait: `python benchmarks/asynchronous.py [dc] [hogwild] [straggler] [--seeds 3] [--save]`.

dc         DC-ASGD beside plain ASGD at a staleness of 8 to 32, in the simulator, on a convex problem: the mean of a
           Gaussian of variance 1 in 20 dimensions, from one example a push. At the optimum, squared gradients are the
           Hessian on average. Printed is the loss above the optimum, mean over the last 500 of 2,000 pushes; it is
           2.0 at the start.
hogwild    Sparse logistic regression by 1 and by 2 processes without locks, in turns: seconds until the loss that both
           have at their ends. Compilation, start and evaluation are off the clock. Processor time tells what the
           second process costs where a busy machine makes seconds worthless.
straggler  Digits by three workers, of which one is 4 times slower, with a server and with DistributedDataParallel over
           Gloo, in turns: seconds from the first update until the mean loss of the last 60 batches is 0.25. Model,
           batches, rate and slowness are the same.

Saved files and lines have the load average from before each run: beside other work, times of several processes on few
cores are worth little.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch

import delay_compensation
import hogwild_speed
import straggler
from common import save_result
from pages import DOCS, write

PARTS: dict[str, Callable[[int], dict[str, Any]]] = {
    "dc": delay_compensation.dc,
    "hogwild": hogwild_speed.hogwild_speed,
    "straggler": straggler.straggler,
}
TABLES: dict[str, Callable[[dict[str, Any]], str]] = {
    "dc": delay_compensation.table,
    "hogwild": hogwild_speed.table,
    "straggler": straggler.table,
}


def save(name: str, found: dict[str, Any], seeds: int) -> None:
    """Write a dated file, the table of the page and, for dc, the plot."""
    path = save_result(f"asynchronous_{name}", {"seeds": seeds, name: found})
    write("asynchronous.md", name, f"{TABLES[name](found)}\n\nFigures: `benchmarks/results/{path.name}`.")
    if name == "dc":
        (DOCS / "staleness.svg").write_text(delay_compensation.plot())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], help="all by default")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--save", action="store_true", help="write dated files into benchmarks/results, and what docs/ has of them"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    for name in options.parts or PARTS:
        found = PARTS[name](options.seeds)
        if options.save:
            save(name, found, options.seeds)


if __name__ == "__main__":
    main()
