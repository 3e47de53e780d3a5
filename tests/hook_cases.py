"""What each rank does in the tests of `gradwire.hooks`: short trainings with our hooks and with PyTorch's."""

import hashlib
import io
import math
import pickle
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import debugging_hooks, default_hooks
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as theirs_power
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire import hooks as ours
from gradwire.core.grain import Grain
from gradwire.core.state import State, walk
from gradwire.reducers import AllReduceExchange, Program, Step

STEPS = 20
MANY = 0.004  # megabytes: a bucket for about every layer

Registration = tuple[object, Callable[..., Any]]


def net() -> nn.Sequential:
    """About 9,000 parameters: two convolutions, two linear layers."""
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(256, 24), nn.ReLU(), nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 4)),
    )


def batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
    """A batch that depends on rank and step alone."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(8, 1, 8, 8, generator=generator)
    return x, x.flatten(1)[:, :4].argmax(1)


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def digest(model: nn.Module) -> str:
    return hashlib.sha256(flat(model).numpy().tobytes()).hexdigest()


def wrap(
    model: nn.Module, registration: Registration, **options: Any
) -> tuple[DistributedDataParallel, torch.optim.Optimizer]:
    ddp = DistributedDataParallel(model, **options)
    ddp.register_comm_hook(*registration)
    return ddp, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def train(ddp: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: Iterable[int]) -> None:
    for step in steps:
        x, y = batch(rank, step)
        optimizer.zero_grad()
        nn.functional.cross_entropy(ddp(x), y).backward()
        optimizer.step()


def trained(rank: int, registration: Registration, perturbed: bool = False, **options: Any) -> nn.Module:
    """The net after `STEPS` steps; `perturbed` starts it two units in the last place away."""
    model = net()
    if perturbed:
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(1 + 2.0**-22 * torch.randn(p.shape, generator=generator).sign())
    ddp, optimizer = wrap(model, registration, **options)
    train(ddp, optimizer, rank, range(STEPS))
    return model


def power_pair(**options: Any) -> tuple[Registration, Registration]:
    mine = (ours.PowerSGDState(None, **options), ours.powerSGD_hook)
    return mine, (theirs_power.PowerSGDState(None, **options), theirs_power.powerSGD_hook)


def pairs() -> dict[str, Callable[[], tuple[Registration, Registration]]]:
    """Ours and theirs, made anew at each call, since states remember."""
    fp16_theirs = default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook)
    return {
        "allreduce": lambda: ((None, ours.allreduce_hook), (None, default_hooks.allreduce_hook)),
        "fp16": lambda: ((None, ours.fp16_compress_hook), (None, default_hooks.fp16_compress_hook)),
        "noop": lambda: ((None, ours.noop_hook), (None, debugging_hooks.noop_hook)),
        "fp16 wrapper": lambda: ((None, ours.fp16_compress_wrapper(ours.allreduce_hook)), (None, fp16_theirs)),
        "fp16 wrapper around PyTorch's": lambda: (
            (None, ours.fp16_compress_wrapper(default_hooks.allreduce_hook)),
            (None, fp16_theirs),
        ),
        "power": lambda: power_pair(start_powerSGD_iter=2),
        "power late": lambda: power_pair(start_powerSGD_iter=10),
        "power rank 3": lambda: power_pair(start_powerSGD_iter=2, matrix_approximation_rank=3),
        "power without feedback": lambda: power_pair(start_powerSGD_iter=2, use_error_feedback=False),
        "power without warm start": lambda: power_pair(start_powerSGD_iter=2, warm_start=False, random_seed=7),
        "power batched draws": lambda: power_pair(
            start_powerSGD_iter=2, batch_tensors_with_same_shape=True, warm_start=False, min_compression_rate=0.5
        ),
    }


def compare(rank: int, world_size: int) -> dict[str, dict[str, Any]]:
    """For every pair: how far we end from PyTorch, and how far PyTorch ends from itself after rounding at the start."""
    found: dict[str, dict[str, Any]] = {}
    for name, make in pairs().items():
        mine, theirs = make()
        a, b = trained(rank, mine), trained(rank, theirs)
        c = trained(rank, make()[1], perturbed=True)
        found[name] = {
            "distance": float((flat(a) - flat(b)).norm()),
            "yardstick": float((flat(c) - flat(b)).norm()),
            "digest": digest(a),
            "moved": float((flat(a) - flat(net())).norm()),
        }
        if isinstance(mine[0], ours.PowerSGDState):
            assert isinstance(theirs[0], theirs_power.PowerSGDState)
            found[name]["stats"] = [mine[0].compression_stats(), theirs[0].compression_stats()]
    return found


def several_buckets(rank: int, world_size: int) -> dict[str, dict[str, Any]]:
    """Every hook over many buckets, where most of PyTorch's do not work on Gloo."""
    power = ours.PowerSGDState
    make: dict[str, Callable[[], Registration]] = {
        "allreduce": lambda: (None, ours.allreduce_hook),
        "fp16": lambda: (None, ours.fp16_compress_hook),
        "bf16": lambda: (None, ours.bf16_compress_hook),
        "bf16 wrapper": lambda: (None, ours.bf16_compress_wrapper(ours.allreduce_hook)),
        "per tensor": lambda: (None, ours.quantization_pertensor_hook),
        "per channel": lambda: (None, ours.quantization_perchannel_hook),
        "power 0": lambda: (power(None, start_powerSGD_iter=0), ours.powerSGD_hook),
        "power 1": lambda: (power(None, start_powerSGD_iter=1), ours.powerSGD_hook),
        "power 2": lambda: (power(None, 2, start_powerSGD_iter=2), ours.powerSGD_hook),
        "batched": lambda: (power(None, start_powerSGD_iter=2), ours.batched_powerSGD_hook),
        "fp16 power": lambda: (
            power(None, 2, start_powerSGD_iter=2),
            ours.fp16_compress_wrapper(ours.powerSGD_hook),
        ),
        "bf16 power": lambda: (
            power(None, start_powerSGD_iter=0),
            ours.bf16_compress_wrapper(ours.powerSGD_hook),
        ),
    }
    reference = flat(trained(rank, (None, default_hooks.allreduce_hook)))
    start = flat(net())
    found: dict[str, dict[str, Any]] = {}
    for name, registration in make.items():
        state, hook = registration()
        model = trained(rank, (state, hook), bucket_cap_mb=MANY)
        error = (flat(model) - reference).norm() / (reference - start).norm()
        found[name] = {"digest": digest(model), "error": float(error)}
        if isinstance(state, power):
            found[name]["payload"] = state.stats().payload_bytes
            found[name]["dense"] = state.stats().dense_bytes
    return found


def same_in_one_bucket_or_many(rank: int, world_size: int) -> dict[str, Any]:
    """PowerSGD depends on the buckets only in the order in which factors are drawn."""
    one = ours.PowerSGDState(None, 2, start_powerSGD_iter=0, warm_start=False)
    a = trained(rank, (one, ours.powerSGD_hook))
    many = ours.PowerSGDState(None, 2, start_powerSGD_iter=0, warm_start=False)
    many.draw_order = one.draw_order
    b = trained(rank, (many, ours.powerSGD_hook), bucket_cap_mb=MANY)
    return {"equal": bool(torch.equal(flat(a), flat(b))), "distance": float((flat(a) - flat(b)).norm())}


def infinite_step(rank: int, world_size: int) -> dict[str, Any]:
    """One infinity on one rank: all skip the step, and go on with what they owed before."""
    state = ours.PowerSGDState(None, start_powerSGD_iter=0)
    ddp, optimizer = wrap(net(), (state, ours.powerSGD_hook), bucket_cap_mb=MANY)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    kept: list[bool] = []
    for step in range(STEPS):
        x, y = batch(rank, step)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(ddp(x), y)
        if step == 5 and rank == 1:
            loss = loss * math.inf
        scaler.scale(loss).backward()
        before = flat(ddp)
        scaler.step(optimizer)
        scaler.update()
        kept.append(not torch.equal(before, flat(ddp)))
    finite = bool(flat(ddp).isfinite().all())
    return {"kept": kept, "finite": finite, "bad_steps": state.stats().bad_steps, "digest": digest(ddp)}


class Gated(nn.Module):
    """Two layers, one of which can be cut off by a zero, or left out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one = nn.Linear(16, 24)
        self.two = nn.Linear(24, 24)
        self.out = nn.Linear(24, 4)
        self.gate: float | None = 1.0

    def forward(self, x: Tensor) -> Tensor:
        h = self.one(x).relu()
        if self.gate is not None:
            h = h + self.gate * self.two(h)
        return self.out(h)


def gated_run(rank: int, gates: Sequence[float | None], hook: Registration, **options: Any) -> tuple[Gated, list[bool]]:
    """Train with a gate for each step; return whether layer `two` moved in it."""
    model = Gated()
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.002, **options)
    ddp.register_comm_hook(*hook)
    moved: list[bool] = []
    for step, gate in enumerate(gates):
        model.gate = gate
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(100 * step + rank))
        model.zero_grad()
        nn.functional.cross_entropy(ddp(x), x[:, :4].argmax(1)).backward()
        before = model.two.weight.detach().clone()
        with torch.no_grad():
            for p in model.parameters():
                if p.grad is not None:
                    p.sub_(0.1 * p.grad)
        moved.append(not torch.equal(before, model.two.weight))
    return model, moved


def zero_layer(rank: int, world_size: int) -> dict[str, Any]:
    state = ours.PowerSGDState(None, start_powerSGD_iter=0, use_error_feedback=False)
    model, moved = gated_run(rank, [0.0] * 4 + [1.0] * 3, (state, ours.powerSGD_hook))
    return {"finite": bool(flat(model).isfinite().all()), "moved": moved, "digest": digest(model)}


def unused_layer(rank: int, world_size: int) -> dict[str, Any]:
    """Layer `two` is left out by all ranks, then by rank 0 alone."""
    state = ours.PowerSGDState(None, start_powerSGD_iter=0)
    gates = [1.0, None, None, None if rank == 0 else 1.0, 1.0]
    model, moved = gated_run(rank, gates, (state, ours.powerSGD_hook), find_unused_parameters=True)
    return {"finite": bool(flat(model).isfinite().all()), "moved": moved, "digest": digest(model)}


def conserved(rank: int, world_size: int, how: str, views: bool) -> dict[str, float]:
    """Layer `two` is left out now and then, gradients are zeroed in place: what became of all gradients.

    Parameters stay as they are, so that gradients can be taken twice: once by hand, once through DDP.
    """
    model = Gated()
    ddp = DistributedDataParallel(
        model, bucket_cap_mb=0.002, find_unused_parameters=True, gradient_as_bucket_view=views
    )
    state = ours.PowerSGDState(None, start_powerSGD_iter=0)
    if how == "hook":
        ddp.register_comm_hook(state, ours.powerSGD_hook)
    handle = gradwire.attach(ddp, "powersgd:1", deadline_s=60) if how == "attach" else None
    given, delivered = 0.0, 0.0
    for step, gate in enumerate([1.0, None, None, None if rank == 0 else 1.0, None, 1.0, None]):
        model.gate = gate
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(100 * step + rank))
        loss = nn.functional.cross_entropy(model(x), x[:, :4].argmax(1))
        local = torch.autograd.grad(loss, list(model.parameters()), materialize_grads=True)
        given += sum(float(gradient.double().sum()) for gradient in local)
        ddp.zero_grad(set_to_none=False)
        nn.functional.cross_entropy(ddp(x), x[:, :4].argmax(1)).backward()
        gradients = [p.grad for p in model.parameters()]
        delivered += sum(float(gradient.double().sum()) for gradient in gradients if gradient is not None)
    engine = handle.session.engine if handle else state._session.engine  # type: ignore[union-attr]
    leaves = [leaf for _, kept in engine.states() for _, leaf in walk(kept) if leaf.owed]
    owed = sum(float(leaf.tensor.double().sum()) for leaf in leaves)
    both = torch.tensor([given, owed], dtype=torch.float64)
    dist.all_reduce(both)
    if handle:
        handle.close()
    return {"given": float(both[0]) / world_size, "owed": float(both[1]) / world_size, "delivered": delivered}


def variants(rank: int, world_size: int) -> dict[str, str]:
    """Fingerprints under DDP's options."""
    found: dict[str, str] = {}
    for name, options in {"static": {"static_graph": True}, "views": {"gradient_as_bucket_view": True}}.items():
        for hook in ("fp16", "power"):
            state = ours.PowerSGDState(None, start_powerSGD_iter=0) if hook == "power" else None
            chosen = ours.powerSGD_hook if hook == "power" else ours.fp16_compress_hook
            found[f"{name} {hook}"] = digest(trained(rank, (state, chosen), bucket_cap_mb=MANY, **options))
    ddp, optimizer = wrap(
        net(), (ours.PowerSGDState(None, start_powerSGD_iter=0), ours.powerSGD_hook), bucket_cap_mb=MANY
    )
    for step in range(6):
        with ddp.no_sync():
            nn.functional.cross_entropy(ddp(batch(rank, step)[0]), batch(rank, step)[1]).backward()
        train(ddp, optimizer, rank, [step])
    found["no_sync"] = digest(ddp)
    return found


def two_models(rank: int, world_size: int) -> dict[str, str]:
    """Two models in one backward pass, their hooks on one process group."""
    states = [ours.PowerSGDState(None, start_powerSGD_iter=0) for _ in range(2)]
    found: dict[str, str] = {}
    for name, registrations in {
        "plain": [(None, ours.fp16_compress_hook)] * 2,
        "power": [(state, ours.powerSGD_hook) for state in states],
    }.items():
        models = [wrap(net(), r, bucket_cap_mb=MANY)[0] for r in registrations]
        optimizer = torch.optim.SGD([p for m in models for p in m.parameters()], lr=0.05)
        for step in range(6):
            x, y = batch(rank, step)
            optimizer.zero_grad()
            nn.functional.cross_entropy(models[0](x) + models[1](x.flip(0)), y).backward()
            optimizer.step()
        found.update({f"{name} {i}": digest(m) for i, m in enumerate(models)})
    return found


def resume(rank: int, world_size: int, warm_start: bool, batched: bool) -> dict[str, Any]:
    """Ten steps, then ten more: uninterrupted, from a pickle, and from a `weights_only` file."""
    hook = ours.batched_powerSGD_hook if batched else ours.powerSGD_hook
    state = ours.PowerSGDState(None, 2, start_powerSGD_iter=3, warm_start=warm_start)
    model = net()
    ddp, optimizer = wrap(model, (state, hook), bucket_cap_mb=MANY)
    train(ddp, optimizer, rank, range(10))
    pickled, file = pickle.dumps(state), io.BytesIO()
    torch.save(state.state_dict(), file)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    momentum = pickle.loads(pickle.dumps(optimizer.state_dict()))
    train(ddp, optimizer, rank, range(10, STEPS))

    by_pickle: ours.PowerSGDState = pickle.loads(pickled)
    by_file = ours.PowerSGDState(None, 2, start_powerSGD_iter=3, warm_start=warm_start)
    file.seek(0)
    by_file.load_state_dict(torch.load(file, weights_only=True))
    assert by_pickle.iter == by_file.iter == 10
    ends = [digest(model)]
    for resumed in (by_pickle, by_file):
        model = net()
        model.load_state_dict(weights)
        ddp, optimizer = wrap(model, (resumed, hook), bucket_cap_mb=MANY)
        optimizer.load_state_dict(pickle.loads(pickle.dumps(momentum)))
        train(ddp, optimizer, rank, range(10, STEPS))
        ends.append(digest(model))
    return {"ends": ends, "iter": by_pickle.iter}


def changed_settings(rank: int) -> str:
    state = ours.PowerSGDState(None, start_powerSGD_iter=0)
    ddp, optimizer = wrap(net(), (state, ours.powerSGD_hook))
    train(ddp, optimizer, rank, range(2))
    state.matrix_approximation_rank = 3
    try:
        train(ddp, optimizer, rank, range(2, 3))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def subgroup(rank: int, world_size: int) -> dict[str, str] | None:
    """Ranks 1 and 2 of three train by themselves; then all three."""
    group = dist.new_group([1, 2])
    found: dict[str, str] = {}
    if rank:
        assert isinstance(group, dist.ProcessGroup)
        states = {"allreduce": group, "power": ours.PowerSGDState(group, start_powerSGD_iter=0)}
        for name, hook in {"allreduce": ours.allreduce_hook, "power": ours.powerSGD_hook}.items():
            model = trained(rank, (states[name], hook), bucket_cap_mb=MANY, process_group=group)
            found[name] = digest(model)
    state = ours.PowerSGDState(None, start_powerSGD_iter=0)
    found["all"] = digest(trained(rank, (state, ours.powerSGD_hook), bucket_cap_mb=MANY))
    return found


class UnluckyError(ValueError):
    """Raised inside a reducer."""


class Failing(AllReduceExchange):
    """Fails on rank 1 in the third step."""

    def reduce(self, grain: Grain, x: Tensor, state: State, step: Step) -> Program:
        if step.rank == 1 and step.index == 2:
            raise UnluckyError("thirteen")
        return super().reduce(grain, x, state, step)


def failure(rank: int) -> str:
    """What the training loop sees when a program fails on one rank."""
    from gradwire.adapters import hooks

    hooks.AllReduceExchange = Failing  # type: ignore[misc]
    try:
        trained(rank, (None, ours.allreduce_hook))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def behaviours(rank: int, world_size: int) -> dict[str, Any]:
    """Everything that needs two ranks, in one pair of processes."""
    return {
        "compare": compare(rank, world_size),
        "several_buckets": several_buckets(rank, world_size),
        "one_or_many": same_in_one_bucket_or_many(rank, world_size),
        "infinite": infinite_step(rank, world_size),
        "zero": zero_layer(rank, world_size),
        "unused": unused_layer(rank, world_size),
        "conserved": {
            f"{how} {views}": conserved(rank, world_size, how, views)
            for how in ("hook", "attach")
            for views in (False, True)
        },
        "variants": variants(rank, world_size),
        "two_models": two_models(rank, world_size),
        "resume": {
            f"{warm} {batched}": resume(rank, world_size, warm, batched)
            for warm, batched in ((True, False), (False, False), (True, True))
        },
        "changed": changed_settings(rank),
        "failure": failure(rank),  # last, since it ends the communication of the process group
    }
