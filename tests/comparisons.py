"""Comparisons made by hand, whose figures are known with nothing run; and someone who watches a real one."""

from __future__ import annotations

from typing import Any

from gradwire.compare.results import Comparison, Evaluation, Run, Split, Wire


def run(
    method: str,
    seed: int = 0,
    *,
    step_s: float = 1.0,
    losses: tuple[float, ...] = (4, 3, 2, 1),
    metric: float | None = None,
    sent: float = 100.0,
) -> Run:
    """A run of a step a loss; half of its time computes, a tenth encodes, the rest waits."""
    steps = len(losses)
    times = [step_s * (i + 1) for i in range(steps)]
    return Run(
        method,
        seed,
        label=f"{method} in words",
        losses=[float(loss) for loss in losses],
        times_s=times,
        tx_bytes=[sent * (i + 1) for i in range(steps)],
        evaluations=[
            Evaluation(min(2, steps), times[min(2, steps) - 1], 80.0),
            Evaluation(steps, times[-1], 90.0 + seed if metric is None else metric),
        ],
        wire=Wire(sent * steps, framing=0.1 * sent * steps, payload=0.88 * sent * steps, other=0.02 * sent * steps),
        split=Split(0.5 * times[-1], 0.1 * times[-1], 0.4 * times[-1], 0.2 * times[-1], times[-1]),
    )  # fmt: skip


def failed(method: str, seed: int = 0, reason: str = "rank 1 ended with status 1") -> Run:
    """A run that failed."""
    return Run(method, seed, status="failed", reason=reason)


def comparison(*runs: Run, target: str | None = None, hosts: int = 2, **changes: Any) -> Comparison:
    """Runs under conditions that do not matter, unless `changes` are made to them."""
    made: dict[str, Any] = {
        "task": {"name": "toy", "description": "a toy", "metric_name": "score", "higher_is_better": True},
        "options": {"hosts": hosts, "rate": "100mbit", "steps": 4, "minutes": None, "bucket_mb": 25.0},
        "environment": dict.fromkeys(
            ("network", "processor", "gradwire", "torch", "python", "system", "created", "command"), "x"
        ),
        "smoothing": 1,
        "target": target,
        "runs": list(runs),
    }
    return Comparison(**(made | changes))


class Silent:
    """Watches a comparison, and keeps which runs began and finished."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.finished: list[Run] = []

    def begin(self, plan: object, network: str, kept: object) -> None: ...

    def start(self, method: str, seed: int) -> None:
        self.begun.append(f"{method} {seed}")

    def news(self, method: str, seed: int, news: object) -> None: ...

    def finish(self, run: Run) -> None:
        self.finished.append(run)
