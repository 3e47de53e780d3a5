"""A byte-GPT with experts over two emulated nodes: `python benchmarks/experts.py [--steps 200] [--save]`.

Each node has two ranks and one link of 100 Mbit/s. The feed-forward layer of each block is experts, which are spread
over all four ranks, so half of all rows cross the link. Each codec trains with the same seeds and batches, and the
gradients of all other parameters are averaged by the same method. Printed are

- the mean loss of the last tenth of the steps and how far it is from that without a codec, the time of a step, and the
  time until the smoothed loss is that which training without a codec ends with;
- what the experts' exchange sends between the nodes in a step, by the counters of the links, beside the formula of
  `gradwire.parallel.moe.MoE` for the rows that were really routed;
- how far the auxiliary loss of Switch and its gradient, as means over parts of a batch, are from those of the whole
  batch, for the model that was trained without a codec;
- the time of a step with an exchange in one level and in two, with and without chunks that overlap, for models that
  train in turn; and what a node sends to the other one in a pass: messages, by the programs of the exchange, bytes, and
  packets for so few tokens that a message fits into a packet, both by the counters of the links.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import gradwire
from common import save_result
from gradwire import kernels
from gradwire.core.collective import AllToAll, AllToAllV, Collective
from gradwire.core.program import Program, asking
from gradwire.network import Network
from gradwire.network.wire import WireMeter, WireReading
from gradwire.parallel.exchange import RowCoding, row_codec
from gradwire.parallel.moe import (
    ExchangeAxis,
    Experts,
    LayerFigures,
    MoE,
    Payloads,
    Routing,
    SoftmaxTopK,
    expert_report,
    leave_experts_to_their_axis,
    switch_loss,
)
from gradwire.ranks.supervised import run_function
from gradwire.tasks.builtin import Block, ByteGPT, flat_cross_entropy, load_corpus, windows
from gradwire.tasks.task import stream
from pipelines import beside, in_words

NODES, LOCAL = 2, 2
RANKS = NODES * LOCAL
LAYERS, WIDTH, HEADS, CONTEXT, SAMPLES = 4, 128, 4, 128, 2
EXPERTS, CHOICES, INNER = 8, 2, 256
CODECS = {"none": None, "bf16": "bf16", "fp8": "fp8:e4m3,block=64", "int8": "int8:64", "int4": "int4:64"}
DENSE = "int8"
"""How gradients of all parameters but the experts are averaged."""

PART_TOKENS = (8192, 2048, 512, 128)
"""Tokens that the loss of Switch is taken over: of all ranks, of one, and of micro-batches of one."""

FEW_TOKENS = 8
"""Of a rank, in passes whose packets are counted."""

BLOCK_ROWS = 64
"""Of a typical block. The payload of a single row is rounded up to whole words, which is 5% of it in `fp8`."""

PROBES = 10
SETTLE_S = 0.2


class ExpertBlock(Block):
    """A block whose feed-forward layer is experts."""

    def __init__(self, feed: MoE) -> None:
        super().__init__(WIDTH, HEADS)
        del self.up, self.down
        self.feed = feed

    def forward(self, x_BTC: Tensor) -> Tensor:
        """Add attention, then experts, to `x` (batch, time, channels)."""
        x_BTC = x_BTC + self.attend(self.norm_attention(x_BTC))
        return x_BTC + self.feed(self.norm_feed(x_BTC))


class Training:
    """A model of its own, with its optimizer and the batches of a seed."""

    def __init__(self, codec: str | None, seed: int, *, node: int | None = LOCAL, chunks: int = 1) -> None:
        torch.manual_seed(seed)
        self.axis, self.seed, self.steps = ExchangeAxis(node=node), seed, 0
        self.model = ByteGPT(layers=0, width=WIDTH, heads=HEADS, context=CONTEXT)
        payloads = Payloads.all(codec) if codec else None
        for layer in range(LAYERS):
            router = SoftmaxTopK(WIDTH, EXPERTS, CHOICES, seed=1000 * seed + layer)
            experts = Experts(WIDTH, INNER, EXPERTS, self.axis, seed=1000 * seed + layer)
            self.model.blocks.append(ExpertBlock(MoE(router, experts, self.axis, payloads=payloads, chunks=chunks)))
        self.ddp = DistributedDataParallel(leave_experts_to_their_axis(self.model))
        self.session = gradwire.attach(self.ddp, DENSE)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=2e-3, betas=(0.9, 0.95))
        self.data = load_corpus().train

    def gradients(self, samples: int = SAMPLES, context: int = CONTEXT) -> float:
        """Make a forward and a backward pass; return the loss of this rank."""
        generator = torch.Generator().manual_seed(stream(self.seed, self.steps, dist.get_rank()))
        self.steps += 1
        starts = torch.randint(len(self.data) - CONTEXT - 1, (samples,), generator=generator)
        inputs, targets = windows(self.data, starts, context)
        loss = flat_cross_entropy(self.ddp(inputs), targets)
        (loss + 0.01 * sum(switch_loss(layer.routing) for layer in self.layers if layer.routing is not None)).backward()
        return loss.item()

    def step(self) -> tuple[float, float]:
        """Train a step; return the loss of this rank, and seconds."""
        dist.barrier()
        began = time.perf_counter()
        self.optimizer.zero_grad()
        loss = self.gradients()
        self.optimizer.step()
        dist.barrier()
        return loss, time.perf_counter() - began

    @property
    def layers(self) -> Iterator[MoE]:
        """Layers of experts."""
        return (module for module in self.model.modules() if isinstance(module, MoE))

    def close(self) -> None:
        """End what averages gradients."""
        self.session.close()


# What crosses the link ------------------------------------------------------------------------------------------


class PassFigures(NamedTuple):
    """What forward and backward passes send that average no gradients.

    Attributes:
        wire: what the counters of this node saw.
        layers: figures of each layer of experts.
        messages: of this rank to ranks of the other node, by the programs of the exchange.
    """

    wire: WireReading
    layers: tuple[LayerFigures, ...]
    messages: int


def counted(training: Training, samples: int = SAMPLES, context: int = CONTEXT) -> PassFigures:
    """The figures of `PROBES` passes."""
    meter = WireMeter.from_environment()
    expert_report(training.model, begin_anew=True)
    with _noted(training.axis) as asked:
        before = settled(meter)
        for _ in range(PROBES):
            with training.ddp.no_sync():
                training.gradients(samples, context)
        after = settled(meter)
    return PassFigures(after.since(before), expert_report(training.model), sum(map(messages_between_nodes, asked)))


@contextlib.contextmanager
def _noted(axis: ExchangeAxis) -> Generator[list[Collective]]:
    """Collectives that the programs on an axis ask for."""
    asked, begin = list[Collective](), axis.begin

    def noted(program: Program[Any], traffic: Any = None) -> Any:
        return begin(asking(program, lambda request: asked.append(request) or request), traffic)

    axis.begin = noted  # type: ignore[method-assign]
    try:
        yield asked
    finally:
        axis.begin = begin  # type: ignore[method-assign]


def messages_between_nodes(request: Collective) -> int:
    """Messages to ranks of other nodes: those of an all-to-all over all ranks, or over the nodes."""
    assert isinstance(request, AllToAll | AllToAllV)
    if request.axis is None:
        return RANKS - LOCAL
    return NODES - 1 if request.axis.size_of(0) == NODES and request.axis.members(0)[1] == LOCAL else 0


def settled(meter: WireMeter) -> WireReading:
    """The counters once nothing is under way, and all ranks ready to begin."""
    dist.barrier()
    time.sleep(SETTLE_S)
    reading = meter.read()
    dist.barrier()
    return reading


def predicted(codec: str | None, loads: Sequence[Sequence[Sequence[int]]]) -> float:
    """Bytes that a node sends to the other one in `PROBES` passes, by the docstring of `MoE`; the mean of both nodes.

    A row crosses in both directions, forward and backward, so four times in all; two of these are sent by the node of
    its token, and two by the node of its expert. Counts cross in the forward pass.

    Args:
        codec: of rows.
        loads: of each rank and layer, the choices of each expert.
    """
    coding = RowCoding(row_codec(codec, WIDTH, "dispatch"), WIDTH, torch.float32)
    row = coding.nbytes(BLOCK_ROWS) / BLOCK_ROWS
    crossing = 0
    for rank, layers in enumerate(loads):
        for load in layers:
            owners = (expert // (EXPERTS // RANKS) for expert in range(EXPERTS))
            crossing += sum(rows for rows, owner in zip(load, owners, strict=True) if owner // LOCAL != rank // LOCAL)
    counts = 8 * (5 + EXPERTS // RANKS) * (RANKS - LOCAL) * RANKS * LAYERS * PROBES
    return (4 * row * crossing + counts) / NODES


# What ranks do --------------------------------------------------------------------------------------------------


def train(rank: int, world_size: int, codec: str, steps: int, seed: int) -> dict[str, Any]:
    """Train on this rank with a codec: losses and times of steps, and what the experts' exchange sends then."""
    kernels.warm_up()
    training = Training(CODECS[codec], seed)
    losses, times_s = zip(*(training.step() for _ in range(steps)), strict=True)
    figures = counted(training)
    switch = switch_of_parts(training) if codec == "none" else []
    training.close()
    return {
        "losses": losses,
        "times_s": times_s,
        "sent": figures.wire.payload_tx_bytes,
        "loads": [layer.load for layer in figures.layers],
        "imbalance": max(layer.imbalance for layer in figures.layers),
        "switch": switch,
    }


def switch_of_parts(training: Training) -> list[dict[str, float]]:
    """The loss of Switch as a mean over parts of a batch, and its gradient, against those of the whole batch."""
    generator = torch.Generator().manual_seed(stream(training.seed, training.steps, dist.get_rank()))
    starts = torch.randint(len(training.data) - CONTEXT - 1, (PART_TOKENS[1] // CONTEXT,), generator=generator)
    with torch.no_grad():
        training.model(windows(training.data, starts, CONTEXT)[0])
    routings = [_of_all_ranks(layer.routing) for layer in training.layers if layer.routing is not None]
    found: list[dict[str, float]] = []
    whole: list[Tensor] = []
    for tokens in PART_TOKENS:
        losses, gradients = zip(*(_mean_of_parts(routing, tokens) for routing in routings), strict=True)
        whole = whole or list(gradients)
        off = [float((g - w).norm() / w.norm()) for g, w in zip(gradients, whole, strict=True)]
        found.append({"tokens": tokens, "loss": statistics.fmean(losses), "gradient_off": statistics.fmean(off)})
    return found


def _of_all_ranks(routing: Routing) -> Routing:
    """The routing of the tokens of all ranks."""

    def gathered(mine: Tensor) -> Tensor:
        parts = [torch.empty_like(mine) for _ in range(RANKS)]
        dist.all_gather(parts, mine.contiguous())
        return torch.cat(parts)

    logits = gathered(routing.logits.detach()).requires_grad_()
    return Routing(logits, logits.softmax(-1), gathered(routing.experts), gathered(routing.weights.detach()))


def _mean_of_parts(routing: Routing, tokens: int) -> tuple[float, Tensor]:
    """Mean of the losses of so many tokens each, and the gradient of the logits."""
    pieces = (each.split(tokens) for each in (routing.logits, routing.scores, routing.experts, routing.weights))
    losses = [switch_loss(Routing(*part)) for part in zip(*pieces, strict=True)]
    loss = torch.stack(losses).mean()
    (gradient,) = torch.autograd.grad(loss, routing.logits, retain_graph=True)
    return float(loss.detach()), gradient


class Layout(NamedTuple):
    """How a layer of experts exchanges rows.

    Attributes:
        codec: of rows.
        node: ranks of a node, for two levels; None: one level.
        chunks: that overlap.
    """

    codec: str
    node: int | None
    chunks: int

    def __str__(self) -> str:
        return f"{self.codec}, {'two levels' if self.node else 'one level'}, chunks: {self.chunks}"


LAYOUTS = [Layout(codec, node, chunks) for codec in ("none", "int8") for node in (None, LOCAL) for chunks in (1, 2)]
"""The first one of each codec is what the others are compared with."""


def lay_out(rank: int, world_size: int, rounds: int) -> list[dict[str, Any]]:
    """Train a model for each layout, in turn: times of steps, and what a pass sends between nodes."""
    kernels.warm_up()
    trainings = [Training(CODECS[layout.codec], 0, node=layout.node, chunks=layout.chunks) for layout in LAYOUTS]
    times_s: list[list[float]] = [[] for _ in LAYOUTS]
    for turn in range(2 + rounds):
        for times, training in zip(times_s, trainings, strict=True):
            _, took_s = training.step()
            times += [took_s] if turn >= 2 else []
    found: list[dict[str, Any]] = []
    for times, training in zip(times_s, trainings, strict=True):
        whole, few = counted(training), counted(training, 1, FEW_TOKENS)
        found.append(
            {
                "times_s": times,
                "messages": whole.messages / PROBES,
                "bytes": whole.wire.payload_tx_bytes / PROBES,
                "packets": few.wire.tx_packets / PROBES,
            }
        )
        training.close()
    return found


# Tables ---------------------------------------------------------------------------------------------------------


def curves(ranks: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """The losses and times of the steps of all ranks: mean losses, and times of the slowest rank."""
    return {
        "losses": [statistics.fmean(each) for each in zip(*(rank["losses"] for rank in ranks), strict=True)],
        "times_s": [max(each) for each in zip(*(rank["times_s"] for rank in ranks), strict=True)],
    }


def run_of(codec: str, seed: int, ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The figures of a training, from those of its ranks."""
    sent = statistics.mean(ranks[first]["sent"] for first in range(0, RANKS, LOCAL))
    return {
        "codec": codec,
        "seed": seed,
        **curves(ranks),
        "node_bytes": sent / PROBES,
        "predicted_node_bytes": predicted(CODECS[codec], [rank["loads"] for rank in ranks]) / PROBES,
        "imbalance": statistics.fmean(rank["imbalance"] for rank in ranks),
        "switch": ranks[0]["switch"],
    }


def trainings(options: argparse.Namespace, network: Network) -> Iterator[dict[str, Any]]:
    """Train with each codec and seed; print a line for each."""
    for seed in range(options.seeds):
        baseline: dict[str, Any] = {}
        for codec in options.codecs:
            told = {"codec": codec, "steps": options.steps, "seed": seed}
            run = run_of(codec, seed, run_function(f"{__file__}:train", RANKS, told, options.deadline, network))
            run |= beside(run, baseline)
            baseline = baseline or run
            run |= {
                "times_fewer_bytes": baseline["node_bytes"] / run["node_bytes"],
                "of_formula": run["node_bytes"] / run["predicted_node_bytes"],
            }
            show(run, baseline)
            yield run


def show(run: Mapping[str, Any], baseline: Mapping[str, Any]) -> None:
    """A line of the table of codecs."""
    print(
        f"seed {run['seed']} {run['codec']:5} {in_words(run, baseline)}; {run['node_bytes'] / 1e6:.3f} MB "
        f"between nodes, {run['times_fewer_bytes']:.2f} times fewer, {run['of_formula']:.4f} of the formula",
        flush=True,
    )
    for part in run["switch"]:
        off = part["loss"] / run["switch"][0]["loss"] - 1
        told = f"loss of Switch over {part['tokens']} tokens {part['loss']:.4f} ({off:+.2%})"
        print(f"  {told}, its gradient {part['gradient_off']:.2%} off", flush=True)


def layouts(options: argparse.Namespace, network: Network) -> Iterator[dict[str, Any]]:
    """Compare an exchange in one level and in two, and chunks; print a line for each."""
    ranks = run_function(f"{__file__}:lay_out", RANKS, {"rounds": options.rounds}, options.deadline, network)
    first = dict[str, dict[str, Any]]()
    for layout, of_ranks in zip(LAYOUTS, zip(*ranks, strict=True), strict=True):
        times_s = [max(each) for each in zip(*(of_rank["times_s"] for of_rank in of_ranks), strict=True)]
        of_nodes = of_ranks[::LOCAL]
        row: dict[str, Any] = layout._asdict() | {
            "times_s": times_s,
            "step_s": statistics.median(times_s),
            "messages": LOCAL * statistics.mean(of_rank["messages"] for of_rank in of_ranks),
            "packets": statistics.mean(node["packets"] for node in of_nodes),
            "node_bytes": statistics.mean(node["bytes"] for node in of_nodes),
        }
        base = first.setdefault(layout.codec, row)
        row |= {
            "times_as_fast": base["step_s"] / row["step_s"],
            "times_fewer_messages": base["messages"] / row["messages"],
            "times_fewer_packets": base["packets"] / row["packets"],
        }
        print(
            f"{layout!s:26} step {1e3 * row['step_s']:.0f} ms, {row['times_as_fast']:.2f} times as fast; to the other "
            f"node {row['messages']:.0f} messages, {row['times_fewer_messages']:.2f} times fewer, "
            f"{row['node_bytes'] / 1e6:.3f} MB; of {FEW_TOKENS} tokens {row['packets']:.0f} packets, "
            f"{row['times_fewer_packets']:.2f} times fewer",
            flush=True,
        )
        yield row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=15, help="steps of each layout")
    parser.add_argument("--rate", default="100mbit")
    parser.add_argument("--codecs", nargs="+", choices=CODECS, default=list(CODECS), help="the first is the baseline")
    parser.add_argument("--deadline", type=float, default=3000.0, help="seconds of one training")
    parser.add_argument("--parts", nargs="+", choices=("codecs", "layouts"), default=["codecs", "layouts"])
    parser.add_argument("--save", action="store_true", help="write a dated file into benchmarks/results")
    options = parser.parse_args()
    parts: Mapping[str, Callable[[argparse.Namespace, Network], Iterator[dict[str, Any]]]]
    parts = {"codecs": trainings, "layouts": layouts}
    loads = [os.getloadavg()[0]]
    with Network(NODES, options.rate, ranks_per_host=LOCAL) as network:
        print(network.description)
        figures = {part: list(parts[part](options, network)) for part in options.parts}
        loads.append(os.getloadavg()[0])
    if options.save:
        told: dict[str, Any] = {"network": network.description, "options": vars(options), "loads": loads}
        print(save_result("experts", told | figures))


if __name__ == "__main__":
    main()
