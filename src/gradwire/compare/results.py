"""What a comparison measured, and the figures that follow from it.

`Run` holds what one method did with one seed; `Comparison` all runs with the conditions they ran under. Both are
plain data, which `storage` writes and reads. Everything else here is derived from them and can be derived again:
`summarise` gives a `Row` a method, which the table on the terminal, the CSV and the report all show. What may be
concluded from the figures is for `verdict` to say.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from msgspec import Meta

from gradwire.core.checked import Read
from gradwire.core.errors import GradwireError

SCHEMA = 1

FP32 = "torch.fp32"
FLOOR = "torch.noop"
SIXTEEN_BIT = ("torch.fp16", "torch.bf16")
DENSE_BASELINES = (FP32, *SIXTEEN_BIT)
"""They send as much in every step, and their losses are the same whatever the link is."""


class ResultsError(GradwireError, ValueError):
    """Stored results that cannot be read, or that belong to another comparison."""


LARGEST = 1e100
"""No figure of a training is beyond it, and sums of smaller ones do not overflow."""

Number = Annotated[float, Meta(ge=-LARGEST, le=LARGEST)]
Amount = Annotated[float, Meta(ge=0, le=LARGEST)]
Whole = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Positive = Annotated[int, Meta(ge=1, le=(1 << 63) - 1)]

if TYPE_CHECKING:
    RunStatus = Literal["finished", "failed"]
    Measurement = float
else:

    class RunStatus(Read):
        """How a run ended."""

        @staticmethod
        def read(value: Any) -> str:
            """Return the value, if it is one of the two."""
            if value not in ("finished", "failed"):
                raise ValueError("Expected 'finished' or 'failed'")
            return value

    class Measurement(Read):
        """A loss or a metric: null stands for what was not finite, and what is beyond all reason counts as infinite."""

        @staticmethod
        def read(value: Any) -> float:
            """Return the number."""
            if value is None or value != value:
                return math.nan
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ValueError("Expected `float`")
            return float(value) if abs(value) <= LARGEST else math.inf if value > 0 else -math.inf


class Evaluation(NamedTuple):
    """The metric on held-out data after `steps` steps, `time_s` seconds of training in."""

    steps: Whole
    time_s: Amount
    value: Measurement


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
        between: of all that the ranks of a node sent together, what left the node by its link, framing included, the
            mean over nodes. 0 where each host has one rank: then it is `total`.
    """

    total: Number = 0.0
    framing: Number = 0.0
    payload: Number = 0.0
    buffers: Number = 0.0
    other: Number = 0.0
    setup: Number = 0.0
    between: Number = 0.0

    @property
    def through_link(self) -> float:
        """Bytes that went through the link of a host."""
        return self.between or self.total

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

    compute_s: Amount = 0.0
    encode_s: Amount = 0.0
    wait_s: Amount = 0.0
    codec_cpu_s: Amount = 0.0
    cpu_s: Amount = 0.0


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
        tx_bytes: bytes sent through a host's link after each step, framing included, the mean over hosts.
        evaluations: the metric along the way; the last one is at the end.
        wire: itemised bytes.
        split: itemised seconds.
        residual_norm: norm of what error feedback still owes at the end, where there is any.
        report: rank 0's `session.report().as_dict()` at the end; None for PyTorch's own hooks.
        conditions: the options and versions it ran under, compared before it is reused.
        line_cores: processor time of the network's delay line over the time of the run; None where there is none.
        line_missed: frames that the delay line was too slow to take.
        metric_values: the metric at the end of each held-out example, whose mean the last evaluation is; empty where
            the task gives one number for all.
        timed_steps: how many steps were made on the links and timed, where the others were made without a limit on the
            links: their `times_s` and `tx_bytes`, `wire` and `split` are estimated. None where all were.
        samples: that all ranks have trained on together; 0 in results of before this was counted.
        energy_j: joules that the whole machine used while the clock ran, estimated like `split` where not all steps
            were timed; None where it does not tell its power, and where ranks did not step together.
    """

    method: str
    seed: Whole
    status: RunStatus = "finished"
    reason: str = ""
    label: str = ""
    losses: list[Measurement] = field(default_factory=list[float])
    times_s: list[Amount] = field(default_factory=list[float])
    tx_bytes: list[Amount] = field(default_factory=list[float])
    evaluations: list[Evaluation] = field(default_factory=list[Evaluation])
    wire: Wire = Wire()
    split: Split = Split()
    residual_norm: Number | None = None
    report: dict[str, Any] | None = None
    conditions: dict[str, Any] = field(default_factory=dict[str, Any])
    line_cores: Amount | None = None
    line_missed: Whole = 0
    metric_values: list[Measurement] = field(default_factory=list[float])
    timed_steps: Positive | None = None
    samples: Whole = 0
    energy_j: Amount | None = None

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
    smoothing: Positive
    target: str | None
    runs: list[Run]
    tolerance: Amount = 0.005
    schema: Positive = SCHEMA

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
