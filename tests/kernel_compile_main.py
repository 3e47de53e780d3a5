"""Let every registered method make steps after `kernels.warm_up()`, and print what numba compiled, before and then.

Run by `test_kernel_warm_up.py` in a process of its own, with an empty cache of compiled kernels.
"""

from __future__ import annotations

import json
import time
from typing import Any

import torch
from numba.core import event

import gradwire
from gradwire import kernels
from gradwire.core.grain import ParameterSpec
from gradwire.drivers.plan import plan
from gradwire.drivers.warm import warm_up as make_steps

CPU, RANKS = torch.device("cpu"), 8  # enough for the most demanding rule, and even, for nodes
MODEL = [ParameterSpec("weight", (700, 600), torch.float32, CPU), ParameterSpec("bias", (600,), torch.float32, CPU)]
"""Large enough for what only large tensors take: several threads, samples, stores past the caches."""


class Compilations(event.Listener):
    """The functions that numba compiles, and does not find compiled."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def on_start(self, event: Any) -> None:
        self.names.append(f"{event.data['dispatcher'].py_func.__qualname__}{event.data['args']}")

    def on_end(self, event: Any) -> None:
        pass


def overloads() -> dict[str, int]:
    from gradwire.kernels.runtime.compiling import COMPILED

    kernels: list[Any] = list(COMPILED)
    return {kernel.__qualname__: len(kernel._dispatcher.overloads) for kernel in kernels}


def main() -> None:
    torch.set_num_threads(2)
    listener, started = Compilations(), time.perf_counter()
    event.register("numba:compile", listener)
    kernels.warm_up()
    told = {"seconds": time.perf_counter() - started, "warm-up": listener.names.copy(), "kernels": overloads()}
    steps: dict[str, list[str]] = {}
    for spec in [spec for method in gradwire.methods().values() for spec in method.examples]:
        seen = len(listener.names)
        make_steps(plan(MODEL, gradwire.parse(spec)).units, RANKS)
        steps[spec] = listener.names[seen:]
    print(json.dumps({**told, "steps": steps, "after": overloads()}))


if __name__ == "__main__":
    main()
