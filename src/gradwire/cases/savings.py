"""Calculators: what lower precision, a lower density, fewer averages or accumulation save in bytes and seconds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from gradwire.cases.islands import parameter_shapes
from gradwire.core.errors import SpecError
from gradwire.core.grain import ParameterSpec
from gradwire.core.link import Link
from gradwire.core.nearest import meant
from gradwire.drivers.cost import cost
from gradwire.drivers.timing import step_s
from gradwire.planning import Transformer
from gradwire.reducers.step import PAST_WARM_UPS

PRECISIONS = ("none", "fp16", "int8", "int4", "int3", "int2")
DENSITIES = (0.1, 0.05, 0.01, 0.001)
WINDOWS = (1, 2, 4, 8, 16, 32, 100, 500)
ACCUMULATED = (1, 2, 4, 8, 16, 32)
CALCULATORS = {
    "precision": "bits of an element",
    "density": "share of elements that is sent",
    "steps": "steps between two averages",
    "accumulation": "micro-batches of a step",
}
"""By name, with what each varies."""
EXACT = 1 << 26
"""Elements that are counted one by one at most. More of a transformer are more of the same layers."""


class Saving(NamedTuple):
    """One setting of a calculator, by micro-batch: what a rank computes between two forward passes.

    Attributes:
        setting: of what is varied.
        spec: that does it.
        nbytes: that a rank sends, the mean over micro-batches.
        link_s: seconds that these take on the link.
        total_s: those and the seconds of computing, if nothing is hidden; None where nobody told how long it computes.
        formula: of the bytes.
    """

    setting: str
    spec: str
    nbytes: float
    link_s: float
    total_s: float | None
    formula: str


def savings(
    calculator: str, model: Transformer, ranks: int, link: Link, compute_s: float | None = None
) -> tuple[Saving, ...]:
    """Return what each setting sends and takes, beginning with float32 in every step.

    Bytes are those of `gradwire.cost`, seconds those of `gradwire.drivers.timing.step_s`: messages follow each other,
    and coding takes no time. Models above `EXACT` parameters are counted by their first layers, in proportion.

    Args:
        calculator: one of `CALCULATORS`.
        model: whose gradients; every rank has the whole model.
        ranks: how many, 2 or more.
        link: of every rank to every other.
        compute_s: seconds of computing of a micro-batch.

    Raises:
        SpecError: an unknown calculator, with the nearest; numbers that make no sense.

    >>> from gradwire.planning import model
    >>> rows = savings("steps", model("gpt2"), ranks=4, link=Link(1e-4, 8e-9))
    >>> rows[0].nbytes / rows[3].nbytes, rows[3].spec
    (8.0, 'local:8')
    """
    if calculator not in CALCULATORS:
        raise SpecError(f"there is no calculator {calculator!r}: {meant(calculator, CALCULATORS)}")
    if ranks < 2:
        raise SpecError(f"{ranks} ranks send nothing: take 2 or more")
    if compute_s is not None and not compute_s > 0:
        raise SpecError(f"a micro-batch computes for some time, not {compute_s} s")
    counted = _Counted(model, ranks, link)
    if calculator == "precision":
        rows = [_precision(counted, spec) for spec in PRECISIONS]
    elif calculator == "density":
        rows = [counted.row("all", "none", DENSE), *(_density(counted, density) for density in DENSITIES)]
    else:
        rows = _spread(counted, calculator)
    if compute_s is None:
        return tuple(rows)
    return tuple(row._replace(total_s=compute_s + row.link_s) for row in rows)


DENSE = "2 (n - 1)/n 4 N"


class _Counted:
    """A model whose bytes and seconds are counted on so many ranks."""

    def __init__(self, model: Transformer, ranks: int, link: Link) -> None:
        shapes = parameter_shapes(model)
        self._shapes = _first(shapes)
        self._scale = model.parameters / sum(shape.numel for shape in self._shapes)
        self._ranks, self._link = ranks, link

    def row(self, setting: str, spec: str, formula: str) -> Saving:
        """What a method sends and takes in every step."""
        nbytes = cost(spec, self._shapes, self._ranks, step=PAST_WARM_UPS).wire_bytes
        seconds = step_s(spec, self._shapes, self._ranks, self._link, step=PAST_WARM_UPS)
        return Saving(setting, spec, self._scale * nbytes, self._scale * seconds, None, formula)


def _first(shapes: Sequence[ParameterSpec]) -> list[ParameterSpec]:
    """The first parameters, up to `EXACT` elements and at least one."""
    taken, held = [shapes[0]], shapes[0].numel
    for shape in shapes[1:]:
        if held + shape.numel > EXACT:
            break
        taken.append(shape)
        held += shape.numel
    return taken


def _precision(counted: _Counted, spec: str) -> Saving:
    bits = {"none": 32, "fp16": 16}.get(spec) or int(spec.removeprefix("int"))
    scales = "" if bits >= 16 else " + scales: 4 bytes for 256 elements"
    return counted.row(f"{bits} bits", spec, f"2 (n - 1)/n N {bits}/8{scales}")


def _density(counted: _Counted, density: float) -> Saving:
    formula = "(n - 1) density N (4 + bytes of an index): an all-gather grows with ranks"
    return counted.row(f"{100 * density:g}%", f"topk:{density:g}", formula)


def _spread(counted: _Counted, calculator: str) -> list[Saving]:
    """float32 in one step of several."""
    every = counted.row("", "none", DENSE)
    rows: list[Saving] = []
    for count in WINDOWS if calculator == "steps" else ACCUMULATED:
        if calculator == "steps":
            setting, spec, formula = f"H={count}", f"local:{count}" if count > 1 else "none", f"{DENSE} / H"
        else:
            setting, spec, formula = f"k={count}", "none, no_sync() for k - 1 of k", f"{DENSE} / k"
        rows.append(Saving(setting, spec, every.nbytes / count, every.link_s / count, None, formula))
    return rows
