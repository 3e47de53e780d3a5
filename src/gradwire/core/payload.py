"""What goes on the wire, byte for byte.

A payload is a tuple of tensors. Its `Layout` says how they lie in one uint8 buffer: in the order declared, each
aligned to its element size, the whole rounded up to `ALIGNMENT` bytes so that rows of payloads stay aligned.
Codecs encode straight into views of that buffer, so nothing is copied to be sent and nothing hides beside it.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire.core import buffers
from gradwire.core.errors import PayloadError

ALIGNMENT = 8

Payload = tuple[Tensor, ...]


def _align(offset: int, size: int) -> int:
    return -(-offset // size) * size


@dataclass(frozen=True)
class Field:
    """One tensor of a payload: `numel` elements of `dtype`."""

    dtype: torch.dtype
    numel: int

    @property
    def nbytes(self) -> int:
        """Bytes of the field without padding."""
        return self.dtype.itemsize * self.numel


@dataclass(frozen=True)
class Layout:
    """Where each field of a payload lies in its buffer.

    >>> layout = Layout((Field(torch.float32, 2), Field(torch.uint8, 5)))
    >>> layout.nbytes
    16
    >>> [t.shape[0] for t in layout.views(torch.zeros(16, dtype=torch.uint8))]
    [2, 5]
    """

    fields: tuple[Field, ...]

    @functools.cached_property
    def offsets(self) -> tuple[int, ...]:
        """Byte offset of each field."""
        offsets: list[int] = []
        at = 0
        for field in self.fields:
            at = _align(at, field.dtype.itemsize)
            offsets.append(at)
            at += field.nbytes
        return tuple(offsets)

    @functools.cached_property
    def nbytes(self) -> int:
        """Bytes of the buffer, padding included."""
        if not self.fields:
            return 0
        return _align(self.offsets[-1] + self.fields[-1].nbytes, ALIGNMENT)

    @functools.cached_property
    def _spans(self) -> tuple[tuple[int, int, torch.dtype], ...]:
        ends = [at + field.nbytes for at, field in zip(self.offsets, self.fields, strict=True)]
        return tuple(zip(self.offsets, ends, (field.dtype for field in self.fields), strict=True))

    @functools.cached_property
    def _gaps(self) -> tuple[tuple[int, int], ...]:
        starts = [*self.offsets[1:], self.nbytes]
        ends = [end for _, end, _ in self._spans]
        return tuple([(end, start) for end, start in zip(ends, starts, strict=True) if end < start])

    def empty(self, device: torch.device, rows: int | None = None) -> Tensor:
        """Return a buffer for one payload, or for `rows` of them.

        Padding is zeroed: what is sent must not depend on what memory held before.
        """
        shape = (self.nbytes,) if rows is None else (rows, self.nbytes)
        wire = buffers.empty(shape, torch.uint8, device)
        for start, stop in self._gaps:
            wire[..., start:stop].zero_()
        return wire

    def views(self, wire: Tensor) -> Payload:
        """Return the fields of `wire`, a uint8 buffer of `nbytes`, as views.

        Raises:
            PayloadError: if the buffer has another size or type.
        """
        if wire.dtype != torch.uint8 or wire.shape != (self.nbytes,):
            raise PayloadError(
                f"payload of {tuple(wire.shape)} {wire.dtype}, expected ({self.nbytes},) torch.uint8: it was cut, "
                "or encoded by another codec or for another size"
            )
        if not self.nbytes:  # a row of nothing may start anywhere, and views of other dtypes want their alignment
            wire = wire.new_empty(0)
        return tuple([wire[start:stop].view(dtype) for start, stop, dtype in self._spans])
