"""`attach`: any reducer as the communication of a `DistributedDataParallel` model.

DDP's buckets only deliver gradients; grains, their order and their state belong to the engine. On a CPU one
communication thread drives the engine while `backward()` runs; on a GPU the hook drives it inline on a side stream.
"""

import atexit
import dataclasses
import functools
import hashlib
import time
import warnings
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import GradBucket  # pyright: ignore[reportPrivateImportUsage]
from torch.nn.parallel import DistributedDataParallel

from gradwire.adapters.communication import INTERRUPTED_S, BucketSession, BucketStep, Lane, queue_callback
from gradwire.adapters.models import check, trained
from gradwire.adapters.report import NON_FINITE, Report, observed
from gradwire.core import saved
from gradwire.core.collective import AllReduce
from gradwire.core.errors import AttachError, NonFiniteWarning
from gradwire.core.link import Link
from gradwire.core.state import walk
from gradwire.drivers.checked import Checked
from gradwire.drivers.cost import parameter_specs
from gradwire.drivers.engine import Engine, Stats
from gradwire.drivers.groups import destroy
from gradwire.drivers.interpreter import ask
from gradwire.drivers.measure import Bench, all_reduce_link, measured
from gradwire.drivers.plan import Plan, plan
from gradwire.drivers.process_group import GroupTransport
from gradwire.drivers.warm import warm_up
from gradwire.drivers.window import Window
from gradwire.reducers.base import Reducer, as_reducer
from gradwire.spec import parse

# `register_comm_hook` reads the annotations of the hook, so this module must not postpone them.

DEADLINE_S = 300.0


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
            takes about a nanosecond a byte, and 4 bytes a message that statistics do not count.

    Returns:
        A handle with statistics, state and `close`. What the method compiles is compiled by then.

    Raises:
        AttachError: a model that cannot be served, with the reason.
        CommunicationError: a rank that did not attach within `deadline_s`, by its number.
        SpecError, CompositionError: a method that cannot be built.

    Example:
        handle = gradwire.attach(ddp, "int4")
    """
    method = reducer if isinstance(reducer, str) else repr(reducer)
    reducer = parse(reducer) if isinstance(reducer, str) else as_reducer(reducer)
    check(ddp)
    reducer.require_ranks(dist.get_world_size(ddp.process_group))
    return Handle(ddp, reducer, seed, deadline_s, grain_numel, scaler, method, checksum)


class Handle(BucketSession):
    """What `attach` returns: the running communication of one model."""

    def __init__(
        self,
        ddp: DistributedDataParallel,
        reducer: Reducer,
        seed: int,
        deadline_s: float,
        grain_numel: int | None,
        scaler: torch.amp.GradScaler | None = None,
        method: str = "",
        checksum: bool = False,
    ) -> None:
        assert ddp.process_group is not None, "DDP over a device mesh has no group of its own yet"
        names = trained(ddp)
        self._device = next(iter(names)).device if names else torch.device("cpu")
        if checksum and self._device.type != "cpu":
            raise AttachError(f"checksums are made on a CPU, and this model lies on {self._device}: leave checksum out")
        self._checksum = checksum
        super().__init__(Lane(ddp.process_group, self._device, deadline_s, "gradwire.attach"))
        self.reducer = reducer
        self.method = method or repr(reducer)
        self.seed = seed
        self._scaler, self._scale = scaler, 1.0
        self._names = names
        self._transport = transport = self.lane.transport()
        # A handle that is forgotten lets go as well: nothing that its threads run for good refers to it.
        self._finalizer = weakref.finalize(self, _let_go, self.lane, transport, at_once=True)
        self._finalizer.atexit = False  # `_close_all` knows what may still be torn down then
        _handles.add(self)
        try:
            planned = self._planned(transport, grain_numel)
            warm_up(planned.units, transport.world_size)
            self._agree_on("ready", transport)  # so that no rank's compiling falls into another's first step
            self._engine = Engine(planned, Checked(transport) if checksum else transport, seed)
            self._window, self._link = Window(), self.measure_link()
        except BaseException:
            self.close(at_once=True)
            raise
        by_name = _places(planned.units)
        self._places = {parameter: by_name[name] for parameter, name in names.items()}
        self._warned_of_non_finite = False
        self._finds_unused = bool(getattr(ddp, "find_unused_parameters", False))
        ddp.register_comm_hook(None, self._hook)

    def __repr__(self) -> str:
        return f"Handle({self.reducer!r}, grains={len(self._engine.plan.units)}, step={self._engine.index})"

    def _planned(self, transport: GroupTransport, grain_numel: int | None) -> Plan:
        """Plan grains, once all ranks agree on what they are, and measure what the reducer wants measured."""
        specs = parameter_specs((name, p) for p, name in self._names.items())
        # Of the device only the kind: ranks of one host have different ones.
        grains = _described(plan(specs, self.reducer, grain_numel))
        self._agree_on(f"{self.reducer!r} seed={self.seed} checksum={self._checksum} {grains}", transport)
        for glob in self.reducer.unmet(self._names.values()):
            said = f"no trained parameter has a name like {glob!r}: that rule of the policy serves none"
            warnings.warn(said, stacklevel=4)
        self.lane.call(lambda: transport.prepare(self.reducer.axes(transport.world_size)), _ATTACHING)
        told = self.lane.call(lambda: measured(self.reducer, transport, self._device), _ATTACHING)
        return plan(specs, told, grain_numel)

    def _agree_on(self, configuration: str, transport: GroupTransport) -> None:
        """Refuse a method or a model that differs between ranks: it would hang later."""
        digest = int.from_bytes(hashlib.blake2b(configuration.encode(), digest_size=7).digest(), "little")
        mine = AllReduce(torch.tensor([digest, -digest], device=self._device), "max")
        high, low = self.lane.call(lambda: ask(mine, transport), _ATTACHING).tolist()
        if high != -low:
            raise AttachError(
                "ranks disagree on the method, the seed, checksum= or the parameters; this one has "
                f"{self.reducer!r}, seed {self.seed} and checksum={self._checksum}"
            )

    def _hook(self, state: Any, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """DDP's communication hook: hand the bucket over and return at once."""
        if not self._finalizer.alive:
            raise AttachError("this handle is closed, and DDP cannot forget a hook: make a new DDP")
        if not self._step.buckets:
            self._window.begin()
            if (growth := self._growth_of_scale()) != 1.0:
                self.lane.driver.run(lambda: self._engine.rescale(growth))
        self._window.ready(time.perf_counter(), bucket.buffer().nbytes)
        return self.hook(bucket)

    def _growth_of_scale(self) -> float:
        """By what the loss scale has grown since the last step; a scale of powers of two makes this exact."""
        scaler = self._scaler if self._scaler is not None and self._scaler.is_enabled() else None
        before, self._scale = self._scale, float(scaler.get_scale()) if scaler else 1.0
        return self._scale / before

    def where(self) -> str:
        """The step at hand, as training loops count them."""
        return f" in step {self._engine.index}"

    def work(self, buckets: Sequence[GradBucket], last: bool) -> None:
        """Deliver the newest bucket's gradients; after the last, write the means into all buckets."""
        if len(buckets) == 1:
            self._engine.begin()
        if self._window.wants_norm:
            self._window.gradient(buckets[-1].buffer(), len(buckets) == 1, self._scale)
        for piece, unit, offset in self._pieces(buckets[-1]):
            self._engine.deliver(unit, offset, piece)
        self._engine.pump()
        if last:
            self._engine.finish()
            for bucket in buckets:
                for piece, unit, offset in self._pieces(bucket):
                    piece.copy_(self._engine.mean(unit)[offset : offset + piece.numel()])
            self._engine.release()
            ended_s = time.perf_counter()
            self._engine.stats.exposed_s += ended_s - self._window.last_ready_s
            self._window.end(ended_s, self._engine.stats)

    def _pieces(self, bucket: GradBucket) -> Iterator[tuple[Tensor, int, int]]:
        """Cut a bucket into (view, unit, offset in the unit)."""
        flat, at = bucket.buffer(), 0
        for parameter in bucket.parameters():
            for unit, start, size, offset in self._places[parameter]:
                yield flat[at + start : at + start + size], unit, offset
            at += parameter.numel()

    def after_backward(self, step: BucketStep) -> None:
        """Before DDP writes gradients: look again once it has, where it may keep some of them back."""
        self._warn_of_non_finite()
        if self._finds_unused:
            queue_callback(lambda: self._take_back_unused(step))

    def _take_back_unused(self, step: BucketStep) -> None:
        """Where no rank used a parameter DDP leaves its gradient as it was: the mean was dropped and is owed still."""
        if unused := {self._names[parameter] for parameter in step.unwritten()}:
            self._engine.take_back(unused)

    def _warn_of_non_finite(self) -> None:
        """Say once that a gradient was not finite, where no loss scaler is known that would skip such steps."""
        scaled = self._scaler is not None and self._scaler.is_enabled()
        if scaled or self._warned_of_non_finite:
            return
        norm_is_known = self._device.type == "cpu"  # a GPU would be waited for
        if self._engine.found_bad() or (norm_is_known and self._window.found_bad()):
            self._warned_of_non_finite = True
            warnings.warn(NonFiniteWarning(NON_FINITE), stacklevel=2)

    def report(self) -> Report:
        """Return what the method costs and saves on this rank, over the last hundred steps and without start-up.

        Ranks may ask whenever they like: nothing is communicated. See `Report` for what its figures mean.

        Example:
            print(handle.report())                # for people
            handle.report().as_dict()["saved_ms"] # for programs
        """
        owed = self.residual_norm() / self._scale
        return observed(self._engine, self._window, self._link, self.method, self.reducer.averages, owed)

    def measure_link(self) -> Link | None:
        """Measure again how long an uncompressed all-reduce takes, since links change; `attach` did so once.

        Every rank must call it at the same place, between two steps. Takes up to half a second.
        """
        self._link = all_reduce_link(Bench(self._engine.transport, self._device), self._engine.dense_bytes)
        return self._link

    def stats(self) -> Stats:
        """Return bytes and times so far, those of the step that has just ended among them."""
        self._engine.settle()
        return dataclasses.replace(self._engine.stats)

    def residual_norm(self) -> float:
        """Return the Euclidean norm of all that this rank owes: its residuals, and its shards' as an owner."""
        squares = [
            float(leaf.tensor.double().square().sum())
            for _, state in self._engine.states()
            for _, leaf in walk(state)
            if leaf.owed
        ]
        return sum(squares) ** 0.5

    def state_dict(self) -> saved.Saved:
        """Return this rank's state by parameter name; save one file a rank.

        Resuming with the same world size is exact; for another, pass all ranks' states to `gradwire.reshard`.
        `gradwire.save` and `gradwire.load` do all of it, files included.
        """
        where = {"step": self._engine.index, "seed": self.seed}
        return saved.pack(self._engine.states(), self._member(), scale=self._scale, **where)

    def _member(self) -> saved.Member:
        return saved.Member(repr(self.reducer), self._engine.transport.rank, self._engine.transport.world_size)

    def load_state_dict(self, state: saved.Saved) -> None:
        """Take up a saved state.

        Raises:
            StateError: a damaged state, or one of another version, method, rank, world size or model; nothing is
                changed then.
        """
        self.take_up(self.unpacked(state))

    def unpacked(self, state: saved.Saved) -> saved.Loaded:
        """Return what a saved state says, for `take_up`; until then nothing is changed.

        Raises:
            StateError: as `load_state_dict`.
        """
        return saved.unpack(state, self._engine.states(), self._member())

    def take_up(self, loaded: saved.Loaded) -> None:
        """Go on from what `unpacked` returned."""
        self._engine.set_states(loaded.states)
        self._engine.index, self._scale = loaded.step, loaded.scale
        self.seed = self._engine.seed = loaded.seed

    def close(self, at_once: bool = False) -> None:
        """Stop communicating: end the threads, then destroy the process groups. A second call does nothing.

        Args:
            at_once: do not wait for a step that is under way, as after an interrupt. A thread that is stuck in it ends
                at `deadline_s`, or with the process.
        """
        if self._finalizer.detach() is not None:
            _handles.discard(self)
            _let_go(self.lane, self._transport, at_once)

    def __enter__(self) -> "Handle":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self.lane.failures.leave_word(error)
        self.close(at_once=error is not None and not isinstance(error, Exception))


_ATTACHING = " in gradwire.attach"

_handles: "weakref.WeakSet[Handle]" = weakref.WeakSet()


def _let_go(lane: Lane, transport: GroupTransport, at_once: bool) -> None:
    """End the threads of a lane, the last of which destroys the groups."""
    lane.close(functools.partial(_destroy, lane, transport), INTERRUPTED_S if at_once else lane.deadline_s + 10.0)


def _destroy(lane: Lane, transport: GroupTransport) -> None:
    transport.close()
    destroy(lane.group)
    del lane.group


@atexit.register
def _close_all() -> None:
    """Join communication threads before the interpreter takes their process groups apart."""
    for handle in list(_handles):
        handle.lane.close()


def _described(planned: Plan) -> str:
    """What must be the same on all ranks of a plan: of the device only its kind, since ranks of a host have several."""
    grains = [unit.grain for unit in planned.units]
    return repr(
        [(g.segments, g.shape, g.dtype, g.device.type, u.reducer) for g, u in zip(grains, planned.units, strict=True)]
    )


def _places(units: Any) -> dict[str, list[tuple[int, int, int, int]]]:
    """Where each parameter lives: (unit, start in the parameter, elements, offset in the grain)."""
    places: dict[str, list[tuple[int, int, int, int]]] = {}
    for i, unit in enumerate(units):
        for name, start, numel, offset in unit.grain.segments:
            places.setdefault(name, []).append((i, start, numel, offset))
    return places
