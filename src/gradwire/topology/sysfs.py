"""Files of sysfs and procfs: what cannot be read is None, and nothing is guessed in its place."""

from __future__ import annotations

from pathlib import Path

MOST_CPUS = 1 << 16


def text_of(path: Path) -> str | None:
    """The first line of a file; None where there is none, or where the kernel refuses to say."""
    try:
        return (path.read_text(encoding="utf-8", errors="replace").splitlines() or [""])[0].strip() or None
    except OSError:
        return None


def whole_number_of(path: Path) -> int | None:
    """The whole number that a file holds."""
    try:
        return int(text_of(path) or "")
    except ValueError:
        return None


def numa_node_of(device: Path) -> int | None:
    """The NUMA node that a device is attached to; the kernel says -1 where it does not know, or where there is one."""
    number = whole_number_of(device / "numa_node")
    return number if number is not None and number >= 0 else None


def folders_in(folder: Path) -> list[Path]:
    """What a folder of sysfs holds, by name with numbers in their order; nothing where it does not exist.

    >>> folders_in(Path("/no/such/folder"))
    []
    """
    try:
        return sorted(folder.iterdir(), key=lambda path: _by_number(path.name))
    except OSError:
        return []


def _by_number(name: str) -> tuple[str, int]:
    stem = name.rstrip("0123456789")
    return stem, int(name[len(stem) :] or -1)


def cpus_in(text: str) -> tuple[int, ...] | None:
    """The numbers in a list of CPUs, as the kernel writes it; None where it is no such list.

    >>> cpus_in("0-3,8"), cpus_in(""), cpus_in("all")
    ((0, 1, 2, 3, 8), (), None)
    """
    numbers: list[int] = []
    try:
        for part in text.strip().split(",") if text.strip() else []:
            first, _, last = part.partition("-")
            numbers += range(int(first), min(int(last or first), int(first) + MOST_CPUS) + 1)
    except ValueError:
        return None
    return tuple(numbers)
