"""Jobs that may have to be left alone: what waits for a process that died may wait for long."""

from __future__ import annotations

import atexit
import threading
import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch

from gradwire.core.errors import CommunicationError
from gradwire.drivers.groups import CONNECT_S

T = TypeVar("T")

_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.005, 0.25
_GRACE_S = 1.0
"""What a job that was called off gets to end by itself."""

_AT_EXIT_S = 2 * CONNECT_S
"""What it gets as Python ends: what cannot be broken off is connecting, which has a deadline of its own."""


class Attempt(Generic[T]):
    """A job in a thread of its own, from now on.

    Python ends once all jobs have: a thread whose wait inside of Gloo is over while Python ends aborts the process.

    Args:
        job: must change nothing that matters unless its result is used.
        call_off: breaks what the job waits for, or will wait for; called from another thread.
    """

    def __init__(self, job: Callable[[], T], call_off: Callable[[], None]) -> None:
        self._job, self._call_off, self._ended = job, call_off, threading.Event()
        self._result: list[T] = []
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="gradwire-attempt", daemon=True)
        self._thread.start()
        _under_way.add(self)

    @torch.no_grad()
    def _run(self) -> None:
        try:
            self._result.append(self._job())
        except BaseException as error:
            self._error = error
        self._ended.set()

    def result(self, worthwhile: Callable[[], bool]) -> T:
        """Wait for the job's result.

        Args:
            worthwhile: asked now and then; once it says no, the job is called off. Where it does not end then, it is
                left alone.

        Raises:
            CommunicationError: the job was called off; or what it has raised.
        """
        pause = _SHORTEST_PAUSE_S
        try:
            while not self._ended.wait(pause):
                if not worthwhile():
                    raise CommunicationError("another worker has given up")
                pause = min(2 * pause, _LONGEST_PAUSE_S)
        except BaseException:
            self.call_off()
            self._ended.wait(_GRACE_S)
            raise
        if self._error is not None:
            raise self._error
        return self._result[0]

    def call_off(self) -> None:
        """Have the job end, unless it has ended."""
        if not self._ended.is_set():
            self._call_off()

    def join(self, timeout_s: float) -> None:
        """Wait for the end of its thread."""
        self._thread.join(timeout_s)


_under_way: weakref.WeakSet[Attempt[Any]] = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    left = list(_under_way)
    for attempt in left:
        attempt.call_off()
    for attempt in left:
        attempt.join(_AT_EXIT_S)
