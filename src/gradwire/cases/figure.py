"""Figures of a case study: a number, the formula that it comes from, and what was published beside it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from gradwire.cases.volumes import Volume
from gradwire.core.errors import SpecError
from gradwire.core.figures import si_bits_per_s, si_bytes, significant, spoken_seconds
from gradwire.planning import DeviceMemory, Hardware, ParallelLayout, StepTime, Transformer


class Figure(NamedTuple):
    """A number of a case study.

    Attributes:
        name: what it is.
        value: what the formula gives, in `unit`.
        unit: "parameters", "FLOP", "bytes", "seconds", "days", "GPU hours", "TFLOP/s", "bit/s", "times" or "share".
        formula: where the value comes from.
        published: the published number in the same unit; None where there is none.
        source: where that stands, or a word on why there is none.
    """

    name: str
    value: float
    unit: str
    formula: str
    published: float | None = None
    source: str = "not published"

    @property
    def error(self) -> float | None:
        """By what share the value is above the published one; None where there is none."""
        return None if self.published is None else self.value / self.published - 1


@dataclass(frozen=True)
class CaseStudy:
    """One model, where it was trained, and its figures.

    Attributes:
        name: what `gradwire cases` calls it.
        title: what it is about, in a line.
        model, hardware, layout: what was trained, on what, and how it was spread. `layout` is that of the volumes and
            of the memory; of training on islands, that of one island.
        figures: with formulas, and published ones beside them.
        volumes: bytes that a GPU sends in a step, by kind.
        memory: of the fullest GPU, by kind.
        time: of a step, as parts that sum to it.
        assumptions: what is not published and was assumed.
    """

    name: str
    title: str
    model: Transformer
    hardware: Hardware
    layout: ParallelLayout
    figures: tuple[Figure, ...]
    volumes: tuple[Volume, ...]
    memory: DeviceMemory
    time: StepTime
    assumptions: tuple[str, ...] = field(default=())


PREFIXES = ((1e24, "Y"), (1e21, "Z"), (1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def spoken(value: float, unit: str) -> str:
    """A number in its unit as people read it.

    Raises:
        SpecError: a unit that no figure has.

    >>> spoken(174.6e9, "parameters"), spoken(3.14e23, "FLOP"), spoken(0.832, "share")
    ('175 G', '3.14e+23', '83.2%')
    """
    words: Mapping[str, str] = {
        "parameters": _prefixed(value),
        "FLOP": f"{value:.3g}",
        "bytes": si_bytes(value),
        "seconds": spoken_seconds(value) if value < 120 else f"{significant(value / 60, 3)} min",
        "days": f"{significant(value, 3)} days",
        "GPU hours": f"{value:,.0f} GPU hours",
        "TFLOP/s": f"{value:.0f} TFLOP/s",
        "bit/s": si_bits_per_s(value),
        "times": f"{value:.0f} times",
        "share": f"{100 * value:.1f}%",
    }
    if unit not in words:
        raise SpecError(f"no figure has the unit {unit!r}: write one of {', '.join(words)}")
    return words[unit]


def _prefixed(value: float) -> str:
    for size, prefix in PREFIXES:
        if value >= size:
            return f"{significant(value / size, 3)} {prefix}"
    return significant(value, 3)
