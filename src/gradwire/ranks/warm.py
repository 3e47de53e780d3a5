"""Processes kept warm: one a host or a rank, that has imported everything and forks a child for each run.

Importing PyTorch, compiling kernels and reading data takes longer than many a run. So such a process does that once,
then waits. Whoever supervises a rank starts `warm_client.py`, which is light; it hands over its environment, its
standard output and error, and lives and dies exactly as the child does:

    run_ranks ── client ══ socket ══ warm process ── fork ── fork ── the rank

The child is ended when its client goes away or is told to end, and all of it ends when whoever started it has ended.
Each rank has a warm process of its own, since children of one would share what Python draws at its start: the order of
sets then agrees between ranks where in real runs it does not.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from gradwire.ranks import moment

CLIENT = Path(__file__).with_name("warm_client.py")

POLITE_S = 1.0
"""How long a child that is told to end may take to say where it was."""

_MOST_WAITING = 16
"""Clients whose children are not forked yet."""


class WarmProcess:
    """A process that waits to fork; it ends with `close`, or with the process that made it.

    Args:
        prepare: "package.module:function" and the words it is called with, once, before anything is forked. It must not
            start a thread: a forked child would not have it.
        log: gets what the process itself has to say.
        enter: makes of a command line one that runs on the host where the process belongs.
        environment: variables on top of this process's own.
    """

    def __init__(
        self,
        prepare: Sequence[str],
        log: Path,
        enter: Callable[[list[str]], list[str]] = list,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._log = log
        # in the system's temporary folder, since the path of a socket must be short
        self._folder = tempfile.TemporaryDirectory(prefix="gradwire-")
        self._socket = str(Path(self._folder.name) / "socket")
        lifeline, self._held = os.pipe()  # it reads an end of file once nobody holds the other end any more
        path = {"PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
        # bound here, so that a client can connect before the process is ready, and is told if that ends first
        try:
            with socket.socket(socket.AF_UNIX) as listener, log.open("wb") as output:
                listener.bind(self._socket)
                listener.listen(_MOST_WAITING)
                descriptors = [listener.fileno(), lifeline]
                self._process = subprocess.Popen(
                    enter([sys.executable, "-m", "gradwire.ranks.warm", *map(str, descriptors), *prepare]),
                    env={**os.environ, **(environment or {}), **path},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    pass_fds=descriptors,
                    start_new_session=True,  # a Ctrl-C in the terminal is the parent's to handle
                )
        except BaseException:
            os.close(self._held)
            self._folder.cleanup()
            raise
        finally:
            os.close(lifeline)

    def command(self, target: str, *words: str) -> list[str]:
        """The command that calls `target`, "package.module:function", with words in a new child.

        The child leaves after `atexit` once the function returns: taking all of Python apart would take it a second. An
        exception ends it at once, with status 1: an orderly end would wait for peers that wait for it.
        """
        # -I -S: the client needs nothing but the standard library, and should start at once
        return [sys.executable, "-I", "-S", str(CLIENT), self._socket, str(self._log), target, *words]

    def close(self) -> None:
        """End the process and what it has forked: without the lifeline it ends its child, and then itself."""
        os.close(self._held)
        try:
            self._process.wait(POLITE_S + 1.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._folder.cleanup()

    @property
    def is_alive(self) -> bool:
        """Whether it still waits for work, or does some."""
        return self._process.poll() is None


# ------------------------------------------------------------------------------- inside a warm process


def call(words: Sequence[str]) -> None:
    """Call "package.module:function" with words."""
    module, _, name = words[0].rpartition(":")
    getattr(importlib.import_module(module), name)(*words[1:])


def serve(listener: socket.socket, lifeline: int) -> list[str]:
    """Fork a child for each client. Returns in a child only, with what that is to do.

    Between the two stands a process that waits for the child, so that several clients may have theirs at once.
    """
    while True:
        ready, _, _ = select.select([listener, lifeline], [], [])
        if lifeline in ready:
            reap(os.WEXITED)
            os._exit(0)
        reap(os.WEXITED | os.WNOHANG)
        connection, _ = listener.accept()
        with connection:
            message, descriptors = received(connection)
            if not message:
                for descriptor in descriptors:
                    os.close(descriptor)
                continue
            if os.fork():
                for descriptor in descriptors:
                    os.close(descriptor)
                continue
            listener.close()
            child = os.fork()
            if child == 0:
                connection.close()
                os.close(lifeline)
                return become(message, descriptors)
            for descriptor in descriptors:
                os.close(descriptor)
            status = outlive(child, connection, lifeline)
            with contextlib.suppress(OSError):  # the client may be gone
                connection.sendall(str(status).encode())
            os._exit(0)


def reap(options: int) -> None:
    """Take note of processes that have ended, so that the system can forget them."""
    with contextlib.suppress(ChildProcessError):  # there are none
        while os.waitid(os.P_ALL, 0, options) is not None:
            pass


def received(connection: socket.socket) -> tuple[bytes, list[int]]:
    """A client's message, which ends with a zero byte, and the files it wants written to."""
    message, descriptors = b"", list[int]()
    while not message.endswith(b"\0"):
        part, more, _, _ = socket.recv_fds(connection, 1 << 16, 2)
        descriptors += more
        if not part:
            return b"", descriptors
        message += part
    return message[:-1], descriptors


def become(message: bytes, descriptors: list[int]) -> list[str]:
    """Take on a client's output, folder and environment, in a forked child; return what it wants called."""
    os.setsid()  # a process group of its own, so that what it starts ends with it
    for descriptor, number in zip(descriptors, (1, 2), strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)
    job = json.loads(message)
    os.chdir(job["folder"])
    os.environ.clear()
    os.environ.update(job["environment"])
    return job["words"]


def outlive(child: int, connection: socket.socket, lifeline: int) -> int:
    """Wait for a child's end, and bring it about if the client wants that or is gone; return the wait status."""
    descriptor = os.pidfd_open(child)
    try:
        ready, _, _ = select.select([descriptor, connection, lifeline], [], [])
        if descriptor not in ready:
            signal_group(child, signal.SIGTERM)
            select.select([descriptor], [], [], POLITE_S)
        signal_group(child, signal.SIGKILL)  # and what it left behind; how it ended itself is on record already
        return os.waitpid(child, 0)[1]
    finally:
        os.close(descriptor)


def signal_group(child: int, number: int) -> None:
    """Send a signal to a child and to what it has started."""
    try:
        os.killpg(child, number)
    except ProcessLookupError:  # it has not made its group yet
        os.kill(child, number)


def main() -> None:
    """Entry point: `python -m gradwire.ranks.warm LISTENER LIFELINE module:function WORD...`, after two descriptors."""
    listener, lifeline, *prepare = sys.argv[1:]
    call(prepare)
    words = serve(socket.socket(fileno=int(listener)), int(lifeline))
    sys.argv = words
    status = 1
    try:
        call(words)
        atexit._run_exitfuncs()  # pyright: ignore[reportPrivateUsage] - `os._exit` alone would not
        status = 0
    except BaseException:
        moment.note()
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    main()
