"""Where the states of all ranks go that belong to what a script saves."""

from __future__ import annotations

import os
from pathlib import Path

from gradwire.adapters.frameworks import SUFFIX, beside

INSIDE = "gradwire"
"""What a folder of states is called inside of a checkpoint's folder."""


def beside_file(given: object) -> list[Path]:
    """The folder that belongs to a file; none for a buffer, which has no place beside it.

    Args:
        given: what `torch.save` or `torch.load` was given.

    >>> [path.name for path in beside_file("runs/step-10.pt")]
    ['step-10.pt.gradwire']
    """
    return [beside(os.fsdecode(given))] if isinstance(given, str | os.PathLike) else []


def inside_checkpoint(checkpoint_id: object, storage: object) -> list[Path]:
    """The folder that belongs to a checkpoint of `torch.distributed.checkpoint`; none where that is in no folder.

    Args:
        checkpoint_id: what was given as such.
        storage: a reader or writer, which knows a folder where no `checkpoint_id` is given.

    >>> [path.parts[-2:] for path in inside_checkpoint("runs/step-10", None)]
    [('step-10', 'gradwire')]
    >>> inside_checkpoint("s3://bucket/step-10", None)
    []
    """
    given = checkpoint_id if checkpoint_id is not None else getattr(storage, "checkpoint_id", None)
    if not isinstance(given, str | os.PathLike) or "://" in os.fsdecode(given):
        return []
    return [Path(os.fsdecode(given)).resolve() / INSIDE]


def checkpoint_of(states: Path) -> Path:
    """What a script saved, by the folder of states that belongs to it.

    >>> checkpoint_of(Path("runs/step-10.pt.gradwire")).name, checkpoint_of(Path("runs/step-10/gradwire")).name
    ('step-10.pt', 'step-10')
    """
    return states.parent if states.name == INSIDE else states.with_name(states.name.removesuffix(SUFFIX))
