"""FSDP2's all-gathers of parameters, in the payloads of a codec. The shards that optimizers see stay as they are."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire import kernels
from gradwire.adapters.fsdp2.comm import ParameterGather
from gradwire.adapters.fsdp2.groups import Group, ShardedParameter
from gradwire.codecs import Codec
from gradwire.codecs.base import layout_of
from gradwire.core.collective import AllGather
from gradwire.core.errors import AttachError, StepError
from gradwire.core.key import Key
from gradwire.core.payload import Layout
from gradwire.drivers.engine import Engine
from gradwire.drivers.interpreter import Transport, ask
from gradwire.drivers.process_group import GroupTransport
from gradwire.session import Session
from gradwire.session.lane import Lane
from gradwire.spec import as_codec

SMALLEST_CHUNK = 256
"""Elements of a chunk from which on it is coded: below that there is little to save."""

WORST_ERROR = 0.3
"""What a codec for parameters may be off by at most, as a part of their norm: int4 is off by 0.12, sign by 0.6."""


def parameter_codec(given: Codec | str) -> Codec:
    """Return the codec that is meant.

    Raises:
        SpecError, CompositionError: as `as_codec`.
        AttachError: one that would spoil parameters, for which nothing is ever made good.

    >>> parameter_codec("int8")
    BlockInt(bits=8, block=256, stochastic=False)
    """
    codec = as_codec(given)
    x = torch.randn(4096, generator=torch.Generator().manual_seed(0))
    key = Key(0, 0, "parameters", "probe", 0)
    off = float((codec.decode(codec.encode(x, key), like=x, key=key) - x).norm() / x.norm())
    if off > WORST_ERROR:
        raise AttachError(
            f"parameters={given!r} would change parameters by {off:.0%} of their norm: use int8, int4, fp8 or bf16"
        )
    return codec


@dataclass(frozen=True)
class _Chunk:
    """One parameter's chunk.

    Attributes:
        name: of the parameter.
        dtype: that FSDP2 gathers it in.
        begin, nbytes: where it lies in FSDP2's row, in bytes.
        at, sent: where it lies in the row that is sent.
        layout: of the payload; None: sent as it is.
    """

    name: str
    dtype: torch.dtype
    begin: int
    nbytes: int
    at: int
    sent: int
    layout: Layout | None

    def given(self, row: Tensor) -> Tensor:
        """The chunk in a row of FSDP2's, as bytes."""
        return row[self.begin : self.begin + self.nbytes]

    def wire(self, row: Tensor) -> Tensor:
        """The chunk in a row that is sent."""
        return row[self.at : self.at + self.sent]

    def values(self, row: Tensor) -> Tensor:
        """The chunk in a row of FSDP2's, as the codec takes it."""
        return _as(self.given(row), self.dtype).float()


class GatherPort:
    """Takes the place of a model's all-gathers.

    Every rank decodes what all have sent, its own chunks too, so all compute with the same bits. Vectors, whole numbers
    and small chunks travel as they are. Random rounding is drawn from a key of the step, so that a parameter that is
    gathered again in the backward pass is the same one.

    A row ends with a byte for each chunk that is coded: 1 where this rank's does not come out finite, as of a mask that
    holds minus infinity. All ranks read the bytes of all, so they agree which parameters to gather again, as they are.

    Args:
        session: whose step it is, and whose statistics count.
        groups: of the model.
        codec: of what travels.
        lane: between the ranks that share the model, where that is not the session's.
    """

    def __init__(self, session: Session, groups: list[Group], codec: Codec, lane: Lane | None = None) -> None:
        self._session, self._groups, self._codec = session, groups, codec
        self._own, self._lane = lane, lane or session.lane
        self._transport = lane.transport() if lane else session.transport
        self._layouts = [tuple(_chunks(group, codec)) for group in groups]
        self._before: list[Any] = []

    def install(self) -> None:
        """Have FSDP2 gather by this port."""
        for part, group in enumerate(self._groups):
            self._before.append(group.held._all_gather_comm)
            group.module.set_custom_all_gather(self._comm(part))

    def remove(self) -> None:
        """Have FSDP2 gather as it did before."""
        for group, before in zip(self._groups, self._before, strict=False):
            group.module.set_custom_all_gather(before)
        self._before = []
        if self._own is not None:
            lane, self._own = self._own, None
            lane.let_go(self._transport)

    def _comm(self, part: int) -> ParameterGather:
        return ParameterGather(lambda output, given, group: self.gather(part, output, given, group))

    @property
    def _engine(self) -> Engine:
        return self._session.engine

    @torch.no_grad()
    def gather(self, part: int, output: Tensor, given: Tensor, group: dist.ProcessGroup) -> None:
        """Gather a group's parameters.

        Args:
            part: which one.
            output: gets all ranks' rows, 1-d.
            given: this rank's row, 1-d; it may lie in `output`.
            group: of FSDP2.
        """
        chunks, ranks = self._layouts[part], self._transport.world_size
        plain, into = given.view(torch.uint8), output.view(torch.uint8).view(group.size(), -1)
        if group.size() != ranks:  # resharded after the forward pass over fewer ranks, which are near each other
            into.copy_(self._exchanged(plain, GroupTransport(group, self._lane.log)))
            return
        if given.nbytes != chunks[-1].begin + chunks[-1].nbytes:
            raise StepError(
                f"FSDP2 gathers {given.nbytes} bytes where {chunks[-1].begin + chunks[-1].nbytes} were expected: give "
                "parameters their dtypes before attach"
            )
        if not any(chunk.layout for chunk in chunks):
            into.copy_(self._exchanged(plain))
            self._count(given.nbytes, given.nbytes)
            return
        row = self._encoded(plain, chunks)
        rows = self._exchanged(row)
        spoiled = _spoiled(rows, chunks)
        # Before anything is written, since `given` may lie in `output`.
        exact = self._exchanged(_joined(plain, spoiled)) if spoiled else None
        self._decode(rows, into, [chunk for chunk in chunks if chunk not in spoiled])
        if exact is not None:
            _split(exact, into, spoiled)
        self._count(row.nbytes + (0 if exact is None else exact[0].nbytes), given.nbytes)

    def _exchanged(self, row: Tensor, among: Transport | None = None) -> Tensor:
        """Return the rows of all ranks, or of those of another transport."""
        session, engine, lane = self._session, self._engine, self._lane
        lane.require_sound()
        run = lane.do if session.window.under_way else lane.call
        transport = among or (self._transport if self._own else engine.transport)
        began = time.perf_counter()
        rows = run(lambda: ask(AllGather(row), transport), session.feed.where())
        engine.stats.wait_s += time.perf_counter() - began
        return rows

    def _count(self, sent: int, dense: int) -> None:
        stats, others = self._engine.stats, self._transport.world_size - 1
        stats.payload_bytes += sent
        stats.wire_bytes += others * sent
        self._engine.count_dense(0, others * dense)

    @torch.inference_mode(False)
    def _encoded(self, given: Tensor, chunks: tuple[_Chunk, ...]) -> Tensor:
        """The row that is sent."""
        began, marks = time.thread_time(), iter(_marks(chunks))
        row = torch.zeros(_up(_marks(chunks).stop), dtype=torch.uint8, device=given.device)
        for chunk in chunks:
            if chunk.layout is None:
                chunk.wire(row).copy_(chunk.given(given))
                continue
            values, payload, key = chunk.values(given), chunk.layout.views(chunk.wire(row)), self._key(chunk.name)
            self._codec.encode_into(values, key, payload)
            # What goes in may be finite and beyond what the codec can say.
            comes_out = self._decoded(chunk, row, key)
            row[next(marks)] = (kernels.all_finite(values) & kernels.all_finite(comes_out)).logical_not()
        self._engine.stats.encode_s += time.thread_time() - began
        return row

    def _decode(self, rows: Tensor, output: Tensor, chunks: Sequence[_Chunk]) -> None:
        """Write all ranks' rows."""
        began = time.thread_time()
        for rank, (row, into) in enumerate(zip(rows, output, strict=True)):
            for chunk in chunks:
                if chunk.layout is None:
                    chunk.given(into).copy_(chunk.wire(row))
                    continue
                chunk.given(into).copy_(self._decoded(chunk, row, self._key(chunk.name, rank)).view(torch.uint8))
        self._engine.stats.encode_s += time.thread_time() - began

    def _decoded(self, chunk: _Chunk, row: Tensor, key: Key) -> Tensor:
        """A coded chunk of a row that is sent, in the dtype that FSDP2 gathers it in."""
        assert chunk.layout is not None
        values = torch.empty(chunk.nbytes // chunk.dtype.itemsize, device=row.device)
        self._codec.decode_into(chunk.layout.views(chunk.wire(row)), values, key)
        return values.to(chunk.dtype)

    def _key(self, name: str, rank: int | None = None) -> Key:
        session = self._session
        mine = self._transport.rank if rank is None else rank
        return Key(session.seed, self._engine.index, name, "parameters", mine)


def _as(chunk: Tensor, dtype: torch.dtype) -> Tensor:
    """Bytes as values; a copy where they do not begin at a multiple of their size."""
    aligned = chunk.storage_offset() % dtype.itemsize == 0
    return (chunk if aligned else chunk.clone()).view(dtype)


def _chunks(group: Group, codec: Codec) -> Iterator[_Chunk]:
    begin = at = 0
    for parameter in group.parameters:
        nbytes = parameter.chunk * parameter.gathered.itemsize
        layout = layout_of(codec, parameter.chunk, torch.float32) if _is_coded(parameter) else None
        sent = layout.nbytes if layout else nbytes
        yield _Chunk(parameter.name, parameter.gathered, begin, nbytes, at, sent, layout)
        begin, at = begin + nbytes, _up(at + sent)


def _marks(chunks: Sequence[_Chunk]) -> range:
    """Where in a row the bytes are that tell which of the coded chunks do not come out finite."""
    begin = _up(chunks[-1].at + chunks[-1].sent)
    return range(begin, begin + sum(chunk.layout is not None for chunk in chunks))


def _spoiled(rows: Tensor, chunks: Sequence[_Chunk]) -> list[_Chunk]:
    """The coded chunks that do not come out finite on some rank: alike on all ranks, which have the same rows."""
    marks = _marks(chunks)
    coded = (chunk for chunk in chunks if chunk.layout is not None)
    told = rows[:, marks.start : marks.stop].amax(0).tolist()
    return [chunk for chunk, mark in zip(coded, told, strict=True) if mark]


def _joined(given: Tensor, chunks: Sequence[_Chunk]) -> Tensor:
    """The chunks in a row of FSDP2's, one after the other."""
    return torch.cat([chunk.given(given) for chunk in chunks])


def _split(rows: Tensor, output: Tensor, chunks: Sequence[_Chunk]) -> None:
    """Write what `_joined` has joined on each rank."""
    for row, into in zip(rows, output, strict=True):
        begin = 0
        for chunk in chunks:
            chunk.given(into).copy_(row[begin : begin + chunk.nbytes])
            begin += chunk.nbytes


def _is_coded(parameter: ShardedParameter) -> bool:
    """Whether it is worth it, and does no harm: vectors are few, and biases and norms want to be exact."""
    return parameter.gathered.is_floating_point and len(parameter.shape) > 1 and parameter.chunk >= SMALLEST_CHUNK


def _up(nbytes: int) -> int:
    """The next multiple of what views of any dtype want."""
    return -(-nbytes // 16) * 16
