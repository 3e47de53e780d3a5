"""Tasks of one's own: imported by name, called, and checked before any host is started.

Whatever a task's code does wrong, an exit of the process included, becomes one sentence.
"""

from __future__ import annotations

import importlib
import inspect
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from gradwire.tasks.task import Task, TaskError


def call_user_task(name: str, seed: int) -> object:
    """Import `package.module:function` and call it with the seed (or with nothing, if it takes nothing)."""
    module_name, _, function_name = name.partition(":")
    if not function_name:
        raise TaskError(f"no task {name!r}: use digits, bytes, or package.module:function")
    function = getattr(import_task_module(module_name), function_name, None)
    if not callable(function):
        raise TaskError(f"module {module_name!r} has no function {function_name!r}")
    try:
        return function(seed) if _takes_seed(function) else function()
    except (Exception, SystemExit) as error:
        raise TaskError(f"task {name} raised {type(error).__name__}: {error}") from error


def _takes_seed(function: Callable[..., Any]) -> bool:
    try:
        return len(inspect.signature(function).parameters) > 0
    except ValueError:  # some builtins do not say: let them speak for themselves
        return True


def import_task_module(module_name: str) -> object:
    """Import a user's module; the current folder counts, as it does for `python -m`."""
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise TaskError(f"cannot import {module_name!r} ({error}): is it installed, or in this folder?") from error
    except (Exception, SystemExit) as error:
        raise TaskError(f"importing {module_name!r} raised {type(error).__name__}: {error}") from error


def as_task(made: object, name: str) -> Task:
    """Accept a `Task`, or the four things (model, batch, loss, metric); refuse all else in one sentence."""
    if isinstance(made, tuple) and len(cast(tuple[object, ...], made)) == 4:
        model, batch, loss, metric = cast(tuple[Any, Any, Any, Any], made)
        made = Task(model, batch, loss, metric, description=name)
    if not isinstance(made, Task):
        raise TaskError(
            f"task {name} returned {type(made).__name__}; "
            "return a gradwire.tasks.task.Task, or (model, batch, loss, metric)"
        )
    if not isinstance(cast(object, made.model), nn.Module):
        raise TaskError(f"task {name}: the model is {type(made.model).__name__}, not a torch.nn.Module")
    for part in ("batch", "loss", "metric", "optimizer", "schedule"):
        if not callable(getattr(made, part)):
            raise TaskError(f"task {name}: {part} is {type(getattr(made, part)).__name__}, not callable")
    if not any(p.requires_grad for p in made.model.parameters()):
        raise TaskError(f"task {name}: the model has no parameter to train")
    for field, fits, wanted in _PLAIN_FIELDS:
        if not fits(getattr(made, field)):
            raise TaskError(f"task {name}: {field} is {getattr(made, field)!r}, and must be {wanted}")
    return made


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < math.inf


_PLAIN_FIELDS: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("steps", _is_count, "a whole number of at least 1"),
    ("evaluate_every", _is_count, "a whole number of at least 1"),
    ("target", lambda value: value is None or _is_number(value), "a finite number or None"),
    ("clip_norm", lambda value: value is None or (_is_number(value) and value > 0), "a positive number or None"),
    ("higher_is_better", lambda value: isinstance(value, bool), "True or False"),
    ("metric_name", lambda value: isinstance(value, str), "a text"),
    ("description", lambda value: isinstance(value, str), "a text"),
    ("fingerprint", lambda value: isinstance(value, str), "a text"),
)


def check_one_step(task: Task, name: str, world_size: int) -> None:
    """Try one forward and backward pass here, so that a broken task fails before any host is started."""
    try:
        inputs, targets = task.batch(0, 0, world_size)
        task.loss(task.model(inputs), targets).backward()
    except (Exception, SystemExit) as error:
        raise TaskError(
            f"task {name} fails in its first step: {type(error).__name__}: {error} "
            "(batch(step, rank, world_size) gives inputs, targets; loss(model(inputs), targets) a scalar)"
        ) from error
    _check_optimizer(task, name)


def _check_optimizer(task: Task, name: str) -> None:
    try:
        made = cast(object, task.optimizer(p for p in task.model.parameters() if p.requires_grad))
        factor = cast(object, task.schedule(0, 0.0))
    except (Exception, SystemExit) as error:
        raise TaskError(f"task {name}: its optimizer or schedule raised {type(error).__name__}: {error}") from error
    if not isinstance(made, torch.optim.Optimizer):
        raise TaskError(f"task {name}: optimizer gave {type(made).__name__}, not a torch.optim.Optimizer")
    if not _is_number(factor):
        raise TaskError(f"task {name}: schedule gave {factor!r}, and must give a finite factor on the learning rate")
