"""Hosts whose processors are slower than this machine's."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence

import torch
from torch import nn

from gradwire.drivers.engine import Engine

MOST = 1000.0
_LEAST_SLEEP_S = 1e-3


def parse_slow(texts: Sequence[str], hosts: int) -> tuple[float, ...]:
    """Read "HOST:FACTORx" and return how many times slower each host is.

    Args:
        texts: such as "3:4x" for host 3, counted from 0, that computes 4 times slower.
        hosts: how many there are.

    Raises:
        ValueError: a text reads otherwise, names a host that does not exist or one twice, or a factor beyond 1 to 1000.

    >>> parse_slow(["3:4x"], 4)
    (1.0, 1.0, 1.0, 4.0)
    """
    factors: dict[int, float] = {}
    for text in texts:
        match = re.fullmatch(r"\s*(\d{1,9})\s*:\s*(\d{1,9}(?:\.\d{1,9})?)\s*x?\s*", text)
        if not match or not 1 <= float(match[2]) <= MOST:
            raise ValueError(
                f"slow host {text[:40]!r} cannot be read: write HOST:FACTOR from 1x to {MOST:g}x, such as 3:4x"
            )
        host = int(match[1])
        if host >= hosts:
            raise ValueError(f"slow host {host} does not exist: hosts are 0 to {hosts - 1}")
        if host in factors:
            raise ValueError(f"slow host {host} is given twice")
        factors[host] = float(match[2])
    return tuple(factors.get(host, 1.0) for host in range(hosts))


class SlowProcessor:
    """Makes this process train as on a processor that is `factor` times slower.

    For each second of processor time that the process uses, whichever thread uses it, the thread that trains sleeps for
    factor - 1 seconds, in small portions: after the forward pass, before each gradient is handed over, and at the end
    of a step. Coding of a session that is watched is slept for by the thread that codes, before it sends. So computing
    and coding take as much longer for every method, gradients and messages come as late as they would, and the cores of
    this machine stay free for the other hosts. What does not get slower is the kernel. What another thread codes after
    the last gradient, as of hooks that are not gradwire's, is paid for at the end of the step.
    """

    def __init__(self, factor: float) -> None:
        self._factor = factor
        self._seen_s = 0.0
        self._owed_s = 0.0
        self._paid_s = 0.0  # of processor time, by threads that code

    def watch(self, model: nn.Module) -> None:
        """Sleep before gradients of a model are handed over."""
        for parameter in model.parameters():
            if parameter.requires_grad and self._factor > 1:
                parameter.register_post_accumulate_grad_hook(self._on_gradient)

    def _on_gradient(self, _: torch.Tensor) -> None:
        self.pay()

    def watch_coding(self, engine: Engine) -> None:
        """Sleep for what an engine codes, where it codes."""
        if self._factor > 1:
            engine.slow_down(self._coded)

    def _coded(self, seconds: float) -> float:
        self._paid_s += seconds
        time.sleep((self._factor - 1) * seconds)
        return self._factor * seconds

    def begin(self) -> None:
        """A step begins; what was done since the last one was off the clock."""
        self._seen_s = self._unpaid_s()

    def pay(self) -> None:
        """Sleep for what was computed since the last call."""
        now = self._unpaid_s()
        self._owed_s += (self._factor - 1) * (now - self._seen_s)
        self._seen_s = now
        if self._owed_s > _LEAST_SLEEP_S:
            begun = time.perf_counter()
            time.sleep(self._owed_s)
            self._owed_s -= time.perf_counter() - begun  # a sleep is always a little longer: the next one is shorter

    def _unpaid_s(self) -> float:
        """Processor time so far, less what threads that code have slept for."""
        return time.process_time() - self._paid_s
