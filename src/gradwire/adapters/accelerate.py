"""Hugging Face Accelerate: `attach(accelerator, model, "int4")`, and its checkpoints hold every rank's state.

Accelerate passes on the communication hooks of PyTorch that it knows, and what is registered for its checkpoints is
saved on one rank. So the model is attached to after `prepare`, and the states of all ranks are saved and loaded by the
hooks that `save_state` and `load_state` call on every rank.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from gradwire.adapters.frameworks import attach_if_distributed, load_if_there, require
from gradwire.core.errors import AttachError
from gradwire.reducers.base import Reducer
from gradwire.session import Session
from gradwire.session.checkpoint import save

if TYPE_CHECKING:
    from accelerate import Accelerator

LEAST = "1.15"
"""The oldest version that tests ran with."""
_TAKEN = "_gradwire_folders"


def attach(
    accelerator: Accelerator, model: nn.Module, method: Reducer | str, *, folder: str = "gradwire", **options: Any
) -> Session | None:
    """Let a method combine the gradients of a prepared model, and save its state with Accelerate's checkpoints.

    Call it on every rank, after `accelerator.prepare` and before `accelerator.load_state`. From then on
    `accelerator.save_state(checkpoint)` also leaves `checkpoint/gradwire`, and `accelerator.load_state(checkpoint)`
    takes it up, exactly. The accelerator's loss scaler, if it has one, is followed.

    Args:
        accelerator: that prepared the model.
        model: what `prepare` returned.
        method: a spec such as `"int4"`, or a reducer.
        folder: of the states inside a checkpoint; give each model its own where an accelerator has several.
        options: of `gradwire.attach`.

    Returns:
        A session, or None where training is not distributed: a warning says so then, and nothing is done.

    Raises:
        AttachError: the model is not in `DistributedDataParallel`, another model has the folder, or Accelerate is too
            old.

    Example:
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        session = gradwire.adapters.accelerate.attach(accelerator, model, "int4")
    """
    require("accelerate", LEAST)
    if folder in (taken := _taken(accelerator)):
        raise AttachError(
            f"another model saves its state as {folder!r}: give this one a name too, as folder='gradwire-2'"
        )
    session = attach_if_distributed(model, method, scaler=accelerator.scaler, **options)
    if session is not None:
        taken.add(folder)
        _follow_checkpoints(accelerator, session, folder)
    return session


def _taken(accelerator: Accelerator) -> set[str]:
    """The folders of an accelerator's models, which it carries itself: no two of them may save to the same place."""
    if not hasattr(accelerator, _TAKEN):
        setattr(accelerator, _TAKEN, set[str]())
    return getattr(accelerator, _TAKEN)


def _follow_checkpoints(accelerator: Accelerator, session: Session, folder: str) -> None:
    def save_states(models: list[Any], weights: list[Any], output_dir: str) -> None:
        if session.is_open:
            save(Path(output_dir) / folder, session, overwrite=True)  # as the checkpoint around it is

    def load_states(models: list[Any], input_dir: str) -> None:
        load_if_there(Path(input_dir) / folder, session, input_dir)

    accelerator.register_save_state_pre_hook(save_states)
    accelerator.register_load_state_pre_hook(load_states)
