"""What ranks do in `test_run_fsdp2.py`: scripts of FSDP2 that save in several ways, and go on from what they saved."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh

from fsdp2_cases import Net, batches, digest, loss_of, mean_over_ranks, owed_by_name, whole
from gradwire.adapters.script_saves import ScriptSaves
from gradwire.adapters.unchanged import Unchanged

dcp: Any = importlib.import_module("torch.distributed.checkpoint")

SPEC, STEPS = "topk:0.05", 8


class Trained:
    """What a script has: a model that it has sharded, and its optimizer."""

    def __init__(self) -> None:
        from torch.distributed.fsdp import fully_shard  # as a script does, once gradwire watches

        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        self.net = Net()
        for block in self.net.blocks:
            fully_shard(block, mesh=mesh)
        self.called: Any = fully_shard(self.net, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.01)

    def train(self, start: int, end: int) -> None:
        """Some steps."""
        for x, y in batches(dist.get_rank(), end, start):
            loss_of(self.called, x, y).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def state(self, **options: Any) -> dict[str, Any]:
        """For a checkpoint."""
        model, optimizer = get_state_dict(self.net, self.optimizer, options=StateDictOptions(**options))
        return {"model": model, "optimizer": optimizer}

    def take_up(self, state: dict[str, Any], **options: Any) -> None:
        """What a checkpoint had."""
        set_state_dict(
            self.net,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
            options=StateDictOptions(**options),
        )


WHOLE = {"full_state_dict": True, "cpu_offload": True}


def save_file(trained: Trained, place: Path) -> None:
    """A full state, on rank 0."""
    state = trained.state(**WHOLE)
    if dist.get_rank() == 0:
        torch.save(state, place)


def load_file(trained: Trained, place: Path) -> None:
    """The same, on every rank."""
    trained.take_up(torch.load(place, weights_only=False), **WHOLE)


def save_shards(trained: Trained, place: Path) -> None:
    """By torch.distributed.checkpoint."""
    dcp.save(trained.state(), checkpoint_id=str(place))


def save_by_writer(trained: Trained, place: Path) -> None:
    """By a writer."""
    dcp.save(trained.state(), storage_writer=dcp.FileSystemWriter(place))


def save_beside_training(trained: Trained, place: Path) -> None:
    """By a thread, with a group of its own, which is waited for after the next step."""
    pending = dcp.async_save(trained.state(), checkpoint_id=place, process_group=dist.new_group())
    trained.train(STEPS // 2, STEPS // 2 + 1)
    pending.result()


def save_alone(trained: Trained, place: Path) -> None:
    """A full state by torch.distributed.checkpoint, on rank 0 alone."""
    state = trained.state(**WHOLE)
    if dist.get_rank() == 0:
        dcp.save(state, checkpoint_id=place, no_dist=True)


def load_shards(trained: Trained, place: Path) -> None:
    """From torch.distributed.checkpoint."""
    state = trained.state()
    dcp.load(state, checkpoint_id=place)
    trained.take_up(state)


def load_alone(trained: Trained, place: Path) -> None:
    """A full state, on every rank for itself."""
    state = trained.state(full_state_dict=True)
    dcp.load(state, checkpoint_id=place, no_dist=True)
    trained.take_up(state, full_state_dict=True)


def load_by_reader(trained: Trained, place: Path) -> None:
    """By a reader."""
    state = trained.state()
    dcp.load(state, storage_reader=dcp.FileSystemReader(place))
    trained.take_up(state)


Way = tuple[Callable[[Trained, Path], None], Callable[[Trained, Path], None]]
WAYS: dict[str, Way] = {
    "file": (save_file, load_file),
    "shards": (save_shards, load_shards),
    "writer": (save_by_writer, load_by_reader),
    "async": (save_beside_training, load_shards),
    "alone": (save_alone, load_alone),
}


@contextlib.contextmanager
def watched(said: list[str], follow: bool = True, **options: Any) -> Generator[Unchanged]:
    """What `gradwire run` does around a script."""
    saves, unchanged = ScriptSaves(said.append), Unchanged(SPEC, said.append, deadline_s=30.0, **options)
    with unchanged.watching(), saves.watching() if follow else contextlib.nullcontext():
        if follow:
            unchanged.on_attach(saves.follow)
        yield unchanged
    for _, handle in unchanged.sessions:
        handle.close()


def resumed(rank: int, world_size: int, folder: str, way: str) -> dict[str, Any]:
    """A run without a break, one that goes on from a checkpoint in its middle, and one that goes on without states."""
    save, load = WAYS[way]
    place, said = Path(folder) / way, list[str]()
    with watched([]):
        trained = Trained()
        trained.train(0, STEPS // 2)
        save(trained, place)
        trained.train(STEPS // 2 + (way == "async"), STEPS)
        digests = [digest(trained.net)]
    for follow in (True, False):
        with watched(said, follow):
            trained = Trained()
            load(trained, place)
            if rank == 0 and way == "file":
                torch.save({}, Path(folder) / "again")  # before the first pass
            trained.train(STEPS // 2, STEPS)
            digests.append(digest(trained.net))
    return {"digests": digests, "said": said, "there": sorted(found.name for found in Path(folder).glob("*gradwire*"))}


def ways(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    """All of them."""
    return {way: resumed(rank, world_size, folder, way) for way in WAYS}


def owed_when_saved(rank: int, world_size: int, folder: str) -> dict[str, list[float]]:
    """What is owed at the step of a checkpoint, the mean over ranks."""
    with watched([]) as unchanged:
        trained = Trained()
        trained.train(0, STEPS)
        save_shards(trained, Path(folder))
        return mean_owed(unchanged, trained.net)


def owed_by_others(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    """The same on another number of ranks, before their first step."""
    owed: list[dict[str, list[float]]] = []
    with watched([]) as unchanged:
        trained = Trained()
        unchanged.on_attach(lambda net, _: owed.append(mean_owed(unchanged, net)))
        load_shards(trained, Path(folder))
        trained.train(STEPS, STEPS + 2)
    return {"owed": owed[0], "digest": digest(trained.net)}


def mean_owed(unchanged: Unchanged, net: nn.Module) -> dict[str, list[float]]:
    """What is owed of each parameter, the mean over ranks."""
    ((_, handle),) = unchanged.sessions
    return {name: mean_over_ranks(owed) for name, owed in owed_by_name(handle, whole(net)).items()}


def unseen_steps(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    """A file that is saved before steps that no forward pass of the root announces."""
    said: list[str] = []
    with watched(said):
        trained = Trained()
        trained.train(0, 2)
        if rank == 0:
            torch.save({}, Path(folder) / "step.pt")
        trained.net.forward = trained.net.forward  # the script's own way in, for which FSDP2 calls its hooks
        importlib.import_module("torch.distributed.fsdp").register_fsdp_forward_method(trained.net, "forward")
        x, y = next(batches(rank, 1))
        nn.functional.cross_entropy(trained.net.forward(x).flatten(0, 1), y.flatten()).backward()
        trained.train(2, 3)
    return {"said": said, "there": sorted(found.name for found in Path(folder).iterdir())}


def named(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    """Two models, a first pass without gradients, one through a part, and parameters in 8 bits."""
    said: list[str] = []
    with watched(said, parameters="int8") as unchanged:
        first, second = Trained(), Trained()
        with torch.no_grad():
            loss_of(first.net, *next(batches(rank, 1)))
        quiet = not unchanged.sessions
        first.called = torch.compile(first.net, backend="eager")
        first.net.blocks[1](torch.ones(2, 14)).sum().backward()
        first.optimizer.zero_grad()
        for trained in (first, second):
            trained.train(0, 3)
        save_shards(first, Path(folder) / "both")
        models = [(name, handle.stats().steps, handle.stats().ratio) for name, handle in unchanged.sessions]
        summary = unchanged.summary()
    there = sorted(found.name for found in (Path(folder) / "both").glob("gradwire*"))
    return {"quiet": quiet, "said": said, "models": models, "summary": summary, "there": there}
