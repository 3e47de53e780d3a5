"""The runs that an output folder holds: one file each, so that a comparison goes on where it stopped."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from gradwire.compare import storage
from gradwire.compare.options import CompareError
from gradwire.compare.results import ResultsError, Run
from gradwire.core.atomic_file import write_atomically


def slug(method: str) -> str:
    """A method's spec as a file name; runs of `torch.fp32` keep the name of when it was written `torch:fp32`."""
    return re.sub(r"[^A-Za-z0-9.=+-]", "_", re.sub(r"^torch\.", "torch_", method))


def prepare_folder(folder: Path, *, fresh: bool) -> Path:
    """Make the output folder and see that it can be written; with `fresh`, forget its runs."""
    (folder / "runs").mkdir(parents=True, exist_ok=True)
    probe = folder / "runs" / ".probe"
    write_atomically(probe, "can this folder be written?")
    probe.unlink()
    if fresh:
        for path in (folder / "runs").glob("*.json"):
            path.unlink()
    return folder


def store_run(folder: Path, run: Run) -> None:
    """Keep a run, so that it need not be made again."""
    path = folder / "runs" / f"{slug(run.method)}-seed{run.seed}.json"
    write_atomically(path, json.dumps(storage.run_to_json(run)))


def stored_runs(
    folder: Path, cells: Iterable[tuple[str, int]], conditions_of: Callable[[str], Mapping[str, Any]]
) -> list[Run]:
    """Finished runs that a folder holds, of these (method, seed), each under the conditions of its method.

    Raises:
        CompareError: a stored run was made under other conditions; the message says which.
    """
    kept: list[Run] = []
    for method, seed in cells:
        path = folder / "runs" / f"{slug(method)}-seed{seed}.json"
        run = read_run(path)
        if run is None or run.method != method or run.status != "finished":
            continue
        conditions = conditions_of(method)
        keys = [*conditions, *(key for key in run.conditions if key not in conditions)]
        differing = [key for key in keys if run.conditions.get(key) != conditions.get(key)]
        if differing:
            raise CompareError(_clash(folder, run, conditions, differing))
        kept.append(run)
    return kept


def read_run(path: Path) -> Run | None:
    """A stored run, or None if there is none that can be read."""
    try:
        return storage.run_from_json(storage.read_json(path))
    except (OSError, ResultsError):
        return None


def _clash(folder: Path, run: Run, conditions: Mapping[str, Any], differing: list[str]) -> str:
    changes = "; ".join(f"{key} was {run.conditions.get(key)!r}, is {conditions.get(key)!r}" for key in differing)
    return (
        f"{folder} holds runs made under other conditions ({changes}). "
        "Give another --out to keep them, or --fresh to replace them."
    )
