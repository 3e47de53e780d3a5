"""Explicit randomness. A key names the random bits it stands for; nothing here touches a global generator."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from gradwire.core.errors import CompositionError

SHARED = -1
"""The `rank` of a key that every rank draws alike."""

Direction = Literal["forward", "backward"]
_DIRECTIONS = (None, *get_args(Direction))


@dataclass(frozen=True, slots=True)
class Key:
    """The name of a stream of random bits: (seed, step, name, stage, rank), and (layer, micro_batch, direction).

    Two keys that differ anywhere give independent streams, and equal keys give equal bits on every machine,
    process and device: `stream_seed` is BLAKE2b of the fields, and the kernels expand it with a counter-based
    generator. Each stage of rounding has a `stage` of its own, since a reused one correlates errors.

    Tensors that pass a layer several times in a step, such as activations and their gradients in a pipeline, are told
    apart by the last three fields. A key without them has the same bits as before these fields existed.

    Args:
        seed: of the run.
        step: of training.
        name: of the tensor.
        stage: of coding it.
        rank: who draws, or `SHARED`.
        layer: e.g. the name of the module whose output is sent.
        micro_batch: its number in the step, from 0; None where there are none.
        direction: "forward" for activations, "backward" for their gradients.

    Raises:
        CompositionError: another direction, or a negative micro-batch.

    >>> Key(seed=1, step=5, name="w").stream_seed == Key(seed=1, step=5, name="w").stream_seed
    True
    >>> Key(seed=1, step=5, name="w").stream_seed == Key(seed=1, step=6, name="w").stream_seed
    False
    >>> forward = Key(seed=1, step=5, layer="blocks.3", micro_batch=0, direction="forward")
    >>> forward.stream_seed == forward.with_(direction="backward").stream_seed
    False
    """

    seed: int = 0
    step: int = 0
    name: str = ""
    stage: str = ""
    rank: int = SHARED
    layer: str = ""
    micro_batch: int | None = None
    direction: Direction | None = None

    def __post_init__(self) -> None:
        if self.direction not in _DIRECTIONS:
            raise CompositionError(f"direction {self.direction!r} of a key: it must be 'forward', 'backward' or None")
        if self.micro_batch is not None and self.micro_batch < 0:
            raise CompositionError(f"micro-batch {self.micro_batch} of a key: they are counted from 0")

    @property
    def stream_seed(self) -> int:
        """The seed of the key's stream: 64 bits that depend on every field."""
        text = f"{self.seed}|{self.step}|{self.name}|{self.stage}|{self.rank}"
        digest = hashlib.blake2b(text.encode(), digest_size=8, person=self._passage())
        return int.from_bytes(digest.digest(), "little")

    def _passage(self) -> bytes:
        """The last three fields, apart from the others' text; nothing where they are left out, as in older keys."""
        if not self.layer and self.micro_batch is None and self.direction is None:
            return b""
        text = f"{self.direction}|{self.micro_batch}|{self.layer}"
        return hashlib.blake2b(text.encode(), digest_size=hashlib.blake2b.PERSON_SIZE).digest()

    @property
    def shared(self) -> Key:
        """The same key for every rank: what all ranks must draw alike is drawn from it."""
        return replace(self, rank=SHARED)

    def with_(self, **changes: Any) -> Key:
        """Return the same key with some fields changed."""
        return replace(self, **changes)
