"""What ranks do in `test_script_saves.py`."""

from __future__ import annotations

import io
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradwire.adapters.script_saves import ScriptSaves
from gradwire.adapters.unchanged import Unchanged

Net = Callable[[torch.Tensor], torch.Tensor]


def step(model: Net, number: int, rank: int) -> None:
    """One pass forwards and backwards, without an optimizer: what is owed changes, the parameters do not."""
    model(torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * number + rank))).square().sum().backward()


def made(seed: int) -> DistributedDataParallel:
    torch.manual_seed(seed)
    return DistributedDataParallel(nn.Linear(8, 300))


def save_on_one_rank(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    """Rank 1 saves twice after its second step; each rank saves a file of its own after the last one."""
    here, said = Path(folder), list[str]()
    saves, unchanged = ScriptSaves(said.append), Unchanged("topk:0.05", lambda _: None)
    unchanged.on_attach(saves.follow)
    with unchanged.watching(), saves.watching():
        models = [made(0), made(1)]
        for model in models:
            step(model, 0, rank)
        torch.save({}, io.BytesIO())
        if rank == 1:
            torch.save({"at": 1}, here / "both.pt")
            torch.save({"at": 1}, f=str(here / "again.pt"))
        with torch.no_grad():
            models[0](torch.ones(1, 8))
        before = sorted(path.name for path in here.iterdir())
        dist.barrier()
        norms = [handle.residual_norm() for _, handle in unchanged.sessions]
        step(models[0], 1, rank)
        torch.save({}, here / f"own-{rank}.pt")
        last = [handle.residual_norm() for _, handle in unchanged.sessions]
        dist.destroy_process_group()
    alone = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group("gloo", store=alone, rank=0, world_size=1)  # for who ends this process
    return {"before": before, "norms": norms, "last": last, "said": said}


def save_unevenly(rank: int, world_size: int, folder: str) -> list[float]:
    """Rank 0 saves the model, by a name that is there for a moment, and each rank its own random numbers."""
    here, norms = Path(folder), list[float]()
    saves, unchanged = ScriptSaves(lambda _: None), Unchanged("topk:0.05", lambda _: None)
    unchanged.on_attach(saves.follow)
    with unchanged.watching(), saves.watching():
        model = made(0)
        for number in range(3):
            step(model, number, rank)
            torch.save({}, here / f"random-{rank}.pt")
            if rank == 0:
                torch.save({"at": number}, here / "model.tmp")
                os.replace(here / "model.tmp", here / "model.pt")
            norms.append(unchanged.sessions[0][1].residual_norm())
        step(model, 3, rank)
        if rank == 0:
            shutil.move(here / "model.pt", here / "best.pt")
        step(model, 4, rank)
    for _, handle in unchanged.sessions:
        handle.close()
    return norms


def load_again(rank: int, world_size: int, folder: str, names: list[str]) -> dict[str, Any]:
    """Every rank loads files and makes one pass with each model; what is owed before that is noted."""
    here, said, norms = Path(folder), list[str](), list[float]()
    saves, unchanged = ScriptSaves(said.append), Unchanged("topk:0.05", lambda _: None)
    unchanged.on_attach(saves.follow)
    unchanged.on_attach(lambda _, handle: norms.append(handle.residual_norm()))
    with unchanged.watching(), saves.watching():
        for name in names:
            torch.load(here / name.format(rank=rank))
        for model in [made(0), made(1)]:
            step(model, 5, rank)
    for _, handle in unchanged.sessions:
        handle.close()
    return {"norms": norms, "said": said}
