"""What a method holds on this rank, by what it is for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain

from torch import Tensor

from gradwire.core.buffers import PINNED, POOL
from gradwire.core.figures import si_bytes
from gradwire.core.state import walk
from gradwire.drivers.engine import Engine


@dataclass(frozen=True)
class HeldMemory:
    """Bytes that a session holds between two steps, and the pool that its process has.

    Attributes:
        residual_bytes: of what is owed to other ranks: residuals, and those of the shards that this rank owns; those
            that lie on the device of the gradients.
        factor_bytes: of matrices that are sent as factors, and begin the next step's.
        other_state_bytes: of estimates, averages, thresholds, and room for a new state to be written to.
        buffer_bytes: that gradients are copied to.
        pool_bytes: kept for the next step's payloads, for what it receives, and for means. All methods of a process
            share one pool, so add this up once. 0 on a GPU, where PyTorch's allocator does the same.
        host_residual_bytes: of residuals of a model on a GPU that lie in the host's memory (`residuals="host"`).
        host_pool_bytes: pinned on the host for the residuals of the next step; one pool a process.

    >>> held = HeldMemory(residual_bytes=4000, factor_bytes=0, other_state_bytes=8, buffer_bytes=4000, pool_bytes=0)
    >>> held.state_bytes, held.total_bytes
    (4008, 8008)
    >>> print(held)
    4.00 kB of residuals, 8.00 B of other states, 4.00 kB of buffers
    >>> print(HeldMemory(0, 0, 8, 4000, 0, host_residual_bytes=4000, host_pool_bytes=4096))
    8.00 B of other states, 4.00 kB of buffers; on the host 4.00 kB of residuals, 4.10 kB of a pool for the next ones
    """

    residual_bytes: int
    factor_bytes: int
    other_state_bytes: int
    buffer_bytes: int
    pool_bytes: int
    host_residual_bytes: int = 0
    host_pool_bytes: int = 0

    @property
    def state_bytes(self) -> int:
        """Residuals, factors and all else that is remembered, wherever it lies."""
        return self.residual_bytes + self.host_residual_bytes + self.factor_bytes + self.other_state_bytes

    @property
    def host_bytes(self) -> int:
        """What of it lies on the host, for gradients that do not."""
        return self.host_residual_bytes + self.host_pool_bytes

    @property
    def total_bytes(self) -> int:
        """All of it, wherever it lies."""
        return self.state_bytes + self.buffer_bytes + self.pool_bytes + self.host_pool_bytes

    def as_dict(self) -> dict[str, int]:
        """Each kind, and the sums `state_bytes`, `host_bytes` and `memory_bytes`."""
        sums = {"state_bytes": self.state_bytes, "host_bytes": self.host_bytes, "memory_bytes": self.total_bytes}
        return vars(self) | sums

    def __str__(self) -> str:
        kinds = {
            "residuals": self.residual_bytes,
            "factors": self.factor_bytes,
            "other states": self.other_state_bytes,
            "buffers": self.buffer_bytes,
            "the pool that methods of a process share": self.pool_bytes,
        }
        on_host = {"residuals": self.host_residual_bytes, "a pool for the next ones": self.host_pool_bytes}
        parts = [_told(kinds), f"on the host {_told(on_host)}" if self.host_bytes else ""]
        return "; ".join(filter(None, parts)) or "none is held"


def _told(kinds: Mapping[str, int]) -> str:
    return ", ".join(f"{si_bytes(nbytes)} of {kind}" for kind, nbytes in kinds.items() if nbytes)


def held_memory(engine: Engine) -> HeldMemory:
    """Return what an engine holds between two steps, each piece of memory counted once.

    Args:
        engine: of a session.
    """
    leaves = list(chain.from_iterable(walk(state) for _, state in engine.states()))
    counted = set[int]()
    owed = _bytes((leaf.tensor for _, leaf in leaves if leaf.owed), counted)
    away = engine.host is not None
    return HeldMemory(
        residual_bytes=0 if away else owed,
        factor_bytes=_bytes((leaf.tensor for _, leaf in leaves if leaf.kind == "matrix"), counted),
        other_state_bytes=_bytes((leaf.tensor for _, leaf in leaves), counted),
        buffer_bytes=_bytes(engine.buffers(), counted),
        pool_bytes=POOL.use().idle_bytes,  # what is in use between steps are states, which are counted above
        host_residual_bytes=owed if away else 0,
        host_pool_bytes=PINNED.use().idle_bytes if away else 0,
    )


def _bytes(tensors: Iterable[Tensor], counted: set[int]) -> int:
    """Bytes of the tensors that were not counted before."""
    new = {tensor.data_ptr(): tensor.nbytes for tensor in tensors if tensor.nbytes}
    total = sum(nbytes for place, nbytes in new.items() if place not in counted)
    counted.update(new)
    return total
