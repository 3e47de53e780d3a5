"""The second half of a two-shot: each rank encodes its shard, and everybody gets the whole."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from gradwire.codecs.base import Codec
from gradwire.codecs.error_memory import add_owed_
from gradwire.core import collective
from gradwire.core.grain import Grain
from gradwire.core.key import Key
from gradwire.core.program import Program
from gradwire.core.state import Leaf, State
from gradwire.reducers.scatter_reduce import require_cuttable
from gradwire.reducers.sharding import CutPayload, ShardedPayload, ShardPayloads, Shards
from gradwire.reducers.step import Step


class Whole(NamedTuple):
    """What a gather returns: the whole tensor, 1-d and the same bits on every rank, and the new state."""

    tensor: Tensor
    state: State


class ShardGather(ABC):
    """Rank j sends its shard y_j, encoded, to all; what the encoding loses stays with rank j as its residual s_j:

        z_j = decode(C(y_j + s_j)),    s_j' = y_j + s_j - z_j,    whole = (z_0, ..., z_{n - 1})

    It is added next time (the server error of 1-bit Adam, Tang et al. 2021, Algorithm 1), else the whole is biased for
    good. A codec that is unbiased and no contraction keeps no residual, which would grow without bound: its error is
    gone, so the gather conserves nothing. The encoding draws from a key of its own. Bytes a rank sends: (n - 1)/n
    payloads.
    """

    codec: Codec

    @property
    def owes(self) -> bool:
        """Whether the owner of a shard keeps what the encoding loses."""
        return not self.codec.lossless and self.codec.contraction(1) is not None

    @property
    def conserves_sum(self) -> bool:
        """Whether the encoding loses nothing, or the owner keeps what it lost."""
        return self.codec.lossless or self.owes

    @abstractmethod
    def sharded(self, numel: int, world_size: int, dtype: torch.dtype) -> ShardedPayload:
        """Return how a tensor of `numel` elements is cut, and its shards coded."""

    def init(self, grain: Grain, step: Step) -> State:
        """The owner's residual: zeros, one for each element of the shard."""
        if not self.owes:
            return State()
        size = self.sharded(grain.numel, step.world_size, torch.float32).shards.size
        return State(owner=Leaf(torch.zeros(size, dtype=torch.float32, device=grain.device), "owned", owed=True))

    def gather(
        self, grain: Grain, y: Tensor, state: State, step: Step, dtype: torch.dtype | None = None
    ) -> Program[Whole]:
        """Return the program that makes one tensor, the same on every rank, of all ranks' shards.

        Args:
            grain: the whole.
            y: this rank's shard, 1-d, float32 or float64; it is used up.
            state: with the owner's residual, or empty: then nothing is owed.
            step: where the program runs.
            dtype: of the result, by default that of `y`.
        """
        sharded = self.sharded(grain.numel, step.world_size, y.dtype)
        key = step.key(grain, "second")
        row, state = self._encoded(y, sharded, state, step.rank, key)
        rows = yield collective.AllGather(row)
        whole = step.empty(grain.numel, y, dtype)
        sharded.decode_into(rows, whole, key)
        return Whole(whole, state)

    def _encoded(self, y: Tensor, sharded: ShardedPayload, state: State, rank: int, key: Key) -> tuple[Tensor, State]:
        """The row of y + s, and the state with s' in it. `y` is used up."""
        row, owner = sharded.empty_row(y.device), state.get("owner")
        payload = sharded.payload(row, rank)
        if not isinstance(owner, Leaf):
            self.codec.encode_into(y, key, payload)
            return row, state
        add_owed_(y, owner.tensor[: y.numel()])
        self.codec.encode_keeping_into(y, key, payload)
        return row, State(owner=Leaf(sharded.shards.padded(y.float()), "owned", owed=True))


@dataclass(frozen=True)
class Gather(ShardGather):
    """The second half for codecs whose payloads can be cut: all shards are decoded by one call.

    Args:
        codec: its tensor must be divisible into shards.
        unit: shards are also cut at multiples of this many elements, as those of the first half.

    Raises:
        CompositionError: a codec that cannot be cut into shards of equal payloads.

    >>> from gradwire.codecs import Identity
    >>> from gradwire.core.grain import flat_grain
    >>> from gradwire.drivers.lockstep import run_lockstep
    >>> half, grain, shards = Gather(Identity()), flat_grain(3), [torch.tensor([1.0, 2.0]), torch.tensor([3.0])]
    >>> programs = [half.gather(grain, y, State(), Step(0, rank, 2)) for rank, y in enumerate(shards)]
    >>> [whole.tensor.tolist() for whole in run_lockstep(programs)]
    [[1.0, 2.0, 3.0], [1.0, 2.0, 3.0]]
    """

    codec: Codec
    unit: int = 1

    def __post_init__(self) -> None:
        require_cuttable(self.codec)

    def sharded(self, numel: int, world_size: int, dtype: torch.dtype) -> CutPayload:
        """Rows of one payload."""
        return CutPayload(self.codec, Shards(numel, world_size, math.lcm(self.unit, self.codec.granularity)), dtype)


@dataclass(frozen=True)
class ShardwiseGather(ShardGather):
    """The second half for any codec: every shard is coded and decoded by itself.

    Args:
        codec: any codec.
    """

    codec: Codec

    def sharded(self, numel: int, world_size: int, dtype: torch.dtype) -> ShardPayloads:
        """A payload a shard."""
        return ShardPayloads(self.codec, Shards(numel, world_size), dtype)
