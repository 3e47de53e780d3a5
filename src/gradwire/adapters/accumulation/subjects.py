"""What gradients are accumulated of: how each kind of training leaves synchronisation out, and over which ranks."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from gradwire.adapters.accumulation.rank_sums import GroupSums, NestedSums, OwnNumbers, RankSums, SessionSums
from gradwire.adapters.fsdp2.groups import forget_accumulated, reduced_over
from gradwire.adapters.unwrapped import HookedSession
from gradwire.core.errors import AttachError
from gradwire.session import Session
from gradwire.session.names import is_fsdp2


class Subject:
    """Gradients that add up over micro-batches and are combined once.

    Args:
        model: whose gradients; None where nobody knows.
        session: that combines them, if one does.
        sums: over the ranks whose gradients are combined.
        divisor: by what their sum is divided: the number of ranks, as a rule.

    Attributes:
        passes_communicate: whether every forward pass does, so that all ranks must make equally many of them.
        tells_of_exceptions: whether a rank that leaves a window by an exception can tell the others before they
            exchange gradients. It cannot where they may wait for it in a forward pass.
    """

    passes_communicate = False
    tells_of_exceptions = True

    def __init__(self, model: nn.Module | None, session: Session | None, sums: RankSums, divisor: float) -> None:
        self.model, self.session, self.sums, self.divisor = model, session, sums, divisor

    @property
    def takes_means(self) -> bool:
        """Whether each rank gives the mean of its own tokens: where ranks are not combined by their plain mean."""
        return self.session is not None and not self.session.reducer.averages

    def hold(self) -> None:
        """Have passes from now on add up and send nothing."""
        return

    def release(self) -> None:
        """Have the next pass exchange what has added up. A second call does nothing."""
        return

    def weigh(self, tokens: float) -> None:
        """Tell a method with `weights=given` what this rank counts for in the exchange that comes next."""
        if self.session is not None and self.session.engine.weighs:
            self.session.weigh(tokens)

    def forget(self) -> None:
        """Drop what has added up."""
        for parameter in self.model.parameters() if self.model is not None else ():
            parameter.grad = None


class _HeldByContext(Subject, ABC):
    """Passes are held by a context such as DDP's `no_sync()`."""

    def __init__(self, model: nn.Module | None, session: Session | None, sums: RankSums, divisor: float) -> None:
        super().__init__(model, session, sums, divisor)
        self._held = contextlib.ExitStack()

    @abstractmethod
    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """The context."""

    @override
    def hold(self) -> None:
        self._held.enter_context(self.no_sync())

    @override
    def release(self) -> None:
        self._held.close()


class _DDPSubject(_HeldByContext):
    """A `DistributedDataParallel`, attached or not. Its first forward passes order buckets, others send buffers."""

    tells_of_exceptions = False

    def __init__(self, ddp: DistributedDataParallel, session: Session | None) -> None:
        assert ddp.process_group is not None, "DDP over a device mesh has no group of its own yet"
        device = next(ddp.parameters()).device
        sums = SessionSums(session) if session else GroupSums(ddp.process_group, device)
        super().__init__(ddp, session, sums, float(ddp.process_group.size()))
        self._ddp = ddp

    @override
    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        return self._ddp.no_sync()


class _HookedSubject(_HeldByContext):
    """A model that nobody wraps, fed by its backward pass."""

    def __init__(self, session: HookedSession, model: nn.Module) -> None:
        super().__init__(model, session, SessionSums(session), float(session.transport.world_size))
        self._session = session

    @override
    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        return self._session.no_sync()


class _ShardedSubject(Subject):
    """A model of `fully_shard`.

    Args:
        model: its root.
        session: of `attach`, if it was.
        keep_sharded: reduce-scatter inside a copy in every micro-batch, and sum between copies once.
    """

    passes_communicate = True
    tells_of_exceptions = False

    def __init__(self, model: Any, session: Session | None, keep_sharded: bool) -> None:
        axes, divisor = reduced_over(model)
        if keep_sharded and len(axes) < 2:
            raise AttachError(
                "keep_sharded=True is for a model that fully_shard was given a mesh of two dimensions for (HSDP): on "
                "one dimension it would exchange gradients in every micro-batch, so leave it out"
            )
        device = next(model.parameters()).device
        sums: list[RankSums] = [GroupSums(axis, device) for axis in axes]
        if session is not None and is_over(session, axes[0]):
            sums = [SessionSums(session)]
        elif session is not None:  # of copies, between which a session averages
            sums.append(SessionSums(session))
            divisor *= session.transport.world_size
        super().__init__(model, session, NestedSums(sums), divisor)
        self._root, self._keeps = model, keep_sharded

    @override
    def hold(self) -> None:
        if self._keeps:
            self._root.set_requires_all_reduce(False)
        else:
            self._root.set_requires_gradient_sync(False)

    @override
    def release(self) -> None:
        self._root.set_requires_gradient_sync(True)

    @override
    def forget(self) -> None:
        super().forget()
        forget_accumulated(self._root)


class _GivenSubject(Subject):
    """Gradients that the training loop gives to a session by itself: once, after the block or in its last pass."""

    def __init__(self, session: Session) -> None:
        super().__init__(session.model, session, SessionSums(session), float(session.transport.world_size))


class _LocalSubject(Subject):
    """A model that each rank trains alone: its gradients are combined with nobody's, or its parameters are, later.

    Args:
        model: the model.
        session: of what averages parameters, if tokens are to be summed over its ranks.
    """

    def __init__(self, model: nn.Module, session: Session | None) -> None:
        ranks = 1 if session is None else session.transport.world_size
        super().__init__(model, None, OwnNumbers() if session is None else SessionSums(session), float(ranks))


def subject_of(trained: object, across_ranks: bool | None, keep_sharded: bool) -> Subject:
    """Return what gradients are accumulated of, see `gradwire.accumulate`.

    Raises:
        AttachError: what combines no gradients, or options that do not fit it.
    """
    session = trained if isinstance(trained, Session) else None
    model = session.model if session is not None else trained
    if is_fsdp2(model):
        _require_all_ranks(across_ranks)
        return _ShardedSubject(model, session, keep_sharded)
    if keep_sharded:
        raise AttachError("keep_sharded= is for models of fully_shard: leave it out")
    if (averaged := _averaged(trained)) is not None:
        return _LocalSubject(averaged, _session_of(trained) if across_ranks else None)
    if isinstance(model, DistributedDataParallel):
        _require_all_ranks(across_ranks)
        return _DDPSubject(model, session)
    if session is not None:
        _require_all_ranks(across_ranks)
        if isinstance(session, HookedSession) and isinstance(model, nn.Module):
            return _HookedSubject(session, model)
        return _GivenSubject(session)
    if isinstance(model, nn.Module) and not (dist.is_initialized() and dist.get_world_size() > 1):
        return _LocalSubject(model, None)
    raise AttachError(
        f"accumulate cannot see what combines the gradients of a {type(trained).__name__}: pass the "
        "DistributedDataParallel, the root of fully_shard, the session that attach or gradwire.Session has returned, "
        "or the optimizer of gradwire.wrap"
    )


def _require_all_ranks(across_ranks: bool | None) -> None:
    if across_ranks is False:
        raise AttachError(
            "across_ranks=False is for models that are averaged (gradwire.wrap): where gradients are averaged, tokens "
            "of all ranks count, so leave it out"
        )


def _averaged(trained: object) -> nn.Module | None:
    """The model that an optimizer of `gradwire.wrap` or an averager trains on each rank alone."""
    averager = getattr(trained, "averaging", trained)
    model = getattr(averager, "model", None) if hasattr(averager, "sync") else None
    return model if isinstance(model, nn.Module) else None


def _session_of(trained: Any) -> Session:
    """The session of what averages models."""
    session = getattr(trained, "session", None)
    if not isinstance(session, Session):
        raise AttachError(
            f"{type(trained).__name__} has no session over all ranks to sum tokens by: leave across_ranks=True out"
        )
    return session


def is_over(session: Session, group: dist.ProcessGroup) -> bool:
    """Whether a session is of the ranks of a group."""
    return dist.get_process_group_ranks(session.lane.group) == dist.get_process_group_ranks(group)
