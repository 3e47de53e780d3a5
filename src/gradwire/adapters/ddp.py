"""`attach`: any reducer as the communication of a `DistributedDataParallel` model.

DDP's buckets only deliver gradients, and are made small enough to do so during the backward pass (`buckets`). Grains,
their order and their state belong to a `Session`. On a CPU one communication thread drives it while `backward()` runs;
on a GPU the hook drives it inline on a side stream.
"""

import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import GradBucket  # pyright: ignore[reportPrivateImportUsage]
from torch.nn.parallel import DistributedDataParallel

from gradwire.adapters.buckets import bucket_bytes, deliver_in_pieces
from gradwire.adapters.communication import BucketPort, BucketStep, queue_callback
from gradwire.adapters.models import check, trained
from gradwire.core import saved
from gradwire.core.errors import AttachError
from gradwire.core.link import Link
from gradwire.drivers.engine import Stats
from gradwire.reducers.base import Reducer
from gradwire.session import DEADLINE_S, Session
from gradwire.session.report import Report

# `register_comm_hook` reads the annotations of the hook, so this module must not postpone them.


def attach(
    ddp: DistributedDataParallel,
    reducer: Reducer | str,
    *,
    seed: int = 0,
    deadline_s: float = DEADLINE_S,
    grain_numel: int | None = None,
    scaler: torch.amp.GradScaler | None = None,
    checksum: bool = False,
) -> "Handle":
    """Let `reducer` combine the gradients of `ddp` from the next backward pass on.

    Call it on every rank of DDP's process group, after DDP is made and before the first step. Communication goes over
    a process group of its own with the same ranks.

    Args:
        ddp: the model.
        reducer: a reducer, or a spec such as `"topk:0.01"`.
        seed: of all random choices, the same on every rank.
        deadline_s: seconds after which a silent rank is an error.
        grain_numel: elements that are encoded together at most (default: a quarter of the model, up to 2^20).
        scaler: the loss scaler of the training loop, if it has one: gradients, and so residuals, are in its units, and
            when the scale changes residuals are multiplied accordingly.
        checksum: send a CRC-32 with each payload of an all-gather or an all-to-all. A rank that gets a damaged one
            raises `PayloadError` with the sender, and the others are told. Sums are not covered. On a CPU only; it
            takes about a nanosecond a byte, and 4 bytes a message that statistics do not count. Without checksums a
            damaged payload decodes to something else, alike on all ranks that got it; with `node=` these are the ranks
            of one node, which then differ from the others.

    Returns:
        A handle with statistics, state and `close`. What the method compiles is compiled by then.

    Raises:
        AttachError: a model that cannot be served, with the reason.
        CommunicationError: a rank that did not attach within `deadline_s`, by its number.
        SpecError, CompositionError: a method that cannot be built.

    Example:
        handle = gradwire.attach(ddp, "int4")
    """
    check(ddp)
    assert ddp.process_group is not None, "DDP over a device mesh has no group of its own yet"
    names = trained(ddp)
    session = Session(
        {name: parameter for parameter, name in names.items()},
        reducer,
        group=ddp.process_group,
        seed=seed,
        deadline_s=deadline_s,
        grain_numel=grain_numel,
        scaler=scaler,
        checksum=checksum,
        what="gradwire.attach",
    )
    return Handle(ddp, names, session)


class Handle:
    """What `attach` returns: the running communication of one model.

    Attributes:
        session: what runs it, step after step.
    """

    def __init__(self, ddp: DistributedDataParallel, names: dict[Tensor, str], session: Session) -> None:
        self.session = session
        port = _Port(session, names, ddp)
        try:
            deliver_in_pieces(ddp, bucket_bytes(session.engine.dense_bytes))
            ddp.register_comm_hook(None, port.on_bucket)
        except BaseException:
            session.close(at_once=True)
            raise

    @property
    def reducer(self) -> Reducer:
        """The method."""
        return self.session.reducer

    @property
    def method(self) -> str:
        """The method as it was given."""
        return self.session.method

    @property
    def seed(self) -> int:
        """Of all random choices."""
        return self.session.seed

    def __repr__(self) -> str:
        return repr(self.session).replace("Session", "Handle", 1)

    def report(self) -> Report:
        """Return what the method costs and saves on this rank, see `Session.report`.

        Example:
            print(handle.report())                # for people
            handle.report().as_dict()["saved_ms"] # for programs
        """
        return self.session.report()

    def change(self, method: Reducer | str) -> None:
        """Go on with another method, on every rank at the same place between two steps, see `Session.change`.

        What is owed under the old one is carried over. A change that fails leaves the old method in place.

        Example:
            if step == 100:
                handle.change("topk:0.01")
        """
        self.session.change(method)

    def measure_link(self) -> Link | None:
        """Measure again how long an uncompressed all-reduce takes, since links change; `attach` did so once.

        Every rank must call it at the same place, between two steps. Takes up to half a second.
        """
        return self.session.measure_link()

    def stats(self) -> Stats:
        """Return bytes and times so far, those of the step that has just ended among them."""
        return self.session.stats()

    def residual_norm(self) -> float:
        """Return the Euclidean norm of all that this rank owes: its residuals, and its shards' as an owner."""
        return self.session.residual_norm()

    def state_dict(self) -> saved.Saved:
        """Return this rank's state by parameter name; save one file a rank.

        Resuming with the same world size is exact; for another, pass all ranks' states to `gradwire.reshard`.
        `gradwire.save` and `gradwire.load` do all of it, files included.
        """
        return self.session.state_dict()

    def load_state_dict(self, state: saved.Saved) -> None:
        """Take up a saved state.

        Raises:
            StateError: a damaged state, or one of another version, method, rank, world size or model; nothing is
                changed then.
        """
        self.session.load_state_dict(state)

    def close(self, at_once: bool = False) -> None:
        """Stop communicating: end the threads, then destroy the process groups. A second call does nothing.

        Args:
            at_once: do not wait for a step that is under way, as after an interrupt. A thread that is stuck in it ends
                at `deadline_s`, or with the process.
        """
        self.session.close(at_once)

    def __enter__(self) -> "Handle":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.session.__exit__(kind, error, trace)


class _Port(BucketPort):
    """DDP's buckets as the steps of a session."""

    def __init__(self, session: Session, names: dict[Tensor, str], ddp: DistributedDataParallel) -> None:
        super().__init__(session.lane)
        self._session, self._names = session, names
        self._finds_unused = bool(getattr(ddp, "find_unused_parameters", False))
        session.window.bucket_bytes = ddp.bucket_bytes_cap  # as DDP alone would have them

    def on_bucket(self, state: Any, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """DDP's communication hook: hand the bucket over and return at once."""
        session = self._session
        if not session.is_open:
            raise AttachError("this handle is closed, and DDP cannot forget a hook: make a new DDP")
        if not self._step.buckets:
            session.begin()
        session.window.ready(time.perf_counter(), bucket.buffer().nbytes)
        return self.hook(bucket)

    def where(self) -> str:
        """The step at hand, as training loops count them."""
        return self._session.where()

    def work(self, buckets: Sequence[GradBucket], last: bool) -> None:
        """Deliver the newest bucket's gradients; after the last, all buckets hold their means."""
        reduction = self._session.reduction
        if len(buckets) == 1:
            reduction.begin()
        for name, gradient in self._gradients(buckets[-1]):
            reduction.put(name, gradient, self._session.scale)
        reduction.pump()
        if last:
            reduction.finish()
            reduction.end()

    def _gradients(self, bucket: GradBucket) -> Iterator[tuple[str, Tensor]]:
        """Cut a bucket into the gradients of its parameters, 1-d."""
        flat, at = bucket.buffer(), 0
        for parameter in bucket.parameters():
            yield self._names[parameter], flat[at : at + parameter.numel()]
            at += parameter.numel()

    def after_backward(self, step: BucketStep) -> None:
        """Before DDP writes gradients: look again once it has, where it may keep some of them back."""
        self._session.warn_of_non_finite()
        if self._finds_unused:
            queue_callback(lambda: self._take_back_unused(step))

    def _take_back_unused(self, step: BucketStep) -> None:
        """Where no rank used a parameter DDP leaves its gradient as it was: the mean was dropped and is owed still."""
        if unused := {self._names[parameter] for parameter in step.unwritten()}:
            self._session.engine.take_back(unused)
