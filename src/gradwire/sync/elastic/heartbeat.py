"""Who is there: each worker has a number of its own, and counts up a key of the store as long as it lives."""

from __future__ import annotations

import atexit
import contextlib
import threading
import uuid

from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

from gradwire.core.errors import CommunicationError
from gradwire.sync.elastic.store import reaching

_LOOKS = 5
"""As many looks without a new sign of life make a worker lost."""


class Heartbeat:
    """Gives this worker's signs of life, and watches for those of the others, in a thread.

    A worker is lost once its key was the same in several looks in a row, which together take `lost_after_s`. Looks are
    counted and not seconds: clocks need not agree, and a host that was asleep does not take all others for lost. One
    that has left, or whose name another one has taken since, is not alive either.

    Args:
        store: a client of the run's keys. The thread has a connection of its own: a wait on the other one would stop
            it.
        name: of this worker; one that was killed comes back under the same name. "" for one that nobody else has.
        lost_after_s: see above.

    Attributes:
        number: this worker's, which no other one has had in this run.
        name: likewise.
    """

    def __init__(self, store: Store, name: str, lost_after_s: float) -> None:
        self.name = name or uuid.uuid4().hex[:12]
        self._lost_after_s = lost_after_s
        self._store: Store = store.clone()  # pyright: ignore[reportAttributeAccessIssue] - the stubs leave it out
        self._seen: dict[int, tuple[bytes, int]] = {}  # the count of each, and in how many looks it has been the same
        self._gone: set[int] = set()
        self._error: CommunicationError | None = None
        self._stop = threading.Event()
        with reaching():
            self.number = self._store.add("workers", 1) - 1
            self._store.set(f"gone/{self.number}", "")
            self.beat()
            self._take_name()
            self._look()
        self._thread = threading.Thread(target=self._run, name="gradwire-heartbeat", daemon=True)
        self._thread.start()
        atexit.register(self._halt)  # a thread that is in the store while Python ends would abort the process

    def _take_name(self) -> None:
        """Have the name; who had it before is lost, and need not be waited for."""
        key = f"name/{self.name}"
        if self._store.check([key]):
            self._store.set(f"gone/{int(self._store.get(key))}", "replaced")
        self._store.set(key, str(self.number))

    def beat(self) -> None:
        """Give a sign of life now: others that took this worker for lost are to see at once that it is not."""
        with reaching():
            self._store.add(f"beat/{self.number}", 1)

    def alive(self, worker: int) -> bool:
        """Whether a worker has given a sign of life of late, or was not looked for yet.

        Raises:
            CommunicationError: the store is out of reach.
        """
        if worker in self._gone:
            return False
        before, looks = self._seen.get(worker, (b"", 0))
        if looks < _LOOKS:
            return True
        with reaching():
            count = self._store.get(f"beat/{worker}")
        if count == before:
            return False
        self._seen[worker] = count, 0  # it was asleep and has come back since the last look
        return True

    def require_sound(self) -> None:
        """Refuse to go on where the store is out of reach, or another worker has this one's name.

        Raises:
            CommunicationError: one of these.
        """
        if self._error is not None:
            raise self._error
        if self.number in self._gone:
            raise CommunicationError(
                f"another worker has taken the name {self.name!r}: give each worker a name= of its own, or none"
            )

    def _run(self) -> None:
        while not self._stop.wait(self._lost_after_s / _LOOKS):
            try:
                self.beat()
                with reaching():
                    self._look()
            except CommunicationError as error:
                self._error = error
                return

    def _look(self) -> None:
        """Note whose count has changed, and who is gone."""
        ever = range(self._store.add("workers", 0))
        here = [w for w in ever if w not in self._gone and (w in self._seen or self._store.check([f"beat/{w}"]))]
        said = self._store.multi_get([f"{what}/{worker}" for what in ("beat", "gone") for worker in here])
        for worker, count, gone in zip(here, said, said[len(here) :], strict=False):
            before, looks = self._seen.get(worker, (b"", 0))
            self._seen[worker] = count, looks + 1 if count == before else 0
            if gone:
                self._gone.add(worker)

    def close(self, leaves: bool) -> None:
        """End the thread. Where this worker `leaves`, nobody waits for it any more."""
        atexit.unregister(self._halt)
        self._halt()
        if leaves and self._error is None:
            with contextlib.suppress(CommunicationError), reaching():
                self._store.set(f"gone/{self.number}", "left")

    def _halt(self) -> None:
        self._stop.set()
        self._thread.join(self._lost_after_s)
