"""What each rank does in the tests of FSDP2: small models, a few steps, figures back."""

import contextlib
import hashlib
import importlib
import math
import os
import re
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

import gradwire
from case_sets import many_of
from gradwire.topology import NODE_VARIABLE

DEADLINE_S = 30.0


class Block(nn.Module):
    """A residual layer whose sizes do not come out even on any number of ranks."""

    def __init__(self, width: int, inner: int, checkpointed: bool = False) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, inner), nn.Linear(inner, width)
        self.checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        """x plus a hidden layer of it."""
        if self.checkpointed:
            return cast(Tensor, checkpoint(self._inside, x, use_reentrant=False))
        return self._inside(x)

    def _inside(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


class Net(nn.Module):
    """Bytes in, bytes out; the second block can be left out."""

    def __init__(self, width: int = 14, inner: int = 37, tied: bool = False, checkpointed: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(33, width)
        self.blocks = nn.ModuleList([Block(width, inner, checkpointed) for _ in range(3)])
        self.head = nn.Linear(width, 33)
        if tied:
            self.head.weight = self.embedding.weight
        self.skip: int | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Logits of the next byte."""
        x = self.embedding(x)
        for i, block in enumerate(self.blocks):
            if i != self.skip:
                x = block(x)
        return self.head(x)


class Half(nn.Module):
    """Uses one of two layers of one group."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.left, self.right, self.turn = nn.Linear(8, 9), nn.Linear(8, 9), 0

    def forward(self, x: Tensor) -> Tensor:
        """Left or right."""
        return (self.left, self.right)[self.turn % 2](x)


def shard(net: Net, mesh: DeviceMesh | None = None, **options: Any) -> Net:
    """Every block is a group, and the rest one."""
    mesh = mesh or init_device_mesh("cpu", (dist.get_world_size(),))
    for block in net.blocks:
        fully_shard(block, mesh=mesh, **options)
    return cast(Net, fully_shard(net, mesh=mesh, **options))


def mixed(param: torch.dtype | None, reduce: torch.dtype | None) -> MixedPrecisionPolicy:
    """Mixed precision."""
    return MixedPrecisionPolicy(param_dtype=param, reduce_dtype=reduce)


def frozen() -> Net:
    """A whole block and part of another one are not trained."""
    net = Net()
    net.blocks[1].requires_grad_(False)
    cast(Block, net.blocks[2]).up.requires_grad_(False)
    return net


def compiled() -> Net:
    """Blocks are compiled in place."""
    net = Net()
    for block in net.blocks:
        block.compile(backend="eager")
    return net


def divided(net: Net, sums: bool) -> Net:
    """The sum of gradients is divided by 1.5."""
    for module in net.modules():
        if hasattr(module, "set_gradient_divide_factor"):
            cast(Any, module).set_gradient_divide_factor(1.5)
            cast(Any, module).set_force_sum_reduction_for_comms(sums)
    return net


VARIANTS: dict[str, Callable[[], Net]] = {
    "plain": lambda: shard(Net()),
    "kept": lambda: shard(Net(), reshard_after_forward=False),
    "resharded": lambda: shard(Net(), reshard_after_forward=True),
    "bf16": lambda: shard(Net(), mp_policy=mixed(torch.bfloat16, torch.float32)),
    "bf16 sums": lambda: shard(Net(), mp_policy=mixed(torch.bfloat16, None)),
    "fp16 sums": lambda: shard(Net(), mp_policy=mixed(None, torch.float16)),
    "frozen": lambda: shard(frozen()),
    "tied": lambda: shard(Net(tied=True)),
    "checkpointed": lambda: shard(Net(checkpointed=True)),
    "compiled": lambda: shard(compiled()),
    "offloaded": lambda: shard(Net(), offload_policy=CPUOffloadPolicy(pin_memory=False)),
    "divided": lambda: divided(shard(Net()), sums=True),
    "accumulated": lambda: shard(Net()),
    "accumulated bf16": lambda: shard(Net(), mp_policy=mixed(torch.bfloat16, torch.float32)),
    "clipped": lambda: shard(Net()),
    "adamw": lambda: shard(Net()),
}


def batches(rank: int, steps: int, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches that depend on rank and step alone: each byte is followed by its double."""
    for step in range(start, steps):
        generator = torch.Generator().manual_seed(1000 * step + rank)
        x = torch.randint(0, 33, (6, 8), generator=generator)
        yield x, (2 * x) % 33


def loss_of(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Cross entropy."""
    return nn.functional.cross_entropy(net(x).flatten(0, 1).float(), y.flatten())


def optimizer_of(net: nn.Module, name: str = "") -> torch.optim.Optimizer:
    """The optimizer of a variant."""
    trained = [p for p in net.parameters() if p.requires_grad]
    if name == "adamw":
        return torch.optim.AdamW(trained, lr=0.01)
    return torch.optim.SGD(trained, lr=0.05, momentum=0.9)


def train(net: Net, rank: int, steps: int, name: str = "", start: int = 0, optimizer: Any = None) -> list[float]:
    """Train, and return the losses."""
    optimizer = optimizer or optimizer_of(net, name)
    losses: list[float] = []
    for i, (x, y) in enumerate(batches(rank, steps, start)):
        loss = loss_of(net, x, y)
        if name.startswith("accumulated"):
            last = i % 3 == 2
            cast(Any, net).set_requires_gradient_sync(last)
            (loss / 3).backward()
        else:
            last = True
            loss.backward()
        losses.append(float(loss.detach()))
        if last:
            if name == "clipped":
                nn.utils.clip_grad_norm_(net.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
    return losses


def whole(net: nn.Module) -> dict[str, Tensor]:
    """All parameters, in full precision."""
    for module in net.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # the root stays as it is after a forward pass alone
    return {name: cast(Any, p).full_tensor().detach() for name, p in net.named_parameters()}


def digest(net: nn.Module) -> str:
    """A fingerprint of all parameters, bit for bit."""
    flat = torch.cat([p.reshape(-1).float() for p in whole(net).values()])
    return hashlib.sha256(flat.numpy().tobytes()).hexdigest()


def off_by(net: nn.Module, other: nn.Module) -> float:
    """The largest difference of a parameter, as a part of its largest element."""
    pairs = zip(whole(net).values(), whole(other).values(), strict=True)
    return max(float((a - b).abs().max() / b.abs().max().clamp_min(1e-3)) for a, b in pairs)


# Cases ---------------------------------------------------------------------------------------------------------


def against_plain(rank: int, world_size: int, variant: str, spec: str, steps: int) -> dict[str, Any]:
    """The same run with FSDP2 alone and with a method: how far parameters are apart, and what was sent."""
    if variant == "premultiplied":
        plain, ours = divided(shard(Net()), sums=True), divided(shard(Net()), sums=False)
    else:
        plain, ours = VARIANTS[variant](), VARIANTS[variant]()
    losses = train(plain, rank, steps, variant)
    with gradwire.attach(ours, spec, deadline_s=DEADLINE_S, grain_numel=1000) as handle:
        own = train(ours, rank, steps, variant)
        stats, norm, report = handle.stats(), handle.residual_norm(), str(handle.report())
    return {
        "report": report,
        "off": off_by(ours, plain),
        "moved": off_by(plain, VARIANTS.get(variant, VARIANTS["plain"])()),
        "losses": [losses[-1], own[-1]],
        "digest": digest(ours),
        "steps": stats.steps,
        "sent": [stats.wire_bytes, stats.dense_wire_bytes],
        "norm": norm,
    }


def conserved(rank: int, world_size: int, spec: str, skip: bool) -> dict[str, Any]:
    """Gradients of parameters that do not change: what arrived and what is owed are what FSDP2 alone delivers."""
    sums: list[dict[str, Tensor]] = []
    owed: dict[str, Tensor] = {}
    for method in (None, spec):
        net = VARIANTS["plain"]()
        total = {name: torch.zeros_like(value) for name, value in whole(net).items()}
        manager = gradwire.attach(net, method, deadline_s=DEADLINE_S) if method else contextlib.nullcontext()
        with manager as handle:
            for i, (x, y) in enumerate(batches(rank, 9)):
                net.skip = 1 if skip and i % 3 == 1 else None
                loss_of(net, x, y).backward()
                for name, parameter in net.named_parameters():
                    if parameter.grad is not None:
                        total[name] += cast(Any, parameter.grad).full_tensor()
                        parameter.grad = None
            if handle is not None:
                owed = owed_by_name(handle, whole(net))
        sums.append(total)
    for value in owed.values():
        dist.all_reduce(value)
        value /= world_size
    off = {name: float((sums[0][name] - sums[1][name] - owed[name]).abs().max()) for name in owed}
    return {
        "off": max(off.values()),
        "owed": max(float(value.abs().max()) for value in owed.values()),
        "size": max(float(value.abs().max()) for value in sums[0].values()),
    }


def owed_by_name(handle: gradwire.Session, like: dict[str, Tensor]) -> dict[str, Tensor]:
    """What this rank owes, in the shape of parameters."""
    found = {name: torch.zeros(value.numel()) for name, value in like.items()}
    for name, leaves in handle.state_dict()["parameters"].items():
        for pieces in leaves.values():
            for piece in pieces:
                found[name][piece["start"] : piece["start"] + piece["values"].numel()] += piece["values"]
    return {name: value.view(like[name].shape) for name, value in found.items()}


def unused(rank: int, world_size: int, spec: str) -> dict[str, Any]:
    """A parameter that no rank uses has no gradient, and what is owed of it stays."""
    net = cast(Any, fully_shard(Half(), mesh=init_device_mesh("cpu", (world_size,))))
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(rank))
    like = whole(net)
    with gradwire.attach(net, spec, deadline_s=DEADLINE_S) as handle:
        found: list[dict[str, Any]] = []
        for turn in range(4):
            net.turn = turn
            net(x).square().mean().backward()
            gone = [name for name, p in net.named_parameters() if p.grad is None]
            net.zero_grad()
            owed = {name: value.norm().item() for name, value in owed_by_name(handle, like).items()}
            found.append({"gone": gone, "owed": owed})
    return {"found": found}


def disagreeing(rank: int, world_size: int, zeros: bool) -> str:
    """Ranks use different layers of one group."""
    net = cast(Any, fully_shard(Half(), mesh=init_device_mesh("cpu", (world_size,))))
    net.set_reduce_scatter_unused_params(zeros)
    net.turn = rank
    with contextlib.suppress(gradwire.CommunicationError), gradwire.attach(net, "int8", deadline_s=DEADLINE_S):
        try:
            net(torch.ones(4, 8)).square().mean().backward()
        except gradwire.StepError as error:
            return str(error)
        left, right = (float(layer.weight.grad.full_tensor().norm()) for layer in (net.left, net.right))
        return "both" if left > 0 and right > 0 else f"{left} {right}"
    return "nothing"


def save_and_go_on(rank: int, world_size: int, spec: str, folder: str, parameters: str | None) -> str:
    """Ten steps, a save, ten more."""
    net = VARIANTS["plain"]()
    optimizer = optimizer_of(net)
    with gradwire.attach(net, spec, parameters=parameters, seed=5, deadline_s=DEADLINE_S) as handle:
        train(net, rank, 10, optimizer=optimizer)
        gradwire.save(Path(folder) / "gradwire", handle)
        save_model(net, optimizer, folder)
        train(net, rank, 20, start=10, optimizer=optimizer)
    return digest(net)


def save_model(net: nn.Module, optimizer: torch.optim.Optimizer, folder: str) -> None:
    """A checkpoint of PyTorch's."""
    dcp: Any = importlib.import_module("torch.distributed.checkpoint")
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model, state = get_state_dict(net, optimizer)
    dcp.save({"model": model, "optimizer": state}, checkpoint_id=Path(folder) / "torch")


def load_model(net: nn.Module, optimizer: torch.optim.Optimizer, folder: str) -> None:
    """The same one."""
    dcp: Any = importlib.import_module("torch.distributed.checkpoint")
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    model, state = get_state_dict(net, optimizer)
    dcp.load({"model": model, "optimizer": state}, checkpoint_id=Path(folder) / "torch")
    set_state_dict(net, optimizer, model_state_dict=model, optim_state_dict=state)


def resume(rank: int, world_size: int, spec: str, folder: str, parameters: str | None) -> str:
    """The last ten steps, in new processes."""
    net = VARIANTS["plain"]()
    optimizer = optimizer_of(net)
    with gradwire.attach(net, spec, parameters=parameters, seed=7, deadline_s=DEADLINE_S) as handle:
        load_model(net, optimizer, folder)
        assert gradwire.load(Path(folder) / "gradwire", handle) == 10
        train(net, rank, 20, start=10, optimizer=optimizer)
    return digest(net)


def owed_after_loading(rank: int, world_size: int, spec: str, folder: str) -> dict[str, Any]:
    """The mean over ranks of what is owed, after a load, and whether training goes on."""
    net = VARIANTS["plain"]()
    like = whole(net)
    with gradwire.attach(net, spec, deadline_s=DEADLINE_S) as handle:
        gradwire.load(Path(folder) / "gradwire", handle)
        owed = owed_by_name(handle, like)
        train(net, rank, 12, start=10)
    return {"owed": {name: mean_over_ranks(value) for name, value in owed.items()}, "digest": digest(net)}


def mean_over_ranks(value: Tensor) -> list[float]:
    """The mean over ranks, flat."""
    value = value.clone()
    dist.all_reduce(value)
    return (value / dist.get_world_size()).flatten().tolist()


def owed_before_saving(rank: int, world_size: int, spec: str, folder: str) -> dict[str, list[float]]:
    """Ten steps, and a save; the mean over ranks of what is owed."""
    net = VARIANTS["plain"]()
    with gradwire.attach(net, spec, deadline_s=DEADLINE_S) as handle:
        train(net, rank, 10)
        gradwire.save(Path(folder) / "gradwire", handle)
        owed = owed_by_name(handle, whole(net))
    return {name: mean_over_ranks(value) for name, value in owed.items()}


def infinite_step(rank: int, world_size: int, spec: str) -> dict[str, Any]:
    """A gradient that is infinite on one rank in one step: what a loss scaler does, and what is owed then."""
    net = VARIANTS["plain"]()
    optimizer = optimizer_of(net)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
    finite: list[bool] = []
    with gradwire.attach(net, spec, scaler=scaler, deadline_s=DEADLINE_S) as handle:
        for i, (x, y) in enumerate(batches(rank, 6)):
            before = digest(net)
            loss = loss_of(net, x, y)
            scale = torch.tensor(float("inf") if i == 3 and rank == 1 else 1.0)
            scaler.scale(loss * scale).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            finite.append(digest(net) != before)
        stats, norm = handle.stats(), handle.residual_norm()
    return {"moved": finite, "scale": scaler.get_scale(), "bad": stats.bad_steps, "finite": math.isfinite(norm)}


def changed(rank: int, world_size: int) -> dict[str, Any]:
    """Another method in mid-run."""
    net = VARIANTS["plain"]()
    optimizer = optimizer_of(net)
    with gradwire.attach(net, "topk:0.1", deadline_s=DEADLINE_S) as handle:
        train(net, rank, 6, optimizer=optimizer)
        before = handle.residual_norm()
        handle.change("int8,ef=off")
        carried = handle.residual_norm()
        train(net, rank, 12, start=6, optimizer=optimizer)
        after = handle.residual_norm()
    return {"before": before, "carried": carried, "after": after, "digest": digest(net)}


def closed(rank: int, world_size: int) -> dict[str, Any]:
    """After `close` the model trains as FSDP2 does alone, and can be attached again."""
    plain, ours = VARIANTS["plain"](), VARIANTS["plain"]()
    gradwire.attach(ours, "topk:0.1", parameters="int8", deadline_s=DEADLINE_S).close()
    train(plain, rank, 5)
    train(ours, rank, 5)
    same = digest(plain) == digest(ours)
    with gradwire.attach(ours, "int8", deadline_s=DEADLINE_S) as handle:
        train(ours, rank, 5)
        steps = handle.stats().steps
    return {"same": same, "steps": steps}


def gathered(rank: int, world_size: int, parameters: str, dtype: str | None) -> dict[str, Any]:
    """What ranks compute with where parameters are gathered in a codec's payloads."""
    policy: dict[str, Any] = {"mp_policy": mixed(getattr(torch, dtype), torch.float32)} if dtype else {}
    net = shard(Net(width=64, inner=130), **policy)
    masters = whole(net)
    with gradwire.attach(net, "int8", parameters=parameters, deadline_s=DEADLINE_S) as handle:
        with torch.no_grad():
            net(torch.zeros(1, 1, dtype=torch.long))
        for block in net.blocks:
            cast(Any, block).unshard()
        seen = {name: p.detach().float().clone() for name, p in net.blocks.named_parameters()}
        for block in net.blocks:
            cast(Any, block).reshard()
        kept = all(torch.equal(value, masters[name]) for name, value in whole(net).items())
        with torch.inference_mode():
            net(torch.zeros(1, 1, dtype=torch.long))
        losses = train(net, rank, 12)
        stats = handle.stats()
    off = {
        name: float((value - masters[f"blocks.{name}"]).norm() / masters[f"blocks.{name}"].norm().clamp_min(1e-6))
        for name, value in seen.items()
    }
    bits = hashlib.sha256(torch.cat([v.reshape(-1) for v in seen.values()]).numpy().tobytes()).hexdigest()
    return {"off": off, "kept": kept, "bits": bits, "losses": losses, "ratio": stats.ratio, "digest": digest(net)}


class Attention(nn.Module):
    """Scores of 96 places, a mask of minus infinity, and one that is far below zero in the last rows alone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scores = nn.Linear(96, 96)
        self.mask = nn.Parameter(torch.full((96, 96), float("-inf")).triu(1), requires_grad=False)
        far = torch.randn(96, 96)
        far[90:, 1:] = torch.finfo(torch.float32).min
        self.far = nn.Parameter(far, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """Shares of the places, of which none is masked by both."""
        return (self.scores(x) + self.mask).softmax(-1) @ (self.scores(x) + self.far).softmax(-1).mT


def masked(rank: int, world_size: int, parameters: str) -> dict[str, Any]:
    """How parameters that codecs cannot say are gathered, and what that costs once they are finite again."""
    net = cast(Any, fully_shard(Attention(), mesh=init_device_mesh("cpu", (world_size,))))
    masters = whole(net)
    with gradwire.attach(net, "int8", parameters=parameters, deadline_s=DEADLINE_S) as handle:
        loss = net(torch.ones(96, 96)).square().sum()
        loss.backward()
        net.unshard()
        same = {name: torch.equal(value, masters[name]) for name, value in net.named_parameters()}
        net.reshard()
        sent = []
        for finite in (False, True):
            if finite:
                for mask in (net.mask, net.far):
                    mask.data.to_local().clamp_(-1.0, 1.0)
            before = handle.stats().payload_bytes
            net.unshard()
            net.reshard()
            sent.append(handle.stats().payload_bytes - before)
        gradients = [float(p.grad.full_tensor().norm()) for p in net.parameters() if p.grad is not None]
    return {"same": same, "loss": float(loss), "sent": sent, "gradients": gradients}


def sharded_later(rank: int, world_size: int) -> list[str]:
    """Models that are another one by the time they are trained; one below the root; and one that has a handle."""
    said: list[str] = []
    mesh = init_device_mesh("cpu", (world_size,))
    net = Net()
    fully_shard(net.blocks[0], mesh=mesh)
    below = net.blocks[0]
    with contextlib.suppress(gradwire.GradwireError), gradwire.attach(below, "int8", deadline_s=DEADLINE_S):
        fully_shard(net, mesh=mesh)
        said.append(error_of(lambda: backward(net, rank)))
    net = shard(Net(), mesh)
    with contextlib.suppress(gradwire.GradwireError), gradwire.attach(net, "int8", deadline_s=DEADLINE_S):
        net.extra = nn.Linear(14, 14)
        fully_shard(net.extra, mesh=mesh)
        said.append(error_of(lambda: backward(net, rank)))
    net = VARIANTS["frozen"]()
    with contextlib.suppress(gradwire.GradwireError), gradwire.attach(net, "int8", deadline_s=DEADLINE_S):
        net.requires_grad_(True)
        said.append(error_of(lambda: backward(net, rank)))
    net = shard(Net(), mesh)
    with gradwire.attach(net, "int8", deadline_s=DEADLINE_S):
        said.append(error_of(lambda: gradwire.attach(net, "int8", deadline_s=DEADLINE_S)))
    return said


def backward(net: nn.Module, rank: int) -> None:
    """One backward pass."""
    torch.autograd.backward(loss_of(net, *next(batches(rank, 1))))


def error_of(act: Callable[[], object]) -> str:
    """What is raised."""
    try:
        act()
    except gradwire.GradwireError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def failing(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    """One rank fails before its backward pass; the others are told, and do not wait for the deadline."""
    net = shard(Net(), reshard_after_forward=False)  # else FSDP2's own gathers wait, of which nobody is told
    told = Path(folder) / "told"
    with contextlib.suppress(ValueError), gradwire.attach(net, "int8", deadline_s=DEADLINE_S):
        train(net, rank, 2)
        dist.barrier()
        loss = loss_of(net, *next(batches(rank, 1)))
        if rank == 1:
            raise ValueError("no more data")
        began = time.monotonic()
        said = error_of(loss.backward)
        told.touch()
        return {"said": said, "waited": time.monotonic() - began}
    while not told.exists():
        time.sleep(0.05)
    return {}


many = many_of(globals())


# Copies of a sharded model -----------------------------------------------------------------------------------------


def two_dimensions() -> DeviceMesh:
    """Two copies of a model that two ranks share."""
    return init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))


def copies(rank: int, world_size: int, spec: str, parameters: str | None, fp16: bool = False) -> dict[str, Any]:
    """FSDP2's own sums over a mesh of two dimensions, and a method between the copies."""
    mesh = two_dimensions()
    options: dict[str, Any] = {"mp_policy": mixed(None, torch.float16)} if fp16 else {}
    plain, ours = shard(Net(), mesh, **options), shard(Net(), mesh["shard"], **options)
    losses = train(plain, rank, 9)
    between: dict[str, Any] = {"replicate": mesh["replicate"], "parameters": parameters, "deadline_s": DEADLINE_S}
    with gradwire.attach(ours, spec, **between) as handle:
        own = train(ours, rank, 9)
        stats, norm, report = handle.stats(), handle.residual_norm(), str(handle.report())
    off = off_by(ours, plain)
    train(ours, rank, 1)  # each copy by itself
    return {
        "off": off,
        "apart": digest(ours),
        "losses": [losses[-1], own[-1]],
        "sent": [stats.wire_bytes, stats.dense_wire_bytes],
        "norm": norm,
        "report": report,
    }


def copies_resumed(rank: int, world_size: int, spec: str, folder: str, again: bool) -> str:
    """A save in the middle, a folder for each shard; and the second half in new processes."""
    mesh = two_dimensions()
    net = shard(Net(), mesh["shard"])
    optimizer = optimizer_of(net)
    own = Path(folder) / f"shard{mesh['shard'].get_local_rank()}"
    with gradwire.attach(net, spec, replicate=mesh["replicate"], deadline_s=DEADLINE_S) as handle:
        if again:
            state = torch.load(own / f"copy{mesh['replicate'].get_local_rank()}.pt", weights_only=False)
            net.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            gradwire.load(own / "gradwire", handle)
        else:
            train(net, rank, 6, optimizer=optimizer)
            own.mkdir(exist_ok=True)
            gradwire.save(own / "gradwire", handle)
            state = {"model": net.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state, own / f"copy{mesh['replicate'].get_local_rank()}.pt")
        train(net, rank, 12, start=6, optimizer=optimizer)
    return digest(net)


def copies_on_nodes(rank: int, world_size: int, nodes: str) -> str:
    """What a method that finds its nodes becomes between copies, or what is said of the axes."""
    os.environ[NODE_VARIABLE] = nodes[rank]
    mesh = two_dimensions()
    net = shard(Net(), mesh["shard"])
    said: list[str] = []

    def attached() -> None:
        with gradwire.attach(net, "int4,node=auto", replicate=mesh["replicate"], deadline_s=DEADLINE_S) as handle:
            said.append(repr(handle.reducer))
            train(net, rank, 2)

    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        said.append(error_of(attached))
    return "; ".join([*said, *(str(each.message) for each in warned)])


def near(rank: int, world_size: int) -> list[str]:
    """Fingerprints of what is trained, gathered for the backward pass among all ranks, and among two that are near."""
    found: list[str] = []
    for fewer in (True, 2):
        net = shard(Net(), reshard_after_forward=fewer)
        with gradwire.attach(net, "int8", parameters="int8", deadline_s=DEADLINE_S):
            train(net, rank, 3)
        found.append(digest(net))
    return found


def copies_that_differ(rank: int, world_size: int) -> list[str]:
    """Copies that begin with other parameters, and other meshes than one of copies."""
    mesh = two_dimensions()
    net = shard(Net(), mesh["shard"])
    said = [error_of(lambda: gradwire.attach(net, "int8", replicate=mesh, deadline_s=DEADLINE_S))]
    with torch.no_grad():
        cast(Any, net.head.bias).to_local().add_(float(mesh["replicate"].get_local_rank()))
    said.append(error_of(lambda: gradwire.attach(net, "int8", replicate=mesh["replicate"], deadline_s=DEADLINE_S)))
    said.append(
        error_of(lambda: gradwire.attach(net, "powersgd:2", replicate=mesh["replicate"], deadline_s=DEADLINE_S))
    )
    said.append(error_of(lambda: gradwire.attach(net, "int8", replicate=mesh["shard"], deadline_s=DEADLINE_S)))
    return said


# Checkpoints of PyTorch's ------------------------------------------------------------------------------------------


def distributed_save(rank: int, world_size: int, spec: str, folder: str) -> dict[str, Any]:
    """Everything in one checkpoint of `torch.distributed.checkpoint`, in the middle of a run."""
    dcp: Any = importlib.import_module("torch.distributed.checkpoint")
    from torch.distributed.checkpoint.state_dict import get_state_dict

    net = VARIANTS["plain"]()
    optimizer = optimizer_of(net)
    with gradwire.attach(net, spec, seed=5, deadline_s=DEADLINE_S) as handle:
        train(net, rank, 6, optimizer=optimizer)
        model, state = get_state_dict(net, optimizer)
        parts = {"model": model, "optimizer": state, "gradwire": cast(Any, handle).stateful()}
        dcp.save(parts, checkpoint_id=folder)
        owed = owed_by_name(handle, whole(net))
        train(net, rank, 12, start=6, optimizer=optimizer)
    return {"digest": digest(net), "owed": {name: mean_over_ranks(value) for name, value in owed.items()}}


def distributed_load(rank: int, world_size: int, spec: str, folder: str) -> dict[str, Any]:
    """The same run from there on."""
    dcp: Any = importlib.import_module("torch.distributed.checkpoint")
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    net = VARIANTS["plain"]()
    optimizer = optimizer_of(net)
    with gradwire.attach(net, spec, seed=7, deadline_s=DEADLINE_S) as handle:
        model, state = get_state_dict(net, optimizer)
        parts = {"model": model, "optimizer": state, "gradwire": cast(Any, handle).stateful(folder)}
        dcp.load(parts, checkpoint_id=folder)
        set_state_dict(net, optimizer, model_state_dict=model, optim_state_dict=state)
        owed = owed_by_name(handle, whole(net))
        train(net, rank, 12, start=6, optimizer=optimizer)
        steps = handle.state_dict()["step"]
    said = ""
    with gradwire.attach(net, "topk:0.2", deadline_s=DEADLINE_S) as handle:
        said = error_of(lambda: dcp.load({"gradwire": cast(Any, handle).stateful(folder)}, checkpoint_id=folder))
    return {
        "digest": digest(net),
        "owed": {name: mean_over_ranks(value) for name, value in owed.items()},
        "step": steps,
        "said": said,
    }


# An optimizer that is sharded --------------------------------------------------------------------------------------


def zero_redundancy(rank: int, world_size: int, spec: str, folder: str, again: bool) -> dict[str, Any]:
    """DDP with a `ZeroRedundancyOptimizer`: a save in the middle, and the second half in new processes."""
    from torch.distributed.optim import ZeroRedundancyOptimizer  # it warns of what is deprecated in PyTorch itself

    net = Net()
    ddp = nn.parallel.DistributedDataParallel(net)
    optimizer = ZeroRedundancyOptimizer(net.parameters(), torch.optim.AdamW, lr=0.01)
    place = Path(folder) / "torch.pt"
    with gradwire.attach(ddp, spec, deadline_s=DEADLINE_S) as handle:
        if again:
            state = torch.load(place, weights_only=True)
            net.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            gradwire.load(Path(folder) / "gradwire", handle)
        else:
            zero_steps(ddp, optimizer, rank, 0, 6)
            gradwire.save(Path(folder) / "gradwire", handle)
            optimizer.consolidate_state_dict(to=0)
            if rank == 0:
                torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict()}, place)
        zero_steps(ddp, optimizer, rank, 6, 12)
        stats = handle.stats()
    flat = torch.cat([p.detach().reshape(-1) for p in net.parameters()])
    held = sum(t.numel() for state in optimizer.optim.state.values() for t in state.values() if t.dim())
    bits = hashlib.sha256(flat.numpy().tobytes()).hexdigest()
    return {"digest": bits, "ratio": stats.ratio, "held": held, "numel": flat.numel()}


def zero_steps(net: nn.Module, optimizer: torch.optim.Optimizer, rank: int, start: int, end: int) -> None:
    """Some steps."""
    for x, y in batches(rank, end, start):
        optimizer.zero_grad()
        torch.autograd.backward(loss_of(net, x, y))
        optimizer.step()


def page(rank: int, world_size: int) -> int:
    """The page's examples, in one go."""
    text = (Path(__file__).parents[1] / "docs" / "fsdp2.md").read_text(encoding="utf-8")
    blocks: list[str] = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    names: dict[str, Any] = {}
    exec("".join(blocks), names)
    names["session"].close()
    return len(blocks)


def broken_off(rank: int, world_size: int) -> dict[str, Any]:
    """A backward pass that an error of the user's ends on all ranks, and training that goes on."""
    net = VARIANTS["plain"]()
    with gradwire.attach(net, "topk:0.1", checksum=True, deadline_s=DEADLINE_S) as handle:
        optimizer = optimizer_of(net)
        train(net, rank, 3, optimizer=optimizer)
        before = handle.residual_norm()
        hook = cast(Block, net.blocks[1]).up.register_full_backward_pre_hook(stop)
        with contextlib.suppress(ArithmeticError):
            backward(net, rank)
        hook.remove()
        cast(Any, net).reset_iter_state()
        optimizer.zero_grad()
        kept = handle.residual_norm() == before
        for block in net.blocks:  # what the pass left of gradients
            for parameter in block.parameters():
                parameter.grad = None
        train(net, rank, 6, start=3, optimizer=optimizer)
        steps = handle.stats().steps
        said = error_of(lambda: handle.session.reduce_({}))
    return {"kept": kept, "steps": steps, "digest": digest(net), "said": said}


def stop(*unused: object) -> None:
    """Fail."""
    raise ArithmeticError("stop")
