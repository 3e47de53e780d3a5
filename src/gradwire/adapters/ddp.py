"""Any reducer as the communication of a `DistributedDataParallel` model.

DDP's buckets only deliver gradients, and are made small enough to do so during the backward pass (`buckets`). Grains,
their order and their state belong to a `Session`. On a CPU one communication thread drives it while `backward()` runs;
on a GPU the hook drives it inline on a side stream.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import GradBucket  # pyright: ignore[reportPrivateImportUsage]
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from gradwire.adapters.attached import bind
from gradwire.adapters.buckets import caps_by, caps_of, deliver_in_pieces
from gradwire.adapters.communication import BucketPort, BucketStep, queue_callback
from gradwire.adapters.models import check, planned, trained
from gradwire.adapters.overlapped_optimizer import OverlappedOptimizer, require_plain_steps
from gradwire.adapters.uncompiled import before_passes
from gradwire.core.errors import AttachError
from gradwire.core.roles import roles_of
from gradwire.reducers.base import Reducer
from gradwire.session import Session
from gradwire.session.feed import Piece
from gradwire.session.form import Alike
from gradwire.session.overlap_settings import OverlapSettings

# `register_comm_hook` reads the annotations of the hook, so this module must not postpone them.


def attach_ddp(ddp: nn.Module, reducer: Reducer | str, optimizer: Optimizer | None = None, **options: Any) -> Session:
    """Let `reducer` combine the gradients of `ddp`, see `gradwire.attach`.

    Args:
        ddp: the model.
        reducer: the method.
        optimizer: that steps parameters as their means come; None where the script steps after the backward pass.
        options: of the session.
    """
    check(ddp)
    assert isinstance(ddp, DistributedDataParallel)
    unused = bool(getattr(ddp, "find_unused_parameters", False))
    require_plain_steps(optimizer, options.get("scaler"), options.get("on_non_finite", "warn"), unused)
    assert ddp.process_group is not None, "DDP over a device mesh has no group of its own yet"
    names = trained(ddp)
    tensors = {name: parameter for parameter, name in names.items()}
    roles = {names[parameter]: role for parameter, role in roles_of(ddp.module).items() if parameter in names}
    form = Alike(caps_of(ddp), roles)
    session = Session(tensors, reducer, group=ddp.process_group, what="gradwire.attach", form=form, **options)
    try:
        port = _Port(session, names, ddp, optimizer)
        nbytes = session.engine.dense_bytes
        deliver_in_pieces(ddp, caps_by(ddp, session.overlap, nbytes))
        held = bind(session, ddp)  # weak, since the model holds the hook, and so the session

        def deliver_by(overlap: OverlapSettings) -> None:
            if (model := held()) is not None:
                deliver_in_pieces(model, caps_by(model, overlap, nbytes), again=True)

        session.when_adopted = deliver_by
        ddp.register_comm_hook(None, port.on_bucket)
        before_passes(ddp, port.require_whole_passes)
    except BaseException:
        session.close(at_once=True)
        raise
    return session


class _Port(BucketPort):
    """DDP's buckets as the steps of a session."""

    def __init__(
        self, session: Session, names: dict[Tensor, str], ddp: DistributedDataParallel, optimizer: Optimizer | None
    ) -> None:
        super().__init__(session.lane)
        self._session, self._names = session, names
        self._model, self._trained = ddp.module, planned(ddp)
        self._early = None
        if optimizer is not None:
            self._early = OverlappedOptimizer(optimizer, {name: parameter for parameter, name in names.items()})
            session.feed.arrived = self._arrived
        self._means: dict[str, Tensor] = {}  # of the step at hand, in DDP's buckets
        self._finds_unused = bool(getattr(ddp, "find_unused_parameters", False))

    def on_bucket(self, state: Any, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """DDP's communication hook: hand the bucket over and return at once."""
        session = self._session
        if not session.is_open:
            raise AttachError("this session is closed, and DDP cannot forget a hook: make a new DDP")
        if not self._step.buckets:
            self._trained.of(self._model)
            if torch._C._current_graph_task_id() == -1:  # pyright: ignore[reportPrivateUsage] - DDP's join()
                session.feed.weight = 0.0  # of a rank that has run out of data, whose gradients are zeros
            session.before_step()
            session.feed.open()
            if self._early is not None:
                self._early.begin()
        session.feed.ready(bucket.buffer().nbytes)
        return self.hook(bucket)

    def require_whole_passes(self) -> None:
        """Refuse another pass after one that broke off, until the session is closed."""
        if self._session.is_open:
            super().require_whole_passes()

    def where(self) -> str:
        """The step at hand, as training loops count them."""
        return self._session.feed.where()

    def work(self, buckets: Sequence[GradBucket], last: bool) -> None:
        """Deliver the newest bucket's gradients; after the last, all buckets hold their means."""
        self._session.feed.put(self._gradients(buckets[-1]))
        if last:
            self._session.feed.end()
            self._means = {}

    def _arrived(self, whole: list[str]) -> None:
        """Means have come to DDP's buckets: their parameters are stepped while others' are on their way."""
        assert self._early is not None
        self._early.step({name: self._means.pop(name) for name in whole})

    def _gradients(self, bucket: GradBucket) -> Iterator[Piece]:
        """Cut a bucket into the gradients of its parameters, 1-d."""
        flat, at = bucket.buffer(), 0
        for parameter in bucket.parameters():
            piece = Piece(self._names[parameter], flat[at : at + parameter.numel()])
            if self._early is not None:
                self._means[piece.name] = _shaped(piece.flat, parameter)
            yield piece
            at += parameter.numel()

    def after_backward(self, step: BucketStep) -> None:
        """Before DDP writes gradients: look again once it has, where it may keep some of them back."""
        self._session.warn_of_non_finite()
        self._session.repeated.exchanged(self._names, self._session.stats)
        if self._session.skipped:
            queue_callback(self._drop_gradients)
        elif self._finds_unused:
            queue_callback(lambda: self._take_back_unused(step))

    def _drop_gradients(self) -> None:
        """Have the optimizer skip a step whose means are not finite."""
        for parameter in self._names:
            parameter.grad = None

    def _take_back_unused(self, step: BucketStep) -> None:
        """Where no rank used a parameter DDP leaves its gradient as it was: the mean was dropped and is owed still."""
        if unused := {self._names[parameter] for parameter in step.unwritten()}:
            self._session.engine.take_back(unused)


def _shaped(flat: Tensor, parameter: Tensor) -> Tensor:
    """Part of a bucket as a gradient: DDP lays its elements out as the parameter's, where these leave no gaps."""
    stride, expected = parameter.stride(), 1
    for step, size in sorted((step, size) for step, size in zip(stride, parameter.shape, strict=True) if size > 1):
        if step != expected:
            return flat.view(parameter.shape)
        expected *= size
    return flat.as_strided(parameter.shape, stride)
