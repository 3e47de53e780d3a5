"""The steps of a profile that has not ended, for a rank whose process is killed: they are written while it runs.

    rank1.part0.jsonl, rank1.part1.jsonl        a line for the rank, and one for each step

A part has as many steps as a profile keeps; the one after it is written over the part before it. So both together hold
the last steps, and take no more room the longer a run is. Only new steps are written, every two seconds: an encoded
step of a hundred spans takes some 10 us. When the block ends, `rank1.json` takes the place of the parts.
"""

from __future__ import annotations

import json
import re
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from gradwire.core.errors import GradwireError

FLUSH_S = 2.0
"""Between two writings: what a rank that is killed may lack."""

_NAME = r"rank(\d+)\.part[01]\.jsonl"


class UnfinishedSteps:
    """Writes steps into a folder as they end.

    Args:
        folder: of the profile.
        rank: whose steps they are.
        head: the record of that rank without steps, as JSON.
        keep: how many steps are kept at least.
    """

    def __init__(self, folder: Path, rank: int, head: str, keep: int) -> None:
        self._paths = [folder / f"rank{rank}.part{part}.jsonl" for part in range(2)]
        self._head = head.encode() + b"\n"
        self._keep, self._count, self._lines = max(1, keep), 0, list[bytes]()
        self._flushed_s = time.monotonic()
        self._is_broken = False

    def add(self, step: object) -> None:
        """Note a step, a structure of msgspec, and write those that were noted if it is time."""
        self._lines.append(msgspec.json.encode(step) + b"\n")
        self._count += 1
        now_s = time.monotonic()
        if now_s - self._flushed_s >= FLUSH_S or self._count % self._keep == 0:
            self._flushed_s = now_s
            self._flush()

    def _flush(self) -> None:
        lines, self._lines = self._lines, []
        if self._is_broken:
            return
        part, before = divmod(self._count - len(lines), self._keep)
        path, is_new = self._paths[part % 2], before == 0
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("wb" if is_new else "ab") as file:
                file.write(b"".join([self._head, *lines] if is_new else lines))
        except OSError as error:  # a full disk must not end the run
            self._is_broken = True
            said = f"{path}: {error.strerror or error}"
            warnings.warn(f"if this rank is killed, its profile will lack its last steps: {said}", stacklevel=4)

    def remove(self) -> None:
        """Remove what was written: it is of an earlier run, or the whole record has taken its place."""
        for path in self._paths:
            path.unlink(missing_ok=True)


def unfinished_parts(folder: Path) -> dict[int, list[Path]]:
    """Return the parts that are in a folder, by their ranks."""
    found: dict[int, list[Path]] = {}
    for path in sorted(folder.glob("rank*.part*.jsonl")):
        if (name := re.fullmatch(_NAME, path.name)) is not None:
            found.setdefault(int(name[1]), []).append(path)
    return found


def read_parts(paths: Sequence[Path], refusal: type[GradwireError], most_bytes: int, remedy: str) -> dict[str, Any]:
    """Return what the parts of a rank hold, as the data of one record; a last line that was cut off is left out.

    Args:
        paths: of the parts.
        refusal: the class of the error.
        most_bytes: of a part.
        remedy: what the sentence ends with.

    Raises:
        GradwireError: of the class `refusal`: a part that cannot be read, or is none.
    """
    head, steps = dict[str, Any](), list[dict[str, Any]]()
    for path in paths:
        try:
            with path.open("rb") as file:
                whole, _, _ = file.read(most_bytes).rpartition(b"\n")
            first, *others = (dict(json.loads(line)) for line in whole.splitlines())
            head, steps = first, sorted([*steps, *others], key=lambda step: step["index"])
        except OSError as error:
            raise refusal(f"{path} cannot be read: {error.strerror or error}") from error
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise refusal(f"{path} is damaged, or no part of a profile: it cannot be read{remedy}") from error
    return {**head, "steps": steps, "unfinished": True}
