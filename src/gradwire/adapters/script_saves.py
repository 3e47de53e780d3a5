"""Checkpoints of scripts that know nothing of gradwire: the states of all ranks go with what the script saves.

Most scripts save on rank 0 alone, and what the other ranks owe is known to themselves only. So before each step all
ranks tell each other, in one all-reduce of a byte each, whether a rank has saved since the step before; where one has,
all save their states beside its file, which has its last name by then. These are the states of that moment, since no
step has ended in between. `torch.distributed.checkpoint` is called by all ranks, which save at once, inside of the
checkpoint's folder. What a script loads before its first step says where its states are.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import threading
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from gradwire.adapters.script_loads import Followed, Loads, shapes_in
from gradwire.adapters.script_moves import Moves
from gradwire.adapters.script_places import beside_file, checkpoint_of, file_of, fingerprint, inside_checkpoint
from gradwire.adapters.told import Told, told
from gradwire.adapters.uncompiled import before_passes
from gradwire.core import save_folder
from gradwire.core.collective import AllReduce
from gradwire.core.errors import StateError
from gradwire.core.tensor_file import Written
from gradwire.drivers.interpreter import ask
from gradwire.session import Session
from gradwire.session.checkpoint import save
from gradwire.session.together import Together


class _Saved(NamedTuple):
    """What a rank's script has saved.

    Attributes:
        states: the folder that belongs to it.
        steps: of each model, when it was saved.
    """

    states: str
    steps: list[int]


class _Place(NamedTuple):
    """Where states are to be saved.

    Attributes:
        states: the folder.
        there: whether the checkpoint is still there.
        checkpoint: size and digest, if it is a file.
    """

    states: str
    there: bool
    checkpoint: list[Any] | None


class ScriptSaves:
    """Follows what a script saves and loads, by PyTorch or safetensors, and where it moves that to.

    Args:
        say: is told what is taken up, and what is not saved.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._said: set[str] = set()
        self._saved: list[_Saved] = []
        self._followed: list[Followed] = []
        self._loads = Loads(say)
        self._moves = Moves(say, self._moved, lambda: [followed.suffix for followed in self._followed])
        self._thread = threading.get_ident()

    @contextlib.contextmanager
    def watching(self) -> Generator[None]:
        """Follow what is saved and loaded inside; a last look is taken before the process group is destroyed."""
        dcp = importlib.import_module("torch.distributed.checkpoint")  # takes long, and no other command needs it
        with told(
            Told(torch, "save", after=self._save_called),
            Told(torch, "load", after=self._load_called),
            *self._safetensors(),
            Told(dcp, "save", before=self._begins_by_all, after=self._saved_by_all),
            Told(dcp, "async_save", before=self._begins_by_all, after=self._saved_by_all),
            Told(dcp, "load", after=self._loaded_by_all),
            *self._moves.functions,
            Told(dist, "destroy_process_group", before=self._ends),
        ):
            yield
            self.catch_up()

    def _safetensors(self) -> list[Told]:
        """Of the package, where it is installed."""
        if importlib.util.find_spec("safetensors") is None:
            return []
        package = importlib.import_module("safetensors.torch")
        return [
            Told(package, "save_file", after=self._save_called),
            Told(package, "save_model", after=self._save_called),
            Told(package, "load_file", after=self._load_called),
            Told(package, "load_model", after=self._loaded_into),
        ]

    def follow(self, model: nn.Module, session: Session) -> None:
        """Take up the states of what the script has loaded, and look for saves before each pass through a model."""
        count, ranks = len(self._followed), session.lane.meeting.ranks
        part = "" if len(ranks) == dist.get_world_size() else f"-from-rank-{ranks[0]}"
        followed = Followed(session, (f"-{count}" if count else "") + part, 0, shapes_in(model))
        self._thread = threading.get_ident()
        self._loads.take_up(followed)
        self._followed.append(followed._replace(begin=followed.step))
        self.catch_up()  # this pass has begun already
        before_passes(model, self.catch_up)

    def catch_up(self) -> None:
        """Save every rank's states where a rank's script has saved since the last look. Every rank must call it."""
        open_now = self._open_now
        news = bool(self._saved or self._moves)
        if not open_now or not dist.is_initialized() or not _any_rank(news, open_now[0].session):
            return
        ranks = Together("saving beside a checkpoint", open_now[0].session.lane, StateError)
        steps, begins = [one.step for one in self._followed], [one.begin for one in self._followed]
        own = {"written": [list(one) for one in self._saved], "places": [list(_place(one)) for one in self._saved]}
        self._saved.clear()
        said = ranks.gather({**own, **self._moves.words(), "steps": steps, "begins": begins})
        self._moves.repeat(said, ranks.rank)
        current = [followed for at, followed in enumerate(self._followed) if not any(_late(one, at) for one in said)]
        for place in _places(said, ranks.rank):
            checkpoint = None if place.checkpoint is None else Written(*place.checkpoint)
            self._save(Path(place.states), [one for one in open_now if one in current], checkpoint)
            if len(current) < len(self._followed):
                late = "steps went by before ranks could ask each other"
                self._say_once("late", f"{checkpoint_of(Path(place.states))} has nothing beside it: {late}")
        gone = next((_Place(*place) for words in said for place in words["places"] if not _Place(*place).there), None)
        if gone is not None:
            how = "rename it with os.replace, os.rename, shutil.move or Path.rename, in the process that saved it"
            file = checkpoint_of(Path(gone.states))
            self._say_once("gone", f"{file} is gone since it was saved, so what is owed is not saved with it: {how}")

    @property
    def _open_now(self) -> list[Followed]:
        return [followed for followed in self._followed if followed.session.is_open]

    def _save(self, states: Path, models: list[Followed], checkpoint: Written | None = None) -> None:
        for followed in models:
            # Replaces what is there, as the script's own file is replaced.
            save(followed.folder(states), followed.session, overwrite=True, checkpoint=checkpoint)

    def _say_once(self, kind: str, sentence: str) -> None:
        if kind not in self._said:
            self._said.add(kind)
            self._say(sentence)

    # What a script calls: these take what the functions of PyTorch take ----------------------------------------------

    def _note(self, states: Path) -> None:
        """Remember to save states, and which steps they are of."""
        steps = [followed.step for followed in self._followed]
        self._saved = [one for one in self._saved if one.states != str(states)] + [_Saved(str(states), steps)]

    def _by_other_thread(self, what: str) -> bool:
        """Whether another thread saves: nobody knows which step that is of."""
        other = bool(self._open_now) and threading.get_ident() != self._thread
        if other:
            self._say_once("thread", f"{what} is saved by another thread, so what is owed is not saved with it")
        return other

    def _save_called(self, _: object, *given: object, **named: object) -> None:
        content = _argument(given, named, 0, "obj", "tensors", "model")
        target = _argument(given, named, 1, "f", "filename")
        states = beside_file(target)
        if states and not self._by_other_thread("a checkpoint"):
            self._note(states[0])
        elif not states and any(one.shapes.items() <= shapes_in(content).items() for one in self._open_now):
            kind = type(target).__name__
            self._say_once("buffer", f"a checkpoint is saved to a {kind}, so what is owed is not saved with it")

    def _load_called(self, result: object, *given: object, **named: object) -> None:
        self._loaded(result, _argument(given, named, 0, "f", "filename"))

    def _loaded_into(self, _: object, *given: object, **named: object) -> None:
        self._loaded(_argument(given, named, 0, "model"), _argument(given, named, 1, "filename"))

    def _loaded(self, content: object, source: object) -> None:
        file = file_of(source)
        name = f"a checkpoint in a {type(source).__name__}" if file is None else str(file)
        self._loads.note(name, next(iter(beside_file(source)), None), content, file)

    def _begins_by_all(self, state_dict: object, storage_writer: object = None, **named: Any) -> None:
        """Files of an older checkpoint are overwritten one by one: its states belong to none of what comes next."""
        for states in inside_checkpoint(named.get("checkpoint_id"), named.get("storage_writer", storage_writer)):
            for followed in self._open_now:
                for number in save_folder.numbers(followed.folder(states)):
                    save_folder.remove(followed.folder(states), number)

    def _saved_by_all(
        self,
        _: object,
        state_dict: object,
        storage_writer: object = None,
        *,
        checkpoint_id: object = None,
        process_group: dist.ProcessGroup | None = None,
        no_dist: bool = False,
        **__: object,
    ) -> None:
        models, states = self._open_now, inside_checkpoint(checkpoint_id, storage_writer)
        if not models:
            return
        if not states:
            self._say_once("elsewhere", "a checkpoint is not in a folder, so what is owed is not saved with it")
        elif self._by_other_thread("a checkpoint"):
            return
        elif no_dist or dist.get_world_size(process_group) < dist.get_world_size():  # some ranks may not have called it
            self._note(states[0])
        else:
            self._save(states[0], models)

    def _loaded_by_all(
        self,
        _: object,
        state_dict: object,
        storage_reader: object = None,
        *,
        checkpoint_id: object = None,
        **__: object,
    ) -> None:
        states = next(iter(inside_checkpoint(checkpoint_id, storage_reader)), None)
        name = "a checkpoint that is not in a folder" if states is None else str(checkpoint_of(states))
        self._loads.note(name, states, state_dict)

    def _moved(self, source: Path, target: Path, copied: bool) -> None:
        """Have states saved where a script has renamed what it saved to, or a folder around it; or there too."""

        def elsewhere(states: Path) -> Path:
            checkpoint = checkpoint_of(states)
            if not checkpoint.is_relative_to(source):
                return states
            moved = target / checkpoint.relative_to(source)
            return moved / states.name if states.parent == checkpoint else beside_file(moved)[0]

        was = self._saved
        new = [one._replace(states=str(elsewhere(Path(one.states)))) for one in was]
        moved = [there for one, there in zip(was, new, strict=True) if there != one]
        written = {target, *(checkpoint_of(Path(one.states)) for one in moved)}  # what was there is overwritten
        stay = [one for one, there in zip(was, new, strict=True) if copied or there == one]
        self._saved = [one for one in stay if checkpoint_of(Path(one.states)) not in written] + moved
        if not copied:
            self._loads.moved(elsewhere)

    def _ends(self, group: object = None) -> None:
        if group is None:
            self.catch_up()


def _argument(given: tuple[object, ...], named: Mapping[str, object], at: int, *names: str) -> object:
    """An argument of a call, by its position or by one of its names."""
    return given[at] if at < len(given) else next((named[name] for name in names if name in named), None)


def _place(saved: _Saved) -> _Place:
    """Where a rank's states go, as the rank sees it whose script has saved."""
    checkpoint = checkpoint_of(Path(saved.states))
    written = fingerprint(checkpoint)
    return _Place(saved.states, checkpoint.exists(), None if written is None else list(written))


def _places(said: list[dict[str, Any]], rank: int) -> list[_Place]:
    """Where a rank saves its states, in as many places as each other rank.

    Where each rank that has saved anything has saved as much, each has its own places; else all have those of the rank
    that has saved most.
    """
    there = [[place for given in words["places"] if (place := _Place(*given)).there] for words in said]
    most = max(there, key=len)
    alike = all(len(own) in (0, len(most)) for own in there)
    return there[rank] if alike and there[rank] else most


def _late(said: dict[str, Any], at: int) -> bool:
    """Whether a rank has saved before a step that its model number `at` has ended by now."""
    now, begins = said["steps"], said["begins"]
    if at >= len(now):  # it has no such model
        return False
    return any(now[at] != (steps[at] if at < len(steps) else begins[at]) for _, steps in said["written"])


def _any_rank(mine: bool, session: Session) -> bool:
    """Whether it is so on any rank, asked in the order of the session's own collectives."""
    flag = torch.tensor([mine], dtype=torch.uint8, device=session.engine.plan.units[0].grain.device)
    request = AllReduce(flag, op="max")  # by the transport, so that a rank that does not come is named
    found = session.lane.call(lambda: ask(request, session.transport), " while looking for checkpoints")
    return bool(found.item())
