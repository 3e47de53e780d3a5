"""What the threads of this process do at this moment, also where one of them is inside of C code.

`sys._current_frames` is asked by a thread of ours. So a thread that sleeps, waits for a collective or reads data need
not do anything. Only C code that keeps Python's lock for itself prevents it.
"""

from __future__ import annotations

import linecache
import re
import sys
import sysconfig
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType

from gradwire.flight.record import ThreadStack

_MOST_FRAMES = 60
"""Of a thread, the innermost ones: a recursion has thousands."""

MAIN = "MainThread"


def stacks() -> list[ThreadStack]:
    """Return the stack of every thread, the main thread first.

    >>> import threading, time
    >>> sleeper = threading.Thread(target=time.sleep, args=(0.2,), name="sleeper")
    >>> sleeper.start()
    >>> [stack.name for stack in stacks() if stack.name == "sleeper"]
    ['sleeper']
    >>> sleeper.join()
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    frames = sys._current_frames()  # pyright: ignore[reportPrivateUsage] - there is no public name of it
    frames[threading.get_ident()] = sys._getframe(1)  # pyright: ignore[reportPrivateUsage] - nor of this
    return [
        ThreadStack(MAIN if ident == main else names.get(ident, f"thread {ident}"), list(_lines(frame)))
        for ident, frame in sorted(frames.items(), key=lambda item: item[0] != main)
    ]


def _lines(innermost: FrameType) -> Iterator[str]:
    """A line a frame, the outermost first."""
    frames: list[FrameType] = []
    at: FrameType | None = innermost
    while at is not None and len(frames) < _MOST_FRAMES:
        frames.append(at)
        at = at.f_back
    for frame in reversed(frames):
        code = frame.f_code
        source = linecache.getline(code.co_filename, frame.f_lineno or 0, frame.f_globals).strip()
        yield f"{code.co_filename}:{frame.f_lineno} in {code.co_qualname}" + (f": {source}" if source else "")


_LIBRARIES = tuple(sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib", "purelib", "platlib"))
_OWN = str(Path(__file__).parents[1])
_FRAME = re.compile(r"(?P<path>.*?):(?P<line>\d+) in (?P<function>[^:]+)")


def place_of(threads: Sequence[ThreadStack]) -> str:
    """Where the main thread is, in the innermost line that is neither Python's, a library's nor gradwire's.

    >>> place_of([ThreadStack(MAIN, ["/home/me/train.py:37 in load: time.sleep(1)", "<frozen x>:3 in run"])])
    'in load (train.py:37)'
    """
    for stack in threads:
        if stack.name != MAIN:
            continue
        for line in reversed(stack.frames):
            found = _FRAME.match(line)
            if found is None or found["path"].startswith(("<", *_LIBRARIES, _OWN)):
                continue
            return f"in {found['function']} ({Path(found['path']).name}:{found['line']})"
    return ""


def text_of(threads: Sequence[ThreadStack], only_main: bool = False) -> str:
    """Stacks as people read them.

    >>> print(text_of([ThreadStack(MAIN, ["train.py:37 in load: time.sleep(1)"])]))
    MainThread:
      train.py:37 in load: time.sleep(1)
    """
    shown = [stack for stack in threads if stack.name == MAIN or not only_main]
    return "\n".join("\n  ".join([f"{stack.name}:", *stack.frames]) for stack in shown)
