"""Let every registered method make steps after `kernels.warm_up()`, and print which signatures numba made, and when.

Run by `test_kernel_warm_up.py` in a process of its own. A signature that is read from the disk counts like one that is
compiled: with an empty cache it would be.
"""

from __future__ import annotations

import json
from typing import Any

import torch

import gradwire
from gradwire import kernels
from gradwire.core.grain import ParameterSpec
from gradwire.drivers.dry_run import dry_run
from gradwire.drivers.plan import plan

CPU, RANKS = torch.device("cpu"), 8  # enough for the most demanding rule, and even, for nodes
MODEL = [ParameterSpec("weight", (700, 600), torch.float32, CPU), ParameterSpec("bias", (600,), torch.float32, CPU)]
"""Large enough for what only large tensors take: several threads, samples."""


def overloads() -> dict[str, int]:
    from gradwire.kernels.runtime.compiling import COMPILED

    kernels: list[Any] = list(COMPILED)
    return {kernel.__qualname__: len(kernel._dispatcher.overloads) for kernel in kernels}


def main() -> None:
    torch.set_num_threads(2)
    kernels.warm_up()
    seen = first = overloads()
    steps: dict[str, list[str]] = {}
    for spec in [spec for method in gradwire.methods().values() for spec in method.examples]:
        dry_run(plan(MODEL, gradwire.parse(spec)).units, RANKS)
        before, seen = seen, overloads()
        steps[spec] = [name for name, count in seen.items() if count != before.get(name)]
    print(json.dumps({"kernels": first, "steps": steps}))


if __name__ == "__main__":
    main()
