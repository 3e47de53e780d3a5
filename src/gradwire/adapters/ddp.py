"""`attach`: any reducer as the communication of a `DistributedDataParallel` model.

DDP's buckets only deliver gradients; grains, their order and their state belong to the engine. On a CPU one
communication thread drives the engine while `backward()` runs; on a GPU the hook drives it inline on a side stream.
"""

import atexit
import dataclasses
import hashlib
import time
import warnings
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import GradBucket  # pyright: ignore[reportPrivateImportUsage]
from torch.nn.parallel import DistributedDataParallel

from gradwire.adapters.communication import BucketSession, Lane, queue_callback
from gradwire.codecs.base import SUPPORTED_DTYPES
from gradwire.core import saved
from gradwire.core.errors import AttachError, StateError
from gradwire.core.state import walk
from gradwire.drivers.cost import parameter_specs
from gradwire.drivers.measure import measured
from gradwire.drivers.plan import Plan, plan
from gradwire.drivers.process_group import Engine, GroupTransport, Stats
from gradwire.reducers.base import Reducer, as_reducer
from gradwire.spec import parse

# `register_comm_hook` reads the annotations of the hook, so this module must not postpone them.

DEADLINE_S = 300.0
_WRAPPERS = ("module.", "_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")


def attach(
    ddp: DistributedDataParallel,
    reducer: Reducer | str,
    *,
    seed: int = 0,
    deadline_s: float = DEADLINE_S,
    grain_numel: int | None = None,
    scaler: torch.amp.GradScaler | None = None,
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

    Returns:
        A handle with statistics, state and `close`.

    Raises:
        AttachError: a model that cannot be served, with the reason.
        SpecError, CompositionError: a method that cannot be built.

    Example:
        handle = gradwire.attach(ddp, "int4")
    """
    reducer = parse(reducer) if isinstance(reducer, str) else as_reducer(reducer)
    _check(ddp)
    reducer.require_ranks(dist.get_world_size(ddp.process_group))
    return Handle(ddp, reducer, seed, deadline_s, grain_numel, scaler)


def canonical_name(name: str) -> str:
    """Return a parameter's name without what wrappers put into it.

    >>> canonical_name("module._orig_mod.layer.weight")
    'layer.weight'
    """
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def _check(ddp: DistributedDataParallel) -> None:
    """Refuse what cannot be served, saying why."""
    if not isinstance(ddp, DistributedDataParallel):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise AttachError(f"attach wants a DistributedDataParallel model, got {type(ddp).__name__}; wrap it first")
    if getattr(ddp, "_comm_hooks", None):
        raise AttachError("this model has a communication hook already; DDP takes one, so attach to a new DDP")
    if getattr(ddp, "mixed_precision", None) is not None:
        raise AttachError("DDP's own mixed_precision casts gradients behind the hook; use torch.autocast instead")
    if getattr(ddp, "_use_python_reducer", False):
        raise AttachError("the python_reducer of compiled DDP calls no hooks; compile the module inside DDP instead")
    for name, module in ddp.module.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise AttachError(f"{name!r} makes sparse gradients, which hooks do not see; set sparse=False")
    for name, parameter in ddp.module.named_parameters():
        if parameter.requires_grad and parameter.dtype not in SUPPORTED_DTYPES:
            names = ", ".join(str(d).removeprefix("torch.") for d in SUPPORTED_DTYPES)
            raise AttachError(f"parameter {name!r} has dtype {parameter.dtype}; supported are {names}")
        if parameter.device.type not in ("cpu", "cuda"):
            raise AttachError(f"parameter {name!r} is on {parameter.device}; supported devices are cpu and cuda")


_REMEDIES = {
    "version": "; is it what `Handle.state_dict` returned?",
    "reducer": "; attach with the spec it was saved with, or begin without it",
    "rank": "; each rank loads what the same rank saved",
    "world_size": "; pass all ranks' states to gradwire.reshard",
}
"""What to do about a saved state of another run, by what differs."""


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
    ) -> None:
        assert ddp.process_group is not None, "DDP over a device mesh has no group of its own yet"
        names = _trained(ddp)
        self._device = next(iter(names)).device if names else torch.device("cpu")
        super().__init__(Lane(ddp.process_group, self._device, deadline_s))
        self.reducer = reducer
        self.seed = seed
        self._scaler, self._scale = scaler, 1.0
        self._names = names
        specs, transport = parameter_specs((name, p) for p, name in names.items()), GroupTransport(self.lane.group)
        # Of the device only the kind: ranks of one host have different ones.
        self._agree_on(f"{reducer!r} seed={seed} {_described(plan(specs, reducer, grain_numel))}")
        for glob in reducer.unmet(names.values()):
            said = f"no trained parameter has a name like {glob!r}: that rule of the policy serves none"
            warnings.warn(said, stacklevel=3)
        transport.prepare(reducer.axes(transport.world_size))
        planned = plan(specs, measured(reducer, transport, self._device), grain_numel)
        self._engine = Engine(planned, transport, seed)
        by_name = _places(planned.units)
        self._places = {parameter: by_name[name] for parameter, name in names.items()}
        self._last_bucket_s = 0.0
        self._closed = False
        self._finds_unused = bool(getattr(ddp, "find_unused_parameters", False))
        self._ddp = weakref.ref(ddp)  # which holds this handle as its hook
        ddp.register_comm_hook(None, self._hook)
        _handles.add(self)

    def __repr__(self) -> str:
        return f"Handle({self.reducer!r}, grains={len(self._engine.plan.units)}, step={self._engine.index})"

    def _agree_on(self, configuration: str) -> None:
        """Refuse a method or a model that differs between ranks: it would hang later."""
        digest = int.from_bytes(hashlib.blake2b(configuration.encode(), digest_size=7).digest(), "little")
        mine = torch.tensor([digest, -digest], device=self._device)
        dist.all_reduce(mine, dist.ReduceOp.MAX, group=self.lane.group)
        if int(mine[0]) != -int(mine[1]):
            self.lane.close()
            raise AttachError(
                f"ranks disagree on the method, the seed or the parameters; this one has {self.reducer!r} and "
                f"seed {self.seed}"
            )

    def _hook(self, state: Any, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """DDP's communication hook: hand the bucket over and return at once."""
        if self._closed:
            raise AttachError("this handle is closed, and DDP cannot forget a hook: make a new DDP")
        if not self._step.buckets and (growth := self._growth_of_scale()) != 1.0:
            self.lane.driver.run(lambda: self._engine.rescale(growth))
        if bucket.is_last():
            self._last_bucket_s = time.perf_counter()
        return self.hook(bucket)

    def _growth_of_scale(self) -> float:
        """By what the loss scale has grown since the last step; a scale of powers of two makes this exact."""
        scaler = self._scaler if self._scaler is not None and self._scaler.is_enabled() else None
        before, self._scale = self._scale, float(scaler.get_scale()) if scaler else 1.0
        return self._scale / before

    def work(self, buckets: Sequence[GradBucket], last: bool) -> None:
        """Deliver the newest bucket's gradients; after the last, write the means into all buckets."""
        if len(buckets) == 1:
            self._engine.begin()
        for piece, unit, offset in self._pieces(buckets[-1]):
            self._engine.deliver(unit, offset, piece)
        self._engine.pump()
        if last:
            self._engine.finish()
            for bucket in buckets:
                for piece, unit, offset in self._pieces(bucket):
                    piece.copy_(self._engine.mean(unit)[offset : offset + piece.numel()])
            self._engine.release()
            self._engine.stats.exposed_s += time.perf_counter() - self._last_bucket_s

    def _pieces(self, bucket: GradBucket) -> Iterator[tuple[Tensor, int, int]]:
        """Cut a bucket into (view, unit, offset in the unit)."""
        flat, at = bucket.buffer(), 0
        for parameter in bucket.parameters():
            for unit, start, size, offset in self._places[parameter]:
                yield flat[at + start : at + start + size], unit, offset
            at += parameter.numel()

    def after_backward(self) -> None:
        """Before DDP writes gradients: look again once it has, where it may keep some of them back."""
        if self._finds_unused:
            queue_callback(self._take_back_unused)

    def _take_back_unused(self) -> None:
        """Where no rank used a parameter DDP leaves its gradient as it was: the mean was dropped and is owed still."""
        if unused := self._unused():
            self._engine.take_back(unused)

    def _unused(self) -> set[str]:
        """Parameters that no rank used in this step, by DDP's own count of ranks that did.

        It stands in the order in which DDP was given its parameters. A static graph counts once, in its first step;
        there a gradient that is None tells.
        """
        ddp = self._ddp()
        used = None if ddp is None or ddp.static_graph else ddp.reducer._get_local_used_map()  # pyright: ignore[reportPrivateUsage]
        if used is None or used.numel() != len(self._names):
            return {name for p, name in self._names.items() if p.grad is None}
        return {name for name, ranks in zip(self._names.values(), used.tolist(), strict=True) if not ranks}

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
        """
        return {
            "version": saved.VERSION,
            "reducer": repr(self.reducer),
            "step": self._engine.index,
            "seed": self.seed,
            "rank": self._engine.transport.rank,
            "world_size": self._engine.transport.world_size,
            "scale": self._scale,
            "parameters": saved.save(self._engine.states(), self._engine.transport.rank),
        }

    def load_state_dict(self, state: saved.Saved) -> None:
        """Take up a saved state.

        Raises:
            StateError: a state of another version, method, rank, world size or model; nothing is changed then.
        """
        here = {
            "version": saved.VERSION,
            "reducer": repr(self.reducer),
            "rank": self._engine.transport.rank,
            "world_size": self._engine.transport.world_size,
        }
        for key, value in here.items():
            if state.get(key) != value:
                hint = _REMEDIES.get(key, "")
                raise StateError(f"the saved state has {key} {state.get(key)!r}, this run {value!r}{hint}")
        rank = self._engine.transport.rank
        states = [saved.load(grain, old, state["parameters"], rank) for grain, old in self._engine.states()]
        self._engine.set_states(states)
        self._engine.index = int(state["step"])
        self._scale = float(state["scale"])
        self.seed = self._engine.seed = int(state["seed"])

    def close(self) -> None:
        """Stop communicating: join the thread, then destroy the process group. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        _handles.discard(self)
        joined = self.lane.driver.close(timeout_s=5.0 if self.lane.poison else self.lane.deadline_s + 10.0)
        # A group that a stuck thread still uses must not be torn down under it: that aborts the process.
        if joined and dist.is_initialized():
            self._engine.transport.close()
            dist.destroy_process_group(self.lane.group)

    def __enter__(self) -> "Handle":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


_handles: "weakref.WeakSet[Handle]" = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """Join communication threads before the interpreter takes their process groups apart."""
    for handle in list(_handles):
        handle.lane.close()


def _trained(ddp: DistributedDataParallel) -> dict[Tensor, str]:
    """Name every parameter that DDP communicates, tied weights once and without what wrappers add."""
    ignored: set[str] = set(getattr(ddp, "parameters_to_ignore", ()))
    named = ddp.module.named_parameters()
    return {p: canonical_name(name) for name, p in named if p.requires_grad and name not in ignored}


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
