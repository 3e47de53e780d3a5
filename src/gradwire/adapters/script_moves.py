"""States that stay beside their checkpoints where a script renames, moves or copies these.

Atomic saves write under a name that is there for a moment, and rename the file into place. Mostly no rank has saved its
states by then, so it is enough to know the new name. Where they are saved already, they go the same way: at once by the
rank that renames, and by a rank of each other host when ranks ask each other next, since hosts may have disks of their
own.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from gradwire.adapters.script_places import folders_beside, named_entry
from gradwire.adapters.told import Told, told, unheard
from gradwire.core import save_folder

_COPYING = ((os, "link"), (shutil, "copyfile"), (shutil, "copytree"))


class Move(NamedTuple):
    """States that have moved or been copied.

    Attributes:
        source: the folder that they were in.
        target: where they are.
        tokens: of the saves in it: a folder that holds others has another history.
        copied: they are in both.
    """

    source: str
    target: str
    tokens: list[str]
    copied: bool


class Moves:
    """Follows what a script renames and copies, while `watching`.

    Args:
        say: is told of states that could not follow.
        react: is told of each file or folder: from where, to where, and whether it was copied.
        suffixes: of the folders of the models that are followed now.
    """

    def __init__(
        self,
        say: Callable[[str], None],
        react: Callable[[Path, Path, bool], None],
        suffixes: Callable[[], Iterable[str]],
    ) -> None:
        self._say, self._react, self._suffixes = say, react, suffixes
        self._done: list[Move] = []

    def __bool__(self) -> bool:
        """Whether other hosts have to be told something."""
        return bool(self._done)

    @property
    def functions(self) -> list[Told]:
        """The functions by which a script renames and copies."""
        return [
            *(Told(os, name, after=self._renamed) for name in ("replace", "rename")),
            *(Told(place, name, after=self._copied) for place, name in _COPYING),
            Told(shutil, "move", after=self._moved),
        ]

    def watching(self) -> contextlib.AbstractContextManager[None]:
        """Follow what is renamed and copied inside."""
        return told(*self.functions)

    def words(self) -> dict[str, Any]:
        """What the ranks of other hosts are told: once."""
        done, self._done = self._done, []
        return {"host": socket.gethostname(), "moves": [list(move) for move in done]}

    def repeat(self, said: Sequence[dict[str, Any]], rank: int) -> None:
        """Do on this host what ranks of others have done; one rank of each host does it.

        Args:
            said: the words of all ranks.
            rank: this one's place in them.
        """
        hosts = [words["host"] for words in said]
        if hosts.index(hosts[rank]) == rank:
            for words in said:
                for move in words["moves"] if words["host"] != hosts[rank] else []:
                    self._carry(Move(*move))

    def _renamed(self, _: object, src: Any, dst: Any, **places: Any) -> None:
        if not any(place is not None for place in places.values()):  # else names are not those of this folder
            self._follow(named_entry(src), named_entry(dst), False)

    def _moved(self, result: Any, src: Any, *_: object, **__: object) -> None:
        self._follow(named_entry(src), named_entry(result), False)

    def _copied(self, _: object, src: Any, dst: Any, *__: object, **places: Any) -> None:
        if places.get("src_dir_fd") is None and places.get("dst_dir_fd") is None:
            self._follow(named_entry(src).resolve(), named_entry(dst).resolve(), True)

    def _follow(self, source: Path, target: Path, copied: bool) -> None:
        self._react(source, target, copied)
        for folder in folders_beside(source, self._suffixes()):
            tokens = [manifest.token for manifest in save_folder.manifests(folder)]
            beside = target.with_name(target.name + folder.name[len(source.name) :])
            move = Move(str(folder), str(beside), tokens, copied)
            if tokens and self._carry(move):
                self._done.append(move)

    def _carry(self, move: Move) -> bool:
        """Move or copy states, unless somebody has done so; a script's own rename does not fail by it."""
        source, target = Path(move.source), Path(move.target)
        try:
            if [manifest.token for manifest in save_folder.manifests(source)] != move.tokens or source == target:
                return False
            with unheard():
                _clear(target, move.tokens)
                _copy(source, target) if move.copied else shutil.move(source, target)
        except OSError as error:
            self._say(f"{source} could not follow its checkpoint to {target}: {error.strerror or error}")
            return False
        return True


def _clear(folder: Path, tokens: Sequence[str]) -> None:
    """Remove the saves of a checkpoint that is overwritten.

    Raises:
        FileExistsError: the folder holds what is not gradwire's.
    """
    for manifest in save_folder.manifests(folder):
        if manifest.token not in tokens:
            save_folder.remove(folder, manifest.number)
    with contextlib.suppress(OSError):
        folder.rmdir()
    if folder.exists():
        raise FileExistsError(None, "there is a folder of that name with other files", str(folder))


def _copy(source: Path, target: Path) -> None:
    """Copy a folder of states; on one disk its files take no more room, since no file of a save is ever changed."""
    part = target.with_name(f"{target.name}.{save_folder.new_token()}.part")
    try:
        shutil.copytree(source, part, copy_function=_link)
        part.rename(target)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
