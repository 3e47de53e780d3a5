"""What each rank does in the tests of `gradwire.save` and `gradwire.load`."""

import errno
import os
import signal
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

import gradwire
from ddp_cases import GRAIN, batches, digest, four_buckets, mlp, sgd, train
from gradwire.core import save_folder
from gradwire.core.errors import StateError

BEFORE, AFTER = 6, 4


def started(
    spec: str, checkpoint: dict[str, Any] | None = None, deadline_s: float = 60, grain_numel: int = GRAIN
) -> Any:
    """A model, its optimizer and a handle, at the start or from a user's own checkpoint."""
    model = mlp(seed=99 if checkpoint else 0)
    if checkpoint:
        model.load_state_dict(checkpoint["model"])
    ddp = four_buckets(model)
    optimizer = sgd(ddp)
    if checkpoint:
        optimizer.load_state_dict(checkpoint["optimizer"])
    return ddp, optimizer, gradwire.attach(ddp, spec, seed=3, grain_numel=grain_numel, deadline_s=deadline_s)


def goes_on(rank: int, ddp: DDP, optimizer: torch.optim.Optimizer) -> list[str]:
    """Digests of some more steps."""
    digests: list[str] = []
    for step in range(BEFORE, BEFORE + AFTER):
        train(ddp, batches(rank, step + 1, start=step), optimizer)
        digests.append(digest(ddp))
    return digests


def owed(state: dict[str, Any]) -> tuple[float, float]:
    """Sums of what this rank owes: as its residual, and as an owner of shards."""
    sums = {"element": 0.0, "owned": 0.0}
    for leaves in state["parameters"].values():
        for path, pieces in leaves.items():
            kind = path.partition(":")[0]
            if kind in sums:
                sums[kind] += sum(float(piece["values"].double().sum()) for piece in pieces)
    return sums["element"], sums["owned"]


def home_of(folder: str, spec: str, rank: int, shared: bool) -> Path:
    """Where a rank saves: a folder that all share, or one of its own host's."""
    home = Path(folder) / ("shared" if shared else f"host{rank}") / spec.replace(":", "-")
    home.mkdir(parents=True, exist_ok=True)
    return home


def save_and_go_on(rank: int, world_size: int, folder: str, specs: list[str]) -> dict[str, Any]:
    """Train, save, and train on: what a run without a break sees."""
    out: dict[str, Any] = {}
    for spec in specs:
        shared, own = (home_of(folder, spec, rank, kind) for kind in (True, False))
        ddp, optimizer, handle = started(spec)
        with handle:
            train(ddp, batches(rank, 2), optimizer)
            gradwire.save(shared, handle)  # replaced by the next
            train(ddp, batches(rank, BEFORE, start=2), optimizer)
            torch.save({"model": ddp.module.state_dict(), "optimizer": optimizer.state_dict()}, own / "user.pt")
            for home in (shared, own):
                gradwire.save(home, handle)
            sums = owed(handle.state_dict())
            out[spec] = {"owed": sums, "digests": goes_on(rank, ddp, optimizer)}
    return out


def load_and_go_on(rank: int, world_size: int, folder: str, jobs: list[tuple[str, bool]]) -> list[dict[str, Any]]:
    """Take runs up in new processes, from a shared folder or from each rank's own."""
    out: list[dict[str, Any]] = []
    for spec, shared in jobs:
        checkpoint = torch.load(home_of(folder, spec, 0, shared=False) / "user.pt", weights_only=True)
        ddp, optimizer, handle = started(spec, checkpoint)
        with handle:
            step = gradwire.load(home_of(folder, spec, rank, shared), handle)
            sums = owed(handle.state_dict())
            out.append({"step": step, "owed": sums, "digests": goes_on(rank, ddp, optimizer)})
    return out


def load_with_other_grains(rank: int, world_size: int, folder: str, specs: list[str]) -> list[dict[str, Any]]:
    """Take runs up whose grains were smaller, from a shared folder; the first also from the ranks' own folders."""
    out: list[dict[str, Any]] = []
    for spec in specs:
        ddp, optimizer, handle = started(spec, grain_numel=3 * GRAIN)
        with handle:
            gradwire.load(home_of(folder, spec, rank, shared=True), handle)
            out.append({"owed": owed(handle.state_dict()), "digests": goes_on(rank, ddp, optimizer)})
    _, _, handle = started(specs[0], grain_numel=3 * GRAIN)
    with handle:
        try:
            gradwire.load(home_of(folder, specs[0], rank, shared=False), handle)
        except StateError as error:
            out.append({"refused": str(error)})
    return out


def refusals(rank: int, world_size: int, folder: str) -> dict[str, str]:
    """What ranks are told that load a folder of their own with another number of ranks, or with another method."""
    out: dict[str, str] = {}
    home = home_of(folder, "int4", rank, shared=False)
    for spec in ("int4", "int8"):
        _, _, handle = started(spec)
        with handle:
            try:
                gradwire.load(home, handle)
            except gradwire.StateError as error:
                out[spec] = str(error)
    return out


def load_and_refusals(rank: int, world_size: int, folder: str, jobs: list[tuple[str, bool]]) -> dict[str, Any]:
    """Both, since starting processes takes longer."""
    return {"loaded": load_and_go_on(rank, world_size, folder, jobs), "refused": refusals(rank, world_size, folder)}


def save_twice_and_die(rank: int, world_size: int, folder: str, at: str) -> None:
    """A good save, and one in which both ranks are killed at `at`, a function of `save_folder`."""
    ddp, optimizer, handle = started("int4")
    train(ddp, batches(rank, 2), optimizer)
    gradwire.save(folder, handle)
    train(ddp, batches(rank, 4, start=2), optimizer)
    if rank == world_size - 1 or at == "finish":
        setattr(save_folder, at, killed)
    gradwire.save(folder, handle)


def killed(*_: object) -> None:
    """What takes the place of the next thing to do."""
    os.kill(os.getpid(), signal.SIGKILL)


def what_is_there(rank: int, world_size: int, folders: list[str]) -> list[dict[str, Any]]:
    """The steps that can be loaded, and what is said to it."""
    out: list[dict[str, Any]] = []
    for folder in folders:
        _, _, handle = started("int4")
        with handle, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            out.append({"step": gradwire.load(folder, handle), "said": [str(warning.message) for warning in caught]})
    return out


def full_disk(*_: object) -> None:
    """What writing to a full disk does."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class Faults:
    """Two ranks with a folder each, and what they are told of what goes wrong."""

    def __init__(self, rank: int, home: Path, handle: gradwire.Session) -> None:
        self.rank, self.home, self.handle = rank, home, handle
        self.told: dict[str, str] = {}

    def tell(self, name: str, act: Callable[[], object]) -> None:
        """Note what is raised, and see to it that nothing has changed."""
        before = owed(self.handle.state_dict())
        try:
            act()
            self.told[name] = "nothing"
        except gradwire.GradwireError as error:
            self.told[name] = f"{type(error).__name__}: {error}"
        assert owed(self.handle.state_dict()) == before
        dist.barrier()

    def save(self) -> None:
        """Save."""
        gradwire.save(self.home, self.handle)

    def load(self) -> None:
        """Load."""
        gradwire.load(self.home, self.handle)

    def absences(self) -> None:
        """Ranks that do not call the same, with a short deadline."""
        self.handle.session.lane.deadline_s = 2
        self.tell("without lead", lambda: self.rank and self.save())
        self.tell("lead alone", lambda: self.rank or self.save())
        self.handle.session.lane.deadline_s = 60
        self.tell("crossed", self.load if self.rank else self.save)

    def broken_files(self) -> None:
        """Files of rank 1 that cannot be written, are damaged, or are gone."""
        number = save_folder.numbers(self.home)[-1]
        here = self.home / f"gradwire-{number}"
        file, manifest = here / f"rank{self.rank}.safetensors", here / "manifest.json"
        for name in ("write_rank", "finish"):
            works = getattr(save_folder, name)
            setattr(save_folder, name, full_disk if self.rank else works)
            self.tell(name, self.save)
            setattr(save_folder, name, works)
            assert save_folder.numbers(self.home) == [number], "a failed save has left something"
        kept, kept_manifest = file.read_bytes(), manifest.read_bytes()
        if self.rank:
            file.write_bytes(kept[:-100] + bytes([kept[-100] ^ 1]) + kept[-99:])
        self.tell("damaged", self.load)
        if self.rank:
            file.unlink()
        self.tell("missing", self.load)
        file.write_bytes(kept)
        if self.rank:
            manifest.unlink()
        self.tell("no manifest", self.load)
        manifest.write_bytes(kept_manifest)
        if self.rank:
            (found,) = save_folder.manifests(self.home)
            save_folder.finish(self.home, replace(found, run=save_folder.SavedRun("theirs", "another model's", "int4")))
        self.tell("another's", self.save)
        assert save_folder.numbers(self.home) == [number], "somebody else's save is gone"
        manifest.write_bytes(kept_manifest)


def faults(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    """Everything that is refused at two ranks: what each rank is told; and what can be loaded after all of it."""
    ddp, optimizer, handle = started("int4")
    with handle:
        train(ddp, batches(rank, 2), optimizer)
        seen = Faults(rank, Path(folder) / f"host{rank}", handle)
        seen.tell("empty", seen.load)
        seen.save()
        seen.absences()
        seen.broken_files()
        return {**seen.told, "step": gradwire.load(seen.home, handle)}
