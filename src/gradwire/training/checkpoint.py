"""Saves of a training: parameters and moments by `torch.distributed.checkpoint`, what methods owe beside them."""

from __future__ import annotations

import dataclasses
import json
import shutil
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException

from gradwire.core.errors import GradwireError, StateError
from gradwire.parallel.moe import MoE
from gradwire.session import Session
from gradwire.session.checkpoint import load as load_session
from gradwire.session.checkpoint import save as save_session
from gradwire.training.configuration import AXES, TrainingConfiguration
from gradwire.training.reading import configuration_of
from gradwire.training.trainer import MOMENTS, MeshTrainer, said_by_all

FORM = 1
ABOUT = "training.json"


def save_training(trainer: MeshTrainer, folder: str | Path) -> Path:
    """Save a training into `folder/step-N`, and return that folder. Every rank must call it, with one folder for all.

    A save is complete or not there: it is given its name once all ranks have written. An older one stays.

    Raises:
        StateError: on all ranks, where one could not write.
    """
    whole = Path(folder) / f"step-{trainer.steps:06d}"
    partial = whole.with_suffix(".partial")
    if dist.get_rank() == 0:
        shutil.rmtree(partial, ignore_errors=True)
    owed = _owed(trainer)
    try:
        state_dict_saver.save(_state(trainer), checkpoint_id=str(partial))
    except CheckpointException as error:
        raise StateError(f"the training could not be saved into {folder}: {_reason(error)}") from error
    fault: str | None = None
    try:
        for name, session in _sessions(trainer):
            save_session(partial / name, session)
    except GradwireError as error:
        fault = str(error)
    faults = [
        each for each in said_by_all(fault, trainer.device) if each
    ]  # until all have written, the name is partial
    if faults:
        raise StateError(f"the training could not be saved into {folder}: {faults[0]}")
    if dist.get_rank() == 0:
        about = {
            "form": FORM,
            "steps": trainer.steps,
            "passes": next((layer.get_extra_state().tolist()[0] for layer in _layers(trainer)), 0),
            "owed": owed,
            "configuration": trainer.configuration.as_tables(),
        }
        (partial / ABOUT).write_text(json.dumps(about, indent=1), encoding="utf-8")
        if whole.exists():
            shutil.rmtree(whole)
        partial.rename(whole)
    said_by_all(whole.name, trainer.device)  # nobody returns before the save has its name
    return whole


def load_training(trainer: MeshTrainer, folder: str | Path, *, drop_owed: bool = False) -> int:
    """Take up the newest save of a folder, and return the steps that it had made. Every rank must call it.

    Parameters and moments are those of the save bit for bit, under any layout. What methods owe goes on with them where
    pp, ep and tp are those of the save; dp and cp may be others, which share what is owed then.

    Args:
        trainer: which has made no step.
        folder: as given to `save_training`.
        drop_owed: leave out what the method owed, for a layout that cannot take it up.

    Raises:
        StateError: no save, one of another model, or one that owes what this layout cannot take up. Nothing has
            changed then.
    """
    whole = newest(folder)
    about = json.loads((whole / ABOUT).read_text(encoding="utf-8"))
    _require_same_model(trainer, about, whole)
    takes_up = not drop_owed and _can_take_up(trainer, about, whole)
    state = _state(trainer)
    try:
        state_dict_loader.load(state, checkpoint_id=str(whole))
    except CheckpointException as error:
        raise StateError(f"{whole} could not be loaded: {_reason(error)}") from error
    if takes_up:
        for name, session in _sessions(trainer):
            if (whole / name).is_dir():
                load_session(whole / name, session)
    trainer.go_on_from(about["steps"])
    for layer in _layers(trainer):
        layer.set_extra_state(torch.tensor([about["passes"], 0, 0]))
    return about["steps"]


def newest(folder: str | Path) -> Path:
    """The newest complete save of a folder.

    Raises:
        StateError: there is none.
    """
    found = [each for each in Path(folder).glob("step-*") if (each / ABOUT).is_file() and each.suffix != ".partial"]
    if not found:
        raise StateError(f"{folder} holds no save of a training: give the folder that it was saved to")
    return max(found, key=lambda each: int(each.name.removeprefix("step-")))


# What is saved -------------------------------------------------------------------------------------------------------


def _state(trainer: MeshTrainer) -> dict[str, dict[str, Tensor]]:
    """Parameters and their moments, over the memory that trains: a load writes into it."""
    tables: dict[str, dict[str, Tensor]] = {"parameters": {}, **{moment: {} for moment in MOMENTS}}
    for name, each in trainer.tensors.items():
        tables["parameters"][name] = each.saved(each.local.detach(), trainer.mesh)
        memory = trainer.moments_of(each.local)
        for moment in MOMENTS:
            tables[moment][name] = each.saved(memory[moment], trainer.mesh)
    return tables


def _layers(trainer: MeshTrainer) -> Iterator[MoE]:
    return (module for stage in trainer.stages.values() for module in stage.modules() if isinstance(module, MoE))


def _sessions(trainer: MeshTrainer) -> Iterator[tuple[str, Session]]:
    """The sessions of this rank, with the folder of each: those of other parts of the model have others."""
    for kind, session in trainer.gradients.sessions.items():
        axes = ("pp", "ep", "tp") if kind == "ep" else ("pp", "tp")
        yield "-".join([kind, *(f"{axis}{trainer.mesh.place(axis)}" for axis in axes)]), session


def _owed(trainer: MeshTrainer) -> float:
    """The largest norm of what any session of any rank owes."""
    mine = max((session.residual_norm() for _, session in _sessions(trainer)), default=0.0)
    return max(said_by_all(mine, trainer.device))


# What can be taken up ------------------------------------------------------------------------------------------------


def _require_same_model(trainer: MeshTrainer, about: Mapping[str, Any], whole: Path) -> None:
    if about["form"] != FORM:
        raise StateError(f"{whole} is of form {about['form']}, and this gradwire reads form {FORM}")
    if trainer.steps:
        raise StateError(f"the training has made {trainer.steps} steps: load into a new one")
    saved, mine = about["configuration"]["model"], dataclasses.asdict(trainer.configuration.model)
    for key, value in saved.items():
        if key != "balance_loss" and value != mine.get(key):
            raise StateError(f"{whole} has [model] {key} = {value!r}, and the configuration {mine.get(key)!r}")
    for table, key in (("data", "seed"), ("data", "batch"), ("data", "micro_batches")):
        was, now = about["configuration"][table][key], trainer.configuration.as_tables()[table][key]
        if was != now and dist.get_rank() == 0:
            warnings.warn(f"[{table}] {key} is {now} and was {was} in {whole}: other batches follow", stacklevel=4)


def _can_take_up(trainer: MeshTrainer, about: Mapping[str, Any], whole: Path) -> bool:
    """Whether sessions go on from the save; there may be nothing to go on from.

    Raises:
        StateError: something is owed that this layout has no place for.
    """
    saved = configuration_of(about["configuration"])
    splits = [axis for axis in ("pp", "ep", "tp") if _size(saved, axis) != _size(trainer.configuration, axis)]
    kinds = {name.partition("-")[0] for name, _ in _sessions(trainer)}
    missing = {each.name.partition("-")[0] for each in whole.iterdir() if each.is_dir()} - kinds
    if about["owed"] and (splits or missing):
        raise StateError(
            f"{whole} owes gradients of norm {about['owed']:.3g} to ranks of {saved.layout}, and "
            f"{trainer.configuration.layout} has no place for them: resume with the same pp, ep and tp, or leave them "
            "out with drop_owed (--drop-owed)"
        )
    return not splits


def _size(configuration: TrainingConfiguration, axis: str) -> int:
    return configuration.sizes[AXES.index(axis)]


def _reason(error: CheckpointException) -> str:
    """What the first rank that failed has said."""
    rank, (failure, _) = next(iter(error.failures.items()))
    return f"rank {rank}: {type(failure).__name__}: {failure}"
