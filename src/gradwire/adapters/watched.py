"""A process of a script that knows nothing of gradwire, and the processes that the script starts in turn.

Some scripts start their ranks themselves, by `torch.multiprocessing.spawn` or `multiprocessing.Process`. What such a
process is to do is given to it in a wrapper, which watches there as the first process is watched here. A forked process
has a copy of that watch and goes on with it; any other makes one of its own.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import sysconfig
from collections.abc import Callable, Generator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from gradwire.adapters.script_profile import ScriptProfile
from gradwire.adapters.script_saves import ScriptSaves
from gradwire.adapters.unchanged import DDP, FSDP2, Unchanged
from gradwire.session import DEADLINE_S


class ScriptWatch(NamedTuple):
    """How the models of a script are trained.

    Attributes:
        method: a spec, such as `"int4"`; None trains them as they are.
        parameters: the codec that models of `fully_shard` gather parameters in.
        seed: of the method's random choices.
        deadline_s: seconds after which a silent rank is an error.
        states: whether states go with the script's checkpoints.
        profile: the folder of a profile, if one is made.
        live: whether ranks tell there how the run goes.
        residuals: where what is owed lies between steps, see `gradwire.attach`.
    """

    method: str | None
    parameters: str | None = None
    seed: int = 0
    deadline_s: float = DEADLINE_S
    states: bool = True
    profile: str | None = None
    live: bool = False
    residuals: str = "device"


class WatchedProcess:
    """A process: its models are attached to, its checkpoints and the processes that it starts are followed.

    Args:
        watch: how.

    Attributes:
        unchanged: its models.
    """

    def __init__(self, watch: ScriptWatch) -> None:
        self._watch, self._started, self._unserved = watch, 0, 0
        self._rank = int(os.environ.get("RANK", "0"))
        options = {"seed": watch.seed, "deadline_s": watch.deadline_s, "residuals": watch.residuals}
        self.unchanged = Unchanged(watch.method, self.say, parameters=watch.parameters, **options)
        self._saves = ScriptSaves(self.say) if watch.states else None
        if self._saves is not None:
            self.unchanged.on_attach(self._saves.follow)
        self._profile = None if watch.profile is None else ScriptProfile(watch.profile, self.say, watch.live)
        if self._profile is not None:
            self.unchanged.on_first_call(self._profile.follow)

    @contextlib.contextmanager
    def watching(self) -> Generator[None]:
        """Attach and follow inside."""
        following = contextlib.nullcontext() if self._saves is None else self._saves.watching()
        profiling = contextlib.nullcontext() if self._profile is None else self._profile.watching()
        with self.unchanged.watching(), following, self._serving(), profiling:
            yield

    def say(self, sentence: str) -> None:
        """Say a sentence on standard error, on rank 0 alone."""
        if dist.is_initialized():  # processes that a script has started have no RANK
            self._rank = dist.get_rank()
        if self._rank == 0:
            print(f"gradwire: {sentence}", file=sys.stderr, flush=True)

    def summary(self) -> list[str]:
        """What was sent, a sentence a model; or why nothing was."""
        if self.unchanged.made or not (self._started or self._unserved):
            return self.unchanged.summary()
        none = f"the script made no model of {DDP} or {FSDP2} in its first process"
        if self._unserved:
            remedy = "let their class have no run() of its own but a target=, or call gradwire.attach in them"
            return [f"{none}, and processes that have a run() of their own are not served: {remedy}"]
        processes = "process" if self._started == 1 else "processes"
        return [f"{none}; of the {self._started} {processes} that it started, each that made one says what it sent"]

    def end(self) -> None:
        """Have a last look at what was saved, and say what was sent, where anything was trained."""
        if self._saves is not None:
            self._saves.catch_up()
        if self._profile is not None:
            self._profile.end()
        for sentence in self.unchanged.summary() if self.unchanged.made else []:
            self.say(sentence)

    @contextlib.contextmanager
    def _serving(self) -> Generator[None]:
        """Watch in processes that are started inside."""
        plain = BaseProcess.__init__

        @functools.wraps(plain)
        def serving(process: BaseProcess, group: None = None, target: Any = None, *rest: Any, **options: Any) -> None:
            plain(process, group, self._served(process, target), *rest, **options)

        name = "__init__"
        setattr(BaseProcess, name, serving)
        try:
            yield
        finally:
            setattr(BaseProcess, name, plain)

    def _served(self, process: BaseProcess, target: Callable[..., Any] | None) -> Callable[..., Any] | None:
        """What a process is to do, watched where it may be training."""
        if target is None:
            self._unserved += _is_own(type(process).run)
            return None
        if not _is_own(target):
            return target
        self._started += 1
        return ServedProcess(target, self._watch, self)


class ServedProcess:
    """What a process is to do that a script starts, with its models attached to.

    Args:
        work: that.
        watch: how its models are trained.
        forked: the watch of the process that starts it, which is there only where it is forked.
    """

    def __init__(self, work: Callable[..., Any], watch: ScriptWatch, forked: WatchedProcess | None = None) -> None:
        self._work, self._watch, self._forked = work, watch, forked

    def __reduce__(self) -> tuple[type[ServedProcess], tuple[Callable[..., Any], ScriptWatch]]:
        return ServedProcess, (self._work, self._watch)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Do the work and return its result, with its models attached to."""
        watched = self._forked or WatchedProcess(self._watch)
        with contextlib.nullcontext() if self._forked else watched.watching():
            result = self._work(*arguments, **options)
            watched.end()
        return result


def _is_own(function: Callable[..., Any]) -> bool:
    """Whether it is a script's own or starts one: processes of libraries load data, or serve others."""
    while isinstance(function, functools.partial):
        function = function.func
    name = getattr(function, "__module__", None) or ""
    file = getattr(sys.modules.get(name), "__file__", None)
    if name == "torch.multiprocessing.spawn" or file is None:
        return True
    libraries = {sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib", "purelib", "platlib")}
    return name.partition(".")[0] != "gradwire" and not any(Path(file).is_relative_to(place) for place in libraries)
