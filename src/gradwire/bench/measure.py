"""The table of a group of ranks, measured on all of them at once."""

from __future__ import annotations

import contextlib
import functools
import math
import os
from collections.abc import Callable, Generator, Iterator
from dataclasses import replace
from typing import Protocol, TypeVar

import torch
import torch.distributed as dist

from gradwire.bench.collectives import CALLS, CollectiveCall, CollectivePlace
from gradwire.bench.errors import BenchError
from gradwire.bench.methods import MethodCall, methods_of
from gradwire.bench.options import BenchOptions
from gradwire.bench.results import BenchLink, BenchRow, BenchTable, OnRow
from gradwire.bench.timing import CallClock
from gradwire.core.collective import AllReduce
from gradwire.core.errors import CommunicationError, GradwireError, first_line
from gradwire.core.figures import ranks_named, si_bytes
from gradwire.drivers.interpreter import ask
from gradwire.drivers.link_profiler import LinkProfiler
from gradwire.drivers.process_group import GroupTransport
from gradwire.drivers.words import gathered_words
from gradwire.session.lane import Lane, group_of

_CPU = torch.device("cpu")
_COPIES = 8
"""A row needs so many times its size in memory at most: what is given, what comes, and what should have come."""

T = TypeVar("T")


class _Timed(Protocol):
    """What a row is about."""

    def fill(self) -> None: ...
    def call(self) -> None: ...


C = TypeVar("C", bound=_Timed)


def measure(options: BenchOptions, group: dist.ProcessGroup | None = None, on_row: OnRow | None = None) -> BenchTable:
    """Measure collectives, methods and links on the ranks of a process group, while nothing else is under way.

    Every rank must call it at the same place, with equal options; all get the same table. Of the options those count
    that say what to measure: the ranks and their network are there already.

    Args:
        options: what to measure.
        group: whose ranks; None for the default group. On NCCL tensors lie on the current device, else on the CPU.
        on_row: called on this rank with the table without its rows, and each row as soon as it is there.

    Raises:
        BenchError: one rank, ranks with other options, a root that is no rank, or sizes beyond this machine's memory.
        SpecError, CompositionError: a method that is none, with the nearest name, or cannot be built.
        CommunicationError: a rank ended, fell silent, or failed where others did not.

    Example:
        torch.distributed.init_process_group("gloo")
        table = gradwire.bench.measure(gradwire.bench.BenchOptions(max_bytes="1M"))
        print(table.of_name("all_reduce")[-1].busbw, "GB/s")
    """
    group = group_of(group)
    if group.size() == 1:
        raise BenchError(
            "one rank sends nothing: start two or more by torchrun, or give --hosts 2 for emulated hosts or --ranks 2"
        )
    with _control(group) as control:
        return _Bench(options, group, control).table(on_row)


@contextlib.contextmanager
def _control(group: dist.ProcessGroup) -> Generator[GroupTransport]:
    """What ranks agree over: their own group where that is Gloo's, else one of Gloo's that is made for it."""
    if dist.get_backend(group) == "gloo":
        yield GroupTransport(group)
        return
    ranks = dist.get_process_group_ranks(group)
    made = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
    assert isinstance(made, dist.ProcessGroup), "all ranks of the group are members"
    try:
        yield GroupTransport(made)
    finally:
        dist.destroy_process_group(made)


class _Bench:
    """One rank's part of a table."""

    def __init__(self, options: BenchOptions, group: dist.ProcessGroup, control: GroupTransport) -> None:
        self._options, self._group, self._control = options, group, control
        self._backend = str(dist.get_backend(group))
        self._device = torch.device("cuda", torch.cuda.current_device()) if self._backend == "nccl" else _CPU
        self._dtype: torch.dtype = getattr(torch, options.dtype)
        self._clock = CallClock(control, self._device, options.calls, options.seconds)
        self._require_sense()
        self._methods = methods_of(options.methods, self._dtype)

    def _require_sense(self) -> None:
        words = replace(self._options, json=None).as_words()
        said = gathered_words(words, self._control, _CPU)
        others = [rank for rank, each in enumerate(said) if each != said[0]]
        if others:
            raise BenchError(f"{ranks_named(others)} got other options than rank 0: give all ranks the same")
        if self._options.root >= self._group.size():
            raise BenchError(f"there is no rank {self._options.root}: --root is from 0 to {self._group.size() - 1}")
        refused = gathered_words(_beyond_memory(self._options.sizes[-1]), self._control, _CPU)
        if any(refused):
            raise BenchError(next(filter(None, refused)))

    def table(self, on_row: OnRow | None) -> BenchTable:
        """Measure all of it."""
        links, text = self._links() if not self._options.no_links else ((), "")
        empty, rows = (
            BenchTable(self._group.size(), self._backend, self._device.type, (), links, text),
            list[BenchRow](),
        )
        for row in self._rows():
            rows.append(row)
            if on_row is not None:
                on_row(empty, row)
        return replace(empty, rows=tuple(rows))

    def _rows(self) -> Iterator[BenchRow]:
        for name in self._options.collectives_in_order:
            yield from self._of_collective(CALLS[name])
        for spec in self._methods:
            yield from self._of_method(spec)

    # Collectives ------------------------------------------------------------------------------------------------------

    def _of_collective(self, kind: type[CollectiveCall]) -> Iterator[BenchRow]:
        """The rows of a collective, the last of which says why there are no more, where the backend lacks it."""
        ranks, element_bytes = self._group.size(), self._dtype.itemsize
        for count in dict.fromkeys(kind.count_of(size, element_bytes, ranks) for size in self._options.sizes):
            row = BenchRow(
                kind.name,
                "collective",
                kind.nbytes_of(count, element_bytes, ranks),
                count,
                self._options.dtype,
                "sum" if kind.sums else "none",
                self._options.root if kind.has_root else -1,
                kind.bus_factor(ranks),
            )
            place = CollectivePlace(self._group, self._device, self._dtype, count, self._options.root)
            made, refused = self._tried(functools.partial(_called, kind, place))
            if made is None:
                yield replace(row, refused=f"{self._backend} has no {kind.name} of {row.dtype} here: {refused}")
                return
            made.rest()
            times = self._clock.time(made.call)
            made.fill()
            made.call()
            wrong = ask(AllReduce(torch.tensor([made.wrong()])), self._control)
            yield replace(row, times=times, wrong=int(wrong))

    # Methods ----------------------------------------------------------------------------------------------------------

    def _of_method(self, spec: str) -> Iterator[BenchRow]:
        """The rows of a method, the last of which says why there are no more, where it cannot serve."""
        ranks = self._group.size()
        lane = Lane(self._group, self._device, self._options.deadline, "gradwire bench")
        transport = lane.transport()
        try:
            for count in dict.fromkeys(max(1, size // self._dtype.itemsize) for size in self._options.sizes):
                row = BenchRow(
                    spec, "method", count * self._dtype.itemsize, count, self._options.dtype, "mean",
                    bus_factor=2 * (ranks - 1) / ranks,
                )  # fmt: skip
                place = (spec, lane, self._device, self._dtype, count)
                made, refused = self._tried(functools.partial(_called, MethodCall, *place))
                if made is None:
                    yield replace(row, refused=f"it cannot serve here: {refused}")
                    return
                yield self._timed_method(row, made)
                made.close()
        finally:
            lane.let_go(transport)

    def _timed_method(self, row: BenchRow, made: MethodCall) -> BenchRow:
        error = self._most(made.error())
        times = self._clock.time(made.call, before=made.fill)
        sent = int(self._most(made.wire_bytes))
        if not math.isfinite(error):
            return replace(row, refused="its result is not finite, so its times would tell nothing")
        return replace(row, redop="mean" if made.averages else "rule", times=times, wire_bytes=sent, error=error)

    # Links ------------------------------------------------------------------------------------------------------------

    def _links(self) -> tuple[tuple[BenchLink, ...], str]:
        """Latency and bandwidth of each level, by the one way in which gradwire measures them."""
        options = self._options
        profiler = LinkProfiler(
            GroupTransport(self._group), self._device, options.cache, options.description, backend=self._backend
        )
        found = profiler.topology()  # a description that cannot be used is refused on every rank
        links, refused = self._tried(profiler.axis_links)
        if links is None:
            return (), f"links were not measured: {refused}"
        kept = tuple(BenchLink(each.level, each.link.alpha_s, each.link.beta_s_per_byte) for each in links.links)
        return kept, f"{found.summary}\n{links.summary(found.topology)}"

    # What ranks agree on ----------------------------------------------------------------------------------------------

    def _tried(self, job: Callable[[], T]) -> tuple[T | None, str]:
        """What a job returns, or why it failed on all ranks, in one sentence.

        Raises:
            CommunicationError: it failed on some ranks and not on others, which cannot go on together.
        """
        made, refused = None, ""
        try:
            made = job()
        except Exception as error:  # whatever a backend raises for what it does not have
            refused = _as_sentence(error)
        said = gathered_words(refused, self._control, _CPU)
        failed = [rank for rank, each in enumerate(said) if each]
        if failed and len(failed) < len(said):
            raise CommunicationError(f"{ranks_named(failed)} failed where others did not: {said[failed[0]]}", failed)
        return (None, said[0]) if failed else (made, "")

    def _most(self, value: float) -> float:
        """The largest of all ranks' values; NaN where one is."""
        values = gathered_words(None if math.isnan(value) else value, self._control, _CPU)
        return math.nan if None in values else max(values)


def _called(make: Callable[..., C], *place: object) -> C:
    """Make what a row is about and run it once: connections, buffers and compiled code are there then."""
    made = make(*place)
    made.fill()
    made.call()
    return made


def _as_sentence(error: Exception) -> str:
    text = first_line(error)
    return text if isinstance(error, GradwireError) else f"{type(error).__name__}: {text}"


def _beyond_memory(nbytes: int) -> str:
    """Why the largest size does not fit into the memory of this machine; "" where it does."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if _COPIES * nbytes <= memory:
        return ""
    return (
        f"a row of {si_bytes(nbytes)} needs about {si_bytes(_COPIES * nbytes)} on each rank, and this machine has "
        f"{si_bytes(memory)}: give a smaller --max-bytes"
    )
