"""Hosts kept warm: one process a host that has imported everything and forks a child for each run.

Importing PyTorch, compiling kernels and reading data takes longer than many a run. So each host's process does that
once, then waits. Whoever supervises a rank starts `warm_client.py`, which is light; it hands over its standard
output and error, and lives and dies exactly as the child does:

    run_ranks ── client ══ socket ══ host process ── fork ── the rank

The child is killed when its client goes away, and the client ends with the child's exit status or signal.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from types import TracebackType
from typing import Protocol

CLIENT = Path(__file__).with_name("warm_client.py")


class Network(Protocol):
    """What is asked of a network."""

    def command(self, rank: int, argv: list[str]) -> list[str]:
        """Words that run a command on a rank's host."""
        ...

    def environment(self, rank: int) -> dict[str, str]:
        """Variables that go with it."""
        ...


class WarmHosts:
    """The host processes of a comparison, for as long as the `with` block runs.

    Args:
        network: where they run; it must outlive them.
        hosts: how many.
        task: whose data they read beforehand.
        text: folder of the bytes task.
        log_dir: gets `host0.log`, ...: what the processes themselves have to say.
    """

    def __init__(self, network: Network, hosts: int, task: str, text: Path | None, log_dir: Path) -> None:
        self._network, self._hosts, self._log_dir = network, hosts, log_dir
        self._arguments = [task, *([str(text.resolve())] if text else [])]
        self._processes: list[subprocess.Popen[bytes]] = []
        # in the system's temporary folder, since the path of a socket must be short
        self._folder = tempfile.TemporaryDirectory(prefix="gradwire-")

    def __enter__(self) -> WarmHosts:
        self._log_dir.mkdir(parents=True, exist_ok=True)
        try:
            for rank in range(self._hosts):
                self._processes.append(self._start(rank))
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the host processes."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()
        self._processes.clear()
        self._folder.cleanup()

    def command(self, rank: int, job: Path) -> list[str]:
        """The command that does a job on a rank's host."""
        # -I -S: the client needs nothing but the standard library, and should start at once
        words = [sys.executable, "-I", "-S", str(CLIENT), self._socket(rank)]
        return [*words, str(job), str(self._log(rank))]

    def _socket(self, rank: int) -> str:
        return str(Path(self._folder.name) / f"host{rank}")

    def _log(self, rank: int) -> Path:
        return self._log_dir / f"host{rank}.log"

    def _start(self, rank: int) -> subprocess.Popen[bytes]:
        path = {"PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
        # bound here, so that a client can connect before the process is ready, and is told if that ends first
        with socket.socket(socket.AF_UNIX) as listener, self._log(rank).open("wb") as log:
            listener.bind(self._socket(rank))
            listener.listen(1)
            argv = [sys.executable, "-m", "gradwire.bench.warm", str(listener.fileno()), *self._arguments]
            return subprocess.Popen(
                self._network.command(rank, argv),
                env={**os.environ, **self._network.environment(rank), **path},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=[listener.fileno()],
                start_new_session=True,  # a Ctrl-C in the terminal is the parent's to handle
            )


# ------------------------------------------------------------------------------- inside a host process


def prepare(task: str, text: Path | None) -> None:
    """Import, compile and read what every run needs. Starts no thread: a forked child would not have it."""
    import torch

    from gradwire.bench import tasks, worker
    from gradwire.bench.task import TaskError

    torch.set_num_threads(1)
    with contextlib.suppress(TaskError):  # it was fine in the parent; if not, the run will tell
        made = tasks.make_task(task, 0, text)
        made.optimizer(p for p in made.model.parameters() if p.requires_grad)
    worker.warm_kernels()


def serve(listener: socket.socket) -> None:
    """Do one job after the other, for ever."""
    while True:
        connection, _ = listener.accept()
        with connection:
            message, descriptors, _, _ = socket.recv_fds(connection, 65536, 2)
            if not message:
                continue
            child = os.fork()
            if child == 0:
                listener.close()
                connection.close()
                become(message.decode(), descriptors)
            for descriptor in descriptors:
                os.close(descriptor)
            status = outlive(child, connection)
            with contextlib.suppress(OSError):  # the client may be gone
                connection.sendall(str(status).encode())


def become(job: str, descriptors: list[int]) -> None:
    """Be a rank, in a forked child; does not return."""
    status = 1
    try:
        os.dup2(descriptors[0], 1)
        os.dup2(descriptors[1], 2)
        from gradwire.bench import worker

        worker.main([job])
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def outlive(child: int, connection: socket.socket) -> int:
    """Wait for a child's end, and bring it about if the client goes away; returns the wait status."""
    descriptor = os.pidfd_open(child)
    try:
        ready, _, _ = select.select([descriptor, connection], [], [])
        if descriptor not in ready:
            os.kill(child, signal.SIGKILL)
        return os.waitpid(child, 0)[1]
    finally:
        os.close(descriptor)


def main() -> None:
    """Entry point: `python -m gradwire.bench.warm FD TASK [TEXT]`."""
    descriptor, task, *text = sys.argv[1:]
    listener = socket.socket(fileno=int(descriptor))
    prepare(task, Path(text[0]) if text else None)
    serve(listener)


if __name__ == "__main__":
    main()
