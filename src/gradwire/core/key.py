"""Explicit randomness. A key names the random bits it stands for; nothing here touches a global generator."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import Any

SHARED = -1
"""The `rank` of a key that every rank draws alike."""


@dataclass(frozen=True, slots=True)
class Key:
    """The name of a stream of random bits: (seed, step, name, stage, rank).

    Two keys that differ anywhere give independent streams, and equal keys give equal bits on every machine,
    process and device: `bits` is BLAKE2b of the fields, and the kernels expand it with a counter-based
    generator. Each stage of rounding has a `stage` of its own, since a reused one correlates errors.

    >>> Key(seed=1, step=5, name="w").bits == Key(seed=1, step=5, name="w").bits
    True
    >>> Key(seed=1, step=5, name="w").bits == Key(seed=1, step=6, name="w").bits
    False
    """

    seed: int = 0
    step: int = 0
    name: str = ""
    stage: str = ""
    rank: int = SHARED

    @property
    def bits(self) -> int:
        """64 bits that depend on every field."""
        text = f"{self.seed}|{self.step}|{self.name}|{self.stage}|{self.rank}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")

    @property
    def shared(self) -> Key:
        """The same key for every rank: what all ranks must draw alike is drawn from it."""
        return replace(self, rank=SHARED)

    def with_(self, **changes: Any) -> Key:
        """Return the same key with some fields changed."""
        return replace(self, **changes)
