"""The ranks of an axis that exchange rows inside a model, and the exchange as functions with a gradient.

    axis = ExchangeAxis(mesh["expert"])
    passage = Passage(axis, rows, "there")
    received = passage.finish(passage.start(x))  # what is computed between the two hides the exchange

The gradient of an exchange is the exchange the other way. Autograd calls the latest function first, so passages that
start one after the other and are finished later overlap in the backward pass as they do in the forward pass.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.codecs.base import Codec, layout_of
from gradwire.core import buffers
from gradwire.core.collective import AllGather, AllReduce
from gradwire.core.errors import AttachError, CompositionError
from gradwire.core.key import Key
from gradwire.core.messages import Expected, Message, SendRecv
from gradwire.core.program import Program, once
from gradwire.drivers.groups import new_group
from gradwire.drivers.interpreter import Begun, Interpreter, Script, Traffic, Transport
from gradwire.drivers.lockstep import Meeting, VirtualTransport
from gradwire.drivers.process_group import GroupTransport
from gradwire.parallel.rows import RowCounts
from gradwire.spec import as_codec

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

T = TypeVar("T")

Way = Literal["there", "back"]

DEADLINE_S = 300.0


class ExchangeAxis:
    """The ranks of an axis that exchange rows, over a process group of their own.

    All ranks of the axis make it at the same place. Without a default process group it is this process alone, so a
    model runs as it is in one process.

    Args:
        ranks: an axis of a mesh, a process group, or None for all ranks. A mesh of two dimensions, nodes and the ranks
            of a node, makes the exchange one of two levels.
        node: ranks of a node, for an exchange of two levels; None: what the mesh says, else one level.
        deadline_s: seconds after which a silent rank is an error.

    Attributes:
        size: how many ranks.
        place: of this rank among them.
        node: ranks of a node, or None.

    Raises:
        AttachError: a mesh of more dimensions, or whose ranks are not in order.
        CompositionError: nodes that do not divide the ranks.
        CommunicationError: a rank that did not come within `deadline_s`.

    >>> axis = ExchangeAxis()
    >>> axis.size, axis.place
    (1, 0)
    """

    def __init__(
        self,
        ranks: DeviceMesh | dist.ProcessGroup | None = None,
        *,
        node: int | None = None,
        deadline_s: float = DEADLINE_S,
    ) -> None:
        members, of_mesh = _members(ranks)
        self.node = _node(node if node is not None else of_mesh, len(members))
        self._transport: Transport = VirtualTransport(Meeting(1), 0)
        if len(members) > 1:
            whole = dist.group.WORLD
            assert whole is not None
            what = "gradwire.parallel.ExchangeAxis"
            self._transport = GroupTransport(new_group(whole, members, deadline_s, what))
        self.size, self.place = self._transport.world_size, self._transport.rank
        self._layers = 0

    def begin(self, program: Program[T], traffic: Traffic | None = None) -> Begun[T]:
        """Start a program, and return what ends it.

        Args:
            program: of this rank; all ranks of the axis begin the same ones in the same order.
            traffic: is told what was sent, and how long coding and waiting took.
        """
        counted = traffic or Traffic()

        def waited(seconds: float) -> None:
            counted.wait_s += seconds

        return Begun(_alone(program, self._transport, counted), waited)

    def run(self, program: Program[T], traffic: Traffic | None = None) -> T:
        """Run a program to its end."""
        return self.begin(program, traffic).end()

    def pass_on(self, wire: Tensor, nbytes: int, traffic: Traffic | None = None) -> Begun[Tensor]:
        """Send bytes to the next rank, from the last one to the first, and return what waits for those that come.

        Args:
            wire: uint8.
            nbytes: that come from the rank before.
            traffic: is told what was sent.
        """
        to, source = (self.place + 1) % self.size, (self.place - 1) % self.size
        return self.begin(once(SendRecv(wire, (Message(to, wire),), (Expected(source, nbytes),))), traffic)

    def passed_round(
        self, wire: Tensor, nbytes: Callable[[int], int], traffic: Traffic | None = None
    ) -> Iterator[tuple[int, Tensor]]:
        """The place and the bytes of each rank, this one's first. The next ones travel while a caller has these.

        Args:
            wire: uint8, of this rank.
            nbytes: of the rank at a place.
            traffic: is told what was sent.
        """
        for hop in range(self.size):
            place = (self.place - hop) % self.size
            if hop == self.size - 1:
                yield place, wire
                return
            under_way = self.pass_on(wire, nbytes((place - 1) % self.size), traffic)
            yield place, wire
            wire = under_way.end()

    def sum(self, tensor: Tensor, traffic: Traffic | None = None) -> Tensor:
        """The sum of a tensor over the ranks, which has no gradient.

        >>> ExchangeAxis().sum(torch.tensor([1, 2]))
        tensor([1, 2])
        """
        return self.run(once(AllReduce(tensor.detach())), traffic)

    def require_agreement(
        self,
        named: Mapping[str, object],
        made: str,
        remedy: str,
        device: torch.device,
        traffic: Traffic | None = None,
    ) -> None:
        """Compare what ranks were given, before an exchange whose sizes depend on it.

        A rank sends 8 (n - 1) bytes for each name.

        Args:
            named: what must be alike, by its name. Integers are compared as they are, anything else by its repr.
            made: what stands between the ranks and what differs, e.g. "were made with".
            remedy: what to do.
            device: of the tensor that travels.
            traffic: is told what was sent.

        Raises:
            CompositionError: on every rank, with what differs.
        """
        mine = [each if isinstance(each, int) else zlib.crc32(repr(each).encode()) for each in named.values()]
        words = torch.tensor(mine, device=device).view(torch.uint8)
        rows = self.run(once(AllGather(words)), traffic).view(torch.int64).tolist()
        for rank, row in enumerate(rows):
            for (name, given), value, other in zip(named.items(), mine, row, strict=True):
                if value != other:
                    told = f": {other} and {value}" if isinstance(given, int) else ""
                    raise CompositionError(
                        f"ranks {rank} and {self.place} of the axis {made} different {name}{told}; {remedy}"
                    )

    def next_layer(self) -> int:
        """Number the layers that use the axis, in the order in which they are made."""
        self._layers += 1
        return self._layers - 1


def _members(ranks: DeviceMesh | dist.ProcessGroup | None) -> tuple[list[int], int | None]:
    """The ranks, by their numbers in the default group, and how many of them share a node where a mesh says it."""
    if not dist.is_initialized():
        if ranks is not None:
            raise AttachError("there is no default process group: call torch.distributed.init_process_group first")
        return [0], None
    if ranks is None:
        return list(range(dist.get_world_size())), None
    if isinstance(ranks, dist.ProcessGroup):
        return dist.get_process_group_ranks(ranks), None
    if ranks.ndim > 2:
        raise AttachError(f"a mesh of {ranks.ndim} dimensions is no axis: take one of them, or nodes and their ranks")
    members: list[int] = ranks.mesh.flatten().tolist()
    if members != sorted(members):
        raise AttachError(f"the ranks of the axis are {members}: make the mesh of ranks in ascending order")
    return members, ranks.size(1) if ranks.ndim == 2 else None


def _node(node: int | None, ranks: int) -> int | None:
    if node is None:
        return None
    if node < 1 or ranks % node:
        raise CompositionError(f"nodes of {node} ranks do not divide an axis of {ranks}: give a divisor")
    return None if node in (1, ranks) else node


def _alone(program: Program[T], transport: Transport, traffic: Traffic) -> Script[T]:
    """The script of one program, whose traffic is counted."""
    (result,) = yield from Interpreter[T](transport, traffic).script(1, lambda _: [program])
    return result


# Blocks of rows ------------------------------------------------------------------------------------------------


def row_codec(given: Codec | str | None, width: int, what: str) -> Codec | None:
    """Return the codec that rows of activations travel in; None sends them as they are.

    Each row must be coded by itself: else what arrives would depend on which rows travel together, and so on the
    number of ranks.

    Args:
        given: a codec, or a spec such as "int8:64" or "bf16".
        width: elements of a row.
        what: the passage, for errors.

    Raises:
        SpecError, CompositionError: no codec, or one whose units do not fit into a row.

    >>> row_codec("int8:64", 128, "dispatch")
    BlockInt(bits=8, block=64, stochastic=False)
    """
    codec = None if given is None else as_codec(given)
    if codec is None or codec.lossless:
        return None
    unit = codec.granularity
    if not unit:
        raise CompositionError(f"{what}={given} leaves out elements of activations: take int8, fp8 or bf16")
    if width % unit:
        raise CompositionError(
            f"{what}={given} codes {unit} elements together, which does not divide rows of {width}: take a block that "
            "does, such as int8:64 or FP8(block=64)"
        )
    return codec


@dataclass(frozen=True)
class RowCoding:
    """How rows become blocks: `width` elements a row, each block one payload of the codec.

    Args:
        codec: None for rows as they are.
        width: elements of a row.
        dtype: of the rows.

    >>> RowCoding(None, 128, torch.bfloat16).nbytes(3), RowCoding(as_codec("int8:64"), 128, torch.float32).nbytes(3)
    (768, 408)
    """

    codec: Codec | None
    width: int
    dtype: torch.dtype

    def nbytes(self, rows: int) -> int:
        """Bytes of a block: rows times width times the size of an element, or the payload's."""
        if self.codec is None:
            return rows * self.width * self.dtype.itemsize
        return layout_of(self.codec, rows * self.width, self.dtype).nbytes if rows else 0

    def encode(self, rows: Tensor, counts: tuple[int, ...], key: Key) -> Tensor:
        """The blocks of `counts` rows each, end to end."""
        flat = rows.detach().contiguous().reshape(-1)
        if self.codec is None:
            return flat.view(torch.uint8)
        wire = buffers.empty((sum(map(self.nbytes, counts)),), torch.uint8, rows.device)
        pieces = flat.split([count * self.width for count in counts])
        for to, (piece, block) in enumerate(zip(pieces, self._blocks(wire, counts), strict=True)):
            if piece.numel():
                layout = layout_of(self.codec, piece.numel(), self.dtype)
                self.codec.encode_into(piece, key.with_(stage=f"{key.stage}{to}"), layout.views(block))
        return wire

    def decode(self, wire: Tensor, counts: tuple[int, ...]) -> Tensor:
        """The rows of blocks of `counts` rows each: (sum of counts, width)."""
        if self.codec is None:
            return wire.view(self.dtype).view(-1, self.width)
        rows = torch.empty(sum(counts) * self.width, dtype=self.dtype, device=wire.device)
        pieces = rows.split([count * self.width for count in counts])
        for piece, block in zip(pieces, self._blocks(wire, counts), strict=True):
            if piece.numel():
                self.codec.decode_into(layout_of(self.codec, piece.numel(), self.dtype).views(block), piece, Key())
        return rows.view(-1, self.width)

    def _blocks(self, wire: Tensor, counts: tuple[int, ...]) -> tuple[Tensor, ...]:
        return wire.split([self.nbytes(count) for count in counts])


# With a gradient -----------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Passage:
    """Rows of a layer on their way to other ranks, and their gradients on the way back.

        y = P x,    dL/dx = P^T dL/dy

    where P places row i of what a rank sends where it arrives. A codec C makes that y = P C(x), whose gradient is taken
    as if C changed nothing (straight-through, Bengio et al. 2013), and dL/dx = P^T C'(dL/dy) with the codec C' of
    gradients.

    Args:
        axis: the ranks.
        rows: how many go where.
        way: "there", or "back" where rows of `receives` return to where they came from.
        codec: of rows; None sends them as they are.
        gradient_codec: of their gradients.
        key: of codecs that draw; two passages must not share one.
        traffic: is told what was sent.
    """

    axis: ExchangeAxis
    rows: RowCounts
    way: Way
    codec: Codec | None = None
    gradient_codec: Codec | None = None
    key: Key = field(default_factory=Key)
    traffic: Traffic | None = None
    _under_way: Begun[Tensor] | None = field(default=None, init=False)
    _decode: Callable[[Tensor], Tensor] | None = field(default=None, init=False)

    def start(self, x: Tensor) -> Tensor:
        """Send rows (n, width); the result is only for `finish`."""
        return _Start.apply(x, self)  # type: ignore[no-any-return]

    def finish(self, started: Tensor) -> Tensor:
        """Return the rows that arrive: (m, width)."""
        return _Finish.apply(started, self)  # type: ignore[no-any-return]

    def begin(self, x: Tensor, backward: bool) -> None:
        """Send rows, or gradients against the way of the rows."""
        codec = self.gradient_codec if backward else self.codec
        coding = RowCoding(codec, x.shape[1], x.dtype)
        outward = (self.way == "there") != backward
        sends, receives = self.rows.sends, self.rows.receives
        if not outward:
            sends, receives = receives, sends
        key = self.key.with_(direction="backward" if backward else "forward", rank=self.axis.place)
        move = self.rows.there if outward else self.rows.back
        self._decode = lambda wire: coding.decode(wire, receives)
        self._under_way = self.axis.begin(move(coding.encode(x, sends, key), coding.nbytes), self.traffic)

    def end(self) -> Tensor:
        """Wait for what was begun."""
        assert self._under_way is not None
        assert self._decode is not None
        decoded = self._decode(self._under_way.end())
        self._under_way = self._decode = None
        return decoded


class _Start(torch.autograd.Function):
    """Forward: send. Backward: wait for the gradients, which `_Finish` has sent."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, passage: Passage) -> Tensor:
        ctx.passage = passage
        passage.begin(x, backward=False)
        return x.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.passage.end(), None


class _Finish(torch.autograd.Function):
    """Forward: wait for the rows. Backward: send their gradients the other way."""

    @staticmethod
    def forward(ctx: Any, started: Tensor, passage: Passage) -> Tensor:
        ctx.passage = passage
        return passage.end()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (grad,) = grads
        ctx.passage.begin(grad, backward=True)
        return grad.new_empty(0), None
