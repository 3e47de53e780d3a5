"""What each rank does in the tests of aggregation rules on real processes."""

from typing import Any

import torch
from torch import Tensor, nn

import gradwire
from ddp_cases import GRAIN, batches, four_buckets, mlp
from gradwire.drivers.virtual import VirtualRanks
from gradwire.reducers import Partition, Reducer

MIXED = {"0.*": "krum:0", "2.*": "int4", "4.*": "rfa"}


def reducer_of(spec: str) -> Reducer:
    """The reducer of a spec; "mixed" is three in one model, two of which need distances."""
    if spec != "mixed":
        return gradwire.parse(spec)
    return Partition(tuple((name, gradwire.parse(s)) for name, s in MIXED.items()), gradwire.parse("median"))


def gradients_of(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """One rank's own gradients."""
    model.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def as_in_lockstep(rank: int, world_size: int, specs: list[str]) -> dict[str, Any]:
    """Steps under DDP beside the same steps of virtual ranks; returns whether every bit agrees."""
    torch.set_num_threads(1)
    out: dict[str, Any] = {}
    for spec in specs:
        ddp, model = four_buckets(mlp()), mlp()
        virtual = VirtualRanks(reducer_of(spec), model, world_size, grain_numel=GRAIN)
        equal: list[bool] = []
        everybody = zip(*(batches(r, 3) for r in range(world_size)), strict=True)
        with gradwire.attach(ddp, reducer_of(spec), grain_numel=GRAIN, deadline_s=60):
            for step in everybody:
                ddp.zero_grad()
                x, y = step[rank]
                nn.functional.cross_entropy(ddp(x), y).backward()
                virtual.step([gradients_of(model, x, y) for x, y in step])
                pairs = zip(ddp.parameters(), model.parameters(), strict=True)
                equal += [torch.equal(p.grad, q.grad) for p, q in pairs if p.grad is not None and q.grad is not None]
        out[spec] = equal
    return out


def too_few(rank: int, world_size: int) -> str:
    """What attach says where a rule needs more ranks."""
    try:
        gradwire.attach(four_buckets(mlp()), "bulyan:1")
    except gradwire.CompositionError as error:
        return str(error)
    return "nothing"


def many(rank: int, world_size: int, specs: list[str]) -> dict[str, Any]:
    """Both cases in one set of processes."""
    return {"refused": too_few(rank, world_size), "equal": as_in_lockstep(rank, world_size, specs)}
