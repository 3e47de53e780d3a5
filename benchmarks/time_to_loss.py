"""Draw the training loss of each method of a comparison against time: docs/time_to_loss.svg.

usage: time_to_loss.py compare-report/results.json
"""

from __future__ import annotations

import sys
from pathlib import Path

from gradwire.compare import storage
from gradwire.compare.crossover import measured_rate
from gradwire.compare.figures import smooth
from gradwire.compare.results import FLOOR, Comparison
from gradwire.compare.verdict import bandwidth
from pages import DOCS
from plots import Line, Panel, figure


def plot(comparison: Comparison) -> str:
    """The drawing, of each method's first seed. Losses are smoothed as in the comparison's table.

    The axis of time is logarithmic, since methods differ by more than five times. The run without communication is left
    out: each of its ranks trains alone, so its loss is not that of one model.
    """
    lines = [
        Line(run.method, list(zip(run.times_s, smooth(run.losses, comparison.smoothing), strict=True)), dots=False)
        for run in comparison.runs
        if run.method != FLOOR and run.seed == 0 and run.status == "finished" and run.losses
    ]
    rate = measured_rate(comparison)
    links = comparison.options["rate"] if rate is None else bandwidth(rate)
    return figure(
        "Training loss against time, one line for each method",
        [Panel(f"Training loss against time, links of {links}", "seconds", lines, log_x=True, low=2.0)],
    )


def main() -> None:
    """Read the stored results and write the drawing."""
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    (DOCS / "time_to_loss.svg").write_text(plot(storage.load(Path(sys.argv[1]))))


if __name__ == "__main__":
    main()
