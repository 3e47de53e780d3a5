"""The processes of a comparison's hosts, kept warm from run to run."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType

from gradwire.network import Network
from gradwire.ranks.warm import WarmProcess


class WarmHosts:
    """The host processes of a comparison, for as long as the `with` block runs.

    Args:
        network: where they run; it must outlive them.
        ranks: how many, on all hosts.
        task: whose data they read beforehand.
        text: folder of the bytes task.
        log_dir: gets `host0.log`, ...: what the processes themselves have to say.
    """

    def __init__(self, network: Network, ranks: int, task: str, text: Path | None, log_dir: Path) -> None:
        self._network, self._ranks, self._log_dir = network, ranks, log_dir
        self._prepare = ["gradwire.compare.worker:prepare", task, *([str(text.resolve())] if text else [])]
        self._processes: list[WarmProcess] = []

    def __enter__(self) -> WarmHosts:
        self._log_dir.mkdir(parents=True, exist_ok=True)
        try:
            for rank in range(self._ranks):
                self._processes.append(self._started(rank))
        except BaseException:
            self.close()
            raise
        return self

    def _started(self, rank: int) -> WarmProcess:
        network = self._network
        log = self._log_dir / f"host{rank}.log"
        return WarmProcess(self._prepare, log, lambda argv: network.command(rank, argv), network.environment(rank))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the host processes."""
        while self._processes:
            self._processes.pop().close()

    def command(self, rank: int, job: Path) -> list[str]:
        """The command that does a job on a rank's host."""
        return self._processes[rank].command("gradwire.compare.worker:main", str(job))
