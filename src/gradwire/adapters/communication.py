"""Where programs run beside a backward pass, and how their errors come back; shared by everything that hooks DDP.

A `Lane` is one order for all collectives of a process group's hooks. A `BucketSession` follows the buckets of one step
from DDP's hook to the end of the backward pass.
"""

import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import GradBucket  # pyright: ignore[reportPrivateImportUsage]

from gradwire.adapters.failures import FailureBoard
from gradwire.core.errors import CommunicationError, ConnectionLost
from gradwire.drivers import groups
from gradwire.drivers.process_group import GroupTransport

# Hooks are made of these, and `register_comm_hook` reads annotations, so this module does not postpone them.

INTERRUPTED_S = 0.7
"""How long to wait for a thread after an interrupt: what it waits for may never come."""

FAILED_S = 5.0
"""How long to wait for one after an error, or at exit: it ends once the other ranks do, and a thread whose wait is over
while Python ends aborts the process."""

T = TypeVar("T")


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
        """Queue a job."""
        self._work.put(job)

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
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)


class SideStream:
    """The same jobs inline, on a stream beside the backward pass; nothing here waits for the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def run(self, job: Callable[[], None]) -> None:
        """Do a job at once, behind what the current stream has been given."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.no_grad(), torch.cuda.stream(self._stream):
            job()

    def future(self) -> torch.futures.Future[Tensor]:
        """Return a future that carries the stream's order with its tensors."""
        return torch.futures.Future(devices=[self._device])

    def close(self, timeout_s: float, at_end: Callable[[], None] | None = None) -> None:
        """Wait for the stream, then do `at_end`."""
        self._stream.synchronize()
        if at_end is not None:
            at_end()


def queue_callback(callback: Callable[[], None]) -> None:
    """Call `callback` at the end of the backward pass now running, in the order of queueing."""
    try:
        torch.autograd.Variable._execution_engine.queue_callback(callback)  # type: ignore[attr-defined]
    except RuntimeError:
        # Outside a backward pass, as DDP's join() calls hooks for ranks that have run out of input.
        return


class BucketStep:
    """One step on its way: the buckets that came, their futures, the gradients as they were, and how it ended."""

    def __init__(self) -> None:
        self.buckets: list[GradBucket] = []
        self.futures: list[torch.futures.Future[Tensor]] = []
        self.before: dict[Tensor, tuple[Tensor | None, int]] = {}
        self.ended = threading.Event()
        self.error: BaseException | None = None

    def watch(self, parameters: Iterable[Tensor]) -> None:
        """Note the gradients of these parameters before DDP writes their means."""
        for parameter in parameters:
            self.before[parameter] = _gradient_of(parameter)

    def unwritten(self) -> list[Tensor]:
        """The parameters whose gradients DDP has left as they were, asked once it has written the others.

        It does so where no rank used a parameter, whether its gradient is None, zeroed in place or left from before. A
        write is seen by the tensor's version, which costs nothing: a mean that equals what stood there is no doubt.
        """
        return [p for p, (gradient, version) in self.before.items() if _same(_gradient_of(p), gradient, version)]


def _gradient_of(parameter: Tensor) -> tuple[Tensor | None, int]:
    """A parameter's gradient, and how often it was written to."""
    gradient = parameter.grad
    return gradient, -1 if gradient is None else gradient._version


def _same(now: tuple[Tensor | None, int], gradient: Tensor | None, version: int) -> bool:
    return now[0] is gradient and now[1] == version


class BucketSession(ABC):
    """Follows DDP's buckets through a lane, step by step. Subclasses say what is done with them."""

    def __init__(self, lane: "Lane") -> None:
        self.lane = lane
        self._step = BucketStep()

    @abstractmethod
    def work(self, buckets: Sequence[GradBucket], last: bool) -> None:
        """Do what the newest of a step's `buckets` allows; after the step's `last`, all hold their means."""

    def after_backward(self, step: BucketStep) -> None:
        """Called at the end of a backward pass that went well, before DDP writes gradients."""
        return

    def where(self) -> str:
        """Where in the training this is, for errors: " in step 7"."""
        return ""

    def hook(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Hand a bucket over and return at once.

        Raises:
            CommunicationError: an earlier step failed.
        """
        if not self._step.buckets:  # else the step at hand will say it at its end
            self.lane.require_sound()
            self.lane.failures.begin()
        future: torch.futures.Future[Tensor] = self.lane.driver.future()
        step, last = self._step, bucket.is_last()
        step.buckets.append(bucket)
        step.watch(bucket.parameters())
        step.futures.append(future)
        count = len(step.buckets)
        if last:
            self._step = BucketStep()
            queue_callback(lambda: self._end(step))
        self.lane.driver.run(lambda: self._guarded(step, count, last))
        return future

    def _guarded(self, step: BucketStep, count: int, last: bool) -> None:
        """Work on one bucket; an error ends the step and every future of it."""
        if step.error is None:
            try:
                self.work(step.buckets[:count], last)
            except BaseException as error:
                step.error = self.lane.poison = self.lane.failures.explain(error, self.where())
        if last or step.error is not None:
            _resolve(step)

    def _end(self, step: BucketStep) -> None:
        """Wait, and raise what went wrong as itself: DDP would turn an exception in a future into another."""
        failure = self.lane.wait(step.ended, self.where())
        self.lane.failures.end()
        step.error = step.error or failure
        if step.error is not None:
            raise step.error
        self.after_backward(step)


class Lane:
    """The communication that all hooks of one process group share: one group of its own, one order, one fate.

    Args:
        group: whose ranks communicate.
        device: of the gradients; on a CPU a thread drives programs, on a GPU a side stream.
        deadline_s: seconds after which a silent rank is an error.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, deadline_s: float, what: str) -> None:
        # One that shares DDP's group with DDP's own collectives aborts Gloo.
        self.group = groups.new_group(group, dist.get_process_group_ranks(group), deadline_s, what)
        self.deadline_s = deadline_s
        self.failures = FailureBoard(self.group, deadline_s)
        self.driver = SideStream(device) if device.type == "cuda" else CommunicationThread()
        self.poison: BaseException | None = None
        self.sessions: dict[Hashable, BucketSession] = {}

    def transport(self) -> GroupTransport:
        """A transport of this lane's group."""
        return GroupTransport(self.group, self.failures.count)

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
        """Do a job where programs run, wait for it, and return what it returns.

        Raises:
            CommunicationError: a rank is at fault; or what the job raises itself.
        """
        answers: list[T] = []
        done = threading.Event()

        def guarded() -> None:
            try:
                answers.append(job())
            except BaseException as error:
                self.poison = self.failures.explain(error, where)
            done.set()

        self.failures.begin()
        self.driver.run(guarded)
        failure = self.wait(done, where)
        self.failures.end()
        if (error := self.poison or failure) is not None:
            raise error
        return answers[0]

    def wait(self, ended: threading.Event, where: str) -> BaseException | None:
        """Wait in slices, so that an interrupt gets through, until the end or until communication has failed."""
        began = time.monotonic()
        try:
            while not ended.wait(timeout=0.1):
                if self.failures.error is not None:
                    break
                if (waited := time.monotonic() - began) > self.deadline_s + 5.0:
                    self.failures.explain(
                        ConnectionLost("the end of the step", waited, TimeoutError("no answer")), where
                    )
        except BaseException as interrupt:
            self.poison = interrupt
            self.failures.leave_word(interrupt)
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
        self.driver.close(patience_s, at_end)


def _resolve(step: BucketStep) -> None:
    """Give every future of the step its buffer."""
    count = len(step.futures)  # the hook may be adding one at this moment, its bucket first
    for bucket, future in zip(step.buckets[:count], step.futures[:count], strict=True):
        if not future.done():
            future.set_result(bucket.buffer())
    step.ended.set()
