"""Where the states of all ranks go that belong to what a script saves."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

from gradwire.adapters.frameworks import SUFFIX, folder_beside
from gradwire.core.tensor_file import Written

INSIDE = "gradwire"
"""What a folder of states is called inside of a checkpoint's folder."""

_WHOLE, _PIECE, _PIECES, _END = 32 << 20, 256 << 10, 64, 4 << 20
"""Bytes: files up to the first are read whole; of larger ones so many pieces, and the end with its table of CRCs."""


def file_of(given: object) -> Path | None:
    """The file that is meant by a path or by an open file; None for a buffer, and for an open file without a name.

    Args:
        given: what `torch.save` or `torch.load` was given.

    >>> file_of("runs/step-10.pt").name
    'step-10.pt'
    >>> import io
    >>> file_of(io.BytesIO())
    """
    if isinstance(given, str | bytes | os.PathLike):
        return Path(os.fsdecode(given)).resolve()
    name = getattr(given, "name", None)
    path = Path(os.fsdecode(name)).resolve() if isinstance(name, str | bytes) else None
    return path if path is not None and path.is_file() else None


def beside_file(given: object) -> list[Path]:
    """The folder that belongs to a file; none for a buffer, which has no place beside it.

    >>> [path.name for path in beside_file("runs/step-10.pt")]
    ['step-10.pt.gradwire']
    """
    path = file_of(given)
    return [] if path is None else [folder_beside(path)]


def named_entry(given: object) -> Path:
    """The place of a file or folder as a rename takes it: links are followed on the way there, and not at its end."""
    path = Path(os.fsdecode(given))  # type: ignore[arg-type] - what os.replace has accepted
    return path.parent.resolve() / path.name


def folders_beside(entry: Path, suffixes: Iterable[str]) -> list[Path]:
    """The folders of states beside a file, one a model.

    Args:
        entry: the file.
        suffixes: of models that are followed. The folder is read only where that of one of them or of a first model is
            there: it may be one of a million files that a script copies.
    """
    own = entry.name + SUFFIX
    if not any(os.path.isdir(entry.parent / (own + suffix)) for suffix in {"", *suffixes}):
        return []
    with os.scandir(entry.parent) as found:
        names = [one.name for one in found if one.name == own or one.name.startswith(f"{own}-")]
    return [entry.parent / name for name in sorted(names)]


def inside_checkpoint(checkpoint_id: object, storage: object) -> list[Path]:
    """The folder that belongs to a checkpoint of `torch.distributed.checkpoint`; none where that is in no folder.

    Args:
        checkpoint_id: what was given as such.
        storage: a reader or writer, which knows a folder where no `checkpoint_id` is given.

    >>> [path.parts[-2:] for path in inside_checkpoint("runs/step-10", None)]
    [('step-10', 'gradwire')]
    >>> inside_checkpoint("s3://bucket/step-10", None)
    []
    """
    given = checkpoint_id if checkpoint_id is not None else getattr(storage, "checkpoint_id", None)
    if not isinstance(given, str | os.PathLike) or "://" in os.fsdecode(given):
        return []
    return [Path(os.fsdecode(given)).resolve() / INSIDE]


def checkpoint_of(states: Path) -> Path:
    """What a script saved, by the folder of states that belongs to it.

    >>> checkpoint_of(Path("runs/step-10.pt.gradwire")).name, checkpoint_of(Path("runs/step-10/gradwire")).name
    ('step-10.pt', 'step-10')
    """
    return states.parent if states.name == INSIDE else states.with_name(states.name.removesuffix(SUFFIX))


def fingerprint(file: Path) -> Written | None:
    """The size of a file, and the SHA-256 of at most 32 MiB of it; None where there is no such file.

    Of a larger file pieces are read that are spread evenly, and its end: there `torch.save` writes the CRC-32 of each
    tensor, so no tensor can have changed.
    """
    digest = hashlib.sha256()
    try:
        with file.open("rb") as opened:
            size = os.fstat(opened.fileno()).st_size
            for start, length in _parts(size):
                opened.seek(start)
                digest.update(opened.read(length))
    except OSError:
        return None
    return Written(size, digest.hexdigest())


def _parts(size: int) -> list[tuple[int, int]]:
    """Where the parts of a file begin that count, and how long they are.

    >>> _parts(100)
    [(0, 100)]
    >>> sum(length for _, length in _parts(10 << 30)) >> 20
    20
    """
    if size <= _WHOLE:
        return [(0, size)]
    return [*((at * (size // _PIECES), _PIECE) for at in range(_PIECES)), (size - _END, _END)]
