"""Bytes, compression and what is owed, by tensor and by method."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from gradwire.core.collective import ring_bytes
from gradwire.core.figures import NOTHING, si_bytes, significant
from gradwire.drivers.plan import Unit
from gradwire.profiling.records import RankRecord, TensorRecord
from gradwire.session import Session

MOST_LISTED = 5
"""Tensors of the table: those of which most is sent."""

LONGEST_NAME = 40


@dataclass(frozen=True)
class TensorShares:
    """What of a tensor is sent in a step, and owed.

    Attributes:
        name: of the parameter; of a sum the method's.
        method: that serves it.
        dense_bytes: of its gradient.
        dense_wire_bytes: that a ring all-reduce of it sends.
        wire_bytes: that a rank sends, the mean over ranks.
        residual_norm: of what the rank that owes most of it owes in the end; None where nothing is owed.
    """

    name: str
    method: str
    dense_bytes: int
    dense_wire_bytes: int
    wire_bytes: float
    residual_norm: float | None

    @property
    def ratio(self) -> float | None:
        """Compression: bytes that a ring all-reduce sends, by bytes sent; None where nothing is sent."""
        return self.dense_wire_bytes / self.wire_bytes if self.wire_bytes > 0 else None

    def cells(self) -> list[str]:
        """The figures of a row, under `HEADINGS`."""
        ratio = NOTHING if self.ratio is None else f"{significant(self.ratio, 3)}x"
        norm = NOTHING if self.residual_norm is None else significant(self.residual_norm, 3)
        return [si_bytes(self.dense_bytes), si_bytes(self.wire_bytes), ratio, norm]


HEADINGS = ("gradient", "on wire", "ratio", "residual")


def tensor_records(session: Session, unit_bytes: Mapping[int, int], steps: int, is_whole: bool) -> list[TensorRecord]:
    """Return what each tensor of a session had of its communication on this rank.

    What is sent of a grain is split among its tensors by their elements, since a codec makes one payload of all.

    Args:
        session: that communicated.
        unit_bytes: that it sent, by unit.
        steps: in which they were.
        is_whole: whether no step is under way, so that what is owed can be read.
    """
    owed = session.residual_norms() if is_whole else {}
    units = session.engine.plan.units
    found: dict[tuple[str, str], TensorRecord] = {}
    for number, unit in enumerate(units):
        method, grain = _method_of(session, unit), unit.grain
        for segment in grain.segments:
            sent = unit_bytes[number] * segment.numel / grain.numel / max(1, steps)
            dense = segment.numel * grain.dtype.itemsize
            key = segment.name, method
            before = found.get(key) or TensorRecord(segment.name, method, 0, 0.0, _scaled(session, owed, segment.name))
            found[key] = replace(before, dense_bytes=before.dense_bytes + dense, wire_bytes=before.wire_bytes + sent)
    return list(found.values())


def _scaled(session: Session, owed: Mapping[str, float], name: str) -> float | None:
    """What is owed of a tensor, without the loss scale."""
    return owed[name] / session.feed.scale if name in owed else None


def _method_of(session: Session, unit: Unit) -> str:
    """The spec of a unit's reducer where it has one; else the session's, if that serves all, or the reducer itself."""
    named = str(unit.reducer)
    only = all(other.reducer == unit.reducer for other in session.engine.plan.units)
    return session.method if only else named


def tensor_shares(records: Sequence[RankRecord]) -> list[TensorShares]:
    """Return the shares of all tensors over ranks, those of which most is sent first."""
    groups: defaultdict[tuple[str, str], list[TensorRecord]] = defaultdict(list)
    for record in records:
        for tensor in record.tensors:
            groups[tensor.name, tensor.method].append(tensor)
    shares = [
        TensorShares(
            name,
            method,
            tensors[0].dense_bytes,
            ring_bytes(tensors[0].dense_bytes, records[0].world_size),
            statistics.fmean(tensor.wire_bytes for tensor in tensors),
            max((tensor.residual_norm for tensor in tensors if tensor.residual_norm is not None), default=None),
        )
        for (name, method), tensors in groups.items()
    ]
    return sorted(shares, key=lambda share: (-share.wire_bytes, share.name))


def by_method(tensors: Sequence[TensorShares]) -> list[TensorShares]:
    """Return the sums of tensors of each method; the norm of all that is owed is the root of the sum of squares."""
    groups: defaultdict[str, list[TensorShares]] = defaultdict(list)
    for tensor in tensors:
        groups[tensor.method].append(tensor)
    return [_sum_of(method, method, of) for method, of in groups.items()]


def _sum_of(name: str, method: str, tensors: Sequence[TensorShares]) -> TensorShares:
    norms = [tensor.residual_norm for tensor in tensors if tensor.residual_norm is not None]
    return TensorShares(
        name,
        method,
        sum(tensor.dense_bytes for tensor in tensors),
        sum(tensor.dense_wire_bytes for tensor in tensors),
        sum(tensor.wire_bytes for tensor in tensors),
        sum(norm**2 for norm in norms) ** 0.5 if norms else None,
    )


def tensor_lines(tensors: Sequence[TensorShares]) -> Iterator[str]:
    """The lines of a table: the tensors of which most is sent, the others together, and the sum of each method."""
    if not tensors:
        return
    rest = tensors[MOST_LISTED:]
    rows = [
        *tensors[:MOST_LISTED],
        *([_sum_of(f"{len(rest)} other{'s' * (len(rest) > 1)}", "", rest)] if rest else []),
        *by_method(tensors),
    ]
    yield f"{'a step':{LONGEST_NAME}s} " + " ".join(f"{heading:>9s}" for heading in HEADINGS)
    for row in rows:
        name = row.name if len(row.name) <= LONGEST_NAME else f"{row.name[: LONGEST_NAME - 3]}..."
        yield f"{name:{LONGEST_NAME}s} " + " ".join(f"{cell:>9s}" for cell in row.cells())
