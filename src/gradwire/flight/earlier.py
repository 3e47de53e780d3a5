"""Records of earlier runs: a run that is started anew in the same folder moves them aside, and overwrites none.

rank0.json, rank1.json, ...              of the newest run
earlier/0123abcd/rank0.json, ...         of a run before it, named by the first characters of its own name
"""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

from gradwire.core.errors import FlightError
from gradwire.core.json_file import read_json
from gradwire.core.rank_files import rank_file, rank_files
from gradwire.flight.record import MOST_BYTES

MOST_EARLIER = 8
"""Runs that are kept beside the newest one; the oldest are removed."""

_FOLDER = "earlier"
_NAME = 8
"""Characters of a run's name that name its folder."""


def set_aside(folder: Path, run: str, rank: int, world_size: int) -> None:
    """Move what this rank has left in earlier runs to where these are kept.

    Each rank moves its own file, since the others may have written theirs anew. Rank 0 moves those of ranks that this
    run does not have, and removes the oldest runs.

    Args:
        folder: where records go.
        run: that is about to write there; its own records stay.
        rank, world_size: in that run.

    Raises:
        OSError: the folder cannot be written into.
    """
    found = rank_files(folder)
    for other, path in found.items():
        if other == rank or (rank == 0 and other >= world_size):
            _move(path, folder, run)
    if rank == 0:
        for old in earlier_runs(folder)[MOST_EARLIER:]:
            _remove(old)


def earlier_runs(folder: Path) -> list[Path]:
    """Return the folders of the earlier runs whose records are kept, the newest first."""
    written: dict[Path, float] = {}
    for each in (folder / _FOLDER).glob("*"):
        with contextlib.suppress(OSError):  # another rank moves or removes them
            if times := [path.stat().st_mtime for path in rank_files(each).values()]:
                written[each] = max(times)
    return sorted(written, key=lambda each: (-written[each], each.name))


def _move(path: Path, folder: Path, run: str) -> None:
    own = _run_of(path)
    if own == run:
        return
    # What names a folder comes from a file: letters and digits alone, which cannot lead elsewhere.
    kept = folder / _FOLDER / (re.sub(r"[^0-9A-Za-z]", "", own)[:_NAME] or "unknown")
    kept.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileNotFoundError):  # rank 0 and a rank that it has not may both move its file
        path.replace(kept / path.name)


def _run_of(path: Path) -> str:
    """The name of the run whose record it is; "" where that cannot be read."""
    try:
        data = read_json(path, FlightError, MOST_BYTES)
    except FlightError:
        return ""
    run = data.get("run") if isinstance(data, dict) else None
    return run if isinstance(run, str) else ""


def _remove(run_folder: Path) -> None:
    """Remove the records of a run, and its folder where nothing else lies in it."""
    with contextlib.suppress(OSError):
        for rank in rank_files(run_folder):
            rank_file(run_folder, rank).unlink(missing_ok=True)
        run_folder.rmdir()
