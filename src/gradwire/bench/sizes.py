"""Sizes as people write them, and the sizes between two of them that a table has a row for."""

from __future__ import annotations

from gradwire.bench.errors import BenchError
from gradwire.core.rates import number_in, shortened

_BINARY = {"k": 2.0**10, "m": 2.0**20, "g": 2.0**30, "t": 2.0**40}
_UNITS = {
    "b": 1.0,
    **_BINARY,
    **{f"{unit}ib": size for unit, size in _BINARY.items()},
    **{f"{unit}b": 1e3**power for power, unit in enumerate(_BINARY, 1)},
}
_MOST_BYTES = 2.0**43


def parse_size(size: str) -> int:
    """Read a size and return bytes.

    Args:
        size: a whole number of bytes, or a number with a unit. K, M, G and T are powers of 1024, as in nccl-tests, and
            so are KiB, MiB, GiB and TiB; kB, MB, GB and TB are powers of 1000. Upper and lower case are the same.

    Raises:
        BenchError: for anything else, and beyond 1 B to 8T.

    >>> parse_size("8"), parse_size("64M"), parse_size("1.5KiB"), parse_size("2MB")
    (8, 67108864, 1536, 2000000)
    """
    text = size.strip()
    nbytes = float(text) if text.isdecimal() else number_in(text, _UNITS)
    if nbytes is None or not 1 <= nbytes <= _MOST_BYTES:
        raise BenchError(
            f"size {shortened(size)} cannot be used: write whole bytes or a number and a unit of K, M, G, T (powers of "
            '1024) or kB, MB, GB, TB (powers of 1000), from 1 to 8T, such as "64M"'
        )
    return int(nbytes)


def sizes_between(least: str, most: str, factor: int) -> tuple[int, ...]:
    """Return the sizes of a table in bytes: the least, and then each `factor` times the one before, up to the most.

    Args:
        least, most: see `parse_size`.
        factor: 2 or more.

    Raises:
        BenchError: a size that cannot be read, the least above the most, or a factor under which sizes do not grow.

    >>> sizes_between("8", "1K", 4)
    (8, 32, 128, 512)
    """
    first, last = parse_size(least), parse_size(most)
    if first > last:
        raise BenchError(f"sizes from {least} to {most} are none: give the smaller one first, such as from 8 to 64M")
    if factor < 2:
        raise BenchError(f"sizes do not grow by a factor of {factor}: give 2 or more")
    found = [first]
    while found[-1] * factor <= last:
        found.append(found[-1] * factor)
    return tuple(found)
