"""Follows the folder that the ranks of a run write into."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

from gradwire.core.figures import listed
from gradwire.core.rank_files import rank_files
from gradwire.profiling.live import LiveRecord, live_folder, read_live
from gradwire.profiling.records import ProfileError
from gradwire.watch.view import RunView, view_of


class Follower:
    """Reads what ranks tell of a run, again and again; only files that have changed are read.

    Several threads may ask.

    Args:
        folder: of the profile.
        clock: seconds since 1970, of this host.

    Example:
        follower = Follower(Path("profile"))
        print(follower.view().steps)
    """

    def __init__(self, folder: Path, clock: Callable[[], float] = time.time) -> None:
        self._folder, self._clock, self._lock = folder, clock, threading.Lock()
        self._read: dict[int, tuple[int, LiveRecord | str]] = {}  # by rank: when it was written, and what
        self._seen_s: dict[int, float] = {}

    def view(self) -> RunView:
        """Return what is known of the run now.

        Raises:
            ProfileError: no rank has told anything that can be read.
        """
        with self._lock:
            self._look()
            records = self._of_latest_run()
            problems = [found for _, (_, found) in sorted(self._read.items()) if isinstance(found, str)]
            if not records:
                raise ProfileError(problems[0] if problems else self._nothing())
            others = [
                rank
                for rank, (_, found) in sorted(self._read.items())
                if not isinstance(found, str) and rank not in records
            ]
            if others:
                problems.append(f"The files of ranks {listed(others)} are of an earlier run, and are left out.")
            now_s = self._clock()
            silent_s = {rank: max(0.0, now_s - self._seen_s[rank]) for rank in records}
            return view_of([records[rank] for rank in sorted(records)], silent_s, problems)

    def _nothing(self) -> str:
        return (
            f"no rank tells in {self._folder} how a run goes: start the run with gradwire.profile(..., live=True), or "
            "with gradwire run --profile DIR --live, and give the same folder"
        )

    def _look(self) -> None:
        """Read what has changed, and forget what is gone."""
        own = live_folder(self._folder)
        paths = rank_files(own if own.is_dir() else self._folder)
        for rank in self._read.keys() - paths.keys():
            del self._read[rank]
        for rank, path in paths.items():
            try:
                written_ns = path.stat().st_mtime_ns
            except OSError:  # it went away meanwhile
                continue
            before = self._read.get(rank)
            if before is not None and before[0] == written_ns:
                continue
            # The clock of who keeps the files may differ from ours: only at the first look is it asked.
            self._seen_s[rank] = self._clock() if before is not None else min(self._clock(), written_ns / 1e9)
            try:
                self._read[rank] = written_ns, read_live(path)
            except ProfileError as error:
                self._read[rank] = written_ns, str(error)

    def _of_latest_run(self) -> dict[int, LiveRecord]:
        """The records of the run that has written last, by rank: a folder may have those of an earlier one too."""
        read = [(at, found) for at, found in self._read.values() if not isinstance(found, str)]
        if not read:
            return {}
        latest = max(read, key=lambda each: each[0])[1].run
        return {found.rank: found for _, found in read if found.run == latest}
