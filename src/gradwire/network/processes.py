"""Processes that belong to a network: found, named and killed."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from pathlib import Path
from types import FrameType

TAG = "GRADWIRE_NET"
"""The variable that names a process's network."""

ENDING = (signal.SIGTERM, signal.SIGHUP)
"""What ends a program at once unless it says otherwise; a terminal that is closed sends SIGHUP."""


def clean() -> list[str]:
    """Kill what networks of dead creators have left behind and return a line about each.

    A creator is known by its process number and start time, so a recycled number does no harm. Networks in
    use are left alone, and so are those of other users and of other containers.
    """
    leftovers: dict[str, list[int]] = {}
    here = _process_namespace()
    for pid, tag in tagged_processes():
        identity, _, _ = tag.rpartition(":")
        creator, _, rest = identity.partition(":")
        _, _, namespace = rest.partition(":")
        if namespace == here and creator.isdigit() and identity_of(int(creator)) != identity:
            leftovers.setdefault(tag, []).append(pid)
    for tag, pids in leftovers.items():
        kill(lambda pids=pids, tag=tag: (pid for pid in pids if _tag_of(pid) == tag))
    return [
        f"network of process {tag.partition(':')[0]}, which is gone: killed {len(pids)} process(es)"
        for tag, pids in leftovers.items()
    ]


def exit_on_signal(number: int, frame: FrameType | None) -> None:
    """End the program by an exception, so that blocks are left in order."""
    raise SystemExit(128 + number)


@contextlib.contextmanager
def undisturbed() -> Generator[None]:
    """Put off SIGINT, SIGTERM and SIGHUP until the block is done: a half torn down network helps nobody."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    old = {
        number: signal.signal(number, lambda number, frame: came.append(number)) for number in (signal.SIGINT, *ENDING)
    }
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        for number in came:
            signal.raise_signal(number)


def all_processes() -> list[int]:
    """Numbers of all processes that can be seen from here."""
    with contextlib.suppress(OSError):
        return [int(name) for name in os.listdir("/proc") if name.isdigit()]
    return []


def _process_namespace() -> str:
    with contextlib.suppress(OSError):
        return str(os.stat("/proc/self/ns/pid").st_ino)
    return "0"


def identity_of(pid: int) -> str:
    """Return "process number:start time:process namespace"; start time 0 if it is gone."""
    start = "0"
    with contextlib.suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        if fields[0] not in "ZX":  # a zombie has ended, whoever has yet to notice
            start = fields[19]
    return f"{pid}:{start}:{_process_namespace()}"


def _tag_of(pid: int) -> str | None:
    """Return the network a process belongs to, by the environment it was started with."""
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return None
    found = re.search(rb"(?:^|\0)%s=([^\0]*)" % TAG.encode(), environment)
    return found[1].decode(errors="replace") if found else None


def tagged_processes() -> Iterator[tuple[int, str]]:
    """Yield (process number, network) of every other process that belongs to a network."""
    for pid in all_processes():
        tag = _tag_of(pid) if pid != os.getpid() else None
        if tag:
            yield pid, tag


def kill(find: Callable[[], Iterable[int]]) -> None:
    """Kill what `find` finds until it finds nothing: a process may start another while it is being killed."""
    give_up = time.monotonic() + 5
    while time.monotonic() < give_up:
        pids = list(find())
        if not pids:
            return
        for pid in pids:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
