"""Checkpoints of scripts that know nothing of gradwire: the states of all ranks go with what the script saves.

Most scripts call `torch.save` on rank 0 alone, and what the other ranks owe is known to themselves only. So before each
step all ranks tell each other, in one all-reduce of a byte each, whether a rank has saved since the step before; where
one has, all save their states beside its file. These are the states of that moment, since no step has ended in between.
`torch.distributed.checkpoint` is called by all ranks, which save at once, inside of the checkpoint's folder. What a
script loads before its first step says where its states are.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import threading
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from gradwire.adapters.handle import Handle
from gradwire.adapters.script_places import beside_file, checkpoint_of, inside_checkpoint
from gradwire.adapters.uncompiled import before_passes
from gradwire.core import save_folder
from gradwire.core.errors import StateError
from gradwire.session.checkpoint import load, save
from gradwire.session.together import Together


class Followed(NamedTuple):
    """A model of the script.

    Attributes:
        handle: of it.
        suffix: what is added to the names of its folders: nothing for the first model of all ranks.
        begin: the step that it began at.
    """

    handle: Handle
    suffix: str
    begin: int

    @property
    def step(self) -> int:
        """How many steps have ended."""
        return self.handle.session.engine.index

    def folder(self, states: Path) -> Path:
        """Its own folder, where that of the first model is `states`."""
        return states.with_name(states.name + self.suffix)


class ScriptSaves:
    """Follows `torch.save` and `torch.load`, and those of `torch.distributed.checkpoint`.

    Args:
        say: is told what is taken up, and what is not saved.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._said = False
        self._written: list[tuple[Path, list[int]]] = []
        self._read: list[Path] = []
        self._followed: list[Followed] = []
        self._thread = threading.get_ident()

    @contextlib.contextmanager
    def watching(self) -> Generator[None]:
        """Follow what is saved and loaded inside; a last look is taken before the process group is destroyed."""
        dcp = importlib.import_module("torch.distributed.checkpoint")  # takes long, and no other command needs it
        with (
            _told(torch, "save", after=self._saved),
            _told(torch, "load", after=self._loaded),
            _told(dcp, "save", after=self._saved_by_all),
            _told(dcp, "async_save", after=self._saved_by_all),
            _told(dcp, "load", after=self._loaded_by_all),
            _told(dist, "destroy_process_group", before=self._ends),
        ):
            yield
            self.catch_up()

    def follow(self, model: nn.Module, handle: Handle) -> None:
        """Take up the states of what the script has loaded, and look for saves before each pass through a model."""
        count, ranks = len(self._followed), handle.session.lane.meeting.ranks
        part = "" if len(ranks) == dist.get_world_size() else f"-from-rank-{ranks[0]}"
        followed = Followed(handle, (f"-{count}" if count else "") + part, 0)
        self._take_up(followed)
        self._followed.append(followed._replace(begin=followed.step))
        self.catch_up()  # this pass has begun already
        before_passes(model, self.catch_up)

    def catch_up(self) -> None:
        """Save every rank's states where a rank's script has saved since the last look. Every rank must call it."""
        open_now = self._open_now
        if not open_now or not dist.is_initialized() or not _any_rank(bool(self._written), open_now[0].handle):
            return
        ranks = Together("saving beside a checkpoint", open_now[0].handle.session.lane, StateError)
        mine = [(str(path), steps) for path, steps in self._written]
        steps, begins = [one.step for one in self._followed], [one.begin for one in self._followed]
        said = ranks.say({"written": mine, "steps": steps, "begins": begins})
        current = [followed for at, followed in enumerate(self._followed) if not any(_moved(one, at) for one in said)]
        written = [[Path(path) for path, _ in one["written"]] for one in said]
        own = written[ranks.rank] or next(filter(None, written))
        self._written.clear()
        for place in range(max(map(len, written))):
            self._save(own[min(place, len(own) - 1)], [followed for followed in open_now if followed in current])
        if len(current) < len(self._followed):
            late = "steps went by before ranks could ask each other"
            self._say_once(f"{checkpoint_of(own[0])} has nothing beside it: {late}")

    @property
    def _open_now(self) -> list[Followed]:
        return [followed for followed in self._followed if followed.handle.session.is_open]

    def _save(self, states: Path, models: list[Followed]) -> None:
        for followed in models:
            save(followed.folder(states), followed.handle)

    def _take_up(self, followed: Followed) -> None:
        """Load the states of what the script loaded last, where there are any."""
        ranks = Together("loading beside a checkpoint", followed.handle.session.lane, StateError)
        here = [states for states in self._read if save_folder.manifests(followed.folder(states))]
        said = ranks.say(str(here[-1]) if here else None)
        found = here[-1] if here else next((Path(states) for states in said if states), None)
        if found is not None:
            step = load(followed.folder(found), followed.handle)
            self._say(f"goes on at step {step} with what was owed when {checkpoint_of(found)} was saved")

    def _say_once(self, sentence: str) -> None:
        if not self._said:
            self._said = True
            self._say(sentence)

    # What a script calls: these take what the functions of PyTorch take ----------------------------------------------

    def _note(self, states: list[Path]) -> None:
        """Remember to save states, and which steps they are of."""
        self._written.extend((one, [followed.step for followed in self._followed]) for one in states)

    def _saved(self, obj: object, f: object, *_: object, **__: object) -> None:
        self._note(beside_file(f))

    def _loaded(self, f: object, *_: object, **__: object) -> None:
        self._read.extend(beside_file(f))

    def _saved_by_all(
        self,
        state_dict: object,
        storage_writer: object = None,
        *,
        checkpoint_id: object = None,
        process_group: dist.ProcessGroup | None = None,
        no_dist: bool = False,
        **_: object,
    ) -> None:
        models, states = self._open_now, inside_checkpoint(checkpoint_id, storage_writer)
        if not models:
            return
        if not states:
            self._say_once("a checkpoint is not in a folder, so what is owed is not saved with it")
        elif threading.get_ident() != self._thread:
            self._say_once("a checkpoint is saved by another thread, so what is owed is not saved with it")
        elif no_dist or dist.get_world_size(process_group) < dist.get_world_size():  # some ranks may not have called it
            self._note(states)
        else:
            self._save(states[0], models)

    def _loaded_by_all(
        self, state_dict: object, storage_reader: object = None, *, checkpoint_id: object = None, **_: object
    ) -> None:
        self._read.extend(inside_checkpoint(checkpoint_id, storage_reader))

    def _ends(self, group: object = None) -> None:
        if group is None:
            self.catch_up()


def _moved(said: dict[str, Any], at: int) -> bool:
    """Whether a rank has saved before a step that its model number `at` has ended by now."""
    now, begins = said["steps"], said["begins"]
    if at >= len(now):  # it has no such model
        return False
    return any(now[at] != (steps[at] if at < len(steps) else begins[at]) for _, steps in said["written"])


def _any_rank(mine: bool, handle: Handle) -> bool:
    """Whether it is so on any rank, asked in the order of the session's own collectives."""
    session = handle.session
    flag = torch.tensor([mine], dtype=torch.uint8, device=session.engine.plan.units[0].grain.device)

    def ask() -> None:
        dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=session.transport.group)

    session.lane.call(ask, "looking for checkpoints")
    return bool(flag.item())


@contextlib.contextmanager
def _told(
    module: Any, name: str, *, before: Callable[..., None] | None = None, after: Callable[..., None] | None = None
) -> Generator[None]:
    """Have somebody told of each call of a module's function, with its arguments, before or after its work."""
    plain = getattr(module, name)

    @functools.wraps(plain)
    def telling(*arguments: Any, **options: Any) -> Any:
        if before is not None:
            before(*arguments, **options)
        result = plain(*arguments, **options)
        if after is not None:
            after(*arguments, **options)
        return result

    setattr(module, name, telling)
    try:
        yield
    finally:
        setattr(module, name, plain)
