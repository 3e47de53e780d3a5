"""A byte-GPT in four stages over two emulated nodes: `python benchmarks/pipelines.py [--steps 300] [--save]`.

Each node has two stages and one link of 100 Mbit/s, so the activations of the middle boundary, and their gradients,
travel over it. Each codec trains with the same seeds and batches. Printed are the mean loss of the last tenth of the
steps and how far it is from that without a codec, the time of a step, and the time until the smoothed loss is that
which training without a codec ends with.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from common import save_result
from gradwire.network import Network
from gradwire.parallel.pipelines import Pipeline
from gradwire.ranks.supervised import run_function
from gradwire.tasks.builtin import Block, flat_cross_entropy, load_corpus, windows

STAGES, WIDTH, HEADS, CONTEXT, SAMPLES, MICRO_BATCHES = 4, 192, 6, 128, 2, 8
CODECS = ("none", "bf16", "fp8", "int8", "int8/int8", "int4")
"""Of activations and, behind a slash, of their gradients where it is not the usual one."""


class First(nn.Module):
    """Embeds bytes, and has a block."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(256, WIDTH), nn.Parameter(torch.zeros(CONTEXT, WIDTH))
        self.block = Block(WIDTH, HEADS)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Activations (batch, time, width)."""
        return self.block(self.embed(tokens_BT) + self.position)


def part(index: int, seed: int) -> nn.Module:
    """A stage with one block, whose weights depend on the seed and its place."""
    torch.manual_seed(1000 * seed + index)
    if index == 0:
        return First()
    block = Block(WIDTH, HEADS)
    return block if index < STAGES - 1 else nn.Sequential(block, nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256, bias=False))


def on_rank(rank: int, world_size: int, codec: str, schedule: str, steps: int, seed: int) -> dict[str, Any]:
    """Train on this rank: losses and times of steps where it has the last stage."""
    pipeline = Pipeline(schedule, MICRO_BATCHES, *codec.split("/"))
    (index,) = pipeline.indices
    tokens = torch.empty(SAMPLES, CONTEXT, dtype=torch.long, device="meta")
    hidden = torch.empty(SAMPLES, CONTEXT, WIDTH, device="meta", requires_grad=True)
    logits = torch.empty(SAMPLES, CONTEXT, 256, device="meta", requires_grad=True)
    last = index == STAGES - 1
    module = part(index, seed)
    stage = pipeline.stage(
        module, index, input_args=tokens if index == 0 else hidden, output_args=logits if last else hidden
    )
    made = pipeline.schedule([stage], flat_cross_entropy)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    data = load_corpus().train
    generator = torch.Generator().manual_seed(seed)
    found, times = list[float](), list[float]()
    for _ in range(steps):
        starts = torch.randint(len(data) - CONTEXT - 1, (SAMPLES * MICRO_BATCHES,), generator=generator)
        inputs, targets = windows(data, starts, CONTEXT)
        losses: list[Tensor] = []
        optimizer.zero_grad()
        dist.barrier()
        began = time.perf_counter()
        given: dict[str, Any] = {"target": targets, "losses": losses} if last else {}
        made.step(*((inputs,) if index == 0 else ()), return_outputs=False, **given)
        optimizer.step()
        dist.barrier()
        times.append(time.perf_counter() - began)
        found += [torch.stack(losses).mean().item()] if last else []
    return {"losses": found, "times_s": times, "sent": stage.sent_bytes / steps}


def smoothed(losses: Sequence[float]) -> list[float]:
    """Trailing means over a tenth of the steps."""
    span = max(1, len(losses) // 10)
    return [statistics.fmean(losses[max(0, i + 1 - span) : i + 1]) for i in range(len(losses))]


def seconds_to(target: float, run: Mapping[str, Any]) -> float | None:
    """Seconds of training until the smoothed loss is at the target; None where it never is."""
    passed = itertools.accumulate(run["times_s"])
    return next((at for at, loss in zip(passed, smoothed(run["losses"]), strict=True) if loss <= target), None)


def beside(run: Mapping[str, Any], baseline: Mapping[str, Any]) -> dict[str, Any]:
    """What a training ended with and how long it took, beside that of the baseline; an empty one is the run itself."""
    final = smoothed(run["losses"])[-1]
    target = baseline.get("final", final)
    return {
        "final": final,
        "of_baseline": final / target,
        "step_s": statistics.median(run["times_s"]),
        "to_target_s": seconds_to(target, run),
    }


def in_words(run: Mapping[str, Any], baseline: Mapping[str, Any]) -> str:
    """A training beside the baseline, in words."""
    reached_s = run["to_target_s"]
    reached = f"{reached_s:.1f} s, {baseline['to_target_s'] / reached_s:.2f} times as fast" if reached_s else "never"
    return (
        f"loss {run['final']:.4f} ({run['of_baseline'] - 1:+.2%}), step {1e3 * run['step_s']:.0f} ms, to the "
        f"baseline's loss: {reached}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rate", default="100mbit")
    parser.add_argument("--schedule", choices=("1F1B", "GPipe"), default="1F1B")
    parser.add_argument("--codecs", nargs="+", default=list(CODECS), help="the first one is the baseline")
    parser.add_argument("--deadline", type=float, default=3000.0, help="seconds of one training")
    parser.add_argument("--save", action="store_true", help="write a dated file into benchmarks/results")
    options = parser.parse_args()
    runs, loads = list[dict[str, Any]](), [os.getloadavg()[0]]
    with Network(2, options.rate, ranks_per_host=2) as network:
        print(network.description)
        for seed in range(options.seeds):
            baseline: dict[str, Any] = {}
            for codec in options.codecs:
                given = {"codec": codec, "schedule": options.schedule, "steps": options.steps, "seed": seed}
                ranks = run_function(f"{__file__}:on_rank", STAGES, given, options.deadline, network)
                run: dict[str, Any] = {
                    "codec": codec,
                    "seed": seed,
                    **ranks[-1],
                    "sent": [rank["sent"] for rank in ranks],
                }
                run |= beside(run, baseline)
                baseline = baseline or run
                runs.append(run)
                print(
                    f"seed {seed} {codec:9} {in_words(run, baseline)}; "
                    f"{run['sent'][1] / 1e6:.2f} MB a step from stage 1",
                    flush=True,
                )
        loads.append(os.getloadavg()[0])
        figures = {"network": network.description, "options": vars(options), "loads": loads, "runs": runs}
    if options.save:
        print(save_result("pipelines", figures))


if __name__ == "__main__":
    main()
