"""Where programs run beside a training loop, and how their errors come back.

A `Lane` is one order for all collectives of a process group.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Generator, Hashable
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.core.errors import AttachError, CommunicationError, ConnectionLost
from gradwire.drivers import groups
from gradwire.drivers.process_group import GroupTransport
from gradwire.session.failures import FailureBoard
from gradwire.session.meeting import GroupMeeting, group_store
from gradwire.session.records import keep_records, tell_death

INTERRUPTED_S = 0.7
"""How long to wait for a thread after an interrupt: what it waits for may never come."""

FAILED_S = 5.0
"""How long to wait for one after an error, or at exit: it ends once the other ranks do, and a thread whose wait is over
while Python ends aborts the process."""

T = TypeVar("T")


def group_of(given: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """The group that is meant.

    Raises:
        AttachError: there is none.
    """
    group = given or dist.group.WORLD if dist.is_initialized() else None
    if group is None:
        raise AttachError("there is no default process group: call torch.distributed.init_process_group first")
    return group


class Executor(Protocol):
    """Where a lane's jobs run."""

    def run(self, job: Callable[[], None]) -> None:
        """Have a job done, after those before it."""
        ...

    def is_here(self) -> bool:
        """Whether the caller is part of a job, or jobs run where the caller is."""
        ...

    def order(self) -> None:
        """Have the caller's next work come after the jobs so far."""
        ...

    def future(self) -> torch.futures.Future[Tensor]:
        """Return a future that a job may resolve."""
        ...

    def close(self, timeout_s: float, at_end: Callable[[], None] | None = None) -> None:
        """End after the jobs so far, of which the last one is `at_end`."""
        ...


class CommunicationThread:
    """One thread that does everything in order, so that collectives start in one order."""

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._at_end: Callable[[], None] | None = None
        self._thread = threading.Thread(target=self._loop, name="gradwire-communication", daemon=True)
        self._thread.start()

    def _loop(self) -> None:
        with torch.no_grad():
            while (job := self._work.get()) is not None:
                job()
                del job  # it holds a bucket
        if self._at_end is not None:
            self._at_end()

    def run(self, job: Callable[[], None]) -> None:
        """Queue a job; it runs after those before it."""
        self._work.put(job)

    def is_here(self) -> bool:
        """Whether the caller is part of a job."""
        return threading.current_thread() is self._thread

    def order(self) -> None:
        """Nothing: who has waited for a job may use what it wrote."""

    def future(self) -> torch.futures.Future[Tensor]:
        """Return a future that a job may resolve."""
        return torch.futures.Future()

    def close(self, timeout_s: float, at_end: Callable[[], None] | None = None) -> None:
        """End the thread after the jobs queued so far, and wait for it so long at most.

        Its last deed is `at_end`, since what a stuck thread still uses must not be taken away from it. The thread may
        call this itself, where the garbage collector runs in it.
        """
        self._at_end = at_end
        self._work.put(None)
        if not self.is_here():
            self._thread.join(timeout_s)


class SideStream:
    """The same jobs inline, on a stream beside the backward pass; nothing here waits for the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def run(self, job: Callable[[], None]) -> None:
        """Do a job at once, behind what the current stream has been given."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        # What a job makes outlives it: out of inference mode, which the caller may be in, nobody could write to it.
        with torch.inference_mode(False), torch.no_grad(), torch.cuda.stream(self._stream):
            job()

    def is_here(self) -> bool:
        """Whether the caller is part of a job."""
        return torch.cuda.current_stream(self._device) == self._stream

    def order(self) -> None:
        """Put the current stream behind the jobs so far: it uses what they wrote. DDP's futures do so by themselves."""
        torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def future(self) -> torch.futures.Future[Tensor]:
        """Return a future that carries the stream's order with its tensors."""
        return torch.futures.Future(devices=[self._device])

    def close(self, timeout_s: float, at_end: Callable[[], None] | None = None) -> None:
        """Wait for the stream, so long at most, then do `at_end`; where it takes longer a thread stays and does it."""

        def end() -> None:
            self._stream.synchronize()
            if at_end is not None:
                at_end()

        if self._stream.query():
            end()
            return
        waiting = threading.Thread(target=end, name="gradwire-end-of-stream", daemon=True)
        waiting.start()
        waiting.join(timeout_s)


class Lane:
    """The communication that all hooks of one process group share: one group of its own, one order, one fate.

    Args:
        group: whose ranks communicate.
        device: of the gradients; on a CPU a thread drives programs, on a GPU a side stream.
        deadline_s: seconds after which a silent rank is an error.
        what: the call that makes the lane.
        records: the folder that this rank's flight record is written into; None: that of `GRADWIRE_RECORDS`, if any.

    Attributes:
        log: of the flight recorder.
        executor: runs jobs in the order in which they were given.
        waiting: entered while a training loop waits for programs: whoever wants to know when puts a context there.
        store: where the ranks leave words for each other.
        name: of the group, used for no other.
    """

    executor: Executor
    waiting: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        deadline_s: float,
        what: str,
        records: str | Path | None = None,
    ) -> None:
        self.store = group_store()
        keep_records(records, self.store)
        try:
            # One that shares DDP's group with DDP's own collectives aborts Gloo.
            self.group = groups.new_group(group, dist.get_process_group_ranks(group), deadline_s, what)
        except CommunicationError as error:
            tell_death(error)
            raise
        self.name, self.deadline_s = self.group.group_name, deadline_s
        self.failures = FailureBoard(self.group, deadline_s, what)
        self.log = self.failures.log
        self.executor = SideStream(device) if device.type == "cuda" else CommunicationThread()
        self.poison: BaseException | None = None
        self.ports: dict[Hashable, Any] = {}
        self.meeting = GroupMeeting(self.store, self.name, self.group.rank(), self.failures.ranks, self.log)

    def transport(self) -> GroupTransport:
        """A transport of this lane's group."""
        return GroupTransport(self.group, self.log)

    def begin(self) -> None:
        """Note that a step begins.

        Raises:
            CommunicationError: communication has failed before, here or elsewhere.
        """
        self.require_sound()
        self.failures.begin()

    def fail(self, error: BaseException, where: str) -> BaseException:
        """Refuse further steps after an error, tell the other ranks of it, and return what to raise here."""
        self.poison = self.failures.explain(error, where)
        return self.poison

    def give_up(self, error: BaseException) -> None:
        """Refuse further steps after an error that arose elsewhere, and tell the other ranks of it."""
        if self.poison is None and self.failures.error is None:
            self.failures.tell(error)
            self.poison = error

    @contextlib.contextmanager
    def telling(self) -> Generator[None]:
        """Tell the other ranks what is raised inside: they wait for this rank, or will."""
        try:
            yield
        except BaseException as error:
            self.give_up(error)
            raise

    def require_sound(self) -> None:
        """Refuse another step once communication has failed.

        Raises:
            CommunicationError: it has failed, here or elsewhere.
        """
        if self.poison is not None:
            text = "communication failed in an earlier step; restart from a checkpoint"
            raise CommunicationError(f"{text} ({self.poison})") from self.poison
        if self.failures.error is not None:
            self.poison = self.failures.error
            raise self.failures.error

    def call(self, job: Callable[[], T], where: str) -> T:
        """Do a job where programs run, wait for it, and return what it returns. In a job of its own it is part of that.

        Raises:
            CommunicationError: a rank is at fault; or what the job raises itself.
        """
        if self.executor.is_here():
            return job()
        self.failures.begin()
        answer = self.do(job, where)
        self.failures.end()
        return answer

    def do(self, job: Callable[[], T], where: str) -> T:
        """The same as a part of a step, which others have been told that this rank is in.

        Raises:
            CommunicationError: as `call`.
        """
        return self.start(job, where)()

    def start(self, job: Callable[[], T], where: str) -> Callable[[], T]:
        """Have a job done where programs run; what is returned waits for it, raises as `do`, and returns its result."""
        answers: list[T] = []
        done = threading.Event()

        def guarded() -> None:
            try:
                answers.append(job())
            except BaseException as error:
                self.fail(error, where)
            done.set()

        self.executor.run(guarded)

        def finish() -> T:
            failure = self.wait(done, where)
            if (error := self.poison or failure) is not None:
                raise error
            self.executor.order()
            return answers[0]

        return finish

    def wait(self, ended: threading.Event, where: str) -> BaseException | None:
        """Wait in slices, so that an interrupt gets through, until the end or until communication has failed."""
        began = time.monotonic()
        try:
            with self.waiting():
                while not ended.wait(timeout=0.1):
                    if self.failures.error is not None:
                        break
                    if (waited := time.monotonic() - began) > self.deadline_s + 5.0:
                        lost = ConnectionLost("the end of the step", waited, TimeoutError("no answer"))
                        self.failures.explain(lost, where)
        except BaseException as interrupt:
            self.poison = interrupt
            self.failures.tell(interrupt)
            raise
        if not ended.is_set():
            self.poison = self.failures.error
        return self.poison

    def close(self, at_end: Callable[[], None] | None = None, patience_s: float = FAILED_S) -> None:
        """End the threads, then let go of what `at_end` says, once what is under way has ended.

        Where that never ends the thread keeps its group: tearing it down under the thread would abort the process.

        Args:
            at_end: done by the thread as its last deed.
            patience_s: how long to wait for a step that is under way, if communication has not failed.
        """
        if self.poison is not None or self.failures.error is not None:
            interrupted = not isinstance(self.poison or self.failures.error, Exception)
            patience_s = min(patience_s, INTERRUPTED_S if interrupted else FAILED_S)
        self.failures.close(min(patience_s, FAILED_S))
        self.executor.close(patience_s, at_end)

    def let_go(self, transport: GroupTransport, patience_s: float = FAILED_S) -> None:
        """End the threads, the last of which closes the one transport that used the lane, and destroys the group."""

        def destroy() -> None:
            transport.close()
            groups.destroy(self.group)
            del self.group  # its connections are closed once nobody has it any more, which tells the others

        self.close(destroy, patience_s)
