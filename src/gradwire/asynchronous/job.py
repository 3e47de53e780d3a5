"""What a server and its workers are to do."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from gradwire.asynchronous.lengths import Fixed, Length
from gradwire.asynchronous.pace import Free, Pace
from gradwire.asynchronous.rules import ServerRule
from gradwire.asynchronous.server import ParameterServer
from gradwire.asynchronous.work import Work
from gradwire.core.errors import CompositionError
from gradwire.sending import Sending

FREE, ONE_STEP, PLAIN = Free(), Fixed(), Sending()


@dataclass(frozen=True)
class Job:
    """Training by servers and workers, each in a process of its own.

    Args:
        parameters: what the server begins with, by name.
        rule: as `ParameterServer` takes it.
        work: called in worker w's own process as work(w), returns what that one computes with. A new process must be
            able to import it where processes are started by `spawn` (`processes.run`).
        workers: n.
        pushes: the run ends once so many were applied; of several servers, by each.
        pace, length, sending, seed: as `ParameterServer` takes them.
        folder: for snapshots. With one, a server that dies goes on from the newest when it is started again.
        snapshot_every: updates between snapshots.
        patience_s: seconds until a worker that never came is taken for dead, and until a worker gives up a server that
            is not there.
        silent_s: seconds without a sign of life after which a connection is lost, where the carrier has such signs.

    Raises:
        CompositionError: a number out of range.
    """

    parameters: Mapping[str, Tensor]
    rule: ServerRule
    work: Callable[[int], Work]
    workers: int
    pushes: int
    pace: Pace = FREE
    length: Length = ONE_STEP
    sending: Sending = PLAIN
    seed: int = 0
    folder: Path | None = None
    snapshot_every: int = 100
    patience_s: float = 120.0
    silent_s: float = 30.0

    def __post_init__(self) -> None:
        if self.pushes < 1 or self.snapshot_every < 1 or not self.patience_s > 0 or not self.silent_s > 0:
            raise CompositionError(
                f"a run of {self.pushes} pushes with snapshots every {self.snapshot_every} and a patience of "
                f"{self.patience_s} s: give 1 or more of each"
            )
        self.server()

    def server(self, parameters: Mapping[str, Tensor] | None = None, seed: int | None = None) -> ParameterServer:
        """A new server with the job's settings, of all parameters or of those that are given with their seed."""
        return ParameterServer(
            self.parameters if parameters is None else parameters,
            self.rule,
            workers=self.workers,
            pace=self.pace,
            length=self.length,
            sending=self.sending,
            seed=self.seed if seed is None else seed,
        )
