"""What came of a job on one machine."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from gradwire.asynchronous.simulation import Applied


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
