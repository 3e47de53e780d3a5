"""What each rank does in the tests of accumulation: windows of uneven micro-batches beside one big batch."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable, Generator, Iterable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.core.errors import AccumulationWarning, CommunicationError, GradwireError
from gradwire.sync import LocalSGD

WINDOWS = 3
LR = 0.3
MASKED = -100

Batch = tuple[Tensor, Tensor]


def net() -> nn.Sequential:
    """About 700 parameters in float64, the same on all ranks."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 24), nn.Tanh(), nn.Linear(24, 20), nn.Tanh(), nn.Linear(20, 3)).double()


def micro_batches(rank: int, window: int, even: bool = False) -> list[Batch]:
    """Micro-batches of 1 to 6 sequences with masked tokens; their number depends on the rank, unless `even`."""
    generator = torch.Generator().manual_seed(100 * window + rank)
    made: list[Batch] = []
    for at in range(4 if even else 2 + (rank + window) % 3):
        x = torch.randn(1 + (at + rank) % 6, 7, 5, generator=generator, dtype=torch.float64)
        y = torch.randint(3, x.shape[:2], generator=generator)
        y[torch.rand(y.shape, generator=generator) < 0.1 + 0.2 * rank] = MASKED
        if at == 1 and rank == 0:
            y[:] = MASKED  # a micro-batch without a token, whose mean would be NaN
        made.append((x, y))
    return made


def tokens(batch: Batch) -> int:
    """Those that are not masked."""
    return int((batch[1] != MASKED).sum())


def summed(model: nn.Module, batch: Batch) -> Tensor:
    """The sum of token losses."""
    logits = model(batch[0]).flatten(0, -2)
    return nn.functional.cross_entropy(logits, batch[1].flatten(), reduction="sum", ignore_index=MASKED)


def mean_loss(model: nn.Module, batches: Iterable[Batch]) -> Tensor:
    """The mean over all tokens of one big batch."""
    x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
    return nn.functional.cross_entropy(model(x).flatten(0, -2), y.flatten(), ignore_index=MASKED)


def big_batch(world_size: int, even: bool = False, windows: int = WINDOWS) -> list[Tensor]:
    """The parameters after steps of SGD by the mean over all tokens of all ranks."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), LR)
    for window in range(windows):
        batches = [batch for rank in range(world_size) for batch in micro_batches(rank, window, even)]
        optimizer.zero_grad()
        mean_loss(model, batches).backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


def train(trained: Any, model: nn.Module, optimizer: Any, rank: int, even: bool = False, **how: Any) -> None:
    """Windows of micro-batches; `reduce` is called after each, and `scaler` scales."""
    reduce: Callable[[], None] = how.pop("reduce", lambda: None)
    scaler: torch.amp.GradScaler = how.pop("scaler", torch.amp.GradScaler("cpu", enabled=False))
    for window in range(WINDOWS):
        with gradwire.accumulate(trained, micro_batches(rank, window, even), tokens, **how) as micros:
            for batch in micros:
                scaler.scale(micros.loss(summed(model, batch))).backward()
        reduce()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def off(model: nn.Module, expected: list[Tensor]) -> float:
    """The largest difference of a parameter."""
    whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in cast(Any, model).parameters()]
    return max(float((a.detach() - b).abs().max()) for a, b in zip(whole, expected, strict=True))


def sgd(model: nn.Module) -> torch.optim.SGD:
    """Plain SGD."""
    return torch.optim.SGD(model.parameters(), LR)


def equal_to_big_batch(rank: int, world_size: int) -> dict[str, float]:
    """By how much each way to train differs from the big batch."""
    expected, found = big_batch(world_size), dict[str, float]()
    for name, make in WAYS.items():
        model = net()
        with make(model) as (trained, called, optimizer, how):
            train(trained, called, optimizer, rank, **how)
        found[name] = off(model, expected)
    return found


Way = tuple[Any, nn.Module, Any, dict[str, Any]]


@contextlib.contextmanager
def plain_ddp(model: nn.Module, **options: Any) -> Generator[Way]:
    """DDP that nobody has attached to."""
    ddp = DistributedDataParallel(model, **options)
    yield ddp, ddp, sgd(model), {}


@contextlib.contextmanager
def attached_ddp(model: nn.Module, method: str = "none") -> Generator[Way]:
    """DDP with a method, given by its session."""
    ddp = DistributedDataParallel(model)
    with gradwire.attach(ddp, method) as session:
        yield session, ddp, sgd(model), {}


@contextlib.contextmanager
def scaled_ddp(model: nn.Module) -> Generator[Way]:
    """DDP with a method and a loss scaler, given itself."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1)
    ddp = DistributedDataParallel(model)
    with gradwire.attach(ddp, "none", scaler=scaler):
        yield ddp, ddp, sgd(model), {"scaler": scaler}


@contextlib.contextmanager
def unwrapped(model: nn.Module) -> Generator[Way]:
    """A model that nobody wraps, attached."""
    with gradwire.attach(model, "none") as session:
        yield session, model, sgd(model), {}


@contextlib.contextmanager
def reduced(model: nn.Module) -> Generator[Way]:
    """A session that the loop calls after each window."""
    with gradwire.Session(model, "none") as session:
        yield session, model, sgd(model), {"reduce": lambda: session.reduce_(model)}


@contextlib.contextmanager
def averaged(model: nn.Module) -> Generator[Way]:
    """Models that are averaged after every step: with SGD, the mean of gradients."""
    optimizer = LocalSGD(sgd(model), model, every=1)
    with optimizer:
        yield optimizer, model, optimizer, {"across_ranks": True}


WAYS: dict[str, Callable[[nn.Module], contextlib.AbstractContextManager[Way]]] = {
    "ddp": plain_ddp,
    "views": lambda model: plain_ddp(model, gradient_as_bucket_view=True),
    "unused": lambda model: plain_ddp(model, find_unused_parameters=True),
    "attached": attached_ddp,
    "weights": lambda model: attached_ddp(model, "none,weights=given"),
    "scaled": scaled_ddp,
    "unwrapped": unwrapped,
    "reduced": reduced,
    "averaged": averaged,
}


def delivered(rank: int, world_size: int) -> float:
    """A session that gets gradients one by one in the last backward pass."""
    model, expected = net(), big_batch(world_size)
    optimizer = sgd(model)
    names = {parameter: name for name, parameter in model.named_parameters()}
    with gradwire.Session(model, "none") as session:
        step: Any = None

        def deliver(parameter: Tensor) -> None:
            assert isinstance(parameter, nn.Parameter)
            if step is not None:
                step.deliver(names[parameter], parameter.grad)

        for parameter in names:
            parameter.register_post_accumulate_grad_hook(deliver)
        for window in range(WINDOWS):
            with gradwire.accumulate(session, micro_batches(rank, window), tokens) as micros:
                for batch in micros:
                    loss = micros.loss(summed(model, batch))
                    with session.step() if micros.is_last else contextlib.nullcontext() as step:
                        loss.backward()
                    step = None
            optimizer.step()
            optimizer.zero_grad()
    return off(model, expected)


def shard(model: nn.Sequential, mesh: DeviceMesh) -> list[FSDPModule]:
    """Shard each layer of a model, and then what is left."""
    return [fully_shard(part, mesh=mesh) for part in (model[0], model[2], model[4], model)]


def sharded(rank: int, world_size: int) -> dict[str, float]:
    """Models of `fully_shard`, with and without a method, and of two dimensions."""
    expected, found = big_batch(world_size, even=True), dict[str, float]()
    flat = init_device_mesh("cpu", (world_size,))
    square = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("replicate", "shard"))
    for name, mesh, attach, how in (
        ("fsdp2", flat, None, {}),
        ("attached", flat, {"reducer": "none", "parameters": "none"}, {}),
        ("hsdp", square, None, {}),
        ("hsdp_sharded", square, None, {"keep_sharded": True}),
        ("copies", square["shard"], {"reducer": "none", "replicate": square["replicate"]}, {}),
        ("divided", flat, None, {}),
    ):
        model = net()
        for part in shard(model, mesh):
            if name == "divided":
                part.set_gradient_divide_factor(1.0)
                part.set_force_sum_reduction_for_comms(True)
        session = None if attach is None else gradwire.attach(model, **cast(Any, attach))
        train(session or model, model, sgd(model), rank, even=True, **how)
        found[name] = off(model, expected)
        if session is not None:
            session.close()
    return found


def sent(rank: int, world_size: int) -> dict[str, tuple[int, int]]:
    """Bytes that a rank sends in a step of 8 micro-batches, as one exchange and as eight, and of how many."""
    found: dict[str, tuple[int, int]] = {}
    for name in ("attached", "unwrapped"):
        for once in (True, False):
            model = net()
            with WAYS[name](model) as (session, called, optimizer, _):
                batches = micro_batches(rank, 0, even=True) * 2
                for _step in range(2):
                    if once:
                        with gradwire.accumulate(session, batches, tokens) as micros:
                            for batch in micros:
                                micros.loss(summed(called, batch)).backward()
                    else:
                        with warnings.catch_warnings():
                            warnings.simplefilter("ignore", AccumulationWarning)
                            for batch in batches:
                                summed(called, batch).backward()
                    optimizer.step()
                    optimizer.zero_grad()
                stats = session.stats()
                found[f"{name}/{'once' if once else 'each'}"] = stats.wire_bytes, stats.steps
    return found


def compressed(rank: int, world_size: int) -> bool:
    """Whether a window gives the optimizer the bits that the same method makes of whole gradients."""
    means = list[Tensor]()
    for windowed in (True, False):
        model = net()
        with gradwire.Session(model, "topk:0.2+int8") as session:
            total = sum(tokens(batch) for r in range(world_size) for batch in micro_batches(r, 0))
            for _ in range(3):
                model.zero_grad()
                if windowed:
                    with gradwire.accumulate(session, micro_batches(rank, 0), tokens) as micros:
                        for batch in micros:
                            micros.loss(summed(model, batch)).backward()
                else:
                    for batch in micro_batches(rank, 0):
                        (summed(model, batch) * (world_size / total)).backward()
                session.reduce_(model)
            means.append(torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None]))
    return torch.equal(*means)


def rules(rank: int, world_size: int) -> float:
    """A median combines the means of each rank's own tokens: by how much it differs from that."""
    model, medians = net(), list[Tensor]()
    for r in range(world_size):
        other = copy.deepcopy(model)
        batches = micro_batches(r, 0)
        mean_loss(other, batches).backward()
        medians.append(torch.cat([p.grad.reshape(-1) for p in other.parameters() if p.grad is not None]))
    with gradwire.Session(model, "median") as session:
        with gradwire.accumulate(session, micro_batches(rank, 0), tokens) as micros:
            for batch in micros:
                micros.loss(summed(model, batch)).backward()
        session.reduce_(model)
    found = torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])
    return float((found - torch.stack(medians).quantile(0.5, dim=0)).abs().max())


def raising(rank: int, world_size: int, name: str, at: int) -> dict[str, Any]:
    """The last rank raises in the second of four windows; all go on with the next one, beside a run without it."""
    told: str = ""
    expected = net()
    reference = sgd(expected)
    for window in (0, 2, 3):
        batches = [batch for r in range(world_size) for batch in micro_batches(r, window)]
        reference.zero_grad()
        mean_loss(expected, batches).backward()
        reference.step()
    model = net()
    with WAYS[name](model) as (trained, called, optimizer, how):
        for window in range(4):
            try:
                with gradwire.accumulate(trained, micro_batches(rank, window), tokens) as micros:
                    for number, batch in enumerate(micros):
                        if window == 1 and rank == world_size - 1 and number == at % len(micros):
                            raise ValueError("no batch today")
                        micros.loss(summed(called, batch)).backward()
            except (ValueError, gradwire.StepError) as error:
                told = f"{type(error).__name__}: {error}"
                assert all(p.grad is None for p in model.parameters())
                continue
            how.get("reduce", lambda: None)()
            optimizer.step()
            optimizer.zero_grad()
    return {"told": told, "off": off(model, [p.detach() for p in expected.parameters()])}


def uncaught(rank: int, world_size: int, name: str, at: int) -> None:
    """The last rank raises in a window and nobody catches it."""
    with WAYS[name](net()) as (trained, called, optimizer, _):
        with gradwire.accumulate(trained, micro_batches(rank, 0), tokens) as micros:
            for number, batch in enumerate(micros):
                if rank == world_size - 1 and number == at % len(micros):
                    raise ValueError("no batch today")
                micros.loss(summed(called, batch)).backward()
        optimizer.step()


def sharded_raising(rank: int, world_size: int) -> dict[str, Any]:
    """All ranks of a sharded model raise in the second window: what had added up is not in the next one."""
    found: dict[str, Any] = {}
    square = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("replicate", "shard"))
    expected = net()
    reference = sgd(expected)
    for window in (0, 2):
        batches = [batch for r in range(world_size) for batch in micro_batches(r, window, even=True)]
        reference.zero_grad()
        mean_loss(expected, batches).backward()
        reference.step()
    for keeps in (False, True):
        model = net()
        shard(model, square)
        optimizer = sgd(model)
        for window in range(3):
            with contextlib.suppress(ValueError):
                batches = micro_batches(rank, window, even=True)
                with gradwire.accumulate(model, batches, tokens, keep_sharded=keeps) as micros:
                    for number, batch in enumerate(micros):
                        if window == 1 and number == 2:
                            raise ValueError("no batch today")
                        micros.loss(summed(model, batch)).backward()
                optimizer.step()
            optimizer.zero_grad()
        found[f"keeps={keeps}"] = off(model, [p.detach() for p in expected.parameters()])
    return found


def wrong(rank: int, world_size: int) -> dict[str, str]:
    """What each rank raises where one of them brings something wrong, and that a window after each is right."""
    told: dict[str, str] = {}
    model = net()
    ddp = DistributedDataParallel(model)
    some = micro_batches(rank, 0)
    none_masked: list[Batch] = [(x, torch.full_like(y, MASKED)) for x, y in some]
    odd = rank == 1

    def failing(batch: Batch) -> int:
        if odd:
            raise KeyError("labels")
        return tokens(batch)

    for name, batches, count in (
        ("empty", [] if odd else some, tokens),
        ("no token", none_masked, tokens),
        ("negative", some, [-1.0 if odd else 1.0] * len(some)),
        ("raises", some, failing),
        ("too few", some, [1.0] * (len(some) - int(odd))),
    ):
        try:
            with gradwire.accumulate(ddp, batches, cast(Any, count)) as micros:
                for batch in micros:
                    micros.loss(summed(ddp, batch)).backward()
            told[name] = "nothing"
        except (KeyError, GradwireError) as error:
            told[name] = f"{type(error).__name__}: {error}"
    with gradwire.accumulate(ddp, micro_batches(rank, 0), tokens) as micros:
        for batch in micros:
            micros.loss(summed(ddp, batch)).backward()
    sgd(model).step()
    told["off"] = str(off(model, big_batch(world_size, windows=1)))
    return told


def uneven_shards(rank: int, world_size: int) -> str:
    """Ranks with different numbers of micro-batches are refused before a pass begins."""
    model = net()
    fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
    try:
        with gradwire.accumulate(model, micro_batches(rank, 0)[: 1 + rank], tokens):
            return "nothing"
    except gradwire.StepError as error:
        return str(error)


def left_early(rank: int, world_size: int) -> tuple[str, str]:
    """One rank breaks off its loop without an exception."""
    ddp, told = DistributedDataParallel(net()), ""
    try:
        with gradwire.accumulate(ddp, micro_batches(rank, 0, even=True), tokens) as micros:
            for batch in micros:
                micros.loss(summed(ddp, batch)).backward()
                if rank == 1:
                    break
    except gradwire.StepError as error:
        told = str(error)
    return told, str(ddp.require_backward_grad_sync)


def repeated(rank: int, world_size: int, name: str) -> list[str]:
    """The warnings of three steps of 4 micro-batches each, every one of which is exchanged."""
    model = net()
    if name == "fsdp2":
        fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
        session = gradwire.attach(model, "none")
        way: Any = contextlib.nullcontext((session, model, sgd(model), {}))
    else:
        way = WAYS[name](model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with way as (session, called, optimizer, how):
            for _ in range(3):
                for batch in micro_batches(rank, 0, even=True):
                    summed(called, batch).backward()
                    how.get("reduce", lambda: None)()
                optimizer.step()
                optimizer.zero_grad()
            session.close()
    return [str(w.message) for w in caught if issubclass(w.category, AccumulationWarning)]


def not_repeated(rank: int, world_size: int, name: str, to_none: bool) -> int:
    """How many warnings there are where each step has one exchange, whoever makes the step."""
    model = net()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with WAYS[name](model) as (_, called, optimizer, how):
            for step in range(6):
                summed(called, micro_batches(rank, step)[0]).backward()
                how.get("reduce", lambda: None)()
                if step % 3 != 2:
                    optimizer.step()
                else:
                    for parameter in model.parameters():
                        parameter.data.add_(parameter.grad, alpha=-0.01)  # pyright: ignore[reportArgumentType]
                optimizer.zero_grad(set_to_none=to_none)
    return sum(issubclass(w.category, AccumulationWarning) for w in caught)


def dead(rank: int, world_size: int) -> str:
    """A rank ends in its first window: the others hear of it, and nobody hangs."""
    model = net()
    session = gradwire.attach(DistributedDataParallel(model), "none", deadline_s=6.0)
    if rank == 1:
        session.lane.failures.leave_word(RuntimeError("out of memory"))
        session.close(at_once=True)
        return "gone"
    try:
        with gradwire.accumulate(session, micro_batches(rank, 0), tokens) as micros:
            for batch in micros:
                micros.loss(summed(model, batch)).backward()
    except CommunicationError as error:
        return type(error).__name__
    finally:
        session.close(at_once=True)
    return "nothing"
