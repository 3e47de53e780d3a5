"""What a method holds on this rank, by what it is for."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain

from torch import Tensor

from gradwire.core.buffers import POOL
from gradwire.core.figures import si_bytes
from gradwire.core.state import walk
from gradwire.drivers.engine import Engine


@dataclass(frozen=True)
class HeldMemory:
    """Bytes that a session holds between two steps, and the pool that its process has.

    Attributes:
        residual_bytes: of what is owed to other ranks: residuals, and those of the shards that this rank owns.
        factor_bytes: of matrices that are sent as factors, and begin the next step's.
        other_state_bytes: of estimates, averages, thresholds, and room for a new state to be written to.
        buffer_bytes: that gradients are copied to.
        pool_bytes: kept for the next step's payloads, for what it receives, and for means. All methods of a process
            share one pool, so add this up once. 0 on a GPU, where PyTorch's allocator does the same.

    >>> held = HeldMemory(residual_bytes=4000, factor_bytes=0, other_state_bytes=8, buffer_bytes=4000, pool_bytes=0)
    >>> held.state_bytes, held.total_bytes
    (4008, 8008)
    >>> print(held)
    4.00 kB of residuals, 8.00 B of other states, 4.00 kB of buffers
    """

    residual_bytes: int
    factor_bytes: int
    other_state_bytes: int
    buffer_bytes: int
    pool_bytes: int

    @property
    def state_bytes(self) -> int:
        """Residuals, factors and all else that is remembered."""
        return self.residual_bytes + self.factor_bytes + self.other_state_bytes

    @property
    def total_bytes(self) -> int:
        """All of it."""
        return self.state_bytes + self.buffer_bytes + self.pool_bytes

    def as_dict(self) -> dict[str, int]:
        """Each kind, and the sums `state_bytes` and `memory_bytes`."""
        return vars(self) | {"state_bytes": self.state_bytes, "memory_bytes": self.total_bytes}

    def __str__(self) -> str:
        kinds = {
            "residuals": self.residual_bytes,
            "factors": self.factor_bytes,
            "other states": self.other_state_bytes,
            "buffers": self.buffer_bytes,
            "the pool that methods of a process share": self.pool_bytes,
        }
        return ", ".join(f"{si_bytes(nbytes)} of {kind}" for kind, nbytes in kinds.items() if nbytes) or "none is held"


def held_memory(engine: Engine) -> HeldMemory:
    """Return what an engine holds between two steps, each piece of memory counted once.

    Args:
        engine: of a session.
    """
    leaves = list(chain.from_iterable(walk(state) for _, state in engine.states()))
    counted = set[int]()
    return HeldMemory(
        residual_bytes=_bytes((leaf.tensor for _, leaf in leaves if leaf.owed), counted),
        factor_bytes=_bytes((leaf.tensor for _, leaf in leaves if leaf.kind == "matrix"), counted),
        other_state_bytes=_bytes((leaf.tensor for _, leaf in leaves), counted),
        buffer_bytes=_bytes(engine.buffers(), counted),
        pool_bytes=POOL.use().idle_bytes,  # what is in use between steps are states, which are counted above
    )


def _bytes(tensors: Iterable[Tensor], counted: set[int]) -> int:
    """Bytes of the tensors that were not counted before."""
    new = {tensor.data_ptr(): tensor.nbytes for tensor in tensors if tensor.nbytes}
    total = sum(nbytes for place, nbytes in new.items() if place not in counted)
    counted.update(new)
    return total
