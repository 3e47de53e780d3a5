"""What each rank does in `test_processors.py`: steps of every method among ranks that compute in different ways."""

from __future__ import annotations

import hashlib

import torch
import torch.distributed as dist
from torch import Tensor

import gradwire
from gradwire.core.grain import ParameterSpec
from gradwire.drivers.engine import Engine
from gradwire.drivers.plan import plan
from gradwire.drivers.process_group import GroupTransport

CPU = torch.device("cpu")
SMALL = ((48, 33), (33,), (20, 65), (3, 5, 7), (5,))
LARGE = ((700, 600),)
"""Enough for kernels to share it among threads."""


def parameters(shapes: tuple[tuple[int, ...], ...]) -> list[ParameterSpec]:
    return [ParameterSpec(f"layer{i}", shape, torch.float32, CPU) for i, shape in enumerate(shapes)]


def digest(tensors: list[Tensor]) -> int:
    """A number of 60 bits that stands for all bits of some tensors."""
    state = hashlib.sha256()
    for tensor in tensors:
        state.update(tensor.contiguous().numpy().tobytes())
    return int(state.hexdigest()[:15], 16)


def means(spec: str, shapes: tuple[tuple[int, ...], ...], steps: int) -> list[int]:
    """A digest of the means of each step."""
    assert dist.group.WORLD is not None
    engine = Engine(plan(parameters(shapes), gradwire.parse(spec)), GroupTransport(dist.group.WORLD))
    generator = torch.Generator().manual_seed(dist.get_rank())
    found: list[int] = []
    for _ in range(steps):
        engine.begin()
        for unit, (grain, _) in enumerate(engine.plan.units):
            engine.deliver(unit, 0, torch.rand(grain.numel, generator=generator) - 0.4)
        engine.finish()
        found.append(digest([engine.value(unit) for unit in range(len(engine.plan.units))]))
    engine.settle()
    return found


def different(rank: int, world_size: int, specs: list[str], threads: list[int], steps: int) -> dict[str, list[int]]:
    """The steps of each method after which not all ranks had the same bits; of large matrices, steps from 1000 on."""
    torch.set_num_threads(threads[rank % len(threads)])
    apart: dict[str, list[int]] = {}
    for spec in specs:
        mine = torch.tensor(means(spec, SMALL, steps) + means(spec, LARGE, 2), dtype=torch.int64)
        everyone = [torch.empty_like(mine) for _ in range(world_size)]
        dist.all_gather(everyone, mine)
        unequal = (torch.stack(everyone) != mine).any(0).nonzero().view(-1).tolist()
        apart[spec] = [step if step < steps else 1000 + step - steps for step in unequal]
    return apart
