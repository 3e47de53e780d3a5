"""What single ranks do in `test_hangs.py`: they are told to end, fail, are asked, and fork, under a flight recorder."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import torch

import gradwire
from gradwire.core.rank_files import rank_file
from gradwire.flight.keeping import keeper
from gradwire.flight.record import read_record

LONG_S = 50.0


def session_in(folder: str) -> gradwire.Session:
    """A session of one rank that keeps records, after one step."""
    session = gradwire.Session({"x": torch.zeros(8)}, "none", records=folder)
    session.reduce_({"x": torch.ones(8)})
    return session


def sleeps_in_c() -> None:
    time.sleep(LONG_S)


def is_stuck_in_c() -> None:
    """Wait for a lock that this thread has, inside of C code that no signal interrupts; other threads go on."""
    lock, library = (ctypes.c_byte * 64)(), ctypes.CDLL(None)
    library.pthread_mutex_init(lock, None)
    library.pthread_mutex_lock(lock)
    library.pthread_mutex_lock(lock)


def terminated(rank: int, world_size: int, folder: str, how: str) -> None:
    """Be told to end by SIGTERM while the main thread is inside of C code."""
    with session_in(folder):
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
        {"sleeping": sleeps_in_c, "stuck": is_stuck_in_c}[how]()


def asked(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    """Be asked from another process while the main thread sleeps."""
    with session_in(folder):
        command = [sys.executable, "-m", "gradwire", "stacks", folder, "--ask", "--json", "--wait", "20"]
        asking = subprocess.Popen(command, stdout=subprocess.PIPE)
        while asking.poll() is None:
            time.sleep(1.0)
        assert asking.stdout is not None
        found = json.loads(asking.stdout.read())
        asking.stdout.close()
        return {"status": asking.returncode, "found": found}


def forks(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    """Fork a process that is told to end; then end well."""
    session = session_in(folder)
    child = os.fork()
    if child == 0:
        assert keeper() is None
        time.sleep(LONG_S)
    time.sleep(0.3)
    os.kill(child, signal.SIGTERM)
    status = os.waitpid(child, 0)[1]
    time.sleep(0.7)  # a byte in a pipe that both have would be read by now
    session.close()
    return {"status": status, "state": read_record(rank_file(Path(folder), 0)).state}


def own_handler(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    """Have a handler of one's own for SIGTERM, which goes on."""
    called: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: called.append(number))
    with session_in(folder):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.7)
    return {"called": called, "state": read_record(rank_file(Path(folder), 0)).state}


def raises(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    """Leave a session by an exception, and go on with another one."""
    record = rank_file(Path(folder), 0)
    try:
        with session_in(folder):
            raise ValueError("the script's own")
    except ValueError:
        died = read_record(record)
    with session_in(folder):
        went_on = read_record(record)
    events = [(event.event, event.what, event.step) for event in died.events if "step" in event.event]
    return {
        "died": [died.state, died.own, died.why, "raise ValueError" in died.error],
        "events": events,
        "went on": went_on.state,
        "same run": died.run == went_on.run,
    }


def unhandled(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    """Let Python see an exception that nothing of gradwire's has seen."""
    session = session_in(folder)
    error = KeyError("nobody catches it")
    sys.excepthook, seen = sys.excepthook, sys.excepthook
    seen(type(error), error, None)
    session.close()
    died = read_record(rank_file(Path(folder), 0))
    return {"state": died.state, "why": died.why, "own": died.own}


def cannot_write(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    """Be told a folder that is a file: the run goes on without records."""
    Path(folder, "file").write_text("")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        session_in(str(Path(folder, "file"))).close()
    return {"said": [str(warning.message) for warning in said]}
