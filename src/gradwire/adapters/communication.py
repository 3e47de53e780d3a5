"""Where programs run beside a backward pass, and how their errors come back; shared by everything that hooks DDP.

A `Lane` is one order for all collectives of a process group's hooks. A `BucketSession` follows the buckets of one step
from DDP's hook to the end of the backward pass.
"""

import pickle
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import GradBucket, PrefixStore  # pyright: ignore[reportPrivateImportUsage]

from gradwire.core.errors import CommunicationError

# Hooks are made of these, and `register_comm_hook` reads annotations, so this module does not postpone them.

_attachments = 0


class CommunicationThread:
    """One thread that does everything in order, so that collectives start in one order."""

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._loop, name="gradwire-communication", daemon=True)
        self._thread.start()

    def _loop(self) -> None:
        with torch.no_grad():
            while (job := self._work.get()) is not None:
                job()
                del job  # it holds a bucket

    def run(self, job: Callable[[], None]) -> None:
        """Queue a job."""
        self._work.put(job)

    def future(self) -> torch.futures.Future[Tensor]:
        """Return a future that a job may resolve."""
        return torch.futures.Future()

    def close(self, timeout_s: float) -> bool:
        """End the thread after the jobs queued so far; return whether it ended in time."""
        self._work.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()


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

    def close(self, timeout_s: float) -> bool:
        """Wait for the stream."""
        self._stream.synchronize()
        return True


class FailureBoard:
    """Where a rank that fails leaves its error, so that the others can raise it too and need not wait."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._rank = dist.get_rank(group)
        store = dist.distributed_c10d._get_default_store()  # pyright: ignore[reportPrivateUsage]
        self._store = PrefixStore(f"gradwire/failure/{group.group_name}", store)

    def explain(self, error: BaseException) -> BaseException:
        """Post an error of this rank's own, or find the one behind a broken connection."""
        if isinstance(error, dist.DistBackendError | RuntimeError) and not isinstance(error, CommunicationError):
            for _ in range(10):
                if (cause := self.of_others()) is not None:
                    return cause
                time.sleep(0.1)
        self._post(error)
        return error

    def _post(self, error: BaseException) -> None:
        try:
            body = pickle.dumps((self._rank, error))
            pickle.loads(body)
        except Exception:
            body = pickle.dumps((self._rank, CommunicationError(f"{type(error).__name__}: {error}")))
        try:
            self._store.set("error", body)  # type: ignore[arg-type]
        except Exception:
            return  # the store went with rank 0: the others find out by their own broken connections

    def of_others(self) -> BaseException | None:
        """The error that another rank has posted, saying which."""
        try:
            if not self._store.check(["error"]):
                return None
            rank, error = pickle.loads(self._store.get("error"))
        except Exception:
            return None
        if rank == self._rank:
            return None
        error.add_note(f"raised on rank {rank} and passed on by gradwire")
        return error


def own_group(group: dist.ProcessGroup, deadline_s: float) -> dist.ProcessGroup:
    """A new group with the ranks of DDP's, since sharing one with DDP's own collectives aborts Gloo."""
    ranks = dist.get_process_group_ranks(group)
    global _attachments
    _attachments += 1
    made = dist.new_group(
        ranks,
        timeout=timedelta(seconds=deadline_s),
        backend=dist.get_backend(group),
        use_local_synchronization=len(ranks) < dist.get_world_size(),
        group_desc=f"gradwire{_attachments}",
    )
    assert isinstance(made, dist.ProcessGroup), "this process is no member of the group"
    return made


def queue_callback(callback: Callable[[], None]) -> None:
    """Call `callback` at the end of the backward pass now running, in the order of queueing."""
    try:
        torch.autograd.Variable._execution_engine.queue_callback(callback)  # type: ignore[attr-defined]
    except RuntimeError:
        # Outside a backward pass, as DDP's join() calls hooks for ranks that have run out of input.
        return


class BucketStep:
    """One step on its way: the buckets that came, their futures, and how it ended."""

    def __init__(self) -> None:
        self.buckets: list[GradBucket] = []
        self.futures: list[torch.futures.Future[Tensor]] = []
        self.ended = threading.Event()
        self.error: BaseException | None = None


class BucketSession(ABC):
    """Follows DDP's buckets through a lane, step by step. Subclasses say what is done with them."""

    def __init__(self, lane: "Lane") -> None:
        self.lane = lane
        self._step = BucketStep()

    @abstractmethod
    def work(self, buckets: Sequence[GradBucket], last: bool) -> None:
        """Do what the newest of a step's `buckets` allows; after the step's `last`, all hold their means."""

    def after_backward(self) -> None:
        """Called at the end of a backward pass that went well, before DDP writes gradients."""
        return

    def hook(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Hand a bucket over and return at once.

        Raises:
            CommunicationError: an earlier step failed.
        """
        if self.lane.poison is not None and not self._step.buckets:  # else the step at hand will say it at its end
            text = "communication failed in an earlier step; restart from a checkpoint"
            raise CommunicationError(text) from self.lane.poison
        future: torch.futures.Future[Tensor] = self.lane.driver.future()
        step, last = self._step, bucket.is_last()
        step.buckets.append(bucket)
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
                step.error = self.lane.poison = self.lane.failures.explain(error)
        if last or step.error is not None:
            _resolve(step)

    def _end(self, step: BucketStep) -> None:
        """Wait, and raise what went wrong as itself: DDP would turn an exception in a future into another."""
        self._await(step)
        if step.error is not None:
            raise step.error
        self.after_backward()

    def _await(self, step: BucketStep) -> None:
        began = time.monotonic()
        while not step.ended.wait(timeout=0.25):
            waited = time.monotonic() - began
            if waited > 1.0 and (failure := self.lane.failures.of_others()) is not None:
                step.error = self.lane.poison = failure
                return
            if waited > self.lane.deadline_s + 5.0:
                step.error = self.lane.poison = CommunicationError(
                    f"no answer within {self.lane.deadline_s:.0f} s: a rank is stuck or the link is down"
                )
                return


class Lane:
    """The communication that all hooks of one process group share: one group of its own, one order, one fate.

    Args:
        group: whose ranks communicate.
        device: of the gradients; on a CPU a thread drives programs, on a GPU a side stream.
        deadline_s: seconds after which a silent rank is an error.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, deadline_s: float) -> None:
        self.group = own_group(group, deadline_s)
        self.deadline_s = deadline_s
        self.driver = SideStream(device) if device.type == "cuda" else CommunicationThread()
        self.failures = FailureBoard(self.group)
        self.poison: BaseException | None = None
        self.sessions: dict[Hashable, BucketSession] = {}

    def close(self) -> None:
        """Join the thread. The group stays, since it may be gone already with the one it was made for."""
        self.driver.close(timeout_s=5.0)


def _resolve(step: BucketStep) -> None:
    """Give every future of the step its buffer."""
    count = len(step.futures)  # the hook may be adding one at this moment, its bucket first
    for bucket, future in zip(step.buckets[:count], step.futures[:count], strict=True):
        if not future.done():
            future.set_result(bucket.buffer())
    step.ended.set()
