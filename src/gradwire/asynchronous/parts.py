"""One vector cut into as many parts as there are servers."""

from __future__ import annotations

from gradwire.core.errors import CompositionError


def sizes(numel: int, servers: int) -> list[int]:
    """Elements of each server's part, as even as can be.

    Raises:
        CompositionError: no server, or more servers than elements.

    >>> sizes(10, 4)
    [3, 3, 2, 2]
    """
    if not 1 <= servers <= numel:
        raise CompositionError(f"{servers} servers for {numel} parameters: give 1 or more, and no more than parameters")
    return [numel // servers + (part < numel % servers) for part in range(servers)]


def seed_of(seed: int, part: int) -> int:
    """The seed of a part: codecs draw other random bits for each."""
    return seed + 1_000_003 * part
