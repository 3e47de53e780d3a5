"""Processes, one for each rank: started together, watched, and ended together."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from gradwire.core.errors import CommunicationError
from gradwire.kernels.runtime.choice import VARIABLE as KERNELS_VARIABLE
from gradwire.network import Network
from gradwire.network.loopback import loopback_environments
from gradwire.ranks import moment
from gradwire.ranks.warm import POLITE_S, WarmProcess

_TAIL_LINES = 20
_OTHERS_TAIL_LINES = 5
_OVERDUE_TAIL_LINES = 40  # where a rank stood, and what it may have said when the first of the others was killed
_TERMINATE_S = POLITE_S + 2.0  # more than a rank of a warm process has to show where it stands
_TICK_S = 0.2
_MOST_WARM = 12


class RankFailure(CommunicationError):  # noqa: N818 - what fails is the rank
    """A rank ended badly, or the deadline passed; the message shows what the ranks said last.

    Attributes:
        rank: the rank that failed first, or the lowest one still running at the deadline.
        status: its exit status, negative for a signal; None if it was still running.
    """

    def __init__(self, message: str, rank: int, status: int | None):
        super().__init__(message, (rank,))
        self.rank = rank
        self.status = status


def run_ranks(
    commands: Sequence[Sequence[str]],
    environments: Sequence[Mapping[str, str]],
    *,
    log_dir: Path,
    deadline_s: float,
    on_line: Callable[[int, str], None] | None = None,
    grace_s: float = 5,
) -> None:
    """Run one command for each rank and return when all have ended well.

    Whatever happens, an interrupt included, no process of any rank runs any more when this function is left.

    Args:
        commands: the command line of each rank.
        environments: variables of each rank, on top of this process's own.
        log_dir: gets `rank0.log`, `rank1.log`, ...: what each rank writes to standard output and error.
        deadline_s: seconds all ranks may take together.
        on_line: called here, in the caller's thread, with (rank, line) for each complete line.
        grace_s: seconds that the other ranks get to end by themselves after one has failed.

    Raises:
        RankFailure: if a rank ends with a status other than 0, naming the first; or if the deadline passes.
    """
    if len(commands) != len(environments) or not commands:
        raise ValueError(f"one command and one environment a rank: got {len(commands)}, {len(environments)}")
    log_dir.mkdir(parents=True, exist_ok=True)
    with _Watch(on_line) as watch:
        for rank, (command, environment) in enumerate(zip(commands, environments, strict=True)):
            watch.start(rank, command, environment, log_dir / f"rank{rank}.log")
        watch.until(lambda: bool(watch.failed) or not watch.running(), deadline_s)
        if watch.failed:
            watch.until(lambda: not watch.running(), grace_s)
            ended_alone = not watch.running()
            watch.stop()
            raise watch.failure(ended_alone)
        if watch.running():
            running = watch.running()
            watch.stop()
            raise watch.overdue(running, deadline_s)


class _Rank:
    """One process, its log, and the line it has not finished yet."""

    def __init__(self, rank: int, command: Sequence[str], environment: Mapping[str, str], log: Path):
        self.rank = rank
        self.log = log
        self._file: BinaryIO = log.open("wb", buffering=0)
        self._unfinished = b""
        self._moment = log.with_suffix(".moment")
        try:
            self.process = subprocess.Popen(
                list(command),
                env={**os.environ, **environment, moment.VARIABLE: str(self._moment)},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a process group of its own, so that its children end with it
            )
        except BaseException:
            self._file.close()
            raise
        assert self.process.stdout is not None
        self.output = self.process.stdout
        os.set_blocking(self.output.fileno(), False)

    def pump(self, on_line: Callable[[int, str], None] | None) -> bool:
        """Move what the process has written to its log; False once it can write no more."""
        while True:
            try:
                data = os.read(self.output.fileno(), 1 << 16)
            except BlockingIOError:
                return True
            if not data:
                return False
            self._file.write(data)
            if on_line is not None:
                *lines, self._unfinished = (self._unfinished + data).split(b"\n")
                for line in lines:
                    on_line(self.rank, line.decode(errors="replace"))

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)

    def tail(self, lines: int) -> str:
        last = self.log.read_text(errors="replace").splitlines()[-lines:]
        return "".join(f"\n    {line}" for line in last) or "\n    (it wrote nothing)"

    def failed_at(self) -> int | None:
        """When an exception ended the rank, if one did and the rank could say so."""
        return moment.read(self._moment)

    def close(self) -> None:
        self.output.close()
        self._file.close()
        self._moment.unlink(missing_ok=True)


class _Watch:
    """Waits for output and for ends of processes in one thread, so that the order of deaths is known."""

    def __init__(self, on_line: Callable[[int, str], None] | None):
        self._on_line = on_line
        self._ranks: list[_Rank] = []
        self._selector = selectors.DefaultSelector()
        self._pidfds: dict[int, int] = {}
        self.failed: list[_Rank] = []

    def __enter__(self) -> _Watch:
        return self

    def __exit__(self, *_: object) -> None:
        for rank in self._ranks:
            rank.signal(signal.SIGKILL)
        for rank in self._ranks:
            rank.process.wait()
            rank.close()
        for descriptor in self._pidfds.values():
            os.close(descriptor)
        self._selector.close()

    def start(self, rank: int, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        try:
            started = _Rank(rank, command, environment, log)
        except OSError as error:
            raise RankFailure(f"rank {rank} cannot start {command[0]!r}: {error.strerror}", rank, None) from error
        self._ranks.append(started)
        self._selector.register(started.output, selectors.EVENT_READ, started)
        with contextlib.suppress(OSError):  # without one, the tick notices the end, a little later
            descriptor = os.pidfd_open(started.process.pid)
            self._pidfds[rank] = descriptor
            self._selector.register(descriptor, selectors.EVENT_READ, started)

    def running(self) -> list[_Rank]:
        return [rank for rank in self._ranks if rank.process.returncode is None]

    def until(self, done: Callable[[], bool], timeout_s: float) -> None:
        """Serve the processes until `done`, or until the time is over."""
        end = time.monotonic() + timeout_s
        while not done() and (left := end - time.monotonic()) > 0:
            for key, _ in self._selector.select(min(left, _TICK_S)):  # in the order in which it happened
                rank: _Rank = key.data
                if key.fileobj is not rank.output:
                    self._reap(rank)
                elif not rank.pump(self._on_line):
                    self._selector.unregister(rank.output)
            for rank in self.running():
                self._reap(rank)

    def _reap(self, rank: _Rank) -> None:
        """Note the end of a process, if it has come."""
        status = rank.process.poll()
        if status is None:
            return
        if (descriptor := self._pidfds.pop(rank.rank, None)) is not None:
            self._selector.unregister(descriptor)
            os.close(descriptor)
        rank.signal(signal.SIGKILL)  # children that it left behind
        rank.pump(self._on_line)
        if status != 0:
            self.failed.append(rank)

    def stop(self) -> None:
        """End the processes that still run: politely, then not."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            for rank in self.running():
                rank.signal(number)
            self.until(lambda: not self.running(), _TERMINATE_S)

    def _first(self) -> _Rank:
        """The rank that failed first: by its own clock reading, else the one whose end was seen first.

        Between a warm process and this one stand two others, which a busy machine may run late, so ends can be seen in
        the wrong order. A rank that a signal ended says no time, and is believed if it was seen first.
        """
        seen = self.failed[0]
        if seen.failed_at() is None:
            return seen
        return min(self.failed, key=lambda rank: rank.failed_at() or float("inf"))

    def failure(self, ended_alone: bool) -> RankFailure:
        first = self._first()
        status = first.process.returncode
        text = f"rank {first.rank} {_ended(status)}; its last lines ({first.log}):{first.tail(_TAIL_LINES)}"
        for rank in self._ranks:
            if rank is not first:
                text += f"\n  rank {rank.rank} {_ended(rank.process.returncode)} after it:"
                text += rank.tail(_OTHERS_TAIL_LINES)
        if not ended_alone:
            text += "\n  (ranks that did not end by themselves were terminated)"
        return RankFailure(text, first.rank, status)

    def overdue(self, running: Sequence[_Rank], deadline_s: float) -> RankFailure:
        names = ", ".join(str(rank.rank) for rank in running)
        text = f"after the deadline of {deadline_s:g} s, still running: rank {names}; the last lines:"
        for rank in running:
            text += f"\n  rank {rank.rank} ({rank.log}):{rank.tail(_OVERDUE_TAIL_LINES)}"
        return RankFailure(text, running[0].rank, None)


def _ended(status: int) -> str:
    if status >= 0:
        return f"ended with status {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"was killed by signal {-status}"


def run_function(
    target: str,
    ranks: int,
    args: Mapping[str, Any] | None = None,
    deadline_s: float = 60,
    network: Network | None = None,
    environments: Sequence[Mapping[str, str]] | None = None,
    on_line: Callable[[int, str], None] | None = None,
) -> list[Any]:
    """Call a function on every rank of a new Gloo group and return what each rank returned.

    On the loopback interface ranks are forked from warm processes, which are kept until this one ends: starting Python
    and importing PyTorch would take longer than most functions. Ranks with variables of their own, which libraries read
    when they are imported, have warm processes of their own. On a network ranks start from nothing, and end by taking
    Python apart as well. Several threads may call it at once, with the same environment.

    Args:
        target: "package.module:function" or "path/to/file.py:function"; called as
            `function(rank, world_size, **args)` in a process of its own with one thread for torch.
        ranks: how many.
        args: keyword arguments that JSON can carry.
        deadline_s: seconds until the ranks are killed.
        network: an entered `Network` to run on; None runs on the loopback interface.
        environments: further environment variables of each rank.
        on_line: called here, in the caller's thread, with (rank, line) for each complete line that a rank prints.

    Returns:
        The results, through JSON, in the order of the ranks.

    Raises:
        RankFailure: if a rank fails or the deadline passes.
    """
    with tempfile.TemporaryDirectory(prefix="gradwire-") as folder:
        results = [Path(folder) / f"result{rank}.json" for rank in range(ranks)]
        own = list(environments or [{}] * ranks)
        words = [[target, json.dumps(dict(args or {})), str(result), str(deadline_s)] for result in results]
        if network is not None:
            places = [network.environment(rank) for rank in range(ranks)]
            fresh = [[sys.executable, "-m", "gradwire.ranks.rank_main", *of_rank] for of_rank in words]
            commands = [network.command(rank, command) for rank, command in enumerate(fresh)]
        else:
            places = loopback_environments(ranks)
            commands = _warm_ranks.commands(own, words)
        path = {"PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
        run_ranks(
            commands,
            [{**place, **path, **variables} for place, variables in zip(places, own, strict=True)],
            log_dir=Path(folder),
            deadline_s=deadline_s,
            on_line=on_line,
        )
        return [json.loads(result.read_text()) for result in results]


class WarmRanks:
    """A warm process for each rank and each set of variables that libraries may read on import, from the first use on.

    They end with this process. Those that were not used for longest end before, where there would be too many.

    Args:
        start: starts one, with a log and with variables on top of this process's own.
    """

    def __init__(self, start: Callable[[Path, Mapping[str, str]], WarmProcess]) -> None:
        self._start = start
        self._processes: dict[object, WarmProcess] = {}
        self._started = 0
        self._lock = threading.Lock()
        self._folder = tempfile.TemporaryDirectory(prefix="gradwire-")

    def commands(self, own: Sequence[Mapping[str, str]], words: Sequence[Sequence[str]]) -> list[list[str]]:
        """For each rank, by its own variables, the command that does the work of `rank_main` in a new child."""
        with self._lock:
            return self._commands(own, words)

    def _commands(self, own: Sequence[Mapping[str, str]], words: Sequence[Sequence[str]]) -> list[list[str]]:
        keys = [(rank, tuple(sys.path), _read_on_import({**os.environ, **of_rank})) for rank, of_rank in enumerate(own)]
        for key in [key for key, process in self._processes.items() if not process.is_alive]:
            self._processes.pop(key).close()
        idle = [key for key in self._processes if key not in keys]
        for key in idle[: max(0, len(idle) + len(keys) - _MOST_WARM)]:
            self._processes.pop(key).close()
        for key, variables in zip(keys, own, strict=True):
            self._processes[key] = self._processes.pop(key, None) or self._started_with(variables)  # the last ones now
        return [
            self._processes[key].command("gradwire.ranks.rank_main:main", *of_rank)
            for key, of_rank in zip(keys, words, strict=True)
        ]

    def _started_with(self, variables: Mapping[str, str]) -> WarmProcess:
        self._started += 1
        return self._start(Path(self._folder.name) / f"host{self._started}.log", variables)

    def close(self) -> None:
        """End all of them, for good."""
        while self._processes:
            self._processes.popitem()[1].close()
        self._folder.cleanup()


def _read_on_import(variables: Mapping[str, str]) -> frozenset[tuple[str, str]]:
    """The variables without those that nobody reads before a rank begins: ours but one, and pytest's name of a test."""
    return frozenset(
        (name, value)
        for name, value in variables.items()
        if name == KERNELS_VARIABLE or not name.startswith(("GRADWIRE_", "PYTEST_CURRENT_TEST"))
    )


def _start(log: Path, variables: Mapping[str, str]) -> WarmProcess:
    return WarmProcess(["gradwire.ranks.rank_main:prepare"], log, environment=variables)


_warm_ranks = WarmRanks(_start)
atexit.register(_warm_ranks.close)
