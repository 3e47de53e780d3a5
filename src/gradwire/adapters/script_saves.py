"""Checkpoints of scripts that know nothing of gradwire: states of all ranks beside each file that `torch.save` wrote.

Most scripts save on rank 0 alone, and what the other ranks owe is known to themselves only. So before each step all
ranks tell each other, in one all-reduce of a byte each, whether a rank has saved since the step before; where one has,
all save their states, which are those of that moment, since no step has ended in between. What a script loads by
`torch.load` before its first step says where its states are.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from gradwire.adapters.frameworks import beside
from gradwire.adapters.handle import Handle
from gradwire.adapters.uncompiled import before_passes
from gradwire.core import save_folder
from gradwire.core.errors import StateError
from gradwire.session.checkpoint import load, save
from gradwire.session.together import Together


class ScriptSaves:
    """Follows a script's `torch.save` and `torch.load`.

    Args:
        say: is told what is taken up.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._written: list[Path] = []
        self._read: list[Path] = []
        self._followed: list[tuple[Handle, str]] = []

    @contextlib.contextmanager
    def watching(self) -> Generator[None]:
        """Follow what is saved and loaded inside; a last look is taken before the process group is destroyed."""
        with (
            _told(torch, "save", after=lambda path: self._written.extend(_place(path)), argument=1),
            _told(torch, "load", after=lambda path: self._read.extend(_place(path)), argument=0),
            _told(dist, "destroy_process_group", before=lambda group: None if group else self.catch_up()),
        ):
            yield
            self.catch_up()

    def follow(self, ddp: DistributedDataParallel, handle: Handle) -> None:
        """Take up the states of what the script has loaded, and look for saves before each pass through a model."""
        name = "" if not self._followed else f"-{len(self._followed)}"
        self._followed.append((handle, name))
        self._take_up(handle, name)
        before_passes(ddp, self.catch_up)

    def catch_up(self) -> None:
        """Save every rank's states where a rank's script has saved since the last look. Every rank must call it."""
        open_now = [(handle, name) for handle, name in self._followed if handle.session.is_open]
        if not open_now or not dist.is_initialized() or not _any_rank(bool(self._written), open_now[0][0]):
            return
        ranks = Together("saving beside a checkpoint", open_now[0][0].session.lane, StateError)
        said = ranks.say([str(path) for path in self._written])
        own = self._written or [Path(path) for path in next(filter(None, said))]
        rounds = max(map(len, said))
        paths = [own[min(place, len(own) - 1)] for place in range(rounds)]
        self._written.clear()
        for path in paths:
            for handle, name in open_now:
                save(_folder(path, name), handle)

    def _take_up(self, handle: Handle, name: str) -> None:
        """Load the states beside the file that the script loaded last, where there are any."""
        ranks = Together("loading beside a checkpoint", handle.session.lane, StateError)
        here = [path for path in self._read if save_folder.manifests(_folder(path, name))]
        said = ranks.say(str(here[-1]) if here else None)
        found = here[-1] if here else next((Path(path) for path in said if path), None)
        if found is not None:
            step = load(_folder(found, name), handle)
            self._say(f"goes on at step {step} with what was owed when {found} was saved")


def _folder(path: Path, name: str) -> Path:
    folder = beside(path)
    return folder.with_name(folder.name + name)


def _place(given: object) -> list[Path]:
    """The path that a call was given, if any: what is written to a buffer has no place beside it."""
    return [Path(os.fspath(given)).resolve()] if isinstance(given, str | os.PathLike) else []


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
    module: Any,
    name: str,
    *,
    before: Callable[[object], None] = lambda given: None,
    after: Callable[[object], None] = lambda given: None,
    argument: int = 0,
) -> Generator[None]:
    """Have a function of a module tell one of its arguments, which may be called `f` too, before or after its work."""
    plain = getattr(module, name)

    @functools.wraps(plain)
    def telling(*arguments: Any, **options: Any) -> Any:
        given = arguments[argument] if len(arguments) > argument else options.get("f", options.get("group"))
        before(given)
        result = plain(*arguments, **options)
        after(given)
        return result

    setattr(module, name, telling)
    try:
        yield
    finally:
        setattr(module, name, plain)
