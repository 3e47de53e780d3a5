"""A server's snapshots in a folder: files that are complete or not there, in the form that `gradwire.save` writes."""

from __future__ import annotations

from pathlib import Path

from gradwire.asynchronous.server import ParameterServer
from gradwire.core import save_folder
from gradwire.core.save_folder import Manifest
from gradwire.core.saved_schema import SHARED

KEPT = 2
"""Snapshots that are kept: the newest, and the one before it."""


def save(server: ParameterServer, folder: Path) -> None:
    """Write a snapshot behind those that are there, and remove older ones.

    Raises:
        OSError: as the file system says.
    """
    number = max(save_folder.numbers(folder), default=-1) + 1
    saved = server.state_dict()
    file = save_folder.write_rank(folder, number, saved)
    head = {key: saved[key] for key in SHARED}
    save_folder.finish(folder, Manifest(number, save_folder.new_token(), head, (file,)))
    save_folder.remove_before(folder, number - KEPT + 1)


def restore(server: ParameterServer, folder: Path) -> bool:
    """Begin a new life from the newest snapshot in the folder; return whether there was one.

    The new life is saved at once, so that no two lives have the same number.

    Raises:
        StateError: a snapshot of another model or of other settings, or a damaged one. The server is as it was.
        OSError: as the file system says.
    """
    if not read(server, folder):
        return False
    server.begin_life()
    save(server, folder)
    return True


def read(server: ParameterServer, folder: Path) -> bool:
    """Load the newest snapshot in the folder, in its life; return whether there was one.

    Raises:
        StateError, OSError: as `restore`.
    """
    found = save_folder.manifests(folder)
    if found:
        server.load_state_dict(found[0].read(folder, 0))
    return bool(found)
