"""Threads that run kernels over pieces of big inputs.

numba's `parallel=True` aborts when two threads enter it at once, and gradient communication does just that.
So kernels are serial, release the GIL, and are spread here over `torch.get_num_threads()` pieces: by torch's own
threads where they can be had, else by threads of ours.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

SERIAL_NUMEL = 1 << 18
"""Up to this size (1 MiB of float32) a second thread costs more than it gains."""

Chunk = tuple[int, int]
T = TypeVar("T")


def chunks(numel: int, granule: int = 1, weight: int = 1) -> list[Chunk]:
    """Cut range(numel) into a (start, stop) for each thread, at multiples of `granule`; into one if small.

    An element may take `weight` times as long as one that is read and coded.

    >>> chunks(10)
    [(0, 10)]
    """
    threads = torch.get_num_threads() if numel * weight > SERIAL_NUMEL else 1
    size = -(-numel // (threads * granule)) * granule
    return [(start, min(start + size, numel)) for start in range(0, numel, size)] if size else [(0, 0)]


@functools.cache
def _executor(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="gradwire-kernel")


# A forked child inherits the executor but not its threads: work given to it would never run.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_executor.cache_clear)


def _at_once(tasks: Sequence[Callable[[], T]]) -> Callable[[], list[T]] | None:
    """A faster way to do tasks that are all calls of one kernel, if that kernel knows one."""
    calls = [task for task in tasks if isinstance(task, functools.partial)]
    together = getattr(calls[0].func, "at_once", None) if calls else None
    if together is None or len(calls) < len(tasks) or any(call.func is not calls[0].func for call in calls):
        return None
    return lambda: together([call.args for call in calls])


def run(tasks: Sequence[Callable[[], T]], numel: int | None = None) -> list[T]:
    """Run tasks at once, the first of them in this thread, and return their results in order.

    Where `numel`, what all of them have to do, is small, they run one after the other.

    All have ended when it returns or raises, so that nobody writes into a tensor that was given back. Tasks
    must not call `run` themselves.

    >>> run([lambda: 1, lambda: 2])
    [1, 2]
    """
    if len(tasks) == 1 or (numel is not None and numel <= SERIAL_NUMEL):
        return [task() for task in tasks]
    at_once = _at_once(tasks)
    if at_once is not None:
        return at_once()
    executor = _executor(len(tasks) - 1)
    others = [executor.submit(task) for task in tasks[1:]]
    try:
        first = tasks[0]()
    finally:
        for other in others:
            other.exception()  # waits
    return [first, *(other.result() for other in others)]
