"""What a rank tells of a run that goes on: one small file that is written anew every second, for `gradwire watch`.

    live/rank0.json, live/rank1.json, ...

A file holds the last steps and the course of a few figures in bounded memory, so it stays small however long the run
is, and who begins to read late sees the whole course. It is replaced as a whole, so nobody reads half of one. A thread
writes it, also while no step ends: then it says what the training loop does, and since when. A rank whose file does not
change any more was killed or stopped.
"""

from __future__ import annotations

import math
import platform
import threading
import time
import uuid
import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import msgspec
from msgspec import Meta
from torch import Tensor

from gradwire.core.atomic_file import write_atomically
from gradwire.core.checked import printable, sentence, thread_safe
from gradwire.core.collective import ring_bytes
from gradwire.core.errors import StepError, first_line
from gradwire.core.rank_files import rank_file
from gradwire.core.state import walk
from gradwire.drivers.window import START_UP
from gradwire.profiling.history import History, JsonNumber, to_json_number
from gradwire.profiling.loop import LoopSpans
from gradwire.profiling.records import ProfileError, StepRecord
from gradwire.session import Session

PERIOD_S = 1.0
"""Between two writings."""

KEPT = 100
"""Steps whose figures are told: the last ones."""

MOST_SCALARS = 16
"""Names that `Profile.log` takes: each is a picture of its own."""

NORM_SHARE = 0.005
"""Of the time, what taking norms of residuals may cost."""

_MOST_TEXT = 300
"""Characters of a name or an error that are shown."""

_MOST_BYTES = 1 << 20
"""Of a file that is read: sixteen scalars have a seventh of it."""

Count = Annotated[int, Meta(ge=0)]
Seconds = Annotated[float, Meta(ge=0.0)]
Course = Annotated[list[tuple[int, JsonNumber]], Meta(max_length=4096)]
"""Steps, and a figure at each of them."""


class LiveStep(NamedTuple):
    """One step of one rank, in seconds and bytes.

    Attributes:
        number: of the step, counted from 0.
        step_s: from the end of the step before to its end.
        data_s: until the batch was there.
        compute_s: of the training loop's other spans, without what it waited in them.
        wait_s: for communication, and for ranks that came later.
        sent: bytes, as payloads and the algorithm of each collective predict.
        dense: that a ring all-reduce of the uncompressed gradients would have sent.
    """

    number: Count
    step_s: Seconds
    data_s: Seconds
    compute_s: Seconds
    wait_s: Seconds
    sent: Count
    dense: Count


class LiveRecord(msgspec.Struct, frozen=True):
    """What one rank has told last.

    Attributes:
        run: drawn once a run, the same on all ranks.
        rank, world_size: in the default process group.
        host: where the rank runs.
        methods: of the sessions.
        state: "running", "ended" well, or "failed" by an exception.
        error: the exception, in a line.
        steps: that have ended.
        doing: what the training loop does: "data", "forward", "loss", "backward", "gradients", "optimizer" or "".
        doing_s: since when.
        last: the last steps.
        step_ms: the course of the length of steps.
        scalars: the course of what the script has told by `Profile.log`.
        residual: the course of the norm of what this rank owes; empty for methods that owe nothing.
        gradient: norm of this rank's gradient in one of the last steps, where it is known.
    """

    run: str
    rank: Count
    world_size: Annotated[int, Meta(ge=1)]
    host: str
    methods: list[str]
    state: Literal["running", "ended", "failed"]
    error: str
    steps: Count
    doing: str
    doing_s: Seconds
    last: Annotated[list[LiveStep], Meta(max_length=4096)]
    step_ms: Course
    scalars: dict[str, Course]
    residual: Course
    gradient: JsonNumber | None = None


def live_folder(folder: Path) -> Path:
    """Return where, in the folder of a profile, ranks tell how the run goes."""
    return folder / "live"


class LiveWriter:
    """Tells how the steps of this rank go, in a file that `gradwire watch` reads.

    Args:
        folder: of the profile.
        run: drawn once a run, the same on all ranks; "" with one rank.
        rank, world_size: in the default process group.
        sessions: whose bytes and residuals are told.
        loop: the spans of the training loop.
        methods: tells what communicates now.
        period_s: between two writings.
    """

    def __init__(
        self,
        folder: Path,
        run: str,
        rank: int,
        world_size: int,
        sessions: Sequence[Session],
        loop: LoopSpans,
        methods: Callable[[], list[str]],
        period_s: float = PERIOD_S,
    ) -> None:
        self._path = rank_file(live_folder(folder), rank)
        self._run, self._rank, self._size = run or uuid.uuid4().hex, rank, world_size
        self._sessions, self._loop, self._methods, self._period_s = sessions, loop, methods, period_s
        self._steps, self._last = 0, deque[LiveStep](maxlen=KEPT)
        self._step_ms, self._residual = History(), History()
        self._scalars: dict[str, History] = {}
        self._gradient: JsonNumber | None = None
        self._sent = self._totals()
        self._norms_from_s = 0.0
        self._lock, self._over = threading.Lock(), threading.Event()  # the lock: of all that is told
        self._thread = threading.Thread(target=self._go_on, name="gradwire-live", daemon=True)
        self.problem = ""

    def start(self) -> None:
        """Write now, and from now on every period."""
        self.tell()
        self._warn()
        self._thread.start()

    def step(self, step: StepRecord) -> None:
        """Tell of a step that has ended."""
        data_s = sum(span.length_s for span in step.loop if span.what == "data")
        wait_s = sum(span.length_s for span in step.waits)
        compute_s = max(0.0, sum(span.length_s for span in step.loop) - data_s - wait_s)
        step_s, data_s, compute_s, wait_s = (round(s, 6) for s in (step.length_s, data_s, compute_s, wait_s))
        told = LiveStep(step.index, step_s, data_s, compute_s, wait_s, *self._sent_in(step))
        with self._lock:
            self._steps = step.index + 1
            self._step_ms.add(step.index, 1e3 * step.length_s)
            self._last.append(told)
        self._take_norms(step.index)

    def _sent_in(self, step: StepRecord) -> tuple[int, int]:
        """Bytes of a step, and what uncompressed gradients would have been; without a session they are the same."""
        if not self._sessions:
            handed = sum(span.nbytes for spans in step.communication for span in spans if span.kind == "wire")
            sent = ring_bytes(handed, self._size)
            return sent, sent
        before, self._sent = self._sent, self._totals()
        return max(0, self._sent[0] - before[0]), max(0, self._sent[1] - before[1])

    def _totals(self) -> tuple[int, int]:
        stats = [session.engine.stats for session in self._sessions]
        return sum(each.wire_bytes for each in stats), sum(each.dense_wire_bytes for each in stats)

    def _take_norms(self, index: int) -> None:
        """Take the norm of what is owed, seldom enough to cost little: it is a pass over all residuals.

        The first time is when a new session knows the norm of its gradient, since the next time may be far away.
        """
        began_s = time.perf_counter()
        if index < START_UP or began_s < self._norms_from_s:
            return
        squares, gradients, owes = 0.0, 0.0, False
        for session in self._sessions:
            try:
                session.feed.occupy()
            except StepError:  # its step ends later than that of the training loop
                return
            try:
                owes = owes or any(leaf.owed for _, state in session.engine.states() for _, leaf in walk(state))
                squares += (session.residual_norm() / session.feed.scale) ** 2
                gradients += (session.window.gradient_norm() or 0.0) ** 2
            finally:
                session.feed.vacate()
        ended_s = time.perf_counter()
        self._norms_from_s = ended_s + max(self._period_s, (ended_s - began_s) / NORM_SHARE)
        with self._lock:
            if owes:
                self._residual.add(index, math.sqrt(squares))
            self._gradient = to_json_number(math.sqrt(gradients)) if gradients else None

    def log(self, index: int, values: Mapping[str, object]) -> None:
        """Tell of a step what the script says of it.

        Raises:
            StepError: a value that is no number, or more names than are kept.
        """
        numbers = {name: _number(name, value) for name, value in values.items()}
        with self._lock:
            if len(self._scalars.keys() | numbers.keys()) > MOST_SCALARS:
                raise StepError(f"profile.log keeps {MOST_SCALARS} names: log fewer")
            for name, number in numbers.items():
                self._scalars.setdefault(name, History()).add(index, number)

    def tell(self) -> None:
        """Write what there is to tell, for any thread."""
        self._write("running", "")

    def stop(self, error: BaseException | None = None) -> None:
        """Write for the last time: that the run has ended, and by which exception if it was one."""
        self._over.set()
        self._thread.join()
        why = _why(error)
        self._write("failed" if why else "ended", why)
        self._warn()

    def _go_on(self) -> None:
        while not self._over.wait(self._period_s):
            self.tell()

    def _write(self, state: Literal["running", "ended", "failed"], error: str) -> None:
        text = msgspec.json.encode(self._record(state, error)).decode()
        try:
            write_atomically(self._path, text)
            self.problem = ""
        except OSError as trouble:  # a full disk must not end the run
            self.problem = f"{self._path}: {trouble.strerror or trouble}"

    def _record(self, state: Literal["running", "ended", "failed"], error: str) -> LiveRecord:
        doing, doing_s = self._loop.under_way()
        with self._lock:
            return LiveRecord(
                run=self._run,
                rank=self._rank,
                world_size=self._size,
                host=platform.node(),
                methods=self._methods(),
                state=state,
                error=error,
                steps=self._steps,
                doing=doing if state == "running" else "",
                doing_s=doing_s,
                last=list(self._last),
                step_ms=self._step_ms.points(),
                scalars={name: history.points() for name, history in self._scalars.items()},
                residual=self._residual.points(),
                gradient=self._gradient,
            )

    def _warn(self) -> None:
        if self.problem:
            warnings.warn(f"gradwire watch sees nothing of this rank: {self.problem}", stacklevel=4)


def _why(error: BaseException | None) -> str:
    """The exception that ended a run, in a line; "" where it ended well, as by `sys.exit(0)`."""
    if error is None or (isinstance(error, SystemExit) and not error.code):
        return ""
    name, said = type(error).__name__, first_line(error)
    return name if said == name else f"{name}: {said}"


def _number(name: str, value: object) -> float:
    """A number that a script tells.

    Raises:
        StepError: it is none.
    """
    if isinstance(value, int | float):
        return float(value)
    if isinstance(value, Tensor) and value.numel() == 1:
        return float(value.detach())
    what = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)[:40]
    raise StepError(f"profile.log({name}=...) takes a number, or a tensor of one element, not {what}")


def read_live(path: Path) -> LiveRecord:
    """Read what a rank has told last. Texts come without what would move a terminal's cursor.

    Raises:
        ProfileError: it is damaged, too large, or no live record of gradwire's.
    """
    try:
        with path.open("rb") as file:
            raw = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise ProfileError(f"{path} cannot be read: {error.strerror or error}") from error
    if len(raw) > _MOST_BYTES:
        raise ProfileError(f"{path} has more than {_MOST_BYTES >> 20} MiB, so it is no live record: remove it")
    try:
        found = msgspec.json.decode(raw, type=thread_safe(LiveRecord))
    except msgspec.ValidationError as error:
        raise ProfileError(f"{sentence(error, path.name, '.')}, so it is no live record: remove it") from error
    except (ValueError, RecursionError) as error:
        raise ProfileError(f"{path} is damaged, or no live record: remove it") from error
    if path.name != f"rank{found.rank}.json" or found.rank >= found.world_size:
        raise ProfileError(f"{path} says that it is of rank {found.rank} of {found.world_size}: give it its own name")
    return msgspec.structs.replace(
        found,
        host=_line(found.host),
        methods=[_line(method) for method in found.methods],
        error=_line(found.error),
        doing=_line(found.doing),
        scalars={_line(name): course for name, course in found.scalars.items()},
    )


def _line(text: str) -> str:
    """A text from elsewhere as one short line of printable characters."""
    line = printable(text).replace("\n", " ")
    return line if len(line) <= _MOST_TEXT else f"{line[:_MOST_TEXT]}..."
