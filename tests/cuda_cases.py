"""What the ranks of `test_cuda_ranks.py` run: several ranks on one GPU, over NCCL.

NCCL refuses two ranks that share a GPU, unless it takes them for ranks of different hosts (`NCCL_HOSTID`): then they
talk over sockets, as ranks on two hosts do.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import traceback
import warnings
from collections.abc import Mapping, Sequence
from contextlib import closing
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

import gradwire
import sequence_cases
import sequence_linear_cases
from everything import by_name
from gradwire.doctor.launched import examine_ranks
from gradwire.drivers.link_profiler import LinkProfiler
from gradwire.drivers.process_group import GroupTransport
from gradwire.parallel.moe import ExchangeAxis, Experts, MoE, SoftmaxTopK
from gradwire.parallel.pipelines import Pipeline
from gradwire.training import MeshTrainer, configuration_of
from pipeline_cases import batch, part, step

DEADLINE_S = 60.0

Out = dict[str, Any]

_groups = itertools.count()


def over(backend: str, folder: str, rank: int, world_size: int) -> torch.device:
    """Put a default group of this backend in place of the one that is there, and return the device of its tensors."""
    dist.destroy_process_group()
    device = torch.device("cuda", 0) if "nccl" in backend else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend,
        init_method=f"file://{folder}/store{next(_groups)}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=DEADLINE_S),
    )
    return device


def network(device: torch.device) -> nn.Sequential:
    """The same on all devices."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 96), nn.LayerNorm(96), nn.Tanh(), nn.Linear(96, 96), nn.Linear(96, 8)).to(device)


def loss_of(model: nn.Module, step: int, rank: int, device: torch.device) -> Tensor:
    x = torch.randn(16, 40, generator=torch.Generator().manual_seed(100 * step + rank))
    return functional.mse_loss(model(x.to(device)), x[:, :8].to(device))


def digest(model: nn.Module) -> str:
    """A fingerprint of all parameters, bit for bit."""
    whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
    flat = torch.cat([p.detach().reshape(-1).cpu() for p in whole])
    return hashlib.sha256(flat.numpy().tobytes()).hexdigest()


def ways(rank: int, world_size: int, folder: str, names: Sequence[str], backend: str, steps: int) -> dict[str, Out]:
    """Train a few steps by each of these ways of `everything`: losses, and a digest of the model at the end."""
    device, out = over(backend, folder, rank, world_size), dict[str, Out]()
    for name in names:
        print("way", name, flush=True)
        try:
            out[name] = _trained(name, steps, rank, device)
        except Exception as error:
            traceback.print_exc()
            out[name] = {"error": f"{type(error).__name__}: {error}"}
    return out


def _trained(name: str, steps: int, rank: int, device: torch.device) -> Out:
    running = by_name()[name].make(network(device), lambda model: torch.optim.SGD(model.parameters(), 0.1))
    losses = list[float]()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", gradwire.NonFiniteWarning)
        for step in range(steps):
            running.inner.zero_grad()
            loss = loss_of(running.network, step, rank, device)
            loss.backward()
            running.step()
            losses.append(loss.item())
    running.finish()
    found = digest(running.network)
    running.close()
    return {"losses": losses, "digest": found}


def specs(rank: int, world_size: int, folder: str, specs: Sequence[str], backend: str, steps: int) -> dict[str, Out]:
    """Train by sessions of these specs: losses, digest, and the bytes that were sent."""
    device, out = over(backend, folder, rank, world_size), dict[str, Out]()
    for spec in specs:
        print("spec", spec, flush=True)
        model = network(device)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with closing(gradwire.Session(model, spec, deadline_s=DEADLINE_S)) as session:
            losses = list[float]()
            for step in range(steps):
                optimizer.zero_grad()
                loss = loss_of(model, step, rank, device)
                loss.backward()
                session.reduce_(model)
                optimizer.step()
                losses.append(loss.item())
            stats = session.stats()
            out[spec] = {"losses": losses, "digest": digest(model), "bytes": stats.wire_bytes, "residual": 0.0}
            out[spec]["residual"] = session.residual_norm()
    return out


def sequences(
    rank: int, world_size: int, folder: str, cases: list[Mapping[str, Any]], dtype: str, backend: str
) -> list[float]:
    device = over(backend, folder, rank, world_size)
    return sequence_cases.twin_errors(rank, world_size, cases, dtype, str(device))


def split_layers(
    rank: int, world_size: int, folder: str, cases: list[Mapping[str, Any]], dtype: str, backend: str
) -> list[float]:
    device = over(backend, folder, rank, world_size)
    return sequence_linear_cases.twin_errors(rank, world_size, cases, dtype, str(device))


def experts(rank: int, world_size: int, folder: str, backend: str, chunks: int) -> float:
    """How far a layer of experts on the device is from the same one on CPUs, over Gloo, in output and gradients."""
    found = list[list[Tensor]]()
    for each in ("gloo", backend):
        device = over(each, folder, rank, world_size)
        axis = ExchangeAxis()
        torch.manual_seed(1)
        layer = MoE(SoftmaxTopK(16, 4 * world_size, 2, seed=1), Experts(16, 24, 4 * world_size, axis, seed=1), axis,
                    chunks=chunks).double().to(device)  # fmt: skip
        x = torch.randn(50 + rank, 16, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)
        x = x.to(device).requires_grad_()
        y = layer(x)
        y.square().sum().backward()
        grads = [p.grad for p in layer.parameters() if p.grad is not None]
        found.append([each.detach().cpu() for each in (y, x.grad, *grads) if each is not None])
    return max(float((one - other).abs().max()) for one, other in zip(*found, strict=True))


def stages(rank: int, world_size: int, folder: str, backend: str, schedule: str, codec: str) -> list[float]:
    """Losses of a pipeline with a stage on each rank, on CPUs and on the device."""
    found = list[float]()
    for each in ("gloo", backend):
        device = over(each, folder, rank, world_size)
        pipeline = Pipeline(schedule, 4, codec, device=device)
        parts = [pipeline.stage(part(i, torch.float32).to(device), i) for i in pipeline.indices]
        made = pipeline.schedule(parts, functional.mse_loss)
        x, y = (each.to(device) for each in batch(0, 4, torch.float32))
        losses, _ = step(made, pipeline.indices, pipeline.shape.stages - 1, x, y)
        found.append(sum(losses))
    return found


def on_a_mesh(
    rank: int, world_size: int, folder: str, tables: Sequence[Mapping[str, Mapping[str, Any]]], backend: str, steps: int
) -> list[list[float]]:
    """Losses of a training under each layout."""
    device = over(backend, folder, rank, world_size)
    out = list[list[float]]()
    for each in tables:
        print("layout", each, flush=True)
        with closing(MeshTrainer(configuration_of(each), deadline_s=DEADLINE_S, device=device)) as trainer:
            out.append([float(trainer.step()[0]) for _ in range(steps)])
    return out


def instruments(rank: int, world_size: int, folder: str, backend: str) -> Out:
    """What the doctor and the profiler of links say of these ranks."""
    device = over(backend, folder, rank, world_size)
    found = examine_ranks(timeout_s=DEADLINE_S)
    group = dist.group.WORLD
    assert group is not None
    profiler = LinkProfiler(GroupTransport(group), device)
    topology, links = profiler.topology(), profiler.axis_links()
    rates = [1 / each.link.beta_s_per_byte for each in links.links]
    words = {"doctor": str(found), "topology": topology.summary, "links": links.summary(topology.topology)}
    return {**words, "bytes_per_s": max(rates)}


def compared(rank: int, world_size: int, folder: str, what: str, backend: str, **arguments: Any) -> list[Any]:
    """A case on CPUs over Gloo, and then on the device."""
    run = functools.partial({"specs": specs, "ways": ways, "on_a_mesh": on_a_mesh}[what], rank, world_size, folder)
    return [run(backend=each, **arguments) for each in ("gloo", backend)]
