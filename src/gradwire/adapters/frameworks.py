"""What the ports to training frameworks share: their versions, attaching, and saves that go with their checkpoints."""

from __future__ import annotations

import warnings
from importlib import metadata
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradwire.adapters.attach import attach
from gradwire.core import save_folder
from gradwire.core.errors import AttachError, StateError
from gradwire.reducers.base import Reducer
from gradwire.session import Session
from gradwire.session.checkpoint import load
from gradwire.session.names import is_fsdp2
from gradwire.session.together import Together

SUFFIX = ".gradwire"
"""What a folder of states is called after the checkpoint file that it stands beside."""


def require(package: str, least: str) -> None:
    """Refuse to go on without a framework.

    Args:
        package: its name, which is that of the extra as well.
        least: the oldest version that will do, as "2.6".

    Raises:
        AttachError: it is not installed, or is older.

    >>> require("torch", "2.9")
    >>> require("torch", "99.1")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    gradwire.core.errors.AttachError: torch ... is too old, 99.1 or newer is needed: pip install ...
    """
    try:
        found = metadata.version(package)
    except metadata.PackageNotFoundError as error:
        raise AttachError(f"{package} is not installed: pip install 'gradwire[{package}]'") from error
    if _numbers(found) < _numbers(least):
        remedy = f"{least} or newer is needed: pip install --upgrade 'gradwire[{package}]'"
        raise AttachError(f"{package} {found} is too old, {remedy}")


def _numbers(version: str) -> tuple[int, ...]:
    """The first two numbers of a version, which count here.

    >>> _numbers("2.13.0+cpu"), _numbers("5.0rc1")
    ((2, 13), (5, 0))
    """
    first, second, *_ = (*version.split("."), "0")
    return int(first), int("".join(letter for letter in second.split("rc")[0] if letter.isdigit()) or 0)


def attach_if_distributed(model: nn.Module, method: Reducer | str, **options: Any) -> Session | None:
    """Attach to a model as a framework has wrapped it; None, and a warning, where training is not distributed.

    Args:
        model: the outermost module, compiled or not.
        method: as for `gradwire.attach`, and so are the options.

    Raises:
        AttachError: the framework distributes the model in another way.
    """
    model = getattr(model, "_orig_mod", model)
    alone = not dist.is_initialized() or dist.get_world_size() == 1
    if alone and not (isinstance(model, DistributedDataParallel) or is_fsdp2(model)):
        text = "training is not distributed, so gradwire does nothing here: start it with torchrun on several ranks"
        warnings.warn(text, stacklevel=3)
        return None
    return attach(model, method, **options)  # type: ignore[arg-type] - it refuses what is none


def load_if_there(folder: Path, session: Session, checkpoint: object) -> None:
    """Take up what was saved with a checkpoint; a warning where that was made without gradwire.

    Every rank must call it. Where some ranks find a save and others do not, it is missed on those.

    Args:
        folder: of the states.
        session: to go on.
        checkpoint: what people call it by.

    Raises:
        StateError: as `gradwire.load`.
    """
    ranks = Together("loading a checkpoint", session.lane, StateError)
    if any(ranks.gather(bool(save_folder.manifests(folder)))):
        try:
            load(folder, session)
        except StateError as error:
            raise StateError(f"{error}. To go on with nothing owed, delete {folder}") from error
    elif ranks.rank == 0:
        text = f"the checkpoint {checkpoint} has no state of gradwire's: training goes on with nothing owed"
        warnings.warn(text, stacklevel=3)


def folder_beside(checkpoint: str | Path) -> Path:
    """The folder of states that belongs to a checkpoint file, also where that is reached by a link.

    >>> folder_beside("runs/epoch=3.ckpt").name
    'epoch=3.ckpt.gradwire'
    """
    path = Path(checkpoint).resolve()
    return path.with_name(path.name + SUFFIX)
