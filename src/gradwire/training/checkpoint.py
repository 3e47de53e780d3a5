"""Saves of a training: parameters and moments by `torch.distributed.checkpoint`, what methods owe beside them."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter

from gradwire.core.errors import GradwireError, StateError
from gradwire.core.json_file import read_json
from gradwire.parallel.moe import MoE
from gradwire.session import Session
from gradwire.session.checkpoint import load as load_session
from gradwire.session.checkpoint import save as save_session
from gradwire.training.configuration import TrainingConfiguration
from gradwire.training.reading import configuration_of
from gradwire.training.trainer import MOMENTS, MeshTrainer, said_by_all

FORM = 1
ABOUT = "training.json"
ABOUT_BYTES = 1 << 20


def save_training(trainer: MeshTrainer, folder: str | Path) -> Path:
    """Save a training into `folder/step-N`, and return that folder. Every rank must call it, with one folder for all.

    A save is complete or not there: it is given its name once all ranks have written. Earlier ones stay.

    Raises:
        StateError: on all ranks, where one could not write, or where the folder holds saves of another training.
    """
    whole = Path(folder) / f"step-{trainer.steps:06d}"
    partial = whole.with_suffix(".partial")
    what = f"the training could not be saved into {folder}"
    _told_to_all(trainer, what, lambda: _begin(trainer, Path(folder), partial))
    owed = max(said_by_all(_owed(trainer), trainer.device))
    try:
        state_dict_saver.save(_state(trainer), storage_writer=FileSystemWriter(partial))
    except CheckpointException as error:
        raise StateError(f"{what}: {_reason(error)}") from error
    _told_to_all(trainer, what, lambda: _save_sessions(trainer, partial))
    _told_to_all(trainer, what, lambda: _finish(trainer, partial, whole, owed))
    return whole


def _begin(trainer: MeshTrainer, folder: Path, partial: Path) -> None:
    """Make room, on rank 0."""
    if dist.get_rank():
        return
    other = next((each for each in saves(folder) if _about(each)["run"] != trainer.run), None)
    if other is not None:
        raise StateError(f"{other} is of another training: resume that one, or give another folder")
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir(parents=True)


def _save_sessions(trainer: MeshTrainer, partial: Path) -> None:
    for name, session in _sessions(trainer):
        save_session(partial / name, session)


def _finish(trainer: MeshTrainer, partial: Path, whole: Path, owed: float) -> None:
    """Say what the save is of, and give it its name, on rank 0."""
    if dist.get_rank():
        return
    about = {
        "form": FORM,
        "run": trainer.run,
        "steps": trainer.steps,
        "passes": next((layer.get_extra_state().tolist()[0] for layer in _layers(trainer)), 0),
        "owed": owed,
        "configuration": trainer.configuration.as_tables(),
    }
    (partial / ABOUT).write_text(json.dumps(about, indent=1), encoding="utf-8")
    before = whole.with_suffix(".replaced")
    if whole.exists():
        whole.rename(before)
    partial.rename(whole)
    if before.exists():
        shutil.rmtree(before)


def load_training(trainer: MeshTrainer, folder: str | Path, *, drop_owed: bool = False) -> int:
    """Take up the newest save of a folder, and return the steps that it had made. Every rank must call it.

    Parameters and moments are those of the save bit for bit, under any layout. What methods owe goes on with them where
    the method, pp, ep and tp are those of the save; dp and cp may be others, which share what is owed then.

    PyTorch unpickles the index of its checkpoint: load what you trust.

    Args:
        trainer: which has made no step.
        folder: as given to `save_training`.
        drop_owed: leave out what the method owed.

    Raises:
        StateError: on all ranks: no save, a damaged one, one of another model, or one that owes what this training
            cannot take up. After files that are damaged make a new trainer; in all other cases nothing has changed.
    """
    found: list[Path] = []
    _told_to_all(trainer, "the training cannot go on", lambda: found.append(newest(folder)))
    whole = Path(folder) / said_by_all(found[0].name, trainer.device)[0]  # as rank 0 sees the folder
    abouts: list[dict[str, Any]] = []

    def read() -> None:
        about = _about(whole)
        _require_same_model(trainer, about, whole)
        if not drop_owed:
            _require_place(trainer, about, whole)
        abouts.append(about)

    _told_to_all(trainer, "the training cannot go on", read)
    (about,) = abouts
    saved = configuration_of(about["configuration"])
    if not drop_owed and saved.dp.method == trainer.configuration.dp.method and not _splits(trainer, saved):
        for name, session in _sessions(trainer):
            if (whole / name).is_dir():
                load_session(whole / name, session)
    try:
        state_dict_loader.load(_state(trainer), storage_reader=FileSystemReader(whole))
    except CheckpointException as error:
        raise StateError(f"{whole} could not be loaded: {_reason(error)}") from error
    trainer.go_on_from(about["steps"], about["run"])
    for layer in _layers(trainer):
        layer.set_extra_state(torch.tensor([about["passes"], 0, 0]))
    return about["steps"]


def saves(folder: str | Path) -> list[Path]:
    """The complete saves of a folder, the oldest first."""
    found = [each for each in Path(folder).glob("step-*") if re.fullmatch(r"step-\d+", each.name)]
    return sorted((each for each in found if (each / ABOUT).is_file()), key=lambda each: int(each.name[5:]))


def newest(folder: str | Path) -> Path:
    """The newest complete save of a folder.

    Raises:
        StateError: there is none.
    """
    found = saves(folder)
    if not found:
        raise StateError(f"{folder} holds no save of a training: give the folder that it was saved to")
    return found[-1]


def _about(whole: Path) -> dict[str, Any]:
    about = read_json(whole / ABOUT, StateError, ABOUT_BYTES)
    if not isinstance(about, dict) or about.get("form") != FORM:  # pyright: ignore[reportUnknownMemberType]
        raise StateError(f"{whole} is of another form than form {FORM}, which this gradwire reads")
    return about  # pyright: ignore[reportUnknownVariableType]


def _told_to_all(trainer: MeshTrainer, what: str, do: Callable[[], None]) -> None:
    """Do something that may fail on some ranks, and have all ranks raise what the first of them says.

    Raises:
        StateError: with what was done, and the rank.
    """
    fault = ""
    try:
        do()
    except (GradwireError, OSError) as error:
        fault = str(error) if isinstance(error, GradwireError) else f"{type(error).__name__}: {error}"
    for rank, said in enumerate(said_by_all(fault, trainer.device)):
        if said:
            raise StateError(f"{what}: {said}" if said == fault else f"{what}: rank {rank}: {said}")


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
    """The largest norm of what a session of this rank owes."""
    return max((session.residual_norm() for _, session in _sessions(trainer)), default=0.0)


# What can be taken up ------------------------------------------------------------------------------------------------


def _require_same_model(trainer: MeshTrainer, about: Mapping[str, Any], whole: Path) -> None:
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


def _require_place(trainer: MeshTrainer, about: Mapping[str, Any], whole: Path) -> None:
    """Refuse a training that has no place for what the save owes.

    Raises:
        StateError: with what differs.
    """
    if not about["owed"]:
        return
    saved, mine = configuration_of(about["configuration"]), trainer.configuration
    kinds = {name.partition("-")[0] for name, _ in _sessions(trainer)}
    missing = {each.name.partition("-")[0] for each in whole.iterdir() if each.is_dir()} - kinds
    if saved.dp.method != mine.dp.method:
        why = f"with [dp] method {saved.dp.method!r}, and the method is {mine.dp.method!r}: take that one"
    elif _splits(trainer, saved):
        why = f"to ranks of {saved.layout}, and the ranks are {mine.layout}: take the same pp, ep and tp"
    elif missing:
        why = "to several ranks of dp and cp, and one rank alone owes nothing: take 2 or more"
    else:
        return
    raise StateError(f"{whole} owes gradients of norm {about['owed']:.3g} {why}, or leave them out (--drop-owed)")


def _splits(trainer: MeshTrainer, saved: TrainingConfiguration) -> bool:
    """Whether ranks have other parts of the model than those that saved."""
    mine = trainer.configuration
    return (saved.pp.ranks, saved.ep.ranks, saved.tp.ranks) != (mine.pp.ranks, mine.ep.ranks, mine.tp.ranks)


def _reason(error: CheckpointException) -> str:
    """What the first rank that failed has said."""
    rank, (failure, _) = next(iter(error.failures.items()))
    return f"rank {rank}: {type(failure).__name__}: {failure}"
