"""One step of a session, whose tensors come one by one."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gradwire.core.errors import StepError

if TYPE_CHECKING:
    from gradwire.session.session import Session


class SessionStep:
    """A step on its way. Its `with` block ends when every tensor that was delivered holds its mean.

    An exception that leaves the block ends communication on all ranks, wherever in the block it arose: the others wait
    for this step, or will, and must not take a later one of this rank for it. They raise a `CommunicationError` with
    the rank and its exception, and this rank's next step raises one too. What the step would have kept (residuals) is
    forgotten.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._delivered: dict[str, Tensor] = {}
        self._copies: dict[str, Tensor] = {}
        self._error: BaseException | None = None
        self._done: threading.Event | None = None
        self._entered = self._ended = False

    def __enter__(self) -> SessionStep:
        session = self._session
        if self._ended:
            raise StepError("a step is used once: call session.step() for another one")
        session.occupy()
        try:
            session.begin()
            session.lane.begin()
            self._run(session.reduction.begin)
        except BaseException:
            session.vacate()
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
        for name in reversed(list(self._session.names)):
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
        session, flat = self._session, self._flat(name, tensor)
        session.window.ready(time.perf_counter(), tensor.nbytes)

        def put() -> None:
            session.reduction.put(name, flat, session.scale)
            session.reduction.pump()

        self._run(put)

    @torch.inference_mode(False)
    def _flat(self, name: str, tensor: Tensor) -> Tensor:
        """All elements of a tensor, 1-d, where a mean may be written: not the tensor's own memory always."""
        flat = tensor.detach().reshape(-1)
        if not tensor.is_contiguous():
            self._copies[name] = flat  # which is no view then
        elif tensor.is_inference():  # and so can be written to in inference mode only
            flat = self._copies[name] = flat.clone()
        return flat

    def _write_copies(self) -> None:
        """Bring means that were written elsewhere to where they belong."""
        for name, flat in self._copies.items():
            tensor = self._delivered[name]
            with torch.inference_mode() if tensor.is_inference() else contextlib.nullcontext():
                tensor.detach().copy_(flat.view(tensor.shape))

    def _require_under_way(self) -> None:
        if not self._entered:
            raise StepError('a step is not under way: deliver inside of "with session.step() as step:"')

    def _require_fit(self, name: str, tensor: Tensor) -> None:
        spec = self._session.planned(name)
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
        missing = set(self._session.names) - set(names)
        if missing:
            first, *others = (name for name in self._session.names if name in missing)
            more = f" and {len(others)} more" if others else ""
            raise StepError(f"{first!r}{more} was not delivered: every rank gives all tensors, zeros where it has none")

    def _run(self, job: Callable[[], None]) -> None:
        """Have a job done where programs run; after an error nothing more is done."""
        if not self._session.is_open:
            raise StepError("this session was closed while a step was under way")

        def guarded() -> None:
            if self._error is None:
                try:
                    job()
                except BaseException as error:
                    self._error = self._session.lane.fail(error, self._session.where())

        self._session.lane.executor.run(guarded)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        session = self._session
        self._entered, self._ended = False, True
        try:
            if error is not None:
                session.lane.fail(error, session.where())
            else:
                self._wait()
                session.warn_of_non_finite()
        except StepError as left_out:
            session.lane.fail(left_out, session.where())
            raise
        finally:
            self._delivered, self._copies = {}, {}  # whoever keeps the step keeps no gradients with it
            session.lane.failures.end()
            session.vacate()
        if error is None:
            session.look_for_drift()

    def go_on(self) -> None:
        """All tensors are delivered: run to the end while the caller does other things, until the block ends.

        Raises:
            StepError: a tensor is missing.
        """
        self._require_all(self._delivered)
        if self._done is not None:
            return
        session, self._done = self._session, threading.Event()

        def finish() -> None:
            session.reduction.finish()
            self._write_copies()
            session.reduction.end()

        self._run(finish)
        session.lane.executor.run(self._done.set)

    def _wait(self) -> None:
        """Run to the end, and raise what went wrong."""
        self.go_on()
        session, done = self._session, self._done
        assert done is not None
        failure = session.lane.wait(done, session.where())
        if (error := self._error or failure) is not None:
            raise error
        session.lane.executor.order()
