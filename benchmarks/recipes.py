"""The recipes of precision beside float32, on real ranks: `python benchmarks/recipes.py [--seeds 3] [--save]`.

Two processes train byte-GPT under `DistributedDataParallel`, or under `fully_shard` where the recipe is for sharded
models. Seeds are paired. Fine-tuning begins, with either precision, from a model that was trained before in float32,
and goes on at a tenth of the rate. For each recipe and for float32: held-out loss, bytes that a rank sends a step, and
bytes that it keeps between two steps (parameters, gradients, optimizer, residuals and buffers).
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import gradwire
from common import save_result
from gradwire.core.state import walk
from gradwire.ranks.supervised import run_function
from gradwire.recipes import RECIPES, TrainingRecipe
from gradwire.tasks.builtin import make_task
from gradwire.tasks.task import Task, measure

RANKS = 2
FP32, FP32_TUNING = "fp32", "fp32, fine-tuning"
BESIDE = {"pre-training": FP32, "fine-tuning": FP32_TUNING, "low memory": FP32}


def local(tensor: Any) -> Tensor:
    """What this rank holds of a tensor."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def kept_bytes(model: nn.Module, optimizer: torch.optim.Optimizer, session: gradwire.Session) -> int:
    """Bytes of all that a rank keeps from one step to the next."""
    held = [local(p) for p in model.parameters()] + [local(p.grad) for p in model.parameters() if p.grad is not None]
    held += [local(v) for state in optimizer.state.values() for v in state.values() if isinstance(v, Tensor)]
    held += [leaf.tensor for _, state in session.engine.states() for _, leaf in walk(state)]
    return sum(tensor.nbytes for tensor in [*held, *session.engine.buffers()])


def passes(
    task: Task, model: Any, optimizer: Any, steps: range, where: tuple[int, int], rate: float, cast: Any
) -> None:
    """Train; the schedule goes over these steps."""
    rates = [group["lr"] * rate for group in optimizer.param_groups]
    for number, step in enumerate(steps):
        for group, each in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = each * task.schedule(number, number / len(steps))
        inputs, targets = task.batch(step, *where)
        optimizer.zero_grad()
        with cast():
            loss = task.loss(model(inputs), targets)
        loss.backward()
        if task.clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), task.clip_norm)
        optimizer.step()


def train(rank: int, world_size: int, name: str, seed: int, steps: int, folder: str) -> dict[str, float]:
    """Train once on one rank."""
    torch.set_num_threads(1)
    task = make_task("bytes", seed, None)
    recipe: TrainingRecipe | None = RECIPES.get(name)
    cast = (lambda: recipe.autocast("cpu")) if recipe and not recipe.sharded else contextlib.nullcontext
    tuning = "fine-tuning" in name
    if tuning:
        begin(task, Path(folder) / f"{seed}-{rank}.pt", steps)
    if recipe and recipe.sharded:
        mesh = init_device_mesh("cpu", (world_size,))
        for module in [m for m in task.model.modules() if type(m).__name__ == "Block"]:
            fully_shard(module, mesh=mesh, mp_policy=recipe.policy())
        model: Any = fully_shard(task.model, mesh=mesh, mp_policy=recipe.policy())
    else:
        model = DistributedDataParallel(task.model)
    optimizer = task.optimizer(model.parameters())
    done = range(steps, 2 * steps) if tuning else range(2 * steps)
    with gradwire.attach(model, recipe.spec if recipe else "none", deadline_s=300) as session:
        passes(task, model, optimizer, done, (rank, world_size), 0.1 if tuning else 1.0, cast)
        sent, kept = session.stats().wire_bytes / len(done), kept_bytes(model, optimizer, session)
        if recipe and recipe.sharded:
            weights = {key: value.full_tensor() for key, value in task.model.state_dict().items()}
            task = make_task("bytes", seed, None)
            task.model.load_state_dict(weights)
    return {"metric": measure(task.metric, task.model.eval()).value, "wire_bytes": sent, "kept_bytes": kept}


def begin(task: Task, file: Path, steps: int) -> None:
    """What fine-tuning begins with: trained for some steps in float32, on the data of one rank, once for each seed."""
    if not file.exists():
        where = (0, 1)
        passes(
            task, task.model, task.optimizer(task.model.parameters()), range(steps), where, 1.0, contextlib.nullcontext
        )
        torch.save(task.model.state_dict(), file)
    task.model.load_state_dict(torch.load(file, weights_only=True))


def main() -> None:
    """Measure and print; with --save write a dated result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=30, help="of pre-training, half of them of fine-tuning")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/recipes_DATE.json")
    arguments = parser.parse_args()
    rows: dict[str, dict[str, Any]] = {name: {"metrics": []} for name in (FP32, FP32_TUNING, *RECIPES)}
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(arguments.seeds):
            for name, row in rows.items():
                job = {"name": name, "seed": seed, "steps": arguments.steps // 2, "folder": folder}
                found = run_function(f"{Path(__file__)}:train", RANKS, job, 900)
                row["metrics"].append(found[0]["metric"])
                row |= {key: found[0][key] for key in ("wire_bytes", "kept_bytes")}
                print(f"seed {seed} {name:20s} {found[0]}", flush=True)
    for name, other in BESIDE.items():
        mine, theirs = (statistics.mean(rows[each]["metrics"]) for each in (name, other))
        rows[name] |= {"beside": other, "relative": mine / theirs - 1}
        print(f"{name:20s} {mine:.4f}, {other} {theirs:.4f}: {100 * (mine / theirs - 1):+.2f}%")
    if arguments.save:
        print("wrote", save_result("recipes", {"ranks": RANKS, "steps": arguments.steps, "recipes": rows}))


if __name__ == "__main__":
    main()
