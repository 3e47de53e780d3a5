"""FSDP2's buffers of gradients: rows of chunks, one chunk for each parameter that is there."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from gradwire.core.errors import StepError
from gradwire.drivers.parts import Columns


class Rows:
    """The buffers of one reduce-scatter."""

    def __init__(self, given: Tensor, output: Tensor, chunks: list[tuple[str, int]], ranks: int) -> None:
        self.begins: dict[str, int] = {}
        at = 0
        for name, chunk in chunks:
            self.begins[name] = at
            at += chunk
        self._width, self._given, self._output, self._ranks = at, given, output, ranks

    def require_whole(self, failed: Callable[[StepError], BaseException]) -> None:
        """Refuse a buffer that holds something else than was seen to be on its way."""
        if self._given.numel() != self._width * self._ranks:
            raise failed(
                StepError(
                    f"FSDP2 reduces {self._given.numel()} elements where {self._width * self._ranks} were expected: "
                    "this version of PyTorch lays gradients out otherwise"
                )
            )

    def fill(self, x: Tensor, columns: list[Columns]) -> None:
        """Write a unit's gradient to `x`, one row a rank; zeros for what did not come."""
        rows = self._given.view(self._ranks, -1)
        for name, start, numel, _, offset in columns:
            into, begin = x[:, offset : offset + numel], self.begins.get(name)
            if begin is None:
                into.zero_()
            else:
                into.copy_(rows[:, begin + start : begin + start + numel])

    def write(self, mean: Tensor, columns: list[Columns], factor: float) -> None:
        """Write this rank's row of a unit's mean, `factor` times."""
        scaled = mean if factor == 1.0 else mean * factor
        for name, start, numel, _, offset in columns:
            if (begin := self.begins.get(name)) is not None:
                self._output[begin + start : begin + start + numel].copy_(scaled[offset : offset + numel])


def by_unit(columns: Sequence[Columns]) -> dict[int, list[Columns]]:
    """Columns, by the unit that they are in."""
    found: dict[int, list[Columns]] = {}
    for column in columns:
        found.setdefault(column.unit, []).append(column)
    return found
