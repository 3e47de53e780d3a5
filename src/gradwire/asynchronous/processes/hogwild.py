"""Hogwild!: processes that change the same parameters without locks and without a server (Recht et al. 2011)."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from gradwire.core.errors import CommunicationError, CompositionError
from gradwire.peers.supervisor import ChildProcess, Supervisor, wait_for_any

HogwildWork = Callable[[Mapping[str, Tensor], int, int], None]
"""work(parameters, process, processes) changes parameters in place until its share of the work is done."""


def hogwild(
    parameters: Mapping[str, Tensor], work: HogwildWork, *, processes: int, deadline_s: float = 600.0
) -> dict[str, Tensor]:
    """Run `work` in several processes on one copy of the parameters in shared memory; return that copy.

    What is atomic: the load and the store of one aligned element of 8 bytes or less, on the processors that PyTorch
    runs on. What is not: `w[i] += x`, which is a load, an addition and a store, so one of two updates of an element at
    the same time may be lost; and any operation on more than one element, so a process sees a vector of which some
    elements are newer. Hogwild! lives with both where updates are sparse: they seldom meet. Where they are dense, use a
    server.

    Args:
        parameters: by name; left as they are.
        work: a function that a new process can import, since it is started by `spawn`.
        processes: how many.
        deadline_s: seconds that they may take.

    Raises:
        CompositionError: no process.
        CommunicationError: a process that failed, by its number, or the deadline. All processes are ended then.
    """
    if processes < 1:
        raise CompositionError(f"{processes} processes: give 1 or more")
    shared = {name: tensor.detach().clone().share_memory_() for name, tensor in parameters.items()}
    end_s = time.monotonic() + deadline_s
    with Supervisor(lambda number: ChildProcess(_run, work, shared, number, processes), processes) as running:
        while len(running.dead) < processes:
            running.look()
            for number in running.lost:
                raise CommunicationError(f"process {number} of {processes} {running.how[number]}")
            if time.monotonic() > end_s:
                raise CommunicationError(f"processes of Hogwild! still ran after {deadline_s:g} s")
            wait_for_any(running.children, min(1.0, end_s - time.monotonic()))
    return shared


def _run(work: HogwildWork, shared: Mapping[str, Tensor], process: int, processes: int) -> None:
    torch.set_num_threads(1)
    work(shared, process, processes)
