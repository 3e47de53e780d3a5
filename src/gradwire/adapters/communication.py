"""How DDP's buckets come through a lane, step by step; shared by everything that hooks DDP."""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor
from torch.distributed import GradBucket  # pyright: ignore[reportPrivateImportUsage]

from gradwire.core.errors import StepError
from gradwire.session.lane import Lane

# Hooks are made of these, and `register_comm_hook` reads annotations, so this module does not postpone them.


def queue_callback(callback: Callable[[], None]) -> bool:
    """Call `callback` at the end of the backward pass now running, in the order of queueing; return whether one is."""
    try:
        torch.autograd.Variable._execution_engine.queue_callback(callback)  # type: ignore[attr-defined]
    except RuntimeError:
        # Outside a backward pass, as DDP's join() calls hooks for ranks that have run out of input.
        return False
    return True


class _PassWatch:
    """A callback that autograd drops without having called it, where an exception ends the backward pass."""

    def __init__(self, broken_off: Callable[[], None]) -> None:
        self._broken_off: Callable[[], None] | None = broken_off

    def __call__(self) -> None:
        self._broken_off = None

    def __del__(self) -> None:
        if self._broken_off is not None:
            self._broken_off()


def watch_pass(broken_off: Callable[[], None]) -> None:
    """Have `broken_off` called if an exception ends the backward pass now running, before the caller of it sees that.

    A pass inside of another one, of a reentrant checkpoint, is watched for itself: call this at each place that counts.
    """
    watch = _PassWatch(broken_off)
    if not queue_callback(watch):
        watch()


class BucketStep:
    """One step on its way: the buckets that came, their futures, the gradients as they were, and how it ended."""

    def __init__(self) -> None:
        self.buckets: list[GradBucket] = []
        self.futures: list[torch.futures.Future[Tensor]] = []
        self.before: dict[Tensor, tuple[Tensor | None, int]] = {}
        self.ended = threading.Event()
        self.error: BaseException | None = None
        self.where = ""
        self.is_broken_off = False

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


class BucketPort(ABC):
    """Follows DDP's buckets through a lane, step by step. Subclasses say what is done with them.

    Attributes:
        broken_off: what ended a backward pass of which buckets had come, if one was ended so.
    """

    def __init__(self, lane: Lane) -> None:
        self.lane = lane
        self.broken_off: BaseException | None = None
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
            self.lane.begin()
            self._step.where = self.where()
        future: torch.futures.Future[Tensor] = self.lane.executor.future()
        step, last = self._step, bucket.is_last()
        watch_pass(lambda: self._broken_off(step))
        step.buckets.append(bucket)
        step.watch(bucket.parameters())
        step.futures.append(future)
        count = len(step.buckets)
        if last:
            self._step = BucketStep()
            queue_callback(lambda: self._end(step))
        self.lane.executor.run(lambda: self._guarded(step, count, last))
        return future

    def _guarded(self, step: BucketStep, count: int, last: bool) -> None:
        """Work on one bucket; an error ends the step and every future of it."""
        if step.error is None:
            try:
                self.work(step.buckets[:count], last)
            except BaseException as error:
                step.error = self.lane.fail(error, self.where())
        if last or step.error is not None:
            _resolve(step)

    def _broken_off(self, step: BucketStep) -> None:
        """Tell the other ranks, which wait for buckets of this pass, or will for the next: DDP cannot go on here."""
        if not step.is_broken_off:
            step.is_broken_off, self._step = True, BucketStep()
            error = StepError(
                f"an exception ended the backward pass{step.where} after {len(step.buckets)} of its buckets, as the "
                "output of this rank shows: restart from a checkpoint, since DDP cannot go on from there"
            )
            self.broken_off = step.error = step.error or self.lane.fail(error, step.where)
            self.lane.failures.end()

    def require_whole_passes(self) -> None:
        """Refuse another pass after one that broke off, which DDP would refuse for reasons that are none.

        Raises:
            StepError: an exception ended a backward pass.
        """
        if self.broken_off is not None:
            raise self.broken_off

    def _end(self, step: BucketStep) -> None:
        """Wait, and raise what went wrong as itself: DDP would turn an exception in a future into another."""
        failure = self.lane.wait(step.ended, self.where())
        self.lane.failures.end()
        step.error = step.error or failure
        if step.error is not None:
            raise step.error
        self.after_backward(step)


def _resolve(step: BucketStep) -> None:
    """Give every future of the step its buffer."""
    count = len(step.futures)  # the hook may be adding one at this moment, its bucket first
    for bucket, future in zip(step.buckets[:count], step.futures[:count], strict=True):
        if not future.done():
            future.set_result(bucket.buffer())
    step.ended.set()
