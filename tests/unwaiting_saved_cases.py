"""What each rank does in the tests that save and load optimizers which do not wait."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import gradwire
from gradwire import CommunicationError, StateError
from gradwire.asynchronous import (
    ASGD,
    AdaptiveDCASGD,
    AsynchronousOptimizer,
    Bounded,
    Fixed,
    HogwildOptimizer,
    Matched,
    Sending,
)
from gradwire.asynchronous.unwaiting import UnwaitingOptimizer
from gradwire.codecs import TopK
from sync_cases import flat
from unwaiting_cases import DEADLINE_S, local_step, loss_of, model, sgd


def made(network: nn.Module, staleness: int, steps: int) -> AsynchronousOptimizer:
    """One whose servers have a memory and backups, and are owed something."""
    return AsynchronousOptimizer(
        sgd(network),
        network,
        AdaptiveDCASGD(lr=1 / 3, strength=0.5, epsilon=0.0),
        pace=Bounded(staleness),
        length=Fixed(steps),
        sending=Sending(TopK(0.3), decay=0.9),
        deadline_s=DEADLINE_S,
    )


def trains(optimizer: UnwaitingOptimizer, network: nn.Module, rank: int, version: int) -> None:
    """Step until there are so many updates; the last rank is slow."""
    step = 0
    while optimizer.version < version:
        local_step(network, optimizer, step, rank)
        step += 1
        time.sleep(0.01 * (rank == dist.get_world_size() - 1))


def saves(rank: int, world_size: int, folder: str, staleness: int, steps: int) -> dict[str, Any]:
    """Save in mid-run, twice without a step between, and go on."""
    network, home = model(), Path(folder)
    with made(network, staleness, steps) as optimizer:
        trains(optimizer, network, rank, 30)
        if rank == 1:
            local_step(network, optimizer, 100, rank)  # of two: a window that has begun
        gradwire.save(home / "first", optimizer)
        first = flat(network)
        gradwire.save(home / "second", optimizer)
        version = optimizer.version
        return {"models": [first.tolist(), flat(network).tolist()], "version": version, **ends(optimizer, network)}


def loads(rank: int, world_size: int, folder: str, staleness: int, steps: int) -> dict[str, Any]:
    """Load that in new processes, save it again, and go on."""
    network, home = model(), Path(folder)
    with made(network, staleness, steps) as optimizer:
        version = gradwire.load(home / "first", optimizer)
        assert version == optimizer.version
        first = flat(network)
        gradwire.save(home / "loaded", optimizer)
        return {"models": [first.tolist(), flat(network).tolist()], "version": version, **ends(optimizer, network)}


def ends(optimizer: AsynchronousOptimizer, network: nn.Module) -> dict[str, Any]:
    trains(optimizer, network, dist.get_rank(), optimizer.version + 20)
    optimizer.finish()
    return {"end": flat(network).tolist()}


def saves_often(rank: int, world_size: int, folder: str, by: str) -> list[int]:
    """Save every few steps of one's own, or every few updates of all ranks, while a bound holds ranks of any speed."""
    network, pauses = model(), random.Random(rank)
    versions, step, save_at = list[int](), 0, 5
    options: dict[str, Any] = {"pace": Bounded(0), "length": Matched(3), "deadline_s": DEADLINE_S}
    with AsynchronousOptimizer(sgd(network), network, **options) as optimizer:
        while len(versions) < 8:
            local_step(network, optimizer, step, rank)
            step += 1
            time.sleep(0.01 * rank * pauses.random())
            reached = step if by == "steps" else optimizer.version
            if reached >= save_at:
                gradwire.save(folder, optimizer)
                versions.append(optimizer.version)
                save_at = 4 + (step if by == "steps" else optimizer.version)
        optimizer.finish()
    return versions


# Runs in which the order of pushes makes no difference ----------------------------------------------------------------


def whole_numbers(rank: int, world_size: int, folder: str, calls: str, begin: int) -> list[list[float]]:
    """The model after each step, where all sums are exact in whatever order they are made: losses are linear.

    Args:
        folder: of the save.
        calls: "save" in the middle, "load" before, or neither.
        begin: step.
    """
    network = nn.Linear(6, 3, bias=False)
    nn.init.zeros_(network.weight)
    inner = torch.optim.SGD(network.parameters(), lr=1.0, momentum=0.5)
    sending = Sending(TopK(0.5), decay=0.5)
    options: dict[str, Any] = {"pace": Bounded(0), "length": Fixed(2), "sending": sending, "deadline_s": DEADLINE_S}
    seen: list[list[float]] = []
    with AsynchronousOptimizer(inner, network, ASGD(0.25), **options) as optimizer:
        if calls == "load":
            gradwire.load(folder, optimizer)
        for step in range(begin, 8):
            if (calls, step) == ("save", 4):
                gradwire.save(folder, optimizer)
            generator = torch.Generator().manual_seed(100 * rank + step)
            network.weight.grad = torch.randint(-3, 4, (3, 6), generator=generator).float()
            optimizer.step()
            seen.append(flat(network).tolist())
        optimizer.finish()
    return seen


# What is refused, and ranks that do not come --------------------------------------------------------------------------


def other_settings(network: nn.Module, what: str) -> AsynchronousOptimizer:
    inner = torch.optim.AdamW(network.parameters()) if what == "inner" else sgd(network)
    return AsynchronousOptimizer(
        inner,
        network,
        ASGD(0.25) if what == "rule" else ASGD(0.5),
        pace=Bounded(2 if what == "pace" else 1),
        length=Fixed(2 if what == "length" else 1),
        sending=Sending(TopK(0.5), 0.5 if what == "sending" else 1.0),
        seed=int(what == "seed"),
        deadline_s=DEADLINE_S,
    )


def said_by(call: Callable[[], Any], kind: type[Exception]) -> str:
    try:
        call()
    except kind as error:
        return str(error)
    return "nothing"


OTHERS = ("rule", "pace", "length", "sending", "seed", "inner", "model")


def others_load(rank: int, world_size: int, folder: str) -> dict[str, str]:
    """What is said of other settings; nothing is changed by it, and ranks go on."""
    network, said = model(), dict[str, str]()
    with other_settings(network, "") as optimizer:
        local_step(network, optimizer, 0, rank)
        gradwire.save(folder, optimizer)
        optimizer.finish()
    said["finished"] = said_by(lambda: gradwire.save(folder, optimizer), StateError)
    for what in OTHERS:
        network = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 2)) if what == "model" else model()
        with torch.no_grad():
            for parameter in network.parameters():
                parameter.fill_(0.5)
        with other_settings(network, what) as optimizer:
            before = flat(network)
            said[what] = said_by(lambda one=optimizer: gradwire.load(folder, one), StateError)
            assert torch.equal(before, flat(network))
            said[f"{what} overwrites"] = said_by(lambda one=optimizer: gradwire.save(folder, one), StateError)
            for step in range(2):
                local_step(network, optimizer, step, rank)
            assert optimizer.version > 0
            optimizer.finish()
    return said


def fewer_load(rank: int, world_size: int, folder: str) -> str:
    network = model()
    with other_settings(network, "") as optimizer:
        return said_by(lambda: gradwire.load(folder, optimizer), StateError)


def one_is_missing(rank: int, world_size: int, folder: str, how: str) -> dict[str, Any]:
    """All save but the last rank, which has closed, only waits, or finishes."""
    network = model()
    deadline_s = {"waits": 3.0, "closes": 3 * DEADLINE_S}.get(how, DEADLINE_S)
    optimizer = AsynchronousOptimizer(sgd(network), network, deadline_s=deadline_s)
    for step in range(3):
        local_step(network, optimizer, step, rank)
    dist.barrier()
    begun_s = time.monotonic()
    said, ranks = "nothing", list[int]()
    try:
        if rank < world_size - 1:
            gradwire.save(folder, optimizer)
        elif how == "closes":
            time.sleep(1.0)  # the others are in their save
            optimizer.close()
        elif how == "finishes":
            optimizer.finish()
    except CommunicationError as error:
        said, ranks = str(error), list(error.ranks)
    took_s = time.monotonic() - begun_s
    dist.barrier()
    optimizer.close()
    return {"said": said, "ranks": ranks, "took_s": took_s}


# Shared memory --------------------------------------------------------------------------------------------------------


def hogwild_saves(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    network = model()
    with HogwildOptimizer(sgd(network), network, deadline_s=DEADLINE_S) as optimizer:
        for step in range(3 + rank):
            local_step(network, optimizer, step, rank)
        gradwire.save(folder, optimizer)
        saved = flat(network).tolist() if rank == 0 else []
        dist.barrier()
        return {"version": optimizer.version, "model": saved}


def hogwild_loads(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    network = model()
    inner = sgd(network)
    with HogwildOptimizer(inner, network, deadline_s=DEADLINE_S) as optimizer:
        version = gradwire.load(folder, optimizer)
        loaded, momentum = flat(network).tolist(), bool(optimizer.state)
        assert version == optimizer.version
        dist.barrier()
        local_step(network, optimizer, 9, rank)
        optimizer.finish()
        return {"version": version, "end": optimizer.version, "model": loaded, "momentum": momentum}


def of_one(network: nn.Module) -> AsynchronousOptimizer:
    """One whose pushes are rounded at random."""
    inner = torch.optim.AdamW(network.parameters(), 0.02)
    return AsynchronousOptimizer(
        inner, network, AdaptiveDCASGD(1.0, epsilon=0.0), sending=Sending.of("int4,ef=off"), address="127.0.0.1"
    )


def stepped(optimizer: AsynchronousOptimizer, network: nn.Module, begin: int, end: int) -> list[Tensor]:
    seen: list[Tensor] = []
    for step in range(begin, end):
        optimizer.zero_grad()
        loss_of(network, step, 0).backward()
        optimizer.step()
        seen.append(flat(network))
    return seen
