"""One step of a session, whose tensors come one by one."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from gradwire.core.errors import StepError
from gradwire.session.feed import Feed, Piece
from gradwire.session.lane import Lane


class SessionStep:
    """A step on its way. Its `with` block ends when every tensor that was delivered holds its mean.

    An exception that leaves the block ends communication on all ranks, wherever in the block it arose: the others wait
    for this step, or will, and must not take a later one of this rank for it. They raise a `CommunicationError` with
    the rank and its exception, and this rank's next step raises one too. What the step would have kept (residuals) is
    forgotten.

    Args:
        feed: of the session.
        lane: where programs run.
        is_open: tells whether the session has not been closed.
        when_ended: called once all tensors hold their means, outside of the step.
    """

    def __init__(self, feed: Feed, lane: Lane, is_open: Callable[[], bool], when_ended: Callable[[], None]) -> None:
        self._feed, self._lane, self._is_open, self._when_ended = feed, lane, is_open, when_ended
        self._delivered: dict[str, Tensor] = {}
        self._copies: dict[str, Tensor] = {}
        self._error: BaseException | None = None
        self._done: threading.Event | None = None
        self._entered = self._ended = False

    def __enter__(self) -> SessionStep:
        if self._ended:
            raise StepError("a step is used once: call session.step() for another one")
        if not self._is_open():
            raise StepError("this session is closed: make a new one")
        self._feed.occupy()
        try:
            self._lane.begin()
            self._feed.open()
        except BaseException:
            self._feed.vacate()
            raise
        self._entered = True
        return self

    def deliver(self, name: str, tensor: Tensor) -> None:
        """Hand a tensor over. It must be left alone until the step ends, and then holds its mean.

        Raises:
            StepError: an unknown name, a tensor that was delivered already, or one of another shape, dtype or device
                than planned; or the step is not under way. The tensors delivered before stay delivered.
        """
        self._require_under_way()
        self._require_fit(name, tensor)
        self._hand_over(name, tensor)

    def deliver_all(self, tensors: Mapping[str, Tensor]) -> None:
        """Deliver all of them, after all have been checked; the last ones first, as gradients come.

        Raises:
            StepError: as `deliver`, or a tensor that is missing. None is delivered then.
        """
        self._require_under_way()
        self.require_fit(tensors)
        for name in reversed(list(self._feed.names)):
            self._hand_over(name, tensors[name])

    def require_fit(self, tensors: Mapping[str, Tensor]) -> None:
        """Refuse tensors that `deliver_all` would refuse; may be asked before the step begins.

        Raises:
            StepError: as `deliver_all`.
        """
        for name, tensor in tensors.items():
            self._require_fit(name, tensor)
        self._require_all(tensors)

    def _hand_over(self, name: str, tensor: Tensor) -> None:
        self._delivered[name] = tensor
        piece = Piece(name, self._flat(name, tensor))
        self._feed.ready(tensor.nbytes)
        self._run(lambda: self._feed.put([piece]))

    @torch.inference_mode(False)
    def _flat(self, name: str, tensor: Tensor) -> Tensor:
        """All elements of a tensor, 1-d, where a mean may be written: not the tensor's own memory always."""
        flat = tensor.detach().reshape(-1)
        if not tensor.is_contiguous():
            self._copies[name] = flat  # which is no view then
        elif tensor.is_inference():  # and so can be written to in inference mode only
            flat = self._copies[name] = flat.clone()
        return flat

    def write_back(self, names: Iterable[str]) -> None:
        """Bring the means of some tensors, which have come, to where they belong, if they were written elsewhere."""
        for name in names:
            if (flat := self._copies.pop(name, None)) is None:
                continue
            tensor = self._delivered[name]
            with torch.inference_mode() if tensor.is_inference() else contextlib.nullcontext():
                tensor.detach().copy_(flat.view(tensor.shape))

    def _require_under_way(self) -> None:
        if not self._entered:
            raise StepError('a step is not under way: deliver inside of "with session.step() as step:"')

    def _require_fit(self, name: str, tensor: Tensor) -> None:
        spec = self._feed.planned(name)
        if name in self._delivered:
            raise StepError(f"{name!r} was delivered already in this step")
        if tensor.layout != torch.strided:
            raise StepError(f"{name!r} is {tensor.layout}, and only dense tensors can be combined")
        if any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
            raise StepError(f"{name!r} is an expanded tensor, whose elements share memory: pass a clone of it")
        if tuple(tensor.shape) != spec.shape or tensor.dtype != spec.dtype or tensor.device != spec.device:
            found = f"{tuple(tensor.shape)} {tensor.dtype} on {tensor.device}"
            raise StepError(f"{name!r} is {found}, and was planned as {spec.shape} {spec.dtype} on {spec.device}")

    def _require_all(self, names: Iterable[str]) -> None:
        missing = set(self._feed.names) - set(names)
        if missing:
            first, *others = (name for name in self._feed.names if name in missing)
            more = f" and {len(others)} more" if others else ""
            raise StepError(f"{first!r}{more} was not delivered: every rank gives all tensors, zeros where it has none")

    def _run(self, job: Callable[[], None]) -> None:
        """Have a job done where programs run; after an error nothing more is done."""
        if not self._is_open():
            raise StepError("this session was closed while a step was under way")

        def guarded() -> None:
            if self._error is None:
                try:
                    job()
                except BaseException as error:
                    self._error = self._lane.fail(error, self._feed.where())

        self._lane.executor.run(guarded)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._entered, self._ended = False, True
        try:
            if error is not None:
                self._lane.fail(error, self._feed.where())
            else:
                self._wait()
        except StepError as left_out:
            self._lane.fail(left_out, self._feed.where())
            raise
        finally:
            self._delivered, self._copies = {}, {}  # whoever keeps the step keeps no gradients with it
            self._lane.failures.end()
            self._feed.vacate()
        if error is None:
            self._when_ended()

    def go_on(self) -> None:
        """All tensors are delivered: run to the end while the caller does other things, until the block ends.

        Raises:
            StepError: a tensor is missing.
        """
        self._require_all(self._delivered)
        if self._done is not None:
            return
        self._done = threading.Event()
        self._run(lambda: self._feed.end(lambda: self.write_back(list(self._copies))))
        self._lane.executor.run(self._done.set)

    def _wait(self) -> None:
        """Run to the end, and raise what went wrong."""
        self.go_on()
        assert self._done is not None
        failure = self._lane.wait(self._done, self._feed.where())
        if (error := self._error or failure) is not None:
            raise error
        self._lane.executor.order()
