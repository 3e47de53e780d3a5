"""Runs of elastic workers in processes of their own, which are killed and come back by a seeded plan."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from gradwire.ranks.warm import WarmProcess

PATIENCE_S = 150.0
OVER = "nobody who has the model of this run is there any more"
"""What a worker is told that comes back after the end."""


class Death(NamedTuple):
    """Where a worker dies, and after how many seconds another one is started in its place."""

    slot: int
    kind: str
    number: float
    back_after_s: float


class Stop(NamedTuple):
    """Where a worker is stopped by SIGSTOP, and when it is continued.

    Attributes:
        slot: the worker.
        kind: see `elastic_cases.signal_at`.
        number: likewise.
        until: "soon": before it is taken for lost; "lost": after it; "over": once all others have ended; "killed": once
            the others have gone on for two windows and were killed.
    """

    slot: int
    kind: str
    number: float
    until: str


class Process:
    """One worker: what it has said so far, and how it ended."""

    def __init__(self, command: Sequence[str], log: Path) -> None:
        self.log = log
        self._log = log.open("wb")
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
        self.process = subprocess.Popen(
            list(command), stdout=subprocess.PIPE, stderr=self._log, stdin=subprocess.DEVNULL, env=environment
        )
        assert self.process.stdout is not None
        self.output = self.process.stdout
        os.set_blocking(self.output.fileno(), False)
        self._unfinished = b""
        self.said: list[dict[str, Any]] = []

    def pump(self) -> None:
        data = self.output.read() or b""
        *lines, self._unfinished = (self._unfinished + data).split(b"\n")
        self.said += [json.loads(line) for line in lines]

    @property
    def pid(self) -> int:
        """Of the worker itself, not of what stands for it here."""
        return next(words["pid"] for words in self.said if "pid" in words)

    def kill(self, number: int = signal.SIGKILL) -> None:
        os.kill(self.pid, number)

    @property
    def is_stopped(self) -> bool:
        with contextlib.suppress(OSError, StopIteration):
            return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
        return False

    @property
    def windows(self) -> int:
        """The last one that it has told of."""
        return max((words["windows"] for words in self.said if "windows" in words), default=0)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.output.close()
        self._log.close()


class Crew:
    """Slots for workers, each with a warm process, and the store of all runs, in a process of its own."""

    def __init__(self, slots: int) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="gradwire-")
        self.folder = Path(self._folder.name)
        self._store = subprocess.Popen(
            [sys.executable, "-m", "gradwire", "store", "--port", "0"], stdout=subprocess.PIPE, text=True
        )
        self._warm = [WarmProcess(["elastic_cases:prepare"], self.folder / f"warm{slot}.log") for slot in range(slots)]
        assert self._store.stdout is not None
        line = self._store.stdout.readline()
        self.store = f"127.0.0.1:{line.rpartition(':')[2].strip()}"
        self._started = 0

    def start(self, slot: int, **plan: Any) -> Process:
        """Start a worker in a slot where none runs."""
        self._started += 1
        log = self.folder / f"{self._started}-{plan['name']}.log"
        words = json.dumps({"store": self.store, "rate": 0.05, "seed": 0, "model_seed": 0, "options": {}, **plan})
        return Process(self._warm[slot].command("elastic_cases:main", words), log)

    def tail(self, process: Process) -> str:
        """What a worker has written last to its standard error."""
        return process.log.read_text(errors="replace")[-2000:]

    def kill_store(self) -> None:
        """As if its host had failed."""
        self._store.kill()
        self._store.wait()

    def __enter__(self) -> Crew:
        try:
            for warm in self._warm:  # a run begins once importing is over
                subprocess.run(warm.command("elastic_cases:ready"), check=True, stdin=subprocess.DEVNULL)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for warm in self._warm:
            warm.close()
        self.kill_store()
        assert self._store.stdout is not None
        self._store.stdout.close()
        self._folder.cleanup()


def until(processes: Sequence[Process], done: Any, deadline_s: float) -> None:
    """Read what workers say until something is the case.

    Raises:
        AssertionError: it is not within the deadline; with what they said last.
    """
    end = time.monotonic() + deadline_s
    while not done():
        for process in processes:
            process.pump()
        assert time.monotonic() < end, f"after {deadline_s} s: {[process.said[-3:] for process in processes]}"
        time.sleep(0.01)


def plan_of(seed: int, slots: int, span_s: float) -> list[Death]:
    """One to three deaths, of any worker but one, also of workers that have come back."""
    generator = random.Random(seed)
    survivor, deaths = generator.randrange(slots), list[Death]()
    for _ in range(generator.randint(1, 3)):
        slot = generator.choice([slot for slot in range(slots) if slot != survivor])
        kind = generator.choice(("time", "time", "before", "after", "issue"))
        number = generator.uniform(0.1, span_s) if kind == "time" else generator.randint(1, 150)
        deaths.append(Death(slot, kind, number, generator.uniform(0.0, 0.5)))
    return deaths


def stop_of(seed: int, slots: int, span_s: float) -> Stop:
    """One worker, stopped anywhere."""
    generator = random.Random(seed)
    kind = generator.choice(("time", "before", "after", "issue", "connect", "end"))
    number = {"time": generator.uniform(0.1, span_s), "connect": generator.randint(1, 3)}.get(kind)
    until = generator.choice(("soon", "lost", "over", "over", "killed"))
    if kind == "end" and until == "killed":
        until = "over"  # nobody goes on after it
    return Stop(generator.randrange(slots), kind, number or generator.randint(1, 60), until)


class Outcome(NamedTuple):
    """How a run went; its loss is that at a fixed number of samples, between those of two windows."""

    loss: float
    windows: int
    seconds: float
    killed: int
    lost: int
    joined: int


def run_of(crew: Crew, name: str, deaths: Sequence[Death], slots: int, plan: Mapping[str, Any]) -> Outcome:
    """Run to the end under a plan of deaths; check that all finish and that no two differ.

    Raises:
        AssertionError: they do not, or two workers differ after some window.
    """
    lives = {slot: [death for death in deaths if death.slot == slot] for slot in range(slots)}
    began, everyone, running, due = time.monotonic(), list[Process](), dict[int, Process](), dict.fromkeys(lives, 0.0)
    killed, ended = 0, False
    try:
        while running or (due and not ended):  # once the run is over, nobody is there to join
            now = time.monotonic()
            assert now < began + PATIENCE_S, f"{name} hangs: {[each.said[-2:] for each in everyone]}"
            for slot in [slot for slot, at in due.items() if now >= at]:
                del due[slot]
                death = lives[slot][0] if lives[slot] else None
                dies = {"kind": death.kind, "number": death.number} if death else None
                running[slot] = crew.start(slot, run=name, name=f"w{slot}", dies=dies, **plan)
                everyone.append(running[slot])
            for slot, process in list(running.items()):
                status = process.process.poll()
                process.pump()
                ended = ended or any("ended" in words for words in process.said)
                if status is None:
                    continue
                del running[slot]
                if status != 0 and not (ended and status == 1 and OVER in crew.tail(process)):
                    assert status == -signal.SIGKILL, f"{name}: worker {slot} ended with {status}: {crew.tail(process)}"
                    killed, due[slot] = killed + 1, now + lives[slot].pop(0).back_after_s
            time.sleep(0.005)
    finally:
        for process in everyone:
            process.close()
    return _checked(name, everyone, plan["samples"], time.monotonic() - began, killed)


class Wake:
    """Continues one stopped worker when its time has come."""

    def __init__(self, stop: Stop, everyone: Sequence[Process], lost_after_s: float) -> None:
        self._stop, self._me = stop, everyone[stop.slot]
        self._others = [each for each in everyone if each is not self._me]
        self._after_s = {"soon": 0.3 * lost_after_s, "lost": 2.0 * lost_after_s}.get(stop.until)
        self._since: float | None = None
        self._windows = 0
        self.was_stopped = self.is_done = False

    def look(self) -> None:
        if not self.was_stopped and self._me.is_stopped:
            self.was_stopped, self._since = True, time.monotonic()
            self._windows = max(each.windows for each in self._others)
        if not self.was_stopped or self.is_done or self._since is None:
            return
        running = [each for each in self._others if each.process.poll() is None]
        if self._after_s is not None:
            due = time.monotonic() > self._since + self._after_s
        elif self._stop.until == "killed" and running:
            if max(each.windows for each in running) >= self._windows + 2:
                for each in running:
                    with contextlib.suppress(ProcessLookupError):  # it has just ended
                        each.kill()
            return
        else:
            due = not running
        if due:
            self.is_done = True
            self._me.kill(signal.SIGCONT)


class StoppedOutcome(NamedTuple):
    """How a run ended whose workers were stopped.

    Attributes:
        finished: how many workers have the run's last model.
        refused: how many were told that the run is over.
        was_stopped: whether a worker was stopped before it had ended.
        seconds: how long it took.
    """

    finished: int
    refused: int
    was_stopped: bool
    seconds: float


def stopped_run_of(crew: Crew, name: str, stop: Stop, slots: int, plan: Mapping[str, Any]) -> StoppedOutcome:
    """Run to the end while a worker is stopped and continued; check that no two differ and that all end well.

    Raises:
        AssertionError: two workers differ after some window or at the end, one ends badly, or the run hangs.
    """
    began, everyone = time.monotonic(), list[Process]()
    try:
        for slot in range(slots):
            stops = {"kind": stop.kind, "number": stop.number} if slot == stop.slot else None
            everyone.append(crew.start(slot, run=name, name=f"w{slot}", stops=stops, **plan))
        wake = Wake(stop, everyone, plan["options"]["lost_after_s"])
        while any(each.process.poll() is None for each in everyone):
            assert time.monotonic() < began + PATIENCE_S, f"{name} hangs: {[each.said[-2:] for each in everyone]}"
            for each in everyone:
                each.pump()
            wake.look()
            time.sleep(0.005)
        for each in everyone:
            each.pump()
        statuses = [each.process.returncode for each in everyone]
        for each, status in zip(everyone, statuses, strict=True):
            killed = status == -signal.SIGKILL and stop.until == "killed" and each is not everyone[stop.slot]
            refused = status == 1 and OVER in crew.tail(each)
            assert status == 0 or killed or refused, f"{name}: a worker ended with {status}: {crew.tail(each)}"
        ends = _ends_alike(name, everyone)
        assert ends or stop.until == "killed", f"{name}: nobody came to the end"
        return StoppedOutcome(len(ends), statuses.count(1), wake.was_stopped, time.monotonic() - began)
    finally:
        for each in everyone:
            each.close()


def _ends_alike(name: str, everyone: Sequence[Process]) -> list[dict[str, Any]]:
    """What workers said at the end; no two differ, neither then nor after any window."""
    _by_window(name, everyone)
    ends = [words for process in everyone for words in process.said if "ended" in words]
    assert len({(words["digest"], words["samples"]) for words in ends}) <= 1, f"{name}: {ends}"
    return ends


def _by_window(name: str, everyone: Sequence[Process]) -> dict[int, dict[str, Any]]:
    """What workers said after each window, which is the same on all of them."""
    by_window: dict[int, dict[str, Any]] = {}
    for words in (words for process in everyone for words in process.said if words.get("kind") == "average"):
        first = by_window.setdefault(words["windows"], words)
        for key in ("digest", "samples", "loss"):
            assert first[key] == words[key], f"{name}: workers differ in {key} after window {words['windows']}"
    return by_window


def _checked(name: str, everyone: Sequence[Process], samples: int, seconds: float, killed: int) -> Outcome:
    by_window, ends = _by_window(name, everyone), _ends_alike(name, everyone)
    assert ends, f"{name}: nobody came to the end: {[process.said[-2:] for process in everyone]}"
    changes = max((words["changes"] for words in ends), key=len)
    lost = sum(len(change["lost"]) for change in changes)
    joined = sum(len(change["joined"]) for change in changes if change["kind"] != "founding")
    return Outcome(_loss_at(samples, by_window), ends[0]["ended"], seconds, killed, lost, joined)


def _loss_at(samples: int, by_window: Mapping[int, Mapping[str, Any]]) -> float:
    """Where the straight line between two windows passes so many samples."""
    *_, before, after = (by_window[window] for window in sorted(by_window))
    share = (samples - before["samples"]) / (after["samples"] - before["samples"])
    return before["loss"] + share * (after["loss"] - before["loss"])
