"""What traces of `torch.profiler` tell of overlap: communication and computation at once, idle time, kernels by kind.

All figures are unions of intervals of one rank by its own clock, as Holistic Trace Analysis has them for NCCL (its page
"Communication Computation Overlap"). No moment of one rank is compared with one of another, so clocks that differ
change nothing, and traces need not be aligned.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from gradwire.core.figures import NOTHING, listed, si_bytes
from gradwire.drivers.traced import Span, in_flight_s
from gradwire.profiling.torch_trace import TorchTrace

MOST_NAMED = 8
"""Kernels or operators of the table: those that took longest."""

LONGEST_NAME = 60


@dataclass(frozen=True)
class CollectiveShares:
    """All collectives of a name, on one rank.

    Attributes:
        calls: how many.
        seconds: summed over calls; where several are under way at once, each counts.
        nbytes: that the rank gave; None where the trace does not tell.
    """

    calls: int
    seconds: float
    nbytes: int | None


@dataclass(frozen=True)
class TorchShares:
    """What the time of a rank's trace was spent on, in seconds, each moment counted once.

    Attributes:
        whole_s: from the first kernel, operator or collective to the end of the last one.
        compute_s: computing. On a CPU copies are a part of it.
        communication_s: with a collective under way.
        at_once_s: both.
        copies_s: copying memory.
        idle_s: none of these.
        collectives: by name.
        own_s: by name of a kernel or an operator, less those within it.
    """

    rank: int
    host: str
    on_gpu: bool
    whole_s: float
    compute_s: float
    communication_s: float
    at_once_s: float
    copies_s: float
    idle_s: float
    collectives: Mapping[str, CollectiveShares]
    own_s: Mapping[str, float]

    @property
    def overlap(self) -> float | None:
        """|communication and computation at once| / |communication|; None without communication."""
        return self.at_once_s / self.communication_s if self.communication_s > 0 else None

    @property
    def exposed_s(self) -> float:
        """Communication while nothing is computed."""
        return self.communication_s - self.at_once_s


@dataclass(frozen=True)
class TorchAccount:
    """What traces of `torch.profiler` tell.

    Attributes:
        steps: marked in the trace of the first rank; 0 for none.
        backend: of the default process group.
        world_size: how many ranks trained.
        ranks: those whose traces there are.
    """

    steps: int
    backend: str
    world_size: int
    ranks: Sequence[TorchShares]

    def as_dict(self) -> dict[str, Any]:
        """Return all figures as plain data, which JSON can hold; "overlap", "exposed_s" and "missing" among them."""
        ranks = [{**asdict(rank), "overlap": rank.overlap, "exposed_s": rank.exposed_s} for rank in self.ranks]
        return {**asdict(self), "ranks": ranks, "missing": self.missing}

    @property
    def missing(self) -> list[int]:
        """The ranks whose traces there are not."""
        there = {rank.rank for rank in self.ranks}
        return [rank for rank in range(self.world_size) if rank not in there]


def torch_account(traces: Sequence[TorchTrace]) -> TorchAccount:
    """Return what the time of traces was spent on, see `read_torch_traces`."""
    first = traces[0]
    return TorchAccount(first.steps, first.backend, first.world_size, [shares_of(trace) for trace in traces])


def shares_of(trace: TorchTrace) -> TorchShares:
    """Return what the time of one trace was spent on.

    >>> from pathlib import Path
    >>> wire, work = Span("wire", "all_reduce", 1.0, 4.0, 100), Span("train", "aten::mm", 0.0, 2.0)
    >>> trace = TorchTrace(Path("t.json"), 0, 2, "gloo", "host", False, [wire], [work], [], {}, 0, 0.0, 4.0)
    >>> shares_of(trace).at_once_s, shares_of(trace).exposed_s, shares_of(trace).idle_s
    (1.0, 2.0, 0.0)
    """
    compute_s, communication_s = in_flight_s(trace.computation), in_flight_s(trace.collectives)
    either_s = in_flight_s([*trace.computation, *trace.collectives])
    whole_s = trace.ended_s - trace.began_s
    return TorchShares(
        trace.rank,
        trace.host,
        trace.on_gpu,
        whole_s,
        compute_s,
        communication_s,
        compute_s + communication_s - either_s,
        in_flight_s(trace.copies),
        max(0.0, whole_s - in_flight_s([*trace.computation, *trace.collectives, *trace.copies])),
        _by_name(trace.collectives),
        trace.own_s,
    )


def _by_name(collectives: Sequence[Span]) -> dict[str, CollectiveShares]:
    groups: defaultdict[str, list[Span]] = defaultdict(list)
    for span in collectives:
        groups[span.what].append(span)
    return {
        name: CollectiveShares(
            len(spans),
            sum(span.length_s for span in spans),
            None if any(span.nbytes < 0 for span in spans) else sum(span.nbytes for span in spans),
        )
        for name, spans in sorted(groups.items())
    }


def torch_summary(found: TorchAccount) -> str:
    """Return tables in milliseconds: all ranks, their collectives, and the kernels or operators that took longest."""
    steps = f", {found.steps} step{'s' * (found.steps > 1)}" if found.steps else ""
    backend = found.backend or "no process group"
    lines = [f"torch.profiler, {backend}, {len(found.ranks)} of {found.world_size} ranks{steps}"]
    headings = ("whole", "compute", "comm", "at once", "exposed", "copies", "idle", "overlap")
    lines += ["", f"{'ms':10s} " + " ".join(f"{heading:>9s}" for heading in headings)]
    for rank in found.ranks:
        times = (rank.whole_s, rank.compute_s, rank.communication_s, rank.at_once_s, rank.exposed_s, rank.copies_s)
        cells = " ".join(f"{1e3 * seconds:9.1f}" for seconds in (*times, rank.idle_s))
        overlap = NOTHING if rank.overlap is None else f"{rank.overlap:.0%}"
        lines.append(f"{f'rank {rank.rank}':10s} {cells} {overlap:>9s}")
    lines += [*_collectives(found), *_longest(found), "", *_remarks(found)]
    return "\n".join(lines).rstrip()


def _collectives(found: TorchAccount) -> Iterator[str]:
    """A line for each rank and name of a collective."""
    if any(rank.collectives for rank in found.ranks):
        yield f"\n{'collective':20s} {'rank':>5s} {'calls':>7s} {'ms':>9s} {'given':>9s}"
    for name in sorted({name for rank in found.ranks for name in rank.collectives}):
        for rank in found.ranks:
            if (of := rank.collectives.get(name)) is not None:
                yield f"{name:20s} {rank.rank:5d} {of.calls:7d} {1e3 * of.seconds:9.1f} {si_bytes(of.nbytes):>9s}"


def _longest(found: TorchAccount) -> Iterator[str]:
    """What took longest, the mean over ranks."""
    names = {name for rank in found.ranks for name in rank.own_s}
    means = {name: statistics.fmean(rank.own_s.get(name, 0.0) for rank in found.ranks) for name in names}
    if means:
        yield f"\n{'kernel' if found.ranks[0].on_gpu else 'operator':{LONGEST_NAME}s} {'ms':>9s}"
    for name in sorted(means, key=lambda name: (-means[name], name))[:MOST_NAMED]:
        shown = name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME - 3]}..."
        yield f"{shown:{LONGEST_NAME}s} {1e3 * means[name]:9.1f}"


def _remarks(found: TorchAccount) -> Iterator[str]:
    """What the figures leave out."""
    if found.missing:
        yield f"The traces of ranks {listed(found.missing)} are missing."
    if any(shares.nbytes is None for rank in found.ranks for shares in rank.collectives.values()):
        yield "Some bytes are unknown: Gloo's are in a trace only with torch.profiler.profile(record_shapes=True)."
    if "nccl" in found.backend and not all(rank.on_gpu for rank in found.ranks):
        yield (
            "NCCL communicates on a GPU, and there is none in the trace: profile with "
            "activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]."
        )
    elif found.world_size > 1 and not all(rank.collectives for rank in found.ranks):
        quiet = listed([rank.rank for rank in found.ranks if not rank.collectives])
        yield (
            f"No collective of Gloo or NCCL is in the trace of rank {quiet}: those of other threads of Python than the "
            "profiled one are not, as those of a session of gradwire."
        )
