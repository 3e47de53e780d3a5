"""A folder of saves: each a folder of its own with a file for every rank, and a manifest that makes it complete.

    FOLDER/gradwire-7/rank0.safetensors     one rank's state (`gradwire.core.tensor_file`)
    FOLDER/gradwire-7/rank1.safetensors
    FOLDER/gradwire-7/manifest.json         which files belong together: written last, renamed into place

The folder may be shared by all ranks, or each host may have its own with the files of its ranks and a manifest beside
them. A save without a manifest was never finished and is not there. Saves are numbered; an older one is removed only
when a newer one is complete on every rank.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from msgspec import Meta

from gradwire.core import tensor_file
from gradwire.core.checked import checked, facts
from gradwire.core.errors import StateError
from gradwire.core.reshard import reshard
from gradwire.core.saved_schema import SHARED, Saved, check_state, is_count
from gradwire.core.tensor_file import Written

_NAME = re.compile(r"gradwire-(\d{1,15})")
_OURS = re.compile(r"(rank\d+\.safetensors|manifest\.json)(\..*\.part)?")
_MANIFEST = "manifest.json"
FORMAT = 1


class SavedRun(NamedTuple):
    """Which run a save is of.

    Attributes:
        id: drawn for its first save, and taken over by whoever loads one of its saves.
        tensors: a digest of what its tensors are called.
        method: that it began with.
    """

    id: str
    tensors: str
    method: str


@dataclass(frozen=True)
class Manifest:
    """What belongs to a save.

    Attributes:
        number: of the save in its folder; newer ones have greater numbers.
        token: drawn for each save, so that saves of different runs under one number are told apart.
        head: what the states of all ranks have in common: reducer, step, seed, scale, world size.
        files: size and digest of each rank's file, in rank order.
        run: that it is of; None where an older version has saved.
        checkpoint: size and digest of the file of somebody else's that the states belong to; None: nobody told.
    """

    number: int
    token: str
    head: Mapping[str, Any]
    files: tuple[Written, ...]
    run: SavedRun | None = None
    checkpoint: Written | None = None

    @property
    def world_size(self) -> int:
        """How many ranks have saved."""
        return len(self.files)

    @property
    def step(self) -> int:
        """Finished steps when it was saved."""
        return int(self.head["step"])

    def path(self, folder: Path, rank: int) -> Path:
        """Where a rank's file is."""
        return place(folder, self.number) / file_name(rank)

    def missing(self, folder: Path) -> list[int]:
        """Ranks whose files are not in the folder, or have another size."""
        return [rank for rank in range(self.world_size) if not self.has(folder, rank)]

    def has(self, folder: Path, rank: int) -> bool:
        """Whether a rank's file is in the folder, in its full size."""
        try:
            return self.path(folder, rank).stat().st_size == self.files[rank].size
        except OSError:
            return False

    def read(self, folder: Path, rank: int) -> Saved:
        """Return a rank's state.

        Raises:
            StateError: a file that is missing or damaged, or belongs to another save.
        """
        saved = tensor_file.read(self.path(folder, rank), self.files[rank])
        check_state(saved)
        if saved["rank"] != rank or {key: saved[key] for key in SHARED} != dict(self.head):
            raise StateError(f"{self.path(folder, rank)} is not the file of rank {rank} that its manifest names")
        return saved


def place(folder: Path, number: int) -> Path:
    """The folder of a save."""
    return folder / f"gradwire-{number}"


def file_name(rank: int) -> str:
    """The name of a rank's file."""
    return f"rank{rank}.safetensors"


def new_token() -> str:
    """A name that no other save has."""
    return secrets.token_hex(8)


def numbers(folder: Path) -> list[int]:
    """Numbers of all saves in the folder, finished or not, in rising order."""
    try:
        found = [_NAME.fullmatch(entry.name) for entry in folder.iterdir()]
    except OSError:
        return []
    return sorted(int(match[1]) for match in found if match)


def manifests(folder: Path) -> list[Manifest]:
    """The finished saves in the folder, the newest first."""
    found = (_manifest(folder, number) for number in reversed(numbers(folder)))
    return [manifest for manifest in found if manifest is not None]


def _manifest(folder: Path, number: int) -> Manifest | None:
    """A save's manifest, if it was finished."""
    try:
        text = json.loads((place(folder, number) / _MANIFEST).read_text(encoding="utf-8"))
        found = checked(text, _STORED, "the manifest", StateError)
    except (OSError, ValueError, RecursionError):
        return None
    step, ranks = found.head.get("step"), found.head.get("world_size")
    if found.format != FORMAT or set(found.head) != set(SHARED) or not is_count(step) or ranks != len(found.files):
        return None
    return Manifest(number, found.token, found.head, found.files, found.run, found.checkpoint)


_STORED = facts(
    {"format": int, "token": str, "head": dict[str, Any], "files": Annotated[tuple[Written, ...], Meta(min_length=1)]},
    run=SavedRun,
    checkpoint=Written | None,
)
"""What a manifest has as a file."""


def write_rank(folder: Path, number: int, saved: Saved) -> Written:
    """Write one rank's file of a save.

    Raises:
        OSError: as the file system says.
    """
    here = place(folder, number)
    here.mkdir(parents=True, exist_ok=True)
    final = here / file_name(saved["rank"])
    with _replacing(final) as part:
        return tensor_file.write(part, saved)


def finish(folder: Path, manifest: Manifest) -> None:
    """Write the manifest, which makes the save complete; ranks that share the folder may all do so.

    Raises:
        OSError: as the file system says.
    """
    text = {"format": FORMAT, "token": manifest.token, "head": dict(manifest.head), "files": manifest.files}
    text |= {} if manifest.run is None else {"run": manifest.run}
    text |= {} if manifest.checkpoint is None else {"checkpoint": manifest.checkpoint}
    with _replacing(place(folder, manifest.number) / _MANIFEST) as part, part.open("w", encoding="utf-8") as file:
        json.dump(text, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


@contextlib.contextmanager
def _replacing(final: Path) -> Generator[Path]:
    """A name to write under; what stands there takes the place of `final` at once, or is removed."""
    part = final.with_name(f"{final.name}.{secrets.token_hex(4)}.part")
    try:
        yield part
        part.replace(final)
        _sync(final.parent)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def _sync(folder: Path) -> None:
    """Wait until the names in a folder are on the disk, where the system can."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def remove(folder: Path, number: int) -> None:
    """Remove a save, its manifest first; files that are not gradwire's stay. Ranks may do so at the same time."""
    here = place(folder, number)
    with contextlib.suppress(OSError):
        (here / _MANIFEST).unlink(missing_ok=True)
        for entry in list(here.iterdir()):
            if _OURS.fullmatch(entry.name):
                entry.unlink(missing_ok=True)
        here.rmdir()


def reshard_folder(folder: Path, world_size: int) -> Manifest:
    """Write the newest save in the folder again, for another number of ranks, and return its manifest.

    The old one stays. Every rank's file must be here: where hosts have folders of their own, copy them into one first,
    and the new files back to their ranks' hosts, each with the manifest.

    Raises:
        StateError: no finished save, a file that is missing or damaged, or a world size below 1.
        OSError: as the file system says.
    """
    manifest = newest(folder)
    if missing := manifest.missing(folder):
        files = ", ".join(file_name(rank) for rank in missing)
        raise StateError(f"{place(folder, manifest.number)} lacks {files}: copy every rank's file there first")
    states = reshard([manifest.read(folder, rank) for rank in range(manifest.world_size)], world_size)
    number = numbers(folder)[-1] + 1
    files = tuple(write_rank(folder, number, state) for state in states)
    head = {key: states[0][key] for key in SHARED}
    made = Manifest(number, new_token(), head, files, manifest.run, manifest.checkpoint)
    finish(folder, made)
    return made


def newest(folder: Path) -> Manifest:
    """The newest finished save in the folder.

    Raises:
        StateError: there is none.
    """
    found = manifests(folder)
    if not found:
        raise StateError(f"there is no finished save of gradwire's in {folder}")
    return found[0]


def remove_before(folder: Path, number: int) -> None:
    """Remove every save that is older than `number`."""
    for older in numbers(folder):
        if older < number:
            remove(folder, older)
