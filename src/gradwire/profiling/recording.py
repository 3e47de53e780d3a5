"""`gradwire.profile`: spans of a training loop and of its communication, on all ranks."""

from __future__ import annotations

import json
import platform
import time
import uuid
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradwire.core.atomic_file import write_atomically
from gradwire.core.collective import ring_bytes
from gradwire.core.errors import StepError
from gradwire.drivers import groups
from gradwire.drivers.axes import compared_pairs
from gradwire.drivers.clocks import ClockOffset, clock_offsets
from gradwire.drivers.process_group import GroupTransport
from gradwire.drivers.traced import Span, Traced
from gradwire.drivers.words import gathered_words
from gradwire.profiling.account import Account, account
from gradwire.profiling.live import LiveWriter
from gradwire.profiling.loop import LoopSpans
from gradwire.profiling.records import ClockReading, RankRecord, StepRecord, TensorRecord, record_of, together
from gradwire.profiling.scalars import ScalarWriter, write_scalars
from gradwire.profiling.sharded_hook import ShardedSpans
from gradwire.profiling.summary import summary
from gradwire.profiling.tensors import tensor_records
from gradwire.profiling.torch_hook import TorchSpans
from gradwire.profiling.trace import chrome_trace
from gradwire.profiling.unfinished import UnfinishedSteps
from gradwire.session import Session
from gradwire.topology import MeasuredPair
from gradwire.topology.pairs import MOST_IN_PAIRS, all_pairs_in_rounds

T = TypeVar("T")

PATIENCE = timedelta(seconds=120)
"""How long ranks wait for each other where the block begins and where it ends."""

KEPT = 200
"""Steps of which spans are kept: the last ones."""

CPU = torch.device("cpu")

DDP_METHOD, FSDP2_METHOD = "PyTorch's own all-reduces", "FSDP2's own collectives"

SKIPPED = 3
"""First steps that an account leaves out, where there are others."""


class Profile:
    """Keeps the spans of a training loop while its `with` block runs, see `gradwire.profile`.

    Attributes:
        records: of all ranks, on rank 0 once the block has ended well; else this rank's.
        readings: of this rank's clock against rank 0's.
    """

    def __init__(
        self,
        model: nn.Module,
        folder: Path,
        sessions: Sequence[Session],
        keep: int = KEPT,
        clock: Callable[[], float] = time.perf_counter,
        links: bool = False,
        live: bool = False,
    ) -> None:
        self.records: list[RankRecord] = []
        self._model, self._folder, self._sessions, self._clock = model, folder, sessions, clock
        self._loop = LoopSpans(clock)
        self._waits: list[Span] = []
        self._steps: deque[StepRecord] = deque(maxlen=keep)
        self._traced: list[Traced] = []
        self._torch: TorchSpans | None = None
        self._sharded: ShardedSpans | None = None
        self.readings: list[ClockReading] = []
        self._group: dist.ProcessGroup | None = None
        self._transport: GroupTransport | None = None
        self._measures_links, self._links = links, list[MeasuredPair]()
        self._tells = live
        self._live: LiveWriter | None = None
        self._tensors: list[TensorRecord] = []
        self._run, self._began_s, self._index = "", 0.0, 0
        self._rank, self._size = 0, 1
        self._stack = ExitStack()
        self._unfinished: UnfinishedSteps | None = None

    # The training loop -------------------------------------------------------------------------------------------

    def steps(self, batches: Iterable[T]) -> Iterator[T]:
        """Yield batches, each for one step: what it takes to get one is the span "data" of that step.

        Example:
            for inputs, targets in profile.steps(loader):
                ...
        """
        batches = iter(batches)
        while True:
            self._loop.begin("data")
            try:
                batch = next(batches)
            except StopIteration:
                self._loop.take()
                return
            self._loop.end()
            yield batch
            self.step()

    def step(self) -> None:
        """Say that a step has ended, and the next one begins: for loops that do not go through `steps`.

        What follows until the forward pass counts as "data".
        """
        now_s = self._clock()
        communication = [traced.take() for traced in self._traced]
        for watch in filter(None, (self._torch, self._sharded)):
            waits, spans = watch.take()
            self._waits += waits
            communication.append(spans)
        waits, self._waits = sorted(self._waits, key=lambda span: span.began_s), []
        step = StepRecord(self._index, self._began_s, now_s, self._loop.take(), waits, communication)
        self._steps.append(step)
        if self._unfinished is not None:
            self._unfinished.add(step)
        if self._live is not None:
            self._live.step(step)
        self._index, self._began_s = self._index + 1, now_s
        self._loop.begin("data")

    def log(self, **values: float | torch.Tensor) -> None:
        """Tell `gradwire watch` the loss of the step under way, and other numbers of it.

        Nothing is done without `live=True`. A tensor on a GPU is read at once, and that waits for the device: there log
        in one step of many.

        Args:
            values: each a number, or a tensor of one element.

        Raises:
            StepError: a value that is none, or more than 16 names.

        Example:
            profile.log(loss=loss, rate=scheduler.get_last_lr()[0])
        """
        if self._live is not None:
            self._live.log(self._index, values)

    @contextmanager
    def _waiting(self) -> Generator[None]:
        """The training loop waits for communication inside."""
        began_s = self._clock()
        try:
            yield
        finally:
            self._waits.append(Span("wait", "communication", began_s, self._clock()))

    # Beginning and ending ----------------------------------------------------------------------------------------

    def __enter__(self) -> Profile:
        if self._began_s:
            raise StepError("a profile is made of one block: call gradwire.profile again")
        if dist.is_initialized() and dist.get_world_size() > 1:
            group = dist.new_group(backend="gloo", timeout=PATIENCE)
            assert isinstance(group, dist.ProcessGroup)
            self._group = group
            self._rank, self._size = dist.get_rank(), dist.get_world_size()
            self._transport = GroupTransport(group)
            self._run = gathered_words(uuid.uuid4().hex, self._transport, CPU)[0]
            self._read_clock(self._transport)
        self._stack.enter_context(self._loop.watching(self._model))
        for session in self._sessions:
            self._traced.append(session.trace(self._clock))
            session.lane.waiting = self._waiting
        if not self._sessions and isinstance(self._model, DistributedDataParallel):
            self._trace_torch(self._model)
        sharded = ShardedSpans(self._model, self._clock)
        self._sharded = sharded if sharded.is_watching else None
        kept, head = self._steps.maxlen or KEPT, self._record()
        self._unfinished = UnfinishedSteps(self._folder, head.rank, head.to_json(), kept)
        self._unfinished.remove()
        self._began_s = self._clock()
        if self._tells:
            whose = self._folder, self._run, self._rank, self._size
            self._live = LiveWriter(*whose, self._sessions, self._loop, self._methods)
            self._live.start()
        return self

    def _trace_torch(self, ddp: DistributedDataParallel) -> None:
        """Watch DDP's own all-reduces, if nobody else combines its gradients."""
        if getattr(ddp, "_comm_hooks", None):
            warnings.warn(
                "this model has a communication hook that gradwire.profile cannot look into, so what it waits for "
                "counts as its backward pass: give session= where gradwire.attach made the hook",
                stacklevel=4,
            )
            return
        self._torch = TorchSpans(ddp, self._clock)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()
        if self._live is not None:
            self._live.stop(error)
        self._tensors = self._tensor_records(error is None)
        for session in self._sessions:
            session.lane.waiting = nullcontext
            if error is None:  # else a step may be under way
                session.stop_tracing()
        for watch in filter(None, (self._torch, self._sharded)):
            watch.close()
        is_whole = error is None and (self._group is None or dist.is_initialized())
        if is_whole and self._transport is not None:
            self._read_clock(self._transport)
            if self._measures_links:
                self._links = self._measured_links(self._transport)
        self.records = [self._record()]
        self.records[0].write(self._folder)
        if self._unfinished is not None:
            self._unfinished.remove()
        if is_whole:
            self._gather()
            if self._rank == 0:
                write_outcome(self.records, self._folder)
            if self._group is not None and self._transport is not None:
                self._transport.close()
                groups.destroy(self._group)

    def _methods(self) -> list[str]:
        own = DDP_METHOD if self._sharded is None else FSDP2_METHOD
        return [session.method for session in self._sessions] or [own]

    def _record(self) -> RankRecord:
        return RankRecord(
            self._run,
            self._rank,
            self._size,
            platform.node(),
            self._methods(),
            self.readings,
            list(self._steps),
            self._links,
            self._tensors,
        )

    def _tensor_records(self, is_whole: bool) -> list[TensorRecord]:
        """What each tensor had of the communication; nothing of a session that has changed its method meanwhile."""
        found = list[TensorRecord]()
        for session, traced in zip(self._sessions, self._traced, strict=True):
            if session.engine.transport is traced:
                found += tensor_records(session, traced.unit_bytes, self._index, is_whole)
        if self._torch is not None and self._index:
            for name, parameter in self._model.named_parameters():
                if parameter.requires_grad:
                    sent = ring_bytes(parameter.nbytes, self._size)
                    found.append(TensorRecord(name, DDP_METHOD, parameter.nbytes, sent, None))
        return found

    def _read_clock(self, transport: GroupTransport) -> None:
        """Compare this clock with rank 0's; all ranks do so at the same place."""
        others = {each.rank: each for each in clock_offsets(range(self._size), transport, CPU, self._clock)}
        rank_0 = ClockOffset(0, 0.0, 0.0, self._clock())  # with its clock the others are compared
        mine = others.get(self._rank, rank_0)
        self.readings.append(ClockReading(mine.at_s, -mine.seconds, 2 * mine.error_s))

    def _measured_links(self, transport: GroupTransport) -> list[MeasuredPair]:
        """Measure links between all pairs of a few ranks; of many, two of each rank."""
        rounds = all_pairs_in_rounds(range(self._size))
        return list(compared_pairs(rounds if self._size <= MOST_IN_PAIRS else rounds[:2], transport, CPU))

    def _gather(self) -> None:
        """Bring the records of all ranks to rank 0, which writes them too: hosts may share no folder."""
        if self._group is None:
            return
        mine = torch.frombuffer(bytearray(self.records[0].to_json().encode()), dtype=torch.uint8)
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self._size)]
        dist.all_gather(lengths, torch.tensor([mine.numel()]), group=self._group)
        padded = torch.zeros(max(int(length) for length in lengths), dtype=torch.uint8)
        padded[: mine.numel()] = mine
        rows = [torch.empty_like(padded) for _ in lengths] if self._rank == 0 else None
        dist.gather(padded, rows, dst=0, group=self._group)
        if rows is not None:
            texts = [bytes(row[: int(n)].numpy()).decode() for row, n in zip(rows, lengths, strict=True)]
            self.records = together([record_of(json.loads(text), f"rank {rank}") for rank, text in enumerate(texts)])
            for record in self.records:
                record.write(self._folder)

    # What came of it ---------------------------------------------------------------------------------------------

    def account(self, skip: int = SKIPPED) -> Account:
        """Return what steps were spent on: of all ranks on rank 0, of this rank on others.

        Args:
            skip: first steps that do not count, where there are others.
        """
        return account(self.records, skip)

    def to_tensorboard(self, to: ScalarWriter | Path | str) -> None:
        """Write the figures of each step as scalars, see `gradwire.profiling.write_scalars`; on rank 0 of all ranks.

        Args:
            to: a `SummaryWriter`, or anything else with `add_scalar(tag, value, step)`; or a folder, for which
                `tensorboard` must be installed.

        Raises:
            ProfileError: a folder, and `tensorboard` is not installed.
            StepError: the block has not ended.

        Example:
            if dist.get_rank() == 0:
                profile.to_tensorboard("runs/int4")
        """
        if not self.records:
            raise StepError("the profile has not ended: call to_tensorboard after its with block")
        write_scalars(self.records, to)

    def __str__(self) -> str:
        """The table that `gradwire profile` prints."""
        return summary(self.account())


def write_outcome(records: Sequence[RankRecord], folder: Path) -> None:
    """Write what people and programs read: `summary.txt` and `trace.json`, for Perfetto."""
    write_atomically(folder / "summary.txt", summary(account(records, SKIPPED)) + "\n")
    write_atomically(folder / "trace.json", chrome_trace(records))


def profile(
    model: nn.Module,
    folder: Path | str = "profile",
    *,
    session: Any = None,
    keep: int = KEPT,
    links: bool = False,
    live: bool = False,
    clock: Callable[[], float] = time.perf_counter,
) -> Profile:
    """Find out where the steps of a training loop go: a `with` block around the loop, on every rank.

    Each rank keeps spans of its data, forward pass, loss, backward pass and optimizer, by hooks that are taken away in
    the end, and of all that its sessions do. When the block ends, rank 0 has the records of all ranks, on one clock,
    and writes them with `summary.txt` and `trace.json` into the folder. Where an exception ends the block each rank
    writes its own record only, and `gradwire profile FOLDER` makes the rest of those that are there.

    Without a session the all-reduces of a `DistributedDataParallel` that has no hook are watched by a hook that does
    the same. It stays with the model. FSDP2's own collectives on a CPU are watched until the block ends.

    Args:
        model: that the loop calls, as it calls it.
        folder: for the records and what is made of them.
        session: what `gradwire.attach` or `gradwire.Session` has returned, what `gradwire.wrap` has made of an
            optimizer, or a list of these.
        keep: of how many steps, the last ones, spans are kept.
        links: whether the links between ranks are measured in the end, so that a slow one can be named. It takes some
            two seconds a round of pairs where a round trip takes 10 ms: seven rounds at most.
        live: whether each rank tells every second how the run goes, for `gradwire watch FOLDER`.
        clock: seconds; another one for each host in emulations.

    Returns:
        A context manager, with `steps(loader)`, or `step()` at the end of each step.

    Raises:
        StepError: a step of the session is under way.

    Example:
        session = gradwire.attach(ddp, "int4")
        with gradwire.profile(ddp, session=session) as profile:
            for inputs, targets in profile.steps(loader):
                optimizer.zero_grad()
                loss_of(ddp(inputs), targets).backward()
                optimizer.step()
        print(profile)
    """
    given = session if isinstance(session, list | tuple) else [session] if session is not None else []
    return Profile(model, Path(folder), [each.session for each in given], keep, clock, links, live)
