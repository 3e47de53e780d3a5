"""What each rank does in the tests of sessions: plain loops without DDP, next to `attach`."""

import hashlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import gradwire
from gradwire.reducers.auto import Auto
from gradwire.session.figures import links_file

STEPS = 6


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 30), nn.Tanh(), nn.Linear(30, 8), nn.LayerNorm(8))


def loss_of(network: nn.Module, step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return network(torch.randn(16, 40, generator=generator)).square().mean()


def digest(network: nn.Module) -> str:
    whole = torch.cat([p.detach().reshape(-1) for p in network.parameters()])
    return hashlib.blake2b(whole.numpy().tobytes(), digest_size=8).hexdigest()


def by_attach(spec: str, rank: int) -> dict[str, Any]:
    ddp = DDP(model())
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
    with gradwire.attach(ddp, spec, grain_numel=500) as handle:
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(ddp, step, rank).backward()
            optimizer.step()
        return {"digest": digest(ddp), **seen(handle.session)}


def by_loop(spec: str, rank: int) -> dict[str, Any]:
    network = model()
    optimizer = torch.optim.SGD(network.parameters(), 0.1)
    session = gradwire.Session(network, spec, grain_numel=500)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(network, step, rank).backward()
        session.reduce_(network)
        optimizer.step()
    found = {"digest": digest(network), **seen(session)}
    session.close()
    return found


def by_pieces(spec: str, rank: int) -> dict[str, Any]:
    """Gradients are handed over one by one while the backward pass makes them."""
    network = model()
    optimizer = torch.optim.SGD(network.parameters(), 0.1)
    names: dict[Tensor, str] = {parameter: name for name, parameter in network.named_parameters()}
    with gradwire.Session(network, spec, grain_numel=500) as session:
        for step in range(STEPS):
            optimizer.zero_grad()
            with session.step() as under_way:

                def deliver(parameter: Tensor, under_way: gradwire.SessionStep = under_way) -> None:
                    under_way.deliver(names[parameter], gradient_of(parameter))

                hooks = [p.register_post_accumulate_grad_hook(deliver) for p in network.parameters()]
                loss_of(network, step, rank).backward()
            for hook in hooks:
                hook.remove()
            optimizer.step()
        return {"digest": digest(network), **seen(session)}


def gradient_of(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def seen(session: gradwire.Session) -> dict[str, Any]:
    """Figures that must be those of DDP."""
    stats = session.stats()
    return {"steps": stats.steps, "wire_bytes": stats.wire_bytes, "state": sorted(session.state_dict())}


def alike(rank: int, world_size: int, specs: list[str]) -> dict[str, list[dict[str, Any]]]:
    """The same training by `attach` and by sessions."""
    return {spec: [way(spec, rank) for way in (by_attach, by_loop, by_pieces)] for spec in specs}


def saved_and_loaded(rank: int, world_size: int, folder: str) -> list[str]:
    """Digests of a run without a break, and of one that was saved in the middle and taken up by a new session."""
    found: list[str] = []
    for breaks in (False, True):
        network = model()
        session = gradwire.Session(network, "topk:0.1")
        for step in range(STEPS):
            network.zero_grad()
            loss_of(network, step, rank).backward()
            session.reduce_(network)
            torch.optim.SGD(network.parameters(), 0.1).step()
            if breaks and step == 2:
                gradwire.save(Path(folder), session)
                session.close()
                session = gradwire.Session(network, "topk:0.1")
                assert gradwire.load(Path(folder), session) == 3
        found.append(digest(network))
        session.close()
    return found


def disagreeing(rank: int, world_size: int) -> dict[str, dict[str, Any]]:
    """What every rank is told where the last one has something else."""
    other = rank == world_size - 1
    x, y = torch.ones(4), torch.ones(2, 3)
    cases: dict[str, Callable[[], gradwire.Session]] = {
        "name": lambda: gradwire.Session({"x": x, "z" if other else "y": y}, "none", deadline_s=20),
        "shape": lambda: gradwire.Session({"x": x, "y": y.T if other else y}, "none", deadline_s=20),
        "dtype": lambda: gradwire.Session({"x": x, "y": y.half() if other else y}, "none", deadline_s=20),
        "order": lambda: gradwire.Session({"y": y, "x": x} if other else {"x": x, "y": y}, "none", deadline_s=20),
        "fewer": lambda: gradwire.Session({"x": x} if other else {"x": x, "y": y}, "none", deadline_s=20),
        "method": lambda: gradwire.Session({"x": x}, "int8" if other else "int4", deadline_s=20),
        "grains": lambda: gradwire.Session({"x": x}, "int4", deadline_s=20, grain_numel=2 if other else 4),
    }
    found: dict[str, dict[str, Any]] = {}
    for name, make in cases.items():
        began = time.monotonic()
        try:
            make().close()
        except gradwire.AttachError as error:
            found[name] = {"text": str(error), "s": time.monotonic() - began}
    return found


def in_a_group(rank: int, world_size: int, folder: str) -> dict[str, str]:
    """Ranks 1 and 2 of three save and load where rank 2 fails; what each is told."""
    group = dist.new_group([1, 2])
    if not rank:
        time.sleep(1)
        dist.barrier()
        return {}
    assert isinstance(group, dist.ProcessGroup)
    x, here = {"x": torch.ones(4)}, Path(folder) / str(rank)
    session = gradwire.Session(x, "int4", group=group, deadline_s=30)
    told: dict[str, str] = {}

    def tell(name: str, act: Callable[[], object]) -> None:
        try:
            act()
        except gradwire.GradwireError as error:
            told[name] = str(error)
        dist.barrier(group)

    session.reduce_(x)
    (Path(folder) / "2").touch()  # where rank 2 would need a folder
    tell("folder", lambda: gradwire.save(here, session))
    session.engine.index = 3 if rank == 2 else 1
    tell("steps", lambda: gradwire.save(Path(folder) / "other", session))
    session.engine.index = 1
    gradwire.save(Path(folder) / "one", session)
    tell("load", lambda: gradwire.load(Path(folder) / ("one" if rank == 1 else "none"), session))
    session.lane.deadline_s = 1
    tell("absent", lambda: gradwire.save(here, session) if rank == 1 else None)
    session.close()
    dist.barrier()
    return told


def in_the_background(rank: int, world_size: int) -> list[float]:
    """Means that are here before the step's block has ended."""
    x, y = torch.full((4,), float(rank)), torch.ones(3)
    with gradwire.Session({"x": x, "y": y}, "none", deadline_s=20) as session, session.step() as step:
        step.deliver("y", y)
        step.deliver("x", x)
        step.go_on()
        step.go_on()  # does nothing more
        end = time.monotonic() + 20
        while x[0] == rank and time.monotonic() < end:
            time.sleep(0.01)
        return x.tolist()


def timed_later(rank: int, world_size: int) -> list[Any]:
    """What a report knows of times and of the link before all ranks time it, and afterwards."""
    x, told = torch.ones(64, 64), list[Any]()
    with gradwire.Session({"x": x}, "int4", deadline_s=20) as session:
        for _ in range(2):
            for _ in range(16):
                session.reduce_({"x": x})
            report = session.report()
            told.append([report.times is not None, report.link_bits_per_s is not None, report.verdict])
            session.measure_link()
    return told


def timing_differs(rank: int, world_size: int) -> str:
    """What is said where one rank would time the link, and the other one would not."""
    try:
        gradwire.Session({"x": torch.ones(4)}, "int4", deadline_s=20)
    except gradwire.AttachError as error:
        return str(error)
    return ""


def profiled(rank: int, world_size: int) -> dict[str, Any]:
    """What sessions of all ranks and of the first two take from the file that is there, or measure."""
    some = dist.new_group([0, 1])
    found: dict[str, Any] = {}
    for group in (None, some):
        if group is not None and not isinstance(group, dist.ProcessGroup):
            continue  # this rank is not in it
        session = gradwire.Session({"x": torch.ones(4)}, "none,exchange=auto", group=group, deadline_s=20)
        units = session.engine.plan.units
        (auto,) = (unit.reducer for unit in units if isinstance(unit.reducer, Auto))
        file = links_file(session.lane.group)
        times = session._link_times  # pyright: ignore[reportPrivateUsage]
        found["other" if group else "file"] = file.stem if file else None
        if group is None:
            found |= {"curves": [curve.points for curve in auto.curves], "probes": times.probes if times else None}
        session.close()
    return found


def left_out(rank: int, world_size: int) -> str:
    """The last rank leaves a tensor out; what each is told."""
    x, y = torch.ones(4), torch.ones(3)
    session = gradwire.Session({"x": x, "y": y}, "none", deadline_s=10)
    try:
        with session.step() as step:
            step.deliver("y", y)
            if rank < world_size - 1:
                step.deliver("x", x)
    except gradwire.GradwireError as error:
        time.sleep(1)  # rank 0 holds the store, in which the others still read
        return f"{type(error).__name__}: {error}"
    return "no error"
