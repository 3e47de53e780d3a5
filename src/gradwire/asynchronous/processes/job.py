"""What the processes of a job share, and what came of it."""

from __future__ import annotations

from typing import NamedTuple, Self

import torch
from torch import Tensor

from gradwire.asynchronous.job import Job
from gradwire.asynchronous.simulation import Applied


class SharedTensors(NamedTuple):
    """Tensors in shared memory.

    Attributes:
        down: (n, d) parameters for each worker. The server writes a row, then sends the grant.
        up: (n, b) uint8, the payload of each worker's push. The worker writes its row, then sends the push, and does
            not touch the row until the server has answered.
        values: (d,) the parameters at the end.
        log: (pushes, 6) float64: fields of `Applied` by version, its time in seconds of the machine's clock.
        version: (1,) int64, updates made.
    """

    down: Tensor
    up: Tensor
    values: Tensor
    log: Tensor
    version: Tensor

    @classmethod
    def of(cls, job: Job) -> Self:
        """Allocate for a job."""
        values = job.server().values.cpu()
        made = cls(
            down=torch.zeros(job.workers, values.numel(), dtype=values.dtype),
            up=torch.zeros(job.workers, job.sending.nbytes(values), dtype=torch.uint8),
            values=values.clone(),
            log=torch.zeros(job.pushes, len(Applied._fields), dtype=torch.float64),
            version=torch.zeros(1, dtype=torch.int64),
        )
        for tensor in made:
            tensor.share_memory_()
        return made


class JobOutcome(NamedTuple):
    """What came of a run.

    Attributes:
        parameters: at the end, by name.
        history: pushes in the order in which they were applied; times count from when the run was made.
        lost: workers that died.
        restarts: of the server.
    """

    parameters: dict[str, Tensor]
    history: list[Applied]
    lost: tuple[int, ...]
    restarts: int
