"""What each rank does in the tests of `gradwire.sync` over sharded models: two copies on two ranks each."""

import contextlib
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

import fsdp2_cases
import gradwire
from case_sets import many_of
from fsdp2_cases import Block, Net, batches, error_of, frozen, loss_of, shard, two_dimensions, whole
from gradwire.sync import (
    BMUF,
    Averaging,
    AveragingOptimizer,
    DiLoCo,
    DriftTriggered,
    Gossip,
    Hierarchical,
    LocalSGD,
    SlowMo,
    parse,
)

STEPS = 13
DEADLINE_S = 30.0

METHODS: dict[str, dict[str, Any]] = {
    "local": {},
    "diloco": {"outer": DiLoCo()},
    "slowmo": {"outer": SlowMo()},
    "bmuf": {"outer": BMUF(0.5)},
    "warm": {"outer": DiLoCo(), "warmup": 3},
    "moments": {"moments": "average"},
    "forgetful": {"moments": "reset", "outer": SlowMo()},
    "streaming": {"outer": DiLoCo(), "fragments": 2, "delay": 1},
    "progress": {"delay": 3, "merge": "progress"},
    "drift": {"every": DriftTriggered(0.02, 6)},
}
"""Settings under which shards are averaged as whole models are."""

CODED: dict[str, dict[str, Any]] = {
    "int8": {"method": "int8", "outer": DiLoCo()},
    "sparse": {"method": "topk:0.1+int2,decay=0.95", "outer": DiLoCo(1.0, 0.0)},
    "low rank": {"method": "powersgd:2"},
    "late": {"method": "int4", "delay": 3, "merge": "progress", "moments": "average"},
}
"""Settings under which shards are coded by themselves."""


def sharded(mesh: DeviceMesh, net: Net | None = None, **options: Any) -> Net:
    """A copy on the ranks of one shard dimension, in double precision unless it is given."""
    return shard(net or Net().double(), mesh["shard"], **options)


def adam(net: nn.Module) -> torch.optim.Optimizer:
    """Has moments."""
    return torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], 0.01)


def settings(mesh: DeviceMesh, name: str) -> dict[str, Any]:
    """Of a method, between copies."""
    between = {"group": mesh["replicate"].get_group(), "deadline_s": DEADLINE_S}
    return {"every": 4, **between, **(METHODS | CODED)[name]}


def loss_of_copy(net: nn.Module, mesh: DeviceMesh, step: int) -> Tensor:
    """The mean loss of all batches that the ranks of this rank's copy have in a step."""
    ranks = cast("list[int]", mesh["shard"].mesh.tolist())
    losses = [loss_of(net, *next(batches(rank, step + 1, step))) for rank in ranks]
    return torch.stack(losses).mean()


def train(net: nn.Module, optimizer: torch.optim.Optimizer, rank: int, begin: int, end: int) -> None:
    """Steps of a sharded model, each rank with its own batch."""
    for x, y in batches(rank, end, begin):
        optimizer.zero_grad()
        loss_of(net, x, y).backward()
        optimizer.step()


def locals_of(net: nn.Module) -> dict[str, Tensor]:
    """This rank's shards."""
    with torch.no_grad():
        return {name: cast(Any, p).to_local().clone() for name, p in net.named_parameters()}


def far(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """The largest difference of an element."""
    assert found.keys() == wanted.keys()
    return max(float((found[name] - wanted[name]).abs().max()) for name in found if found[name].numel())


# The same as whole models --------------------------------------------------------------------------------------


def as_whole(rank: int, world_size: int, name: str) -> dict[str, Any]:
    """How far sharded copies are from whole ones that are fed the same data, in mid-window and at the end."""
    mesh = two_dimensions()
    net, plain = sharded(mesh), Net().double()
    start = {key: value.detach().clone() for key, value in plain.named_parameters()}
    how = settings(mesh, name)
    found: dict[str, Any] = {}
    with LocalSGD(adam(net), net, **how) as ours, LocalSGD(adam(plain), plain, **how) as other:
        ended: list[list[int]] = [[], []]
        for step in range(STEPS):
            train(net, ours, rank, step, step + 1)
            other.zero_grad()
            loss_of_copy(plain, mesh, step).backward()
            other.step()
            for seen, optimizer in zip(ended, (ours, other), strict=True):
                seen.append(optimizer.averaging.since)
        found["windows"] = ended[0]
        found["wanted windows"] = ended[1]
        found["mid-window"] = far(whole(net), dict(plain.named_parameters()))
        copies = {key: cast(Any, value).full_tensor() for key, value in ours.averaging.global_copy().items()}
        found["copies"] = far(copies, other.averaging.global_copy())
        ours.sync()
        other.sync()
    found["end"] = far(whole(net), dict(plain.named_parameters()))
    found["moved"] = far(whole(net), start)
    found["digest"] = fsdp2_cases.digest(net)
    return found


def coded(rank: int, world_size: int, name: str) -> dict[str, Any]:
    """How far shards are from what a session over this rank's shards makes of the same windows, by hand."""
    mesh = two_dimensions()
    net, plain = sharded(mesh), sharded(mesh)
    how = settings(mesh, name)
    inner, x = adam(plain), locals_of(plain)
    session = gradwire.Session(x, how["method"], group=how["group"], deadline_s=DEADLINE_S)
    memory = {key: how["outer"].memory(value) for key, value in x.items()}
    with LocalSGD(adam(net), net, **how) as ours, session:
        train(net, ours, rank, 0, 12)
        for window in range(3):
            train(plain, inner, rank, 4 * window, 4 * window + 4)
            changed = {key: value - x[key] for key, value in locals_of(plain).items()}
            session.reduce_(changed)
            for key, value in x.items():
                how["outer"].move_(value, changed[key], memory[key], gradwire.sync.Rates(1.0, 1.0))
            with torch.no_grad():
                for key, parameter in plain.named_parameters():
                    cast(Any, parameter).to_local().copy_(x[key])
        norm = ours.averaging.session.residual_norm()
        owed = abs(norm - session.residual_norm())
    return {"far": far(locals_of(net), x), "owed": owed, "norm": norm, "digest": fsdp2_cases.digest(net)}


def ways(rank: int, world_size: int, variant: str) -> dict[str, Any]:
    """Whatever FSDP2 does within a copy: after three windows copies are equal, and learn."""
    mesh = two_dimensions()
    nets: dict[str, Callable[[], Net]] = {
        "frozen": lambda: sharded(mesh, frozen()),
        "tied": lambda: sharded(mesh, Net(tied=True)),
        "offloaded": lambda: sharded(mesh, Net(), offload_policy=CPUOffloadPolicy(pin_memory=False)),
    }
    net = nets.get(variant, lambda: sharded(mesh, Net()))()
    before = locals_of(net)
    how = settings(mesh, "int8")
    handle = gradwire.attach(net, "int8", parameters="int8", deadline_s=DEADLINE_S) if variant == "attached" else None
    losses: list[float] = []
    with handle or contextlib.nullcontext(), LocalSGD(adam(net), net, **how) as optimizer:
        for step in range(12):
            for part in range(2 if variant == "accumulated" else 1):
                cast(Any, net).set_requires_gradient_sync(variant != "accumulated" or part == 1)
                loss = loss_of(net, *next(batches(rank + 10 * part, step + 1, step)))
                loss.backward()
                losses.append(float(loss.detach()))
            optimizer.step()
            optimizer.zero_grad()
        trained = list(optimizer.averaging.global_copy())
    still = [key for key, value in locals_of(net).items() if value.numel() and torch.equal(value, before[key])]
    return {"losses": losses, "digest": fsdp2_cases.digest(net), "still": still, "trained": trained}


# Memory --------------------------------------------------------------------------------------------------------


def sizes(rank: int, world_size: int) -> dict[str, int]:
    """Elements that are kept on this rank, and those of the model."""
    mesh = two_dimensions()
    net = sharded(mesh, Net())
    with LocalSGD(adam(net), net, **settings(mesh, "int8")) as optimizer:
        train(net, optimizer, rank, 0, 5)
        state = optimizer.averaging.state_dict()
    (fragment,) = state["fragments"]
    leaves = [leaf for held in fragment["session"]["parameters"].values() for leaf in held.items()]
    return {
        "model": sum(p.numel() for p in net.parameters()),
        "shard": sum(value.numel() for value in locals_of(net).values()),
        "copies": sum(copy.numel() for copy in fragment["copies"].values()),
        "momentum": sum(memory["momentum"].numel() for memory in fragment["memory"].values()),
        "owed": sum(p["values"].numel() for path, pieces in leaves if path == "element:residual" for p in pieces),
    }


# Resuming ------------------------------------------------------------------------------------------------------


def resumed(rank: int, world_size: int, folder: str, again: bool, name: str) -> str:
    """A save in mid-window, and the second half in new processes."""
    kept = Path(folder)
    mesh = two_dimensions()
    net = sharded(mesh, Net())
    with (
        gradwire.attach(net, "int8", deadline_s=DEADLINE_S) as handle,
        LocalSGD(adam(net), net, **settings(mesh, name)) as optimizer,
    ):
        inside = kept / f"copy{mesh['replicate'].get_local_rank()}"
        if again:
            net.load_state_dict(torch.load(kept / f"{rank}.pt", weights_only=False))
            gradwire.load(inside, handle)
            assert gradwire.load(kept / "sync", optimizer) == 6
        else:
            train(net, optimizer, rank, 0, 6)
            gradwire.save(inside, handle)
            gradwire.save(kept / "sync", optimizer)
            torch.save(net.state_dict(), kept / f"{rank}.pt")
        train(net, optimizer, rank, 6, STEPS)
        before = fsdp2_cases.digest(net)
        optimizer.sync()
    return f"{before} {fsdp2_cases.digest(net)}"


def other_copies(rank: int, world_size: int, folder: str, saves: bool) -> dict[str, Any]:
    """Two copies save after `sync`, or in mid-window; another number of copies goes on."""
    shards = 2
    mesh = init_device_mesh("cpu", (world_size // shards, shards), mesh_dim_names=("replicate", "shard"))
    net = sharded(mesh, Net())
    said: dict[str, Any] = {}
    with LocalSGD(adam(net), net, **settings(mesh, "sparse")) as optimizer:
        if saves:
            train(net, optimizer, rank, 0, 6)
            gradwire.save(Path(folder) / "within", optimizer)
            optimizer.sync()
            gradwire.save(Path(folder) / "after", optimizer)
        else:
            said["within"] = error_of(lambda: gradwire.load(Path(folder) / "within", optimizer))
            said["step"] = gradwire.load(Path(folder) / "after", optimizer)
        owed = _owed(optimizer, mesh)
        found = {"copy": float(sum(copy.double().sum() for copy in _whole_copy(optimizer).values()))}
        train(net, optimizer, rank, 6, 10)
    return {**found, **said, "owed": owed}


def _whole_copy(optimizer: LocalSGD) -> dict[str, Tensor]:
    return {key: cast(Any, value).full_tensor() for key, value in optimizer.averaging.global_copy().items()}


def _owed(optimizer: LocalSGD, mesh: DeviceMesh) -> float:
    """The sum over elements of the mean over copies of what is owed, of this rank's shard."""
    (fragment,) = optimizer.averaging.state_dict()["fragments"]
    leaves = fragment["session"]["parameters"].values()
    residuals = [piece["values"] for leaf in leaves for piece in leaf["element:residual"]]
    owed = torch.stack([value.double().sum() for value in residuals]).sum()
    dist.all_reduce(owed, group=mesh["replicate"].get_group())
    return float(owed) / mesh["replicate"].size()


def damaged(rank: int, world_size: int, folder: str) -> list[str]:
    """A file of one rank is gone: no rank takes anything up."""
    mesh = two_dimensions()
    net = sharded(mesh, Net())
    with LocalSGD(adam(net), net, **settings(mesh, "int8")) as optimizer:
        train(net, optimizer, rank, 0, 5)
        gradwire.save(folder, optimizer)
        files = sorted(Path(folder).glob("gradwire-*/rank3.safetensors"))
        dist.barrier()
        if rank == 0:
            files[0].unlink()
        dist.barrier()
        steps = optimizer.steps
        said = error_of(lambda: gradwire.load(folder, optimizer))
        return [said, "same" if optimizer.steps == steps else "changed"]


# What one rank sees ----------------------------------------------------------------------------------------------


def not_finite(rank: int, world_size: int, name: str) -> dict[str, Any]:
    """One rank's shard is not finite at a window's end; all ranks are told, give it up, and go on."""
    mesh = two_dimensions()
    net = sharded(mesh, Net())
    with LocalSGD(adam(net), net, **settings(mesh, name)) as optimizer:
        train(net, optimizer, rank, 0, 5)
        copies, owed = locals_like(optimizer), optimizer.averaging.session.residual_norm()
        train(net, optimizer, rank, 5, 7)
        loss_of(net, *next(batches(rank, 8, 7))).backward()
        if rank == 3:
            with torch.no_grad():
                cast(Any, net.get_parameter("blocks.1.up.weight")).to_local()[0, 0] = torch.nan
        said = error_of(optimizer.step)
        kept = far(locals_like(optimizer), copies) == 0 and owed == optimizer.averaging.session.residual_norm()
        with torch.no_grad():
            for key, value in optimizer.averaging.global_copy().items():
                net.get_parameter(key).copy_(value)
            for value in optimizer.state.values():
                value["exp_avg"].zero_()
                value["exp_avg_sq"].zero_()
        train(net, optimizer, rank, 8, 12)
        optimizer.sync()
    return {"said": said, "kept": kept, "owed": owed, "digest": fsdp2_cases.digest(net)}


def locals_like(optimizer: LocalSGD) -> dict[str, Tensor]:
    """The global copy of this rank's shards."""
    return {key: cast(Any, value).to_local() for key, value in optimizer.averaging.global_copy().items()}


def skipped(rank: int, world_size: int, infinite: bool) -> dict[str, Any]:
    """A scaler finds an infinity on one rank: its copy makes no step, and windows end together."""
    mesh = two_dimensions()
    net, plain = sharded(mesh), Net().double()
    how = settings(mesh, "diloco")
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=100) for _ in range(2)]
    with LocalSGD(adam(net), net, **how) as ours, LocalSGD(adam(plain), plain, **how) as other:
        for step in range(8):
            for trained, optimizer, scaler in ((net, ours, scalers[0]), (plain, other, scalers[1])):
                is_bad = infinite and step == 2
                optimizer.zero_grad()
                if trained is net:
                    loss = loss_of(net, *next(batches(rank, step + 1, step)))
                    loss = loss * (torch.inf if is_bad and rank == 2 else 1.0)
                else:
                    loss = loss_of_copy(plain, mesh, step)
                    loss = loss * (torch.inf if is_bad and mesh["replicate"].get_local_rank() == 1 else 1.0)
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
        since = ours.averaging.since
    return {
        "far": far(whole(net), dict(plain.named_parameters())),
        "scale": scalers[0].get_scale(),
        "since": since,
        "digest": fsdp2_cases.digest(net),
    }


def failing(rank: int, world_size: int, folder: str, how: str) -> dict[str, Any]:
    """Rank 1 fails before a backward pass or in the last step of a window, or is silent there."""
    times, said = list[float](), ""
    try:
        _fails(rank, how, times, Path(folder))
    except (ValueError, RuntimeError) as error:
        times.append(time.monotonic())
        said = f"{type(error).__name__}: {error}"
    _here(Path(folder), rank)
    if how == "in a step" or (how == "before" and rank != 1):  # rank 0 has the store that says who has failed
        _wait_for(world_size, Path(folder))
    return {"said": said, "waited": times[1] - times[0] if said else 0.0}


def _here(folder: Path, rank: int) -> None:
    (folder / str(rank)).touch()


def _wait_for(ranks: int, folder: Path) -> None:
    while len(list(folder.glob("*"))) < ranks:
        time.sleep(0.05)


def _fails(rank: int, how: str, times: list[float], folder: Path) -> None:
    mesh = two_dimensions()
    net = sharded(mesh, Net())
    patience: dict[str, Any] = {"deadline_s": 10.0} if how == "silent" else {}
    with LocalSGD(adam(net), net, **settings(mesh, "int8") | patience) as optimizer:
        train(net, optimizer, rank, 0, 7)
        times.append(time.monotonic())
        if rank == 1 and how == "before":
            raise ValueError("no more data")
        loss_of(net, *next(batches(rank, 8, 7))).backward()
        if rank == 1 and how == "silent":
            _wait_for(3, folder)
        elif rank == 1:
            raise ValueError("no more memory")
        else:
            try:
                optimizer.step()
            except gradwire.CommunicationError:
                times.append(time.monotonic())
                _here(folder, rank)
                _wait_for(4 if how == "in a step" else 3, folder)  # nobody closes anything before all have been told
                raise
            train(net, optimizer, rank, 8, 9)


# What else a model has ---------------------------------------------------------------------------------------------


def buffers(rank: int, world_size: int) -> dict[str, Any]:
    """Running means of BatchNorm under each policy: what ranks had, and what they have after `sync`."""
    found: dict[str, Any] = {}
    for policy in ("average", "rank0", "own"):
        mesh = two_dimensions()
        torch.manual_seed(0)
        net: Any = fully_shard(nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5)), mesh=mesh["shard"])
        group = mesh["replicate"].get_group()
        with LocalSGD(adam(net), net, 4, group=group, buffers=policy, deadline_s=DEADLINE_S) as optimizer:
            for step in range(3):
                x = torch.randn(8, 6, generator=torch.Generator().manual_seed(10 * step + rank))
                net(x).square().mean().backward()
                optimizer.step()
            had = cast(Tensor, net[1].running_mean).tolist()
            optimizer.sync()
        found[policy] = {"had": had, "has": cast(Tensor, net[1].running_mean).tolist()}
    return found


def evaluated(rank: int, world_size: int) -> dict[str, Any]:
    """The global copy is what is evaluated in mid-window, and the model trains on as if nothing had been."""
    mesh = two_dimensions()
    net, undisturbed = sharded(mesh), sharded(mesh)
    losses: list[float] = []
    how = settings(mesh, "diloco")
    with LocalSGD(adam(net), net, **how) as optimizer, LocalSGD(adam(undisturbed), undisturbed, **how) as other:
        train(net, optimizer, rank, 0, 6)
        x, y = next(batches(7, 1))
        with torch.no_grad(), optimizer.averaging.evaluating():
            losses.append(float(loss_of(net, x, y)))
        with torch.no_grad():
            own = float(loss_of(net, x, y))
        with torch.no_grad(), optimizer.averaging.evaluating():
            losses.append(float(loss_of(net, x, y)))
        train(net, optimizer, rank, 6, 11)
        train(undisturbed, other, rank, 0, 11)
    return {"losses": losses, "own": own, "far": far(whole(net), whole(undisturbed))}


def hierarchy(rank: int, world_size: int) -> dict[str, Any]:
    """Levels over a mesh of three dimensions are those of whole models; and a spec makes an optimizer."""
    found: dict[str, Any] = {}
    for name, sizes in {"nodes": (2, 1, 2), "places": (2, 2, 1)}.items():
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("site", "place", "shard"))
        nets = [Net().double(), Net().double()]
        shard(nets[0], mesh["shard"])
        made: list[AveragingOptimizer] = []
        for net in nets:
            levels = Hierarchical.over(mesh, net, {"place": 2, "site": 4}, outer=DiLoCo(), deadline_s=DEADLINE_S)
            made.append(AveragingOptimizer(adam(net), levels))
        for step in range(9):
            train(nets[0], made[0], rank, step, step + 1)
            made[1].zero_grad()
            loss_of_copy(nets[1], mesh, step).backward()
            made[1].step()
        found[name] = far(whole(nets[0]), dict(nets[1].named_parameters()))
        for optimizer in made:
            optimizer.close()
    mesh = two_dimensions()
    net = sharded(mesh)
    group = mesh["replicate"].get_group()
    optimizer = parse("diloco:H=4,outer=int4").optimizer(adam(net), net, group=group, deadline_s=DEADLINE_S)
    train(net, optimizer, rank, 0, 4)
    optimizer.close()
    found["digest"] = fsdp2_cases.digest(net)
    return found


# What is refused ---------------------------------------------------------------------------------------------------


def refused(rank: int, world_size: int) -> dict[str, str]:
    """What is said of groups and models that cannot be served, on every rank."""
    mesh = two_dimensions()
    between: dict[str, Any] = {"deadline_s": DEADLINE_S}
    group = mesh["replicate"].get_group()
    net = sharded(mesh, Net())
    part = Net()
    for block in part.blocks:
        fully_shard(cast(Block, block), mesh=mesh["shard"])
    apart = sharded(mesh, Net())
    with torch.no_grad():
        cast(Any, apart.head.bias).to_local()[:1].add_(float(rank == 3))
    tiny: Any = fully_shard(nn.Linear(2, 1), mesh=mesh["shard"])
    acts: dict[str, Callable[[], object]] = {
        "all": lambda: LocalSGD(adam(net), net, **between),
        "shards": lambda: Averaging(net, group=mesh["shard"].get_group(), **between),
        "two dimensions": lambda: Averaging(shard(Net(), mesh), group=group, **between),
        "part": lambda: Averaging(part, group=group, **between),
        "apart": lambda: Averaging(apart, group=group, **between),
        "settings": lambda: Averaging(net, every=4 + rank % 2, group=group, **between),
        "methods": lambda: Averaging(net, method="int8" if rank % 2 else "int4", group=group, **between),
        "other copy": lambda: Averaging(net, every=4 + rank // 2, group=group, **between),
        "tiny": lambda: Averaging(tiny, group=group, **between),
        "crossed": lambda: Averaging(net, group=crossed(), **between),
        "gossip": lambda: Gossip(net, group=group, **between),
        "dion": lambda: gradwire.sync.optimizers.Dion(net, rank=2, group=group, **between),
        "session": lambda: gradwire.Session(net, "int8", group=group, **between),
        "elastic": lambda: gradwire.sync.Elastic(net, store="127.0.0.1:1"),
        "asynchronous": lambda: gradwire.asynchronous.AsynchronousOptimizer(adam(net), net),
    }
    return {name: error_of(act) for name, act in acts.items()}


def crossed() -> dist.ProcessGroup:
    """Groups of ranks of two copies that hold different shards."""
    made = [dist.new_group(ranks) for ranks in ([0, 3], [1, 2])]
    return cast(dist.ProcessGroup, made[0 if dist.get_rank() in (0, 3) else 1])


def page(rank: int, world_size: int) -> int:
    """The page's block for sharded models, on as many ranks as it wants."""
    text = (Path(__file__).parents[1] / "docs" / "sync.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", text.partition("## Sharded models")[2], re.DOTALL)[:1]
    names: dict[str, Any] = {"torch": torch, "dist": dist, "gradwire": gradwire}
    exec(code, names)
    return int(names["optimizer"].averaging.steps)


many = many_of(globals())
