"""SIGTERM: the record is written first, and then the process ends as it would have.

Python calls a handler in the main thread, and not before that leaves C code. A process whose main thread is stuck there
would write nothing, and would not end any more. So Python also writes a byte into a pipe (`signal.set_wakeup_fd`),
which it does at once, and a thread that reads the pipe does the same as the handler.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType


class Termination:
    """Has something done before SIGTERM ends this process.

    A script's own handler stays in place, also one that is set later, and only the thread that reads the pipe does
    `before` then. Where another
    library has the wakeup descriptor (asyncio may), or this is not the main thread, nothing is changed.

    Args:
        before: what is done.

    Attributes:
        descriptors: those to be read: where one is ready, `read` is to be called.
    """

    def __init__(self, before: Callable[[], None]) -> None:
        self._before, self._pid = before, os.getpid()
        self.descriptors: list[int] = []
        self._written = -1

    def watch(self) -> None:
        """Begin."""
        if threading.current_thread() is not threading.main_thread():
            return
        handler = signal.getsignal(signal.SIGTERM)
        if handler is None or handler == signal.SIG_IGN:  # set by C code, or meant to be ignored
            return
        reading, writing = os.pipe()
        os.set_blocking(reading, False)
        os.set_blocking(writing, False)
        before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        if before != -1:
            signal.set_wakeup_fd(before)
            os.close(reading)
            os.close(writing)
            return
        self._written, self.descriptors = writing, [reading]
        if handler == signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._handled)
        os.register_at_fork(after_in_child=self._forked)

    def _forked(self) -> None:
        """A forked process is no rank, and its signals are not this one's."""
        if self._written != -1:
            signal.set_wakeup_fd(-1)
            if signal.getsignal(signal.SIGTERM) == self._handled:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
            self._written = -1

    def _handled(self, number: int, frame: FrameType | None) -> None:
        self._end()

    def read(self) -> None:
        """Read which signals have come, and act on SIGTERM."""
        with contextlib.suppress(BlockingIOError):
            if signal.SIGTERM in os.read(self.descriptors[0], 256):
                self._end()

    def _end(self) -> None:
        """Do what is to be done, and end by the signal, whichever thread comes here first."""
        ends = signal.getsignal(signal.SIGTERM) == self._handled  # else a script has a handler of its own by now
        self._before()
        if ends and os.getpid() == self._pid:
            # signal.signal is for the main thread alone, and that may be stuck.
            reset = ctypes.pythonapi.PyOS_setsig
            reset.argtypes, reset.restype = [ctypes.c_int, ctypes.c_void_p], ctypes.c_void_p
            reset(signal.SIGTERM, None)
            os.kill(self._pid, signal.SIGTERM)
