"""A byte-GPT with contexts of 4,096 on four ranks: `python benchmarks/sequences.py [--steps 40] [--save]`.

Two emulated nodes have two ranks and one link of 100 Mbit/s each. A sequence is spread over all four ranks, and keys
and values go round a ring that crosses the link twice. Each codec of keys and values trains with the same seeds and
batches, and the gradients of parameters are averaged by the same method. Printed are

- the mean loss of the last tenth of the steps and how far it is from that without a codec, the time of a step, and the
  time until the smoothed loss is that which training without a codec ends with;
- what attention sends between the nodes in a step, by the counters of the links, beside the formula of
  `gradwire.parallel.sequences.ring_attention`;
- the most memory that attention of 16,384 positions takes on a rank, forward and backward, for rings of 1, 2, 4 and 8
  ranks, beside 1 / P of what one rank takes.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

import gradwire
from common import save_result
from experts import curves, settled
from gradwire import kernels
from gradwire.network import Network
from gradwire.network.wire import WireMeter
from gradwire.parallel.exchange import RowCoding, row_codec
from gradwire.parallel.sequences import AttentionMask, ExchangeAxis, Zigzag, ring_attention
from gradwire.ranks.supervised import run_function
from gradwire.tasks.builtin import Block, ByteGPT, flat_cross_entropy, load_corpus, windows
from pipelines import beside, in_words

NODES, LOCAL = 2, 2
RANKS = NODES * LOCAL
LAYERS, WIDTH, HEADS, CONTEXT = 2, 128, 2, 4096
HEAD = WIDTH // HEADS
CODECS = {"none": None, "bf16": "bf16", "fp8": "fp8:e4m3,block=64", "int8": "int8:64"}
DENSE = "int8"
"""How gradients of parameters are averaged."""

PROBES = 5
CAUSAL = AttentionMask(causal=True)
RINGS, MEMORY_POSITIONS, MEMORY_HEADS = (1, 2, 4, 8), 16384, 4


class RingBlock(Block):
    """A block that attends to the positions of all ranks."""

    def __init__(self, axis: ExchangeAxis, layout: Zigzag, codec: str | None) -> None:
        super().__init__(WIDTH, HEADS)
        self.axis, self.layout, self.codec = axis, layout, codec

    @override
    def attend(self, x_BTC: Tensor) -> Tensor:
        batch, count, _ = x_BTC.shape
        q, k, v = self.qkv(x_BTC).view(batch, count, 3, HEADS, HEAD).permute(2, 0, 3, 1, 4)
        mixed = ring_attention(q, k, v, self.axis, self.layout, CAUSAL, codec=self.codec)
        return self.out(mixed.transpose(1, 2).reshape(batch, count, WIDTH))  # type: ignore[no-any-return]


class RingGPT(ByteGPT):
    """A byte-GPT of the positions of a rank."""

    def __init__(self, codec: str | None) -> None:
        super().__init__(layers=LAYERS, width=WIDTH, heads=HEADS, context=CONTEXT)
        axis = ExchangeAxis()
        self.layout, self.place = Zigzag(CONTEXT, axis.size), axis.place
        for index, block in enumerate(self.blocks):
            ring = RingBlock(axis, self.layout, codec)
            ring.load_state_dict(block.state_dict())
            self.blocks[index] = ring

    @override
    def forward(self, tokens_BT: Tensor) -> Tensor:
        x_BTC = self.embed(tokens_BT) + self.position[self.layout.positions(self.place)]
        for block in self.blocks:
            x_BTC = block(x_BTC)
        return functional.linear(self.norm(x_BTC), self.embed.weight)


# What ranks do --------------------------------------------------------------------------------------------------


def train(rank: int, world_size: int, codec: str, steps: int, seed: int) -> dict[str, Any]:
    """Train on this rank with a codec: losses and times of steps, and what attention sends in a pass."""
    kernels.warm_up()
    torch.manual_seed(seed)
    model = RingGPT(CODECS[codec])
    ddp = DistributedDataParallel(model)
    session = gradwire.attach(ddp, DENSE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95))
    data = load_corpus().train
    generator = torch.Generator().manual_seed(seed)

    def loss() -> Tensor:
        starts = torch.randint(len(data) - CONTEXT - 1, (1,), generator=generator)
        inputs, targets = (model.layout.shard(x, rank) for x in windows(data, starts, CONTEXT))
        return flat_cross_entropy(ddp(inputs), targets)

    losses, times_s = list[float](), list[float]()
    for _ in range(steps):
        dist.barrier()
        began = time.perf_counter()
        optimizer.zero_grad()
        made = loss()
        made.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        dist.barrier()
        times_s.append(time.perf_counter() - began)
        losses.append(made.item())
    meter = WireMeter.from_environment()
    before = settled(meter)
    for _ in range(PROBES):
        with ddp.no_sync():
            loss().backward()
    sent = settled(meter).since(before).payload_tx_bytes / PROBES
    session.close()
    return {"losses": losses, "times_s": times_s, "sent": sent}


def predicted(codec: str | None) -> float:
    """Bytes that a node sends to the other one in a pass, all by the rank whose successor is there.

    What compares the inputs of ranks is less than a thousandth of it.
    """
    rows = HEADS * CONTEXT // RANKS
    coding = RowCoding(row_codec(codec, HEAD, "codec"), HEAD, torch.float32)
    keys_and_values, sums = 2 * coding.nbytes(rows), 2 * rows * HEAD * torch.float32.itemsize
    return float(LAYERS * (2 * (RANKS - 1) * keys_and_values + RANKS * sums))


def memory(rank: int, world_size: int) -> float:
    """The most megabytes that attention takes on this rank beside what it is given."""
    axis = ExchangeAxis()

    def attend(length: int) -> None:
        layout = Zigzag(length, axis.size)
        shape = (1, MEMORY_HEADS, layout.count(rank), HEAD)
        q, k, v = (torch.randn(shape, requires_grad=True) for _ in range(3))
        ring_attention(q, k, v, axis, layout, CAUSAL).sum().backward()

    attend(512 * world_size)  # loads what is loaded once, memory of matrix products among it
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins anew
    began = _resident("VmRSS")
    attend(MEMORY_POSITIONS)
    return (_resident("VmHWM") - began) / 1e6


def _resident(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith(name))
    return 1024 * int(line.split()[1])


# Tables ---------------------------------------------------------------------------------------------------------


def trainings(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Train with each codec and seed; print a line for each."""
    with Network(NODES, options.rate, ranks_per_host=LOCAL) as network:
        print(network.description, flush=True)
        for seed in range(options.seeds):
            baseline: dict[str, Any] = {}
            for codec in options.codecs:
                told = {"codec": codec, "steps": options.steps, "seed": seed}
                run = run_of(codec, seed, run_function(f"{__file__}:train", RANKS, told, options.deadline, network))
                run |= beside(run, baseline)
                baseline = baseline or run
                show(run, baseline)
                yield run


def run_of(codec: str, seed: int, ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The figures of a training, from those of its ranks. All have as many positions, so means are the loss."""
    return {
        "codec": codec,
        "seed": seed,
        **curves(ranks),
        "node_bytes": statistics.fmean(rank["sent"] for rank in ranks[::LOCAL]),
        "predicted_node_bytes": predicted(CODECS[codec]),
    }


def show(run: Mapping[str, Any], baseline: Mapping[str, Any]) -> None:
    """A line of the table of codecs."""
    sent = run["node_bytes"]
    print(
        f"seed {run['seed']} {run['codec']:5} {in_words(run, baseline)}; {sent / 1e6:.3f} MB from a node "
        f"in a pass, {baseline['node_bytes'] / sent:.2f} times fewer, {sent / run['predicted_node_bytes']:.4f} of the "
        "formula",
        flush=True,
    )


def memories(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Memory of attention by the number of ranks; print a line for each."""
    alone = math.nan
    for ranks in RINGS:
        most = max(run_function(f"{__file__}:memory", ranks, {}, options.deadline))
        alone = most if ranks == 1 else alone
        print(f"{ranks} ranks: {most:.1f} MB a rank, {most * ranks / alone:.2f} of 1 / P", flush=True)
        yield {"ranks": ranks, "megabytes": most, "of_share": most * ranks / alone}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rate", default="100mbit")
    parser.add_argument("--codecs", nargs="+", choices=CODECS, default=list(CODECS), help="the first is the baseline")
    parser.add_argument("--deadline", type=float, default=3000.0, help="seconds of one training")
    parser.add_argument("--parts", nargs="+", choices=("codecs", "memory"), default=["codecs", "memory"])
    parser.add_argument("--save", action="store_true", help="write a dated file into benchmarks/results")
    options = parser.parse_args()
    parts: Mapping[str, Callable[[argparse.Namespace], Iterator[dict[str, Any]]]]
    parts = {"codecs": trainings, "memory": memories}
    loads = [os.getloadavg()[0]]
    figures = {part: list(parts[part](options)) for part in options.parts}
    loads.append(os.getloadavg()[0])
    if options.save:
        name = "sequences" if "codecs" in options.parts else "sequences_memory"
        print(save_result(name, {"options": vars(options), "loads": loads} | figures))


if __name__ == "__main__":
    main()
