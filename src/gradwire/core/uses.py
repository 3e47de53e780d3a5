"""What a method is for: most users, a case of its own, or study. Every method says it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class Recommended:
    """For most users: which link, which model, and what it costs in accuracy, as it was measured.

    Attributes:
        spec: as it is best written.
        link: the links that it is for, and what it gained there.
        model: the models that it is for.
        cost: what it ended at, beside what uncompressed training ended at.
        measured: where all these figures stand: pages of the docs with a heading, `docs/page.md#heading`.
    """

    spec: str
    link: str
    model: str
    cost: str
    measured: tuple[str, ...]

    title: ClassVar[str] = "Recommended"


@dataclass(frozen=True)
class Special:
    """For a case of its own.

    Attributes:
        case: when to take it.
    """

    case: str

    title: ClassVar[str] = "Special cases"


@dataclass(frozen=True)
class Study:
    """For study: kept and tested, and no case is known in which another method would not be better.

    Attributes:
        reason: what is known of it.
    """

    reason: str = "kept for comparison"

    title: ClassVar[str] = "Study"


Use = Recommended | Special | Study
"""What a method is for."""
USES: tuple[type[Use], ...] = (Recommended, Special, Study)
"""In the order in which methods are shown."""
