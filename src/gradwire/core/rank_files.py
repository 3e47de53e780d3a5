"""Files that ranks leave in a folder, one each: `rank0.json`, `rank1.json`, ..."""

from __future__ import annotations

import re
from pathlib import Path


def rank_file(folder: Path, rank: int) -> Path:
    """Return the file of a rank."""
    return folder / f"rank{rank}.json"


def rank_files(folder: Path) -> dict[int, Path]:
    """Return the files of a folder by their ranks, in the order of ranks; other files are left out."""
    found = ((re.fullmatch(r"rank(\d+)\.json", path.name), path) for path in folder.glob("rank*.json"))
    return dict(sorted((int(name[1]), path) for name, path in found if name is not None))
