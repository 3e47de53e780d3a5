"""How gradients are synchronised once in a window: what leaves it out in other passes, and over which ranks it goes."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from gradwire.adapters.accumulation.rank_sums import GroupSums, NestedSums, OwnNumbers, RankSums, SessionSums
from gradwire.adapters.attached import session_of
from gradwire.adapters.fsdp2.groups import divisor_of, forget_accumulated, reduced_over
from gradwire.adapters.unwrapped import HookedSession
from gradwire.asynchronous.unwaiting import UnwaitingOptimizer
from gradwire.core.errors import AttachError
from gradwire.session import Session
from gradwire.session.names import is_fsdp2
from gradwire.sync.averager import Averager
from gradwire.sync.local_sgd import AveragingOptimizer
from gradwire.sync.optimizers import SharedOptimizer


class GradientSync:
    """Gradients that add up over micro-batches and are synchronised once.

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


class _HeldByContext(GradientSync, ABC):
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


class _DDPSync(_HeldByContext):
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


class _HookedSync(_HeldByContext):
    """A model that nobody wraps, fed by its backward pass."""

    def __init__(self, session: HookedSession) -> None:
        super().__init__(session.held_model(), session, SessionSums(session), float(session.transport.world_size))
        self._session = session

    @override
    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        return self._session.no_sync()


class _ShardedSync(GradientSync):
    """A model of `fully_shard`.

    Args:
        model: its root.
        session: of `attach`, if it was: over its shards, or with `replicate=` over copies.
        keep_sharded: reduce-scatter inside a copy in every micro-batch, and sum between copies once.
        averaged_by: the session that averages the parameters of copies, if tokens are to be summed over these as well.
    """

    passes_communicate = True
    tells_of_exceptions = False

    def __init__(
        self, model: Any, session: Session | None, keep_sharded: bool, averaged_by: Session | None = None
    ) -> None:
        axes = reduced_over(model)
        if keep_sharded and len(axes) < 2:
            raise AttachError(
                "keep_sharded=True is for a model that fully_shard was given a mesh of two dimensions for (HSDP): on "
                "one dimension it would exchange gradients in every micro-batch, so leave it out"
            )
        device = next(model.parameters()).device
        sums: list[RankSums] = [GroupSums(axis, device) for axis in axes]
        copies = 1
        if session is not None and _is_over(session, axes[0]):
            sums = [SessionSums(session)]
        elif session is not None:
            sums.append(SessionSums(session))
            copies = session.transport.world_size
        divisor = divisor_of(model, copies)
        if averaged_by is not None:
            sums.append(SessionSums(averaged_by))
            divisor *= averaged_by.transport.world_size
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


class _GivenSync(GradientSync):
    """Gradients that the training loop gives to a session by itself: once, after the block or in its last pass."""

    def __init__(self, session: Session) -> None:
        super().__init__(session.held_model(), session, SessionSums(session), float(session.transport.world_size))


class _SteppedSync(_GivenSync):
    """Gradients that ranks combine in the step of an optimizer that is compression."""

    def __init__(self, optimizer: SharedOptimizer) -> None:
        super().__init__(optimizer.session)
        self._optimizer = optimizer

    @override
    def forget(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)


class _LocalSync(GradientSync):
    """A model that each rank trains alone: its gradients are combined with nobody's, or its parameters are, later.

    Args:
        model: the model.
        averaged_by: the session that averages parameters, if tokens are to be summed over its ranks.
    """

    def __init__(self, model: nn.Module, averaged_by: Session | None) -> None:
        ranks = 1 if averaged_by is None else averaged_by.transport.world_size
        super().__init__(model, None, OwnNumbers() if averaged_by is None else SessionSums(averaged_by), float(ranks))


def sync_of(trained: object, across_ranks: bool | None, keep_sharded: bool) -> GradientSync:
    """Return how gradients are synchronised, see `gradwire.accumulate`.

    Raises:
        AttachError: what combines no gradients, or options that do not fit it.
        StepError: a session that is closed.
    """
    trained = getattr(trained, "_orig_mod", trained)  # of torch.compile
    local = _trained_alone(trained)
    if isinstance(trained, Session):
        trained.require_open()
        session, model = trained, trained.held_model()
    else:
        model = trained if local is None else local
        session = session_of(model) if isinstance(model, nn.Module) else None
    if across_ranks is False and local is None:
        raise AttachError(
            "across_ranks=False is for models that are averaged (gradwire.wrap): where gradients are averaged, tokens "
            "of all ranks count, so leave it out"
        )
    averaged_by = _averaging_session(trained) if local is not None and across_ranks else None
    if is_fsdp2(model):
        return _ShardedSync(model, session, keep_sharded, averaged_by)
    if keep_sharded:
        raise AttachError("keep_sharded= is for models of fully_shard: leave it out")
    if local is not None:
        return _LocalSync(local, averaged_by)
    if isinstance(trained, SharedOptimizer):
        return _SteppedSync(trained)
    if isinstance(model, DistributedDataParallel):
        return _DDPSync(model, session)
    if isinstance(session, HookedSession):
        return _HookedSync(session)
    if session is not None:
        return _GivenSync(session)
    if isinstance(model, nn.Module) and not (dist.is_initialized() and dist.get_world_size() > 1):
        return _LocalSync(model, None)
    raise AttachError(
        f"accumulate cannot see what combines the gradients of a {type(trained).__name__}: pass the "
        "DistributedDataParallel, the root of fully_shard, the session that attach or gradwire.Session has returned, "
        "or the optimizer of gradwire.wrap"
    )


def _trained_alone(trained: object) -> nn.Module | None:
    """The model that each rank, or each sharded copy, steps alone: it is averaged later, or nobody waits for it."""
    if isinstance(trained, AveragingOptimizer):
        return trained.averaging.model
    return trained.model if isinstance(trained, Averager | UnwaitingOptimizer) else None


def _averaging_session(trained: Any) -> Session:
    session = getattr(trained, "session", None)
    if not isinstance(session, Session):
        raise AttachError(
            f"{type(trained).__name__} has no session over all ranks to sum tokens by: leave across_ranks=True out"
        )
    return session


def _is_over(session: Session, group: dist.ProcessGroup) -> bool:
    """Whether a session is of the ranks of a group."""
    return dist.get_process_group_ranks(session.lane.group) == dist.get_process_group_ranks(group)
