"""What a step was spent on: the critical path of each rank, and by whom each of its waits was caused."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from gradwire.drivers.traced import Span, covered_s, in_flight_s
from gradwire.profiling.records import RankRecord, StepRecord
from gradwire.profiling.tensors import TensorShares, by_method, tensor_shares
from gradwire.topology import MeasuredPair

KINDS = ("data", "compute", "encode", "decode", "transfer", "wait")
"""What a step is spent on. "wait" is for ranks that come later, "transfer" for bytes once all ranks are there."""


@dataclass(frozen=True)
class RankShares:
    """What a step of one rank was spent on, in seconds, the mean over steps.

    Attributes:
        step_s: a step.
        seconds: on its critical path, by kind, see `KINDS`.
        loop: of the training loop's own spans, less what it waited in them.
        waited_for: by the rank that came last: the parts of "wait".
        in_flight_s: with a collective under way.
        exposed_s: of these, what the training loop waited through.
        sent_bytes: that were handed over.
    """

    rank: int
    host: str
    step_s: float
    seconds: Mapping[str, float]
    loop: Mapping[str, float]
    waited_for: Mapping[int, float]
    in_flight_s: float
    exposed_s: float
    sent_bytes: float

    @property
    def accounted(self) -> float:
        """The share of the step that the critical path explains."""
        return sum(self.seconds.values()) / self.step_s if self.step_s > 0 else 1.0

    @property
    def efficiency(self) -> float:
        """Overlap efficiency: the share of the time with a collective under way in which the training loop went on."""
        return 1.0 - self.exposed_s / self.in_flight_s if self.in_flight_s > 0 else 1.0


@dataclass(frozen=True)
class Account:
    """What steps were spent on.

    Attributes:
        steps: how many were looked at.
        ranks: of each rank whose record there is.
        missing: ranks whose records there are not.
        unfinished: ranks that were killed in mid-profile, and the last step that each of them had written.
        methods: of the sessions.
        links: between pairs of ranks, where they were measured.
        tensors: those of which most is sent first.
    """

    steps: int
    ranks: Sequence[RankShares]
    missing: Sequence[int]
    methods: Sequence[str]
    links: Sequence[MeasuredPair] = ()
    tensors: Sequence[TensorShares] = ()
    unfinished: Mapping[int, int] = field(default_factory=dict[int, int])

    def as_dict(self) -> dict[str, Any]:
        """Return all figures as plain data, which JSON can hold; derived ones such as "efficiency" among them."""
        ranks = [{**asdict(rank), "accounted": rank.accounted, "efficiency": rank.efficiency} for rank in self.ranks]
        tensors = [{**asdict(tensor), "ratio": tensor.ratio} for tensor in self.tensors]
        methods = [{**asdict(method), "ratio": method.ratio} for method in by_method(self.tensors)]
        return {**asdict(self), "ranks": ranks, "tensors": tensors, "by_method": methods}

    @property
    def step_s(self) -> float:
        """A step of the slowest rank."""
        return max((rank.step_s for rank in self.ranks), default=0.0)

    def caused_s(self, rank: int) -> float:
        """What the others waited for a rank in a step, in the mean over them."""
        others = [shares.waited_for.get(rank, 0.0) for shares in self.ranks if shares.rank != rank]
        return statistics.fmean(others) if others else 0.0

    def compute_ratio(self, rank: int) -> float:
        """How many times as long as the median of the others a rank computes and reads data."""
        busy = {each.rank: each.seconds["compute"] + each.seconds["data"] for each in self.ranks}
        others = [busy_s for other, busy_s in busy.items() if other != rank]
        usual_s = statistics.median(others) if others else 0.0
        return busy[rank] / usual_s if usual_s > 0 else 1.0


class WaitedWire(NamedTuple):
    """One collective of a rank, and its wait for the result."""

    wait: Span
    wire: Span


def critical_path(step: StepRecord) -> list[Span]:
    """Return disjoint spans: what the training loop did, and where it waited, what communication did meanwhile."""
    path = list[Span]()
    for span in step.loop:
        path += _without(span, step.waits)
    for outer in step.waits:
        for spans in step.communication:
            inside = [_clipped(span, outer) for span in spans if span.kind != "wire"]
            path += [span for span in inside if span.length_s > 0]
    return sorted(path, key=lambda span: span.began_s)


def _clipped(span: Span, outer: Span) -> Span:
    return span._replace(began_s=max(span.began_s, outer.began_s), ended_s=min(span.ended_s, outer.ended_s))


def _without(span: Span, holes: Iterable[Span]) -> Iterator[Span]:
    """The parts of a span that lie in none of the holes, which are in order."""
    began_s = span.began_s
    for hole in holes:
        if hole.ended_s <= began_s or hole.began_s >= span.ended_s:
            continue
        if hole.began_s > began_s:
            yield span._replace(began_s=began_s, ended_s=hole.began_s)
        began_s = max(began_s, hole.ended_s)
    if began_s < span.ended_s:
        yield span._replace(began_s=began_s)


def wires_of(spans: Sequence[Span]) -> list[WaitedWire]:
    """The collectives of a session's step, in the order in which they began, which is alike on all ranks."""
    waits = [span for span in spans if span.kind == "wait"]
    wires = [span for span in spans if span.kind == "wire"]
    return sorted(map(WaitedWire, waits, wires), key=lambda each: each.wire.began_s)


def common_steps(records: Sequence[RankRecord], skip: int) -> list[int]:
    """The numbers of the steps that all ranks have kept, from `skip` on where there are such."""
    indices = set.intersection(*({step.index for step in record.steps} for record in records)) if records else set()
    return sorted(index for index in indices if index >= skip) or sorted(indices)


def account(records: Sequence[RankRecord], skip: int = 0) -> Account:
    """Return what the steps that all ranks have kept were spent on.

    Args:
        records: of the ranks of one run, see `read_records`.
        skip: first steps that are left out, as connections and caches are cold in them.
    """
    kept = common_steps(records, skip)
    moved = {record.rank: record.steps_on_common_clock() for record in records}
    sums = {rank: _Sums() for rank in moved}
    for index in kept:
        wires = {rank: [wires_of(spans) for spans in steps[index].communication] for rank, steps in moved.items()}
        began = _beginnings(wires)
        for rank, steps in moved.items():
            sums[rank].add(rank, steps[index], wires[rank], began)
    ranks = [sums[record.rank].shares(record, len(kept)) for record in records]
    there, size = {record.rank for record in records}, records[0].world_size if records else 0
    methods = records[0].methods if records else []
    links = records[0].links if records else []
    missing = [rank for rank in range(size) if rank not in there]
    unfinished = {record.rank: record.steps[-1].index for record in records if record.unfinished and record.steps}
    return Account(len(kept), ranks, missing, methods, links, tensor_shares(records), unfinished)


_Beginnings = Mapping[tuple[int, int], Mapping[int, float]]
"""When each rank began a collective, by the session's place and the number of the collective in the step."""


def _beginnings(wires: Mapping[int, Sequence[Sequence[WaitedWire]]]) -> _Beginnings:
    """When each rank began each collective of a step."""
    began: defaultdict[tuple[int, int], dict[int, float]] = defaultdict(dict)
    for rank, sessions in wires.items():
        for place, of_session in enumerate(sessions):
            for number, each in enumerate(of_session):
                began[place, number][rank] = each.wire.began_s
    return began


class _Sums:
    """Sums over steps of one rank."""

    def __init__(self) -> None:
        self._seconds = dict.fromkeys(KINDS, 0.0)
        self._loop: defaultdict[str, float] = defaultdict(float)
        self._waited_for: defaultdict[int, float] = defaultdict(float)
        self._step_s = self._in_flight_s = self._exposed_s = 0.0
        self._sent = 0

    def add(self, rank: int, step: StepRecord, wires: Sequence[Sequence[WaitedWire]], began: _Beginnings) -> None:
        """Count a step.

        Args:
            rank: whose step it is.
            step: on the common clock.
            wires: its collectives, session by session.
            began: when each rank began each of them.
        """
        self._step_s += step.length_s
        for span in critical_path(step):
            if span.kind == "train":
                self._loop[span.what] += span.length_s
                self._seconds["data" if span.what == "data" else "compute"] += span.length_s
            elif span.kind in ("encode", "decode"):
                self._seconds[span.kind] += span.length_s
        for place, of_session in enumerate(wires):
            for number, each in enumerate(of_session):
                self._sent += each.wire.nbytes
                for outer in step.waits:
                    self._wait(rank, _clipped(each.wait, outer), each.wire.peers, began[place, number])
            under_way = [each.wire for each in of_session]
            self._in_flight_s += in_flight_s(under_way)
            self._exposed_s += sum(covered_s(under_way, outer) for outer in step.waits)

    def _wait(self, rank: int, wait: Span, peers: Sequence[int], began: Mapping[int, float]) -> None:
        """Cut a wait where the last of the ranks it was for had come: before it is for that rank, then for bytes."""
        if wait.length_s <= 0:
            return
        there = {peer: began_s for peer, began_s in began.items() if not peers or peer in peers}
        latest = max(there, key=lambda peer: there[peer]) if there else rank
        for_rank_s = 0.0
        if latest != rank:
            for_rank_s = min(max(there[latest] - wait.began_s, 0.0), wait.length_s)
        if for_rank_s > 0:
            self._waited_for[latest] += for_rank_s
        self._seconds["wait"] += for_rank_s
        self._seconds["transfer"] += wait.length_s - for_rank_s

    def shares(self, record: RankRecord, steps: int) -> RankShares:
        """The means."""
        steps = max(1, steps)
        return RankShares(
            record.rank,
            record.host,
            self._step_s / steps,
            {kind: seconds / steps for kind, seconds in self._seconds.items()},
            {what: seconds / steps for what, seconds in self._loop.items()},
            {rank: seconds / steps for rank, seconds in self._waited_for.items()},
            self._in_flight_s / steps,
            self._exposed_s / steps,
            self._sent / steps,
        )
