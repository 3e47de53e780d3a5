"""A worker of several servers at its lines: sends what it asks, waits for whichever answers, and asks again."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from gradwire.asynchronous.several.messages import Ask, Asked, ServerAnswer
from gradwire.asynchronous.several.worker import PartedWorker
from gradwire.core.errors import CommunicationError

Line = Callable[[Ask], "Future[ServerAnswer]"]
"""Sends a question to a server. The future has its answer, or the exception by which the server was not reached."""

LOOK_S = 0.5
"""Seconds without an answer until servers whose grants are held are looked at."""
_AGAIN_S = 0.1


class WorkerClient:
    """Works until a server says that all is done.

    Args:
        worker: what is to be said.
        lines: to each server.
        patience_s: seconds until it gives up a server that is not there.
    """

    def __init__(self, worker: PartedWorker, lines: Sequence[Line], patience_s: float) -> None:
        self.worker, self.lines, self.patience_s = worker, lines, patience_s
        self._heard: queue.SimpleQueue[tuple[Ask, Future[ServerAnswer]]] = queue.SimpleQueue()
        self._missing_s: dict[int, float] = {}

    def run(self) -> None:
        """Work.

        Raises:
            CommunicationError: a server that is not there.
            PushError, StateError, StepError: as `PartedWorker.receive`.
        """
        self._send(self.worker.begin())
        while not self.worker.is_done:
            self._turn()

    def _turn(self) -> None:
        try:
            ask, future = self._heard.get(timeout=LOOK_S)
        except queue.Empty:
            return self._send(self.worker.poll())
        error = future.exception()
        if error is not None:
            return self._miss(ask, error)
        self._missing_s.pop(ask.server, None)
        return self._send(self.worker.receive(ask, future.result()))

    def _send(self, asks: Sequence[Ask]) -> None:
        for ask in asks:
            self.lines[ask.server](ask).add_done_callback(lambda future, ask=ask: self._heard.put((ask, future)))

    def _miss(self, ask: Ask, error: BaseException) -> None:
        now_s = time.monotonic()
        since_s = now_s - self._missing_s.setdefault(ask.server, now_s)
        if since_s > self.patience_s:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:120]
            raise CommunicationError(
                f"worker {ask.worker} finds no server {ask.server} after {since_s:.0f} s: start it again ({reason})"
            ) from error
        if ask.kind is not Asked.PUSH:
            time.sleep(_AGAIN_S)
        self._send(self.worker.miss(ask))
