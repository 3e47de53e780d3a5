"""What each rank does in the tests of accumulation: windows of uneven micro-batches beside one big batch."""

from __future__ import annotations

import contextlib
import copy
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.adapters.fsdp2.groups import forget_accumulated
from gradwire.core.errors import AccumulationWarning, CommunicationError, GradwireError
from gradwire.network.wire import WireMeter, WireReading
from gradwire.sync import LocalSGD
from gradwire.sync.optimizers import OneBitAdam

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
def weighted_ddp(model: nn.Module) -> Generator[Way]:
    """DDP with a method that asks for weights, given itself and not by its session."""
    ddp = DistributedDataParallel(model)
    with gradwire.attach(ddp, "none,weights=given"):
        yield ddp, ddp, sgd(model), {}


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
def unwrapped_itself(model: nn.Module) -> Generator[Way]:
    """The same, given itself and not by its session."""
    with gradwire.attach(model, "none"):
        yield model, model, sgd(model), {}


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
    "weights_of_model": weighted_ddp,
    "scaled": scaled_ddp,
    "unwrapped": unwrapped,
    "unwrapped_itself": unwrapped_itself,
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
    between = {"reducer": "none", "replicate": square["replicate"]}
    for name, mesh, attach, how in (
        ("fsdp2", flat, None, {}),
        ("attached", flat, {"reducer": "none", "parameters": "none"}, {}),
        ("hsdp", square, None, {}),
        ("hsdp_sharded", square, None, {"keep_sharded": True}),
        ("copies", square["shard"], between, {}),
        ("divided", flat, None, {}),
        ("divided_copies", square["shard"], between, {}),
    ):
        model = net()
        for part in shard(model, mesh):
            if name.startswith("divided"):
                part.set_gradient_divide_factor(1.0)
                part.set_force_sum_reduction_for_comms(True)
        with contextlib.nullcontext() if attach is None else gradwire.attach(model, **cast(Any, attach)) as session:
            train(model if name == "attached" else session or model, model, sgd(model), rank, even=True, **how)
        found[name] = off(model, expected)
    model = net()
    shard(model, square["shard"])
    with LocalSGD(sgd(model), model, every=1, group=square["replicate"].get_group()) as optimizer:
        train(optimizer, model, optimizer, rank, even=True, across_ranks=True)
    found["averaged copies"] = off(model, expected)
    return found


WIDTH = 512


def wide() -> nn.Linear:
    """A model whose gradients are most of what is sent, the same on all ranks."""
    torch.manual_seed(0)
    return nn.Linear(WIDTH, WIDTH)


def sent(rank: int, world_size: int) -> dict[str, tuple[int, int]]:
    """Bytes that a rank's sockets have sent in a window of 8 micro-batches, and where each of these is exchanged."""
    return {name: (wire_bytes(name, "once"), wire_bytes(name, "each")) for name in WAYS if name in EXCHANGES}


EXCHANGES = ("ddp", "attached", "unwrapped", "reduced", "averaged")


def wire_bytes(name: str, mode: str) -> int:
    """Payload bytes of one optimizer step of 8 micro-batches, whose tokens are counted too.

    It is the least of three steps after the first one, since a busy machine sends segments again.
    """
    meter, model, found = WireMeter.from_environment(), wide(), list[int]()
    with WAYS[name](model) as (trained, called, optimizer, how):
        for _ in range(4):
            before = settled(meter)
            if mode == "once":
                run_window(trained, called, **how)
                optimizer.step()
            else:
                step_each(called, optimizer, how, steps=name == "averaged")
            optimizer.zero_grad()
            found.append(settled(meter).since(before).payload_tx_bytes)
    return min(found[1:])


def settled(meter: WireMeter) -> WireReading:
    """The counters once nothing is under way, and all ranks ready to begin."""
    dist.barrier()
    time.sleep(0.1)
    reading = meter.read()
    dist.barrier()
    return reading


def run_window(trained: Any, called: nn.Module, reduce: Callable[[], None] = lambda: None, **how: Any) -> None:
    """A window of 8 micro-batches of 4 samples."""
    with gradwire.accumulate(trained, [torch.ones(4, WIDTH)] * 8, len, **how) as window:
        for x in window:
            window.loss(called(x).sum()).backward()
    reduce()


def step_each(called: nn.Module, optimizer: Any, how: dict[str, Any], steps: bool) -> None:
    """A loop that exchanges every micro-batch: gradients, or with `steps` the model after a step of each."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AccumulationWarning)
        for _ in range(8):
            called(torch.ones(4, WIDTH)).sum().backward()
            how.get("reduce", lambda: None)()
            if steps:
                optimizer.step()


def sent_by_shards(rank: int, world_size: int) -> dict[str, tuple[int, int]]:
    """The same of gradients of `fully_shard`: without the parameters, which are gathered in every pass."""
    found: dict[str, tuple[int, int]] = {}
    flat = init_device_mesh("cpu", (world_size,))
    square = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("replicate", "shard"))
    for name, mesh in (("fsdp2", flat), ("attached", flat), ("hsdp", square)):
        meter, model = WireMeter.from_environment(), wide()
        sharded = fully_shard(model, mesh=mesh)
        with gradwire.attach(model, "none") if name == "attached" else contextlib.nullcontext():
            sent = defaultdict[str, list[int]](list)
            for mode in ("once", "each", "gathered") * 4:
                before = settled(meter)
                if mode == "once":
                    run_window(model, model)
                else:
                    sharded.set_requires_gradient_sync(mode == "each")
                    step_each(model, None, {}, steps=False)
                    sharded.set_requires_gradient_sync(True)
                sent[mode].append(settled(meter).since(before).payload_tx_bytes)
                forget_accumulated(model)
                model.zero_grad()
        least = {mode: min(each[1:]) for mode, each in sent.items()}
        found[name] = least["once"] - least["gathered"], least["each"] - least["gathered"]
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
                    run_all(session, model, micro_batches(rank, 0))
                else:
                    for batch in micro_batches(rank, 0):
                        (summed(model, batch) * (world_size / total)).backward()
                session.reduce_(model)
            means.append(torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None]))
    return torch.equal(*means)


def stepped(rank: int, world_size: int) -> float:
    """An optimizer that is compression, beside one whose ranks have the gradient of the big batch: in float32."""
    found = list[Tensor]()
    for windowed in (True, False):
        model = net().float()
        with OneBitAdam(model, 1e-2, freeze_step=WINDOWS + 1, method="none") as optimizer:
            for window in range(WINDOWS):
                batches = [(x.float(), y) for x, y in micro_batches(rank, window)]
                if windowed:
                    run_all(optimizer, model, batches)
                else:
                    every = [batch for r in range(world_size) for batch in micro_batches(r, window)]
                    mean_loss(model, [(x.float(), y) for x, y in every]).backward()
                optimizer.step()
                optimizer.zero_grad()
        found.append(nn.utils.parameters_to_vector(model.parameters()).detach())
    return float((found[0] - found[1]).abs().max())


def own_tokens(rank: int, world_size: int) -> float:
    """Models that are averaged: each rank steps by the mean of its own tokens, unless it is told otherwise."""
    stepped = list[Tensor]()
    for r in range(world_size):
        other = net()
        mean_loss(other, micro_batches(r, 0)).backward()
        sgd(other).step()
        stepped.append(nn.utils.parameters_to_vector(other.parameters()).detach())
    expected, found = torch.stack(stepped).mean(0), list[float]()
    for given in ("optimizer", "averager"):
        model = net()
        with LocalSGD(sgd(model), model, every=1) as optimizer:
            run_all(optimizer if given == "optimizer" else optimizer.averaging, model, micro_batches(rank, 0))
            optimizer.step()
        found.append(float((nn.utils.parameters_to_vector(model.parameters()).detach() - expected).abs().max()))
    return max(found)


def rules(rank: int, world_size: int) -> float:
    """A median combines the means of each rank's own tokens: by how much it differs from that."""
    model, medians = net(), list[Tensor]()
    for r in range(world_size):
        other = copy.deepcopy(model)
        batches = micro_batches(r, 0)
        mean_loss(other, batches).backward()
        medians.append(torch.cat([p.grad.reshape(-1) for p in other.parameters() if p.grad is not None]))
    ddp = DistributedDataParallel(model)
    with gradwire.attach(ddp, "median"):
        run_all(ddp, ddp, micro_batches(rank, 0))
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
    run_all(ddp, ddp, micro_batches(rank, 0))
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


def refused_shards(rank: int, world_size: int) -> list[str]:
    """What is said of options that do not fit a sharded model, and of a model that ranks train each by itself."""
    model, told = net(), list[str]()
    first, *_ = shard(model, init_device_mesh("cpu", (world_size,)))
    first.set_gradient_divide_factor(8.0)
    calls: list[tuple[nn.Module, dict[str, Any]]] = [
        (model, {}),
        (model, {"keep_sharded": True}),
        (model, {"across_ranks": False}),
        (net(), {}),
    ]
    for given, how in calls:
        try:
            gradwire.accumulate(given, micro_batches(rank, 0), tokens, **how)
            told.append("nothing")
        except gradwire.AttachError as error:
            told.append(str(error))
    return told


def left_early(rank: int, world_size: int, name: str) -> tuple[str, float]:
    """Rank 1 breaks off its loop without an exception, under DDP all ranks do; and how right the next window is."""
    told, model = "", net()
    with WAYS[name](model) as (trained, called, optimizer, _):
        try:
            with gradwire.accumulate(trained, micro_batches(rank, 1, even=True), tokens) as micros:
                for batch in micros:
                    micros.loss(summed(called, batch)).backward()
                    if rank == 1 or name == "ddp":
                        break
        except gradwire.StepError as error:
            told = str(error)
        run_all(trained, called, micro_batches(rank, 0))
        optimizer.step()
    return told, off(model, big_batch(world_size, windows=1))


def run_all(trained: Any, called: nn.Module, batches: list[Batch]) -> None:
    """A whole window."""
    with gradwire.accumulate(trained, batches, tokens) as micros:
        for batch in micros:
            micros.loss(summed(called, batch)).backward()


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
        run_all(session, model, micro_batches(rank, 0))
    except CommunicationError as error:
        return type(error).__name__
    finally:
        session.close(at_once=True)
    return "nothing"
