"""Where the flight recorder of a rank is told its folder, and of deaths."""

from __future__ import annotations

import os
import uuid
import warnings
from pathlib import Path

import torch.distributed as dist
from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

from gradwire.core.errors import first_line
from gradwire.flight.keeping import keep, keeper
from gradwire.flight.record import VARIABLE, FlightRecord

_RUN = "gradwire/flight/run"


def keep_records(records: str | Path | None, store: Store, worker: int | None = None) -> None:
    """Have this rank's record written into a folder, if one is told.

    Args:
        records: the folder; None: that of `GRADWIRE_RECORDS`, if there is one.
        store: that all ranks of the run met at: the first one to come there names the run.
        worker: the number of a worker that comes and goes; None for a rank of the default process group.

    Warns:
        UserWarning: the folder cannot be written into. The run goes on without records.
    """
    folder = records if records is not None else os.environ.get(VARIABLE)
    if not folder:
        return
    run = store.compare_set(_RUN, "", uuid.uuid4().hex).decode()
    if worker is None:
        kept = keep(Path(folder).absolute(), run, dist.get_rank(), dist.get_world_size())
    else:
        kept = keep(Path(folder).absolute(), run, worker, worker + 1, comes_and_goes=True)
    if kept.problem:
        warnings.warn(f"no records of this run can be written: {kept.problem}", stacklevel=2)


def has_left() -> None:
    """Write that this worker has left its run well, though it was told to by a signal that ends others."""
    if (kept := keeper()) is not None:
        kept.goes_on()


def note_trouble() -> FlightRecord | None:
    """Write the record of this rank as it is, where one is kept, before it is known who is to blame; return it.

    Other ranks may end as soon as they have heard of this one, and a launcher then ends this one.
    """
    kept = keeper()
    return None if kept is None else kept.note_trouble()


def tell_death(error: BaseException, seen: FlightRecord | None = None) -> None:
    """Write the record of this rank, where one is kept: the run dies of an error.

    Args:
        error: what is raised.
        seen: the record when the trouble was noticed, if that was before.
    """
    if (kept := keeper()) is not None:
        kept.died(f"{type(error).__name__}: {first_line(error)}", error, seen)
