"""What came of a run with several servers."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from gradwire.asynchronous.several.journal import JournalRow


class ServersOutcome(NamedTuple):
    """What came of a run.

    Attributes:
        parameters: at the end, by name.
        journals: of each server, every push that it applied, in order; those that a restart lost are among them.
        histories: of each server, the pushes that its part at the end is made of; times are seconds of its clock.
        lost: workers that died, as often as they did.
        restarts: of each server.
    """

    parameters: dict[str, Tensor]
    journals: list[list[JournalRow]]
    histories: list[list[JournalRow]]
    lost: tuple[int, ...]
    restarts: tuple[int, ...]
