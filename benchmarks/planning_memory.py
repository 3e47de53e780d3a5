"""What two ranks hold of a small GPT under DDP and FSDP2, against what `gradwire.planning` estimates beforehand.

python benchmarks/planning_memory.py --save

Each recommended method trains three steps of byte-GPT on two CPU ranks with Gloo. After the last one the ranks count
the bytes of their parameters, gradients and moments, and take from `session.report()` what the method holds.
Activations are counted in another way than they are estimated: by what the allocator gave and got back during the
forward pass.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

import gradwire
from common import save_result
from gradwire.catalogue import Recommended, catalogue
from gradwire.core.errors import GradwireError
from gradwire.core.places import EVERY_STEP
from gradwire.planning.held import held_by_training
from gradwire.ranks.supervised import run_function
from gradwire.tasks.builtin import make_task

RANKS, STEPS = 2, 3


def train(rank: int, world_size: int, methods: list[str], sharded: bool) -> list[dict[str, Any]]:
    """What this rank holds with each method, and what was estimated for it."""
    return [_held(method, sharded) for method in methods]


def _held(method: str, sharded: bool) -> dict[str, Any]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    task = make_task("bytes", 0)
    inputs, targets = task.batch(0, rank, ranks)
    plain = task.model
    blocks = list(cast(Iterable[nn.Module], plain.get_submodule("blocks").children()))
    spec = None if method == "torch" else method
    estimated = held_by_training(
        plain, spec, ranks, blocks if sharded else None, lambda model: task.loss(model(inputs), targets)
    )
    if sharded:
        for block in blocks:
            fully_shard(block)
        model = cast(nn.Module, fully_shard(plain))
    else:
        model = DistributedDataParallel(plain, gradient_as_bucket_view=True)
    session = None if spec is None else gradwire.attach(model, spec)
    optimizer = torch.optim.AdamW(model.parameters())
    activations = 0
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=False)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
            loss = task.loss(model(inputs), targets)
        activations = _kept_bytes(seen) if step == STEPS - 1 else 0
        loss.backward()
        optimizer.step()
    moments = (each for state in optimizer.state.values() for each in state.values() if each.dim())
    held = {
        "parameters": _bytes(model.parameters()),
        "gradients": _bytes(p.grad for p in model.parameters() if p.grad is not None),
        "optimizer": _bytes(moments),
        "residuals": 0,
        "factors": 0,
        "other_states": 0,
        "buffers": 0,
        "activations": activations,
    }
    if session is not None:
        memory = session.report().memory
        held |= {
            "residuals": memory.residual_bytes,
            "factors": memory.factor_bytes,
            "other_states": memory.other_state_bytes,
            "buffers": memory.buffer_bytes,
        }
        session.close()
    return {"held": held, "estimated": estimated._asdict()}


def _bytes(tensors: Iterable[Tensor]) -> int:
    """Of the memory that lies under tensors, each piece once; of sharded ones this rank's part."""
    found: dict[int, int] = {}
    for each in tensors:
        local: Tensor = getattr(each, "_local_tensor", each)
        storage = local.untyped_storage()
        # buckets of DDP hold many gradients in one storage, of which each is counted by itself
        found[local.data_ptr()] = local.nbytes if local.nbytes < storage.nbytes() else storage.nbytes()
    return sum(found.values())


def _kept_bytes(seen: profile) -> int:
    """What the allocator gave in a forward pass and did not get back by its end."""
    results: Any = seen.profiler
    return sum(event.nbytes() for event in results.kineto_results.events() if event.name() == "[memory]")


def recommended() -> list[str]:
    """Specs of recommended methods that serve gradients of every step."""
    found = (each for each in catalogue() if each.place is EVERY_STEP)
    return list(dict.fromkeys(each.use.spec for each in found if isinstance(each.use, Recommended)))


def _has_shards(method: str) -> bool:
    try:
        held_by_training(nn.Linear(4, 4), method, RANKS, [])
    except GradwireError:
        return False
    return True


def main() -> None:
    """Print a line for each method, and the worst errors."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", default=["torch", *recommended()])
    parser.add_argument("--deadline", type=float, default=600.0)
    parser.add_argument("--save", action="store_true", help="write a dated file into benchmarks/results")
    told = parser.parse_args()
    rows: list[dict[str, Any]] = []
    print(f"{'layout':6} {'method':44} {'held':>10} {'estimated':>10} {'error':>7} {'method error':>12}")
    for sharded in (False, True):
        methods = [each for each in told.methods if not sharded or each == "torch" or _has_shards(each)]
        found = run_function(f"{__file__}:train", RANKS, {"methods": methods, "sharded": sharded}, told.deadline)
        for method, ranks in zip(methods, zip(*found, strict=True), strict=True):
            fullest = max(ranks, key=lambda each: sum(each["held"].values()))
            held, estimated = (sum(fullest[kind].values()) for kind in ("held", "estimated"))
            own = [sum(fullest[kind][name] for name in METHOD) for kind in ("held", "estimated")]
            row = {
                "layout": "fsdp2" if sharded else "ddp",
                "method": method,
                "error": estimated / held - 1,
                "method_error": own[1] / own[0] - 1 if own[0] else 0.0,
                **fullest,
            }
            rows.append(row)
            print(
                f"{row['layout']:6} {method:44} {held / 1e6:7.2f} MB {estimated / 1e6:7.2f} MB {row['error']:+7.1%} "
                f"{row['method_error']:+12.1%}"
            )
    worst = {kind: max(abs(row[kind]) for row in rows) for kind in ("error", "method_error")}
    print(f"worst error {worst['error']:.1%}, of what methods hold {worst['method_error']:.1%}")
    if told.save:
        print("wrote", save_result("planning_memory", {"ranks": RANKS, "task": "bytes", "worst": worst, "rows": rows}))


METHOD = ("residuals", "factors", "other_states", "buffers")
"""Kinds of memory that belong to the method."""


if __name__ == "__main__":
    main()
