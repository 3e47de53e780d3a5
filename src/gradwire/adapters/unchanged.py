"""Scripts that know nothing of gradwire: every model that they train in parallel is attached to.

`DistributedDataParallel` itself is changed for a while, so it does not matter how a script imports it or derives from
it; `fully_shard` is changed wherever it can be imported from. A model is attached to when it is called with gradients
for the first time: by then the script has made its `GradScaler`, has registered a communication hook if it wants one of
its own, and has sharded all that it shards.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Generator
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradwire.adapters.attach import attach
from gradwire.adapters.fsdp2.groups import is_fsdp2
from gradwire.adapters.fsdp2.roots import Roots
from gradwire.adapters.uncompiled import uncompiled
from gradwire.core.errors import GradwireError
from gradwire.core.figures import si_bytes, significant
from gradwire.session import Session

Say = Callable[[str], None]
"""Tells people a sentence."""

DDP, FSDP1, FSDP2 = "DistributedDataParallel", "FullyShardedDataParallel", "fully_shard"


class Unchanged:
    """What happens to the models of a script while `watching`.

    Args:
        method: a spec, such as `"int4"`; None attaches nothing.
        say: is told what is attached to.
        parameters: the codec that models of `fully_shard` gather parameters in; None: as FSDP2 does alone.
        options: further arguments of `gradwire.attach`.

    Attributes:
        sessions: one for each model that was trained, with the model's name.
        refused: why a model of the script could not be attached to, if so. The script was given it too.

    Example:
        with Unchanged("int4", print).watching() as unchanged:
            runpy.run_path("train.py", run_name="__main__")
        print(unchanged.summary())
    """

    def __init__(self, method: str | None, say: Say, *, parameters: str | None = None, **options: Any) -> None:
        self.sessions: list[tuple[str, Session]] = []
        self.refused: GradwireError | None = None
        self._method, self._say, self._parameters, self._options = method, say, parameters, options
        self._scalers: weakref.WeakSet[torch.amp.GradScaler] = weakref.WeakSet()
        self._attached: list[Callable[[nn.Module, Session], None]] = []
        self._met: list[Callable[[nn.Module, Session | None], None]] = []
        self._made, self._roots = {DDP: 0, FSDP1: 0}, Roots(self._attach)
        self._said_of_parameters = False

    def on_attach(self, react: Callable[[nn.Module, Session], None]) -> None:
        """Have a function called with every model and its session, before the model's first step."""
        self._attached.append(react)

    def on_first_call(self, react: Callable[[nn.Module, Session | None], None]) -> None:
        """Have a function called with every model before its first step, and with its session if it has one."""
        self._met.append(react)

    @contextlib.contextmanager
    def watching(self) -> Generator[Unchanged]:
        """Attach to whatever models are made inside; the classes are as they were afterwards."""
        from torch.distributed.fsdp import FullyShardedDataParallel  # most of a second, for this command alone

        with (
            _after_making(DistributedDataParallel, self._note_wrapped),
            _after_making(FullyShardedDataParallel, lambda _: self._count(FSDP1)),
            _after_making(torch.amp.GradScaler, self._scalers.add),
            self._roots.watching(),
        ):
            yield self

    def _count(self, kind: str) -> None:
        self._made[kind] += 1

    def _note_wrapped(self, ddp: DistributedDataParallel) -> None:
        self._count(DDP)

        @uncompiled
        def first_call(*_: object) -> None:
            if torch.is_grad_enabled():
                waiting.remove()
                self._attach(ddp)

        waiting = ddp.register_forward_pre_hook(first_call)

    def _attach(self, model: nn.Module) -> None:
        """Attach to a model on every rank, and say so."""
        session = None if self._method is None else self._session(model, self._method)
        for react in self._met:
            react(model, session)

    def _session(self, model: nn.Module, method: str) -> Session:
        """Attach to a model, and say so."""
        options: dict[str, Any] = {"scaler": self._scaler(), **self._options}
        gathered = ""
        if self._parameters is not None and is_fsdp2(model):
            options["parameters"], gathered = self._parameters, f", gathered in {self._parameters}"
        try:
            session = attach(model, method, **options)
        except GradwireError as error:
            self.refused = error
            raise
        self.sessions.append((_name(model), session))
        for react in self._attached:
            react(model, session)
        numel = sum(p.numel() for p in model.parameters() if p.requires_grad)
        ranks = _ranks(session.transport.world_size)
        self._say(f"{method} is attached to {_name(model)}: {numel:,} parameters{gathered}, {ranks}")
        self._say_of_parameters(model)
        return session

    def _say_of_parameters(self, model: nn.Module) -> None:
        """Say once that there is nothing to gather."""
        if self._parameters is not None and not is_fsdp2(model) and not self._said_of_parameters:
            self._said_of_parameters = True
            self._say(
                f"--parameters {self._parameters} is for models of {FSDP2}: {_name(model)} is in {DDP}, where every "
                "rank has all parameters and nothing is gathered"
            )

    def _scaler(self) -> torch.amp.GradScaler | None:
        """The loss scaler of the script, where it is clear which one that is."""
        enabled = [scaler for scaler in self._scalers if scaler.is_enabled()]
        if len(enabled) > 1:
            self._say(f"{len(enabled)} GradScalers: none is followed, so what is owed is wrong when a scale changes")
        return enabled[0] if len(enabled) == 1 else None

    @property
    def made(self) -> bool:
        """Whether a model was made."""
        return bool(self.sessions or self.refused or self._roots.sharded or any(self._made.values()))

    def summary(self) -> list[str]:
        """What was saved, a sentence a model; or why nothing was."""
        if self._method is None:
            return []
        if self.sessions:
            return [_saved(name, session) for name, session in self.sessions]
        if self.refused is not None:
            return [f"nothing was compressed: {self.refused}"]
        made = [kind for kind, count in ((DDP, self._made[DDP]), (FSDP2, self._roots.sharded)) if count]
        if made:
            return [f"the script made a model of {' and of '.join(made)} and did not train it: nothing was compressed"]
        if self._made[FSDP1]:
            return [f"{FSDP1} (FSDP1) is not served, so nothing was compressed: give the module to {FSDP2} instead"]
        return [f"the script made no model of {DDP} or {FSDP2}, so nothing was compressed"]


def _name(model: nn.Module) -> str:
    """What the script calls the class of a model: FSDP2 makes a class of its own for each, with `FSDP` in front."""
    if isinstance(model, DistributedDataParallel):
        return type(model.module).__name__
    return type(model).__name__.removeprefix("FSDP")


def _ranks(count: int) -> str:
    return "1 rank, so nothing is sent" if count == 1 else f"{count} ranks"


def _saved(name: str, session: Session) -> str:
    """What a method sent for one model on this rank, and what the uncompressed gradients would have taken."""
    stats, report = session.stats(), session.report()
    if not stats.wire_bytes:
        return f"{name}: {session.method} sent nothing in {stats.steps} steps; {report.verdict}"
    sent, dense = si_bytes(stats.wire_bytes), si_bytes(stats.dense_wire_bytes)
    factor = significant(stats.dense_wire_bytes / stats.wire_bytes, 2)
    return (
        f"{name}: {session.method} sent {sent} in {stats.steps} steps where {report.dense_name} sends {dense} "
        f"({factor} times less); {report.verdict}"
    )


@contextlib.contextmanager
def _after_making(kind: type[Any], note: Callable[[Any], None]) -> Generator[None]:
    """Have every new object of a class noted once that class has made it."""
    name, plain = "__init__", kind.__init__

    @functools.wraps(plain)
    def noted(self: object, *arguments: Any, **options: Any) -> None:
        plain(self, *arguments, **options)
        note(self)

    setattr(kind, name, noted)
    try:
        yield
    finally:
        setattr(kind, name, plain)
