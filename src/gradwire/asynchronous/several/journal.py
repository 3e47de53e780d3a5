"""What a server applied, push by push, over all its lives: rows of fixed form in a file that is only added to."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

_FORM = struct.Struct("<d5qd")


class JournalRow(NamedTuple):
    """A push that was applied.

    Attributes:
        at_s: when, in seconds since the epoch.
        life: of the server.
        worker: whose.
        number: of that worker's pushes.
        version: updates before it.
        staleness: tau.
        loss: as the worker said.
    """

    at_s: float
    life: int
    worker: int
    number: int
    version: int
    staleness: int
    loss: float


class Journal:
    """Rows in a file, or in memory where there is no file.

    Args:
        path: of the file, which is made or gone on with; a row that was not written to its end is cut off.

    Raises:
        OSError: as the file system says.

    >>> journal = Journal()
    >>> journal.add(JournalRow(0.0, life=0, worker=1, number=0, version=0, staleness=0, loss=0.5))
    >>> [(row.worker, row.loss) for row in journal.rows()]
    [(1, 0.5)]
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path, self._rows = path, list[JournalRow]()
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("ab") as file:
                file.truncate(file.tell() - file.tell() % _FORM.size)
            self._rows = [JournalRow(*fields) for fields in _FORM.iter_unpack(path.read_bytes())]

    def add(self, row: JournalRow) -> None:
        """Append a row; it is with the operating system when this returns."""
        self._rows.append(row)
        if self.path is not None:
            with self.path.open("ab") as file:
                file.write(_FORM.pack(*row))

    def rows(self) -> list[JournalRow]:
        """All rows, in the order in which they were added."""
        return list(self._rows)


def history(rows: Iterable[JournalRow], version: int) -> list[JournalRow]:
    """Return the rows that parameters of this version are made of.

    A server that was restored from a snapshot goes on at that one's version, so a row takes the place of earlier ones
    of its version and later. A journal may begin at a later version than 0, where its server had none before.

    >>> def row(life, version): return JournalRow(0.0, life, 0, version, version, 0, 0.0)
    >>> [(one.life, one.version) for one in history([row(0, 0), row(0, 1), row(0, 2), row(1, 1)], version=2)]
    [(0, 0), (1, 1)]
    """
    found: list[JournalRow] = []
    for row in rows:
        while found and found[-1].version >= row.version:
            found.pop()
        found.append(row)
    return [row for row in found if row.version < version]
