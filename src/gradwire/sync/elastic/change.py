"""Who came and went."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from gradwire.sync.elastic.protocol import RoundLog


@dataclass(frozen=True)
class Change:
    """Who came and went at the end of a window.

    Attributes:
        windows: how many windows of the run were averaged by then.
        kind: "founding", "average", or "discard" where the window is trained once more.
        workers: the names of those who go on, in order of rank.
        joined: of those who came.
        left: of those who had been asked to leave.
        lost: of those who are gone or did not come in time, with the norm of what each owed of the mean (its residual
            over the number of workers): this the run has lost with them.
    """

    windows: int
    kind: str
    workers: tuple[str, ...]
    joined: tuple[str, ...] = ()
    left: tuple[str, ...] = ()
    lost: Mapping[str, float] = field(default_factory=dict[str, float])

    @property
    def is_quiet(self) -> bool:
        """Whether nobody came or went, and the window counts."""
        return self.kind == "average" and not (self.joined or self.left or self.lost)


def change_of(ended: RoundLog, windows: int) -> Change:
    """What a committed round has changed, by which so many windows of the run were averaged."""
    decision, names = ended.decision, {worker: came.name for worker, came in ended.came.items()}
    assert decision is not None
    return Change(
        windows=windows,
        kind=decision.kind,
        workers=tuple(names[worker] for worker in sorted(decision.staying + decision.newcomers)),
        joined=tuple(names[worker] for worker in decision.newcomers),
        left=tuple(names[worker] for worker in decision.leaving),
        lost={member.name: member.owed for member in decision.lost.values()},
    )
