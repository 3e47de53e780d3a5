"""Real training: programs over `torch.distributed`.

`Engine` runs a plan's waves over a process group. It is told of gradients as they come (`deliver`) and performs
collectives in one static order: waves in planned order, two in flight, so that one is encoded while the other's
bytes move. The order comes from the programs alone, never from timing, so ranks cannot disagree on it.

    start 0, start 1, advance 0, advance 1, ... where a wave ends, the next starts

All of a step's `Agree`s travel as one collective after the last wave, and so do its `Total`s before them. New states
are kept aside until the step is known to be good (`settle`), which on a GPU is found out at the next step and costs no
waiting inside this one.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.core.collective import Agree, AllGather, AllReduce, AllToAll, Axis, Collective, SendRecv, Total
from gradwire.core.errors import ConnectionLost
from gradwire.core.grain import Grain
from gradwire.core.state import Leaf, State, walk
from gradwire.drivers.coalesce import Batch, add_grains, add_ranks, coalesce, sum_of, sums_to_send
from gradwire.drivers.cost import sent_bytes, wire_bytes
from gradwire.drivers.groups import deadline_of, destroy, new_group
from gradwire.drivers.plan import Plan, Unit, Wave
from gradwire.reducers.base import Program, Reduced, Step, advance

_Parked = TypeVar("_Parked", Agree, Total)

WINDOW = 2
SMALL_ROW_BYTES = 1 << 16
LARGE_ROWS_BYTES = 1 << 19


class Pending(Protocol):
    """A collective under way."""

    def wait(self) -> Tensor:
        """Return the result: wait for it on a CPU, order the stream behind it on a GPU."""
        ...


@dataclass(frozen=True, eq=False)
class _Started:
    works: Sequence[dist.Work]
    result: Tensor
    what: str
    began: float

    def wait(self) -> Tensor:
        try:
            for work in self.works:
                work.wait()
        except RuntimeError as error:
            raise ConnectionLost(self.what, time.monotonic() - self.began, error) from error
        return self.result


def run_program(program: Program, transport: GroupTransport) -> Reduced:
    """Run one program by itself to its end: what tests, benchmarks and one-off reductions want."""
    answer: Tensor | None = None
    while not isinstance(turn := advance(program, answer), Reduced):
        (batch,) = coalesce([(0, turn)])
        (answer,) = batch.split(transport.issue(batch).wait())
        answer = answer.bool() if isinstance(turn, Agree) else answer
    return turn


class GroupTransport:
    """Issues batches on a process group, all of them asynchronous.

    Gloo's all_gather moves large rows at 94% of a link's rate but takes 3.5 ms for the smallest; an all-to-all of the
    repeated row sends the same bytes, takes 0.6 ms, and on large rows loses a quarter to flows that meet at a receiver.
    They break even at about 64 KiB a row on four hosts at 100 Mbit/s (docs/log.md).

    Gloo's all_to_all takes 1.6 times as long as the same messages posted one by one where they are large (16 MB on four
    hosts at 200 Mbit/s: 839 against 535 ms; 1 MB: 47 against 37; 256 KB: 10.4 against 11.1), so large rows are posted.

    Collectives on an axis have a group of their own for each sub-group, made when the first one is issued: all its
    members reach that place in the same static order. Messages between pairs travel on the whole group.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        self._is_gloo = dist.get_backend(group) == "gloo"
        self._subgroups: dict[Axis, dist.ProcessGroup] = {}

    def issue(self, batch: Batch) -> Pending:
        """Start the collective of a batch.

        Raises:
            ConnectionLost: a connection broke or a rank fell silent; waiting for the result raises it as well.
        """
        began = time.monotonic()
        try:
            works, result = self._issued(batch)
        except RuntimeError as error:
            if not (isinstance(error, dist.DistError) or "gloo" in str(error)):  # a mistake of ours
                raise
            raise ConnectionLost(_described(batch), time.monotonic() - began, error) from error
        return _Started(works, result, _described(batch), began)

    def _issued(self, batch: Batch) -> _Issued:
        kind, _, op, axis = batch.kind
        if kind is SendRecv:
            return self._round(batch)
        group, size = self._group_of(axis), axis.size if axis else self.world_size
        if not batch.buffer.numel():  # backends differ on what they make of nothing
            return [], batch.buffer.new_empty((size, 0)) if kind is AllGather else batch.buffer
        if kind is AllGather:
            return self._all_gather(batch.buffer, group, size)
        if kind is AllToAll:
            return self._all_to_all(batch.buffer, group)
        reduce_op = dist.ReduceOp.SUM if op == "sum" else dist.ReduceOp.MAX
        return _started(dist.all_reduce(batch.buffer, reduce_op, group, async_op=True), batch.buffer)

    def _all_gather(self, row: Tensor, group: dist.ProcessGroup, size: int) -> _Issued:
        if self._is_gloo and row.numel() <= SMALL_ROW_BYTES:
            return self._all_to_all(row.expand(size, -1).contiguous(), group)
        out = row.new_empty(size * row.numel())
        # Newer PyTorch renames it and warns of the old name.
        gather = getattr(dist, "all_gather_single", None) or getattr(dist, "all_gather_into_tensor")  # noqa: B009
        work = gather(out, row, group, async_op=True)
        return _started(work, out.view(size, -1))

    def _all_to_all(self, rows: Tensor, group: dist.ProcessGroup) -> _Issued:
        out = torch.empty_like(rows)
        if self._is_gloo and rows.numel() >= LARGE_ROWS_BYTES:
            return self._swap(rows, out, group)
        return _started(dist.all_to_all_single(out, rows, group=group, async_op=True), out)

    def _swap(self, rows: Tensor, out: Tensor, group: dist.ProcessGroup) -> _Issued:
        """An all-to-all as messages; each rank begins with the next one, so that not all begin with the same."""
        rank, n = dist.get_rank(group), rows.shape[0]
        out[rank].copy_(rows[rank])
        peers = [(rank + i) % n for i in range(1, n)]
        sends, receives = [(peer, rows[peer]) for peer in peers], [(peer, out[peer]) for peer in reversed(peers)]
        return self._post(sends, receives, group), out

    def _round(self, batch: Batch) -> _Issued:
        """Post every receive, then every send, and wait for none of them: so no order of ranks can block a round."""
        result = batch.buffer.new_empty(sum(batch.sizes))
        requests = [request for request in batch.requests if isinstance(request, SendRecv)]
        expected = [(source, numel) for request in requests for source, numel in request.receives]
        pieces = result.split([numel for _, numel in expected]) if expected else ()
        ranks = batch.axis.members(self.rank) if batch.axis else range(self.world_size)
        receives = [(ranks[source], piece) for (source, _), piece in zip(expected, pieces, strict=True)]
        sends = [(ranks[to], tensor) for request in requests for to, tensor in request.sends]
        return self._post(_filled(sends), _filled(receives), self.group), result

    def _post(self, sends: _Letters, receives: _Letters, group: dist.ProcessGroup) -> list[dist.Work]:
        if self._is_gloo:  # directly, without the checks that a batch makes of every message
            posted = [group.recv([piece], source, 0) for source, piece in receives]
            return posted + [group.send([tensor], to, 0) for to, tensor in sends]
        made = [dist.P2POp(dist.irecv, piece, group=group, group_peer=source) for source, piece in receives]
        made += [dist.P2POp(dist.isend, tensor, group=group, group_peer=to) for to, tensor in sends]
        return dist.batch_isend_irecv(made) if made else []

    def _group_of(self, axis: Axis | None) -> dist.ProcessGroup:
        """The group of this rank's sub-group."""
        if axis is None or axis.size == self.world_size:
            return self.group
        if axis not in self._subgroups:
            whole = dist.get_process_group_ranks(self.group)
            members = [whole[rank] for rank in axis.members(self.rank)]
            device = torch.device("cpu" if self._is_gloo else "cuda")
            self._subgroups[axis] = new_group(
                self.group, members, deadline_of(self.group, device), f"a group of {axis}"
            )
        return self._subgroups[axis]

    def prepare(self, axes: Iterable[Axis]) -> None:
        """Make the groups of these axes now: two threads that made theirs later might not meet each other's."""
        for axis in axes:
            if axis.size > 1:
                self._group_of(axis)

    def close(self) -> None:
        """Let go of the sub-groups, and forget the group itself, which belongs to whoever gave it."""
        while self._subgroups:
            destroy(self._subgroups.popitem()[1])
        del self.group


_Issued = tuple[Sequence[dist.Work], Tensor]
"""What is under way, and the tensor that will hold the result."""

_Letters = list[tuple[int, Tensor]]
"""Peers of a group, and what goes to or comes from each."""


def _filled(messages: _Letters) -> _Letters:
    """Messages that have something in them: both ends know the size, and leave out the others alike."""
    return [(peer, tensor) for peer, tensor in messages if tensor.numel()]


def _started(work: dist.Work | None, result: Tensor) -> _Issued:
    assert work is not None, "this process is no member of the group"
    return [work], result


def _described(batch: Batch) -> str:
    """A batch's collective, for errors."""
    kind, _, _, axis = batch.kind
    return f"{kind.__name__} of {batch.nbytes:,} bytes" + (f" on {axis}" if axis else "")


@dataclass
class Stats:
    """What an engine has done since it was made; times in seconds, sizes in bytes on this rank.

    Attributes:
        steps: finished steps, and `bad_steps` those that were rolled back.
        payload_bytes: handed to collectives, counted once each.
        wire_bytes: sent, as payloads and the algorithm of each collective predict.
        dense_bytes: the gradients' own size, per step times steps.
        dense_wire_bytes: what a ring all-reduce of the uncompressed gradients would have sent.
        encode_s: CPU time in programs (encoding, decoding, summing).
        wait_s: waiting for collectives.
        exposed_s: between the last bucket's delivery and the end of the step: what the backward pass did not hide.
    """

    steps: int = 0
    bad_steps: int = 0
    payload_bytes: int = 0
    wire_bytes: int = 0
    dense_bytes: int = 0
    dense_wire_bytes: int = 0
    encode_s: float = 0.0
    wait_s: float = 0.0
    exposed_s: float = 0.0

    @property
    def ratio(self) -> float:
        """Compression: bytes an uncompressed ring all-reduce sends, by bytes sent."""
        return self.dense_wire_bytes / self.wire_bytes if self.wire_bytes else 1.0


@dataclass
class _Run:
    """The programs of one wave. `parked` are those that wait for the rest of the step."""

    units: list[int]
    programs: list[Program]
    results: dict[int, Reduced]
    parked: dict[int, Agree | Total]
    pending: list[tuple[Batch, Pending]] = field(default_factory=list[tuple[Batch, Pending]])

    def advance(self, inbox: dict[int, Tensor | None]) -> list[Batch]:
        """Send each program its result and collect what they ask for next."""
        requests: list[tuple[int, Collective]] = []
        for i, value in inbox.items():
            turn = advance(self.programs[i], value)
            if isinstance(turn, Reduced):
                self.results[self.units[i]] = turn
            elif isinstance(turn, Agree | Total):
                self.parked[i] = turn
            else:
                requests.append((i, turn))
        return coalesce(requests)


@dataclass(eq=False)
class _Slot:
    """A unit with its buffer, its state and how much of its gradient is here."""

    unit: Unit
    state: State
    x: Tensor
    missing: int = 0

    @property
    def grain(self) -> Grain:
        return self.unit.grain


class Engine:
    """Runs a plan, step after step. Not thread-safe: one thread drives it.

    Args:
        plan: waves of units.
        transport: issues collectives.
        seed: of all keys.
    """

    def __init__(self, plan: Plan, transport: GroupTransport, seed: int = 0) -> None:
        self.plan = plan
        self.transport = transport
        self.seed = seed
        self.index = 0
        self.stats = Stats()
        self._slots: list[_Slot] = [self._slot(unit) for unit in plan.units]
        self._waves: list[list[int]] = _positions(plan.waves)
        self._fresh: list[State] | None = None
        self._flags: list[Tensor] = []
        self._results: dict[int, Reduced] = {}
        self.dense_bytes = sum(unit.grain.numel * unit.grain.dtype.itemsize for unit in plan.units)
        self._next_wave = 0
        self._window: deque[_Run] = deque()
        self._runs: list[_Run] = []

    def step(self) -> Step:
        """Where the step now under way stands."""
        return Step(self.index, self.transport.rank, self.transport.world_size, self.seed)

    def _slot(self, unit: Unit) -> _Slot:
        grain, reducer = unit
        x = torch.empty(grain.numel, dtype=_buffer_dtype(unit), device=grain.device)
        return _Slot(unit, reducer.init(grain, self.step()), x)

    def begin(self) -> None:
        """Get ready for a step's gradients."""
        self.settle()
        self._next_wave = 0
        self._window.clear()
        self._runs = []
        self._results = {}
        for slot in self._slots:
            slot.missing = slot.grain.numel

    def deliver(self, unit: int, offset: int, gradient: Tensor) -> None:
        """Copy `gradient`, 1-d, to `offset` in the buffer of a unit."""
        slot = self._slots[unit]
        slot.x[offset : offset + gradient.numel()].copy_(gradient)
        slot.missing -= gradient.numel()

    def pump(self) -> None:
        """Do what the schedule and the gradients that are here allow."""
        while True:
            if len(self._window) < WINDOW and self._next_wave < len(self._waves):
                if any(self._slots[u].missing for u in self._waves[self._next_wave]):
                    return
                self._start(self._waves[self._next_wave])
                self._next_wave += 1
            elif self._window:
                run = self._window.popleft()
                self._continue(run, self._collect(run))
            else:
                return

    def finish(self) -> None:
        """End the step: all gradients are delivered. Settles what the ranks agree on and counts."""
        self.pump()
        assert self._next_wave == len(self._waves), "the step ended before all gradients were delivered"
        while any(run.parked for run in self._runs):
            if totals := self._waiting_for(Total):
                self._add_up(totals)
            else:
                self._agree()
            self.pump()
        self._fresh = [self._results[i].state for i in range(len(self._slots))]
        self._flags = [result.bad.view(()) for result in self._results.values() if result.bad is not None]
        self.index += 1
        self.stats.steps += 1
        self.stats.dense_bytes += self.dense_bytes
        self.stats.dense_wire_bytes += wire_bytes(AllReduce, self.dense_bytes, self.transport.world_size)

    def mean(self, unit: int) -> Tensor:
        """The mean of a unit's grain after `finish`, 1-d."""
        return self._results[unit].mean.reshape(-1)

    def release(self) -> None:
        """Forget the means, once they are written where they belong."""
        self._results, self._runs = {}, []

    def settle(self) -> None:
        """Keep the new states of the last step, or forget them where ranks found it bad."""
        fresh, self._fresh = self._fresh, None
        if fresh is None:
            return
        if self._is_bad():
            self.stats.bad_steps += 1
            return
        for slot, new in zip(self._slots, fresh, strict=True):
            slot.x = _spare(slot.state, new, slot.x)
            slot.state = new

    def _is_bad(self) -> bool:
        return bool(self._flags) and bool(torch.stack(self._flags).any())

    def found_bad(self) -> bool:
        """Whether any step was bad, as far as is known without waiting: on a GPU the last one is not known yet."""
        known = self._fresh is not None and all(flag.device.type == "cpu" for flag in self._flags)
        return self.stats.bad_steps > 0 or (known and self._is_bad())

    def buffers(self) -> list[Tensor]:
        """The memory that gradients are copied to."""
        return [slot.x for slot in self._slots]

    def states(self) -> list[tuple[Grain, State]]:
        """Every unit's grain and state."""
        self.settle()
        return [(slot.grain, slot.state) for slot in self._slots]

    def initial_states(self) -> list[State]:
        """Every unit's state as it is before the first step, in the order of `states()`."""
        first = Step(0, self.transport.rank, self.transport.world_size, self.seed)
        return [unit.reducer.init(unit.grain, first) for unit in self.plan.units]

    def set_states(self, states: Sequence[State]) -> None:
        """Replace every unit's state, in the order of `states()`."""
        self.settle()
        for slot, state in zip(self._slots, states, strict=True):
            slot.state = state

    def rescale(self, factor: float) -> None:
        """Multiply what is in the gradients' units: these are new ones from this step on."""
        self.settle()
        for slot in self._slots:
            for _, leaf in walk(slot.state):
                if leaf.owed or leaf.scaled:
                    leaf.tensor.mul_(factor)

    def take_back(self, names: set[str]) -> None:
        """Undo the last step for parameters whose mean was dropped: what they owed, they owe still."""
        old = [slot.state for slot in self._slots]
        self.settle()
        for slot, before in zip(self._slots, old, strict=True):
            if slot.state is before:
                continue
            for path, leaf in walk(slot.state):
                was = dict(walk(before)).get(path)
                if was is not None and leaf.owed:
                    _restore(slot.grain, leaf, was.tensor, names, self.transport.rank)

    def _start(self, units: list[int]) -> None:
        began = time.thread_time()
        slots = [self._slots[u] for u in units]
        programs = [s.unit.reducer.reduce(s.grain, s.x.view(s.grain.shape), s.state, self.step()) for s in slots]
        run = _Run(units, programs, self._results, {})
        self._runs.append(run)
        batches = run.advance(dict.fromkeys(range(len(programs))))
        self.stats.encode_s += time.thread_time() - began
        self._issue(run, batches)

    def _continue(self, run: _Run, inbox: dict[int, Tensor | None]) -> None:
        began = time.thread_time()
        batches = run.advance(inbox)
        self.stats.encode_s += time.thread_time() - began
        self._issue(run, batches)

    def _issue(self, run: _Run, batches: list[Batch]) -> None:
        run.pending = [(batch, self._send(batch)) for batch in batches]
        if run.pending:
            self._window.append(run)

    def _send(self, batch: Batch) -> Pending:
        self.stats.payload_bytes += batch.nbytes
        self.stats.wire_bytes += sent_bytes(batch, self.transport.world_size)
        return self.transport.issue(batch)

    def _collect(self, run: _Run) -> dict[int, Tensor | None]:
        began = time.perf_counter()
        inbox: dict[int, Tensor | None] = {}
        for batch, pending in run.pending:
            inbox.update(zip(batch.members, batch.split(pending.wait()), strict=True))
        self.stats.wait_s += time.perf_counter() - began
        return dict(sorted(inbox.items()))

    def _waiting_for(self, kind: type[_Parked]) -> list[tuple[_Run, int, _Parked]]:
        """Parked programs that ask for `kind`, in planned order."""
        return [(run, i, ask) for run in self._runs for i, ask in run.parked.items() if isinstance(ask, kind)]

    def _add_up(self, waiting: list[tuple[_Run, int, Total]]) -> None:
        """One collective for the totals of every program that waits for one."""
        sums = add_grains([total for _, _, total in waiting])
        names = list(sums)
        began = time.perf_counter()
        for batch in coalesce(sums_to_send(sums)):
            for position, rows in zip(batch.members, batch.split(self._send(batch).wait()), strict=True):
                sums[names[position]] = add_ranks(rows, like=sums[names[position]])
        self.stats.wait_s += time.perf_counter() - began
        for run in {id(run): run for run, _, _ in waiting}.values():  # a run's programs go on together
            inbox = {i: sums[sum_of(ask)] for own, i, ask in waiting if own is run}
            for i in inbox:
                del run.parked[i]
            self._continue(run, dict[int, Tensor | None](inbox))

    def _agree(self) -> None:
        """One collective for the flags of every parked program."""
        waiting = self._waiting_for(Agree)
        (batch,) = coalesce([(position, flag) for position, (_, _, flag) in enumerate(waiting)])
        began = time.perf_counter()
        agreed = self._send(batch).wait().bool()
        self.stats.wait_s += time.perf_counter() - began
        answers: dict[int, tuple[_Run, dict[int, Tensor | None]]] = {}
        for position, (run, i, _) in enumerate(waiting):
            del run.parked[i]
            answers.setdefault(id(run), (run, {}))[1][i] = agreed[position]
        for run, inbox in answers.values():  # a run's programs go on together
            self._continue(run, inbox)


def _positions(waves: Sequence[Wave]) -> list[list[int]]:
    """Positions of each wave's units in the plan."""
    positions: list[list[int]] = []
    at = 0
    for wave in waves:
        positions.append(list(range(at, at + len(wave))))
        at += len(wave)
    return positions


def _buffer_dtype(unit: Unit) -> torch.dtype:
    """Residuals are float32 whatever the gradients are, so a reducer that keeps its input gets float32."""
    keeps = unit.reducer.consumes and unit.grain.dtype != torch.float64
    return torch.float32 if keeps else unit.grain.dtype


def _spare(old: State, new: State, x: Tensor) -> Tensor:
    """The buffer for the next gradient: `x`, or where a state kept that, the tensor it took the place of."""
    before = dict(walk(old))
    for path, leaf in walk(new):
        if leaf.tensor.data_ptr() == x.data_ptr() and leaf.tensor.numel() == x.numel():
            was = before.get(path)
            fits = was is not None and was.tensor.numel() == x.numel() and was.tensor.dtype == x.dtype
            return was.tensor.view(-1) if fits and was is not None else torch.empty_like(x)
    return x


def _restore(grain: Grain, leaf: Leaf, old: Tensor, names: set[str], rank: int) -> None:
    """Copy the old values of the named parameters' elements over the new ones."""
    new, first = leaf.tensor, leaf.first(rank)
    for segment in grain.segments:
        if segment.name in names and leaf.kind in ("element", "owned"):
            begin = max(segment.offset - first, 0)
            end = min(segment.offset + segment.numel - first, new.numel())
            if begin < end:
                new.view(-1)[begin:end].copy_(old.view(-1)[begin:end])
