"""What hides behind the backward pass: `python benchmarks/overlap.py [--methods ...] [--hosts 2] [--rate 100mbit]`.

Every method trains a model of its own, all in the same processes on the same emulated network, in turn, beside
`torch.noop`, which sends nothing. Printed for each, medians over rounds of the slowest rank: the step, what of it is
exposed (the step's time less that of `torch.noop`), what its communication takes by itself, and the overlap efficiency.
Then of rank 0, medians over its steps: the backward pass, and the tail of it after the last gradient; the processor
time of the process, and what programs took of it; the share of the link's rate at which the interface sent during the
backward pass, by its byte counter; and, by the trace, the share of the backward pass in which a collective was under
way. With `--trace FOLDER` the last steps of each method are written for Perfetto, one file a method.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from common import network_arguments, save_result
from gradwire import kernels
from gradwire.baselines import TorchMethod
from gradwire.compare.torch_hooks import attach_torch
from gradwire.drivers.traced import Span
from gradwire.network import Network, parse_rate
from gradwire.network.wire import WireMeter
from gradwire.overlap import Overlap, Stopwatch, all_reduce_alone, covered_s, reduce_alone
from gradwire.profiling import RankRecord, StepRecord, write_chrome_trace
from gradwire.ranks.supervised import run_function
from gradwire.tasks.builtin import make_task

FLOOR = "torch.noop"
DEFAULT = ["torch.fp32", "bf16", "int8", "int4", "topk:0.01", "powersgd:8,factors=fp16"]
SKIPPED = 6
"""First steps that do not count: buckets are rebuilt, factors start."""


class Training:
    """One method on a model of its own; one of PyTorch's has no session, and no trace."""

    def __init__(self, method: str, task_name: str, batches: int, bucket_mb: float | None, grain: int | None) -> None:
        self.task, self._batches = make_task(task_name, 0), batches
        self.ddp = DistributedDataParallel(self.task.model, bucket_cap_mb=bucket_mb)  # pyright: ignore[reportArgumentType]
        made = gradwire.parse(method)
        self.session = self.traced = None
        if isinstance(made, TorchMethod):
            attach_torch(self.ddp, made)
        else:
            self.session = gradwire.attach(self.ddp, method, grain_numel=grain)
            self.traced = self.session.trace()
        self.optimizer = self.task.optimizer(self.ddp.parameters())
        self.steps = list[list[Span]]()
        self.sent, self.cpu_s = list[int](), list[float]()
        self.meter = WireMeter.from_environment()
        self.index = 0

    def _batch(self) -> tuple[Any, Any]:
        """Several batches of the task as one."""
        first = self.index * self._batches
        drawn = [self.task.batch(first + n, dist.get_rank(), dist.get_world_size()) for n in range(self._batches)]
        inputs, targets = zip(*drawn, strict=True)
        return torch.cat(inputs), torch.cat(targets)

    def communicate(self) -> None:
        """Communicate as a step does, and compute nothing."""
        if self.session is None or self.traced is None:
            all_reduce_alone(self.ddp)
            return
        named = self.ddp.module.named_parameters()
        reduce_alone(self.session, {name: p.grad for name, p in named if p.grad is not None})
        self.traced.spans.clear()

    def close(self) -> None:
        """Stop communicating."""
        if self.session is not None:
            self.session.close()

    def step(self) -> None:
        """Train a step, and note what happened when."""
        marks, sent, cpu_s = [time.perf_counter()], [], time.process_time()
        inputs, targets = self._batch()
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.task.loss(self.ddp(inputs), targets)
        last = _LastGradient(self.ddp, self.meter)
        marks.append(time.perf_counter())
        sent.append(self.meter.read().tx_bytes)
        loss.backward()
        last.remove()
        marks += [last.at_s, time.perf_counter()]
        sent.append(last.sent)
        if self.task.clip_norm is not None:
            nn.utils.clip_grad_norm_(self.ddp.parameters(), self.task.clip_norm)
        self.optimizer.step()
        marks.append(time.perf_counter())
        self.index += 1
        names = ("forward", "backward", "tail", "update")
        spans = [Span("train", what, a, b) for what, a, b in zip(names, marks, marks[1:], strict=False)]
        self.steps.append([*spans, *(self.traced.spans if self.traced else ())])
        self.sent.append(sent[1] - sent[0])
        self.cpu_s.append(time.process_time() - cpu_s)
        if self.traced:
            self.traced.spans.clear()


class _LastGradient:
    """Notes when the latest gradient of the backward pass was accumulated, and what had been sent by then."""

    def __init__(self, model: nn.Module, meter: WireMeter) -> None:
        self.at_s, self.sent, self._meter = 0.0, 0, meter
        self._missing = 0
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._note)
            for parameter in model.parameters()
            if parameter.requires_grad
        ]
        self._missing = len(self._hooks)

    def _note(self, _: torch.Tensor) -> None:
        self._missing -= 1
        if not self._missing:
            self.at_s, self.sent = time.perf_counter(), self._meter.read().tx_bytes

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()


def train_all(
    rank: int,
    world_size: int,
    *,
    task: str,
    methods: list[str],
    rounds: int,
    stretch: int,
    batches: int,
    bucket_mb: float | None,
    grain: int | None,
) -> dict[str, Any]:
    """Train with every method, `stretch` steps at a time, for so many rounds; return what happened when."""
    torch.set_num_threads(1)
    kernels.warm_up()
    trainings = {method: Training(method, task, batches, bucket_mb, grain) for method in [FLOOR, *methods]}
    group = dist.group.WORLD
    assert group is not None
    jobs = {method: training.step for method, training in trainings.items()}
    jobs |= {f"{method} alone": trainings[method].communicate for method in methods}
    watch = Stopwatch(group, torch.device("cpu"))
    watch.interleaved({method: jobs[method] for method in trainings}, rounds=1, stretch=SKIPPED)
    found = watch.interleaved(jobs, rounds, stretch)
    times = {method: [found.median_s(of) for of in (method, FLOOR, f"{method} alone")] for method in methods}
    coded = {
        method: own.session.stats().encode_s / own.index if own.session else 0.0 for method, own in trainings.items()
    }
    for training in trainings.values():
        training.close()
    dist.barrier()
    return {
        method: {
            "steps": trainings[method].steps[SKIPPED:],
            "sent": trainings[method].sent[SKIPPED:],
            "cpu_s": statistics.median(trainings[method].cpu_s[SKIPPED:]),
            "coded_s": coded.get(method, 0.0),
            "times_s": times[method],
        }
        for method in methods
    }


def row_of(figures: dict[str, Any], rate: float) -> dict[str, float]:
    """The medians of one method."""
    rows: list[dict[str, float]] = []
    for spans, sent in zip(figures["steps"], figures["sent"], strict=True):
        spans = [Span(*span) for span in spans]
        by_name = {span.what: span for span in spans if span.kind == "train"}
        wire = [span for span in spans if span.kind == "wire"]
        backward = by_name["backward"]
        rows.append(
            {
                "backward_ms": 1e3 * backward.length_s,
                "tail_ms": 1e3 * by_name["tail"].length_s,
                "link_share": sent * 8 / rate / backward.length_s,
                "wire_share": covered_s(wire, backward) / backward.length_s,
            }
        )
    medians = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
    overlap = Overlap(*figures["times_s"])
    return {
        "step_ms": 1e3 * overlap.step_s,
        "floor_ms": 1e3 * overlap.floor_s,
        "exposed_ms": 1e3 * overlap.exposed_s,
        "isolated_ms": 1e3 * overlap.isolated_s,
        "exposed_share": overlap.exposed_share,
        "efficiency": overlap.efficiency,
        **medians,
        "cpu_ms": 1e3 * figures["cpu_s"],
        "coded_ms": 1e3 * figures["coded_s"],
    }


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Run on the emulated network; return each method's figures."""
    names = ("task", "methods", "rounds", "stretch", "batches", "bucket_mb", "grain")
    options = {name: getattr(arguments, name) for name in names}
    with Network(arguments.hosts, arguments.rate) as network:
        target = f"{__file__}:train_all"
        ranks = run_function(target, arguments.hosts, options, deadline_s=arguments.deadline, network=network)
        description, rate = network.description, parse_rate(arguments.rate)
    if arguments.trace:
        arguments.trace.mkdir(parents=True, exist_ok=True)
        for method in arguments.methods:
            records = [_record(number, rank[method]["steps"][-4:]) for number, rank in enumerate(ranks)]
            write_chrome_trace(arguments.trace / f"{method.replace(':', '_')}.json", records)
    rows = {method: row_of(ranks[0][method], rate) for method in arguments.methods}
    return {"network": description, "task": arguments.task, "batches": arguments.batches, "methods": rows}


def _record(rank: int, steps: list[list[Any]]) -> RankRecord:
    """The last steps of a rank, for a trace: hosts of the emulated network share a clock."""
    kept = list[StepRecord]()
    for index, spans in enumerate(steps):
        loop, communication = list[Span](), list[Span]()
        for span in (Span(*each) for each in spans):
            (loop if span.kind == "train" else communication).append(span)
        kept.append(StepRecord(index, loop[0].began_s, loop[-1].ended_s, loop, [], [communication]))
    return RankRecord("overlap", rank, 2, f"host{rank}", [], [], kept)


def show(rows: dict[str, dict[str, float]]) -> None:
    """Print the table."""
    columns = (
        f"{'step':>7s} {'exposed':>8s} {'isolated':>8s} {'share':>6s} {'hidden':>6s} {'backward':>9s} {'tail':>6s}"
    )
    print(f"{'method':28s} {columns} {'cpu':>6s} {'coded':>6s} {'link':>6s} {'wire':>6s}")
    for method, row in rows.items():
        whole = f"{row['step_ms']:7.1f} {row['exposed_ms']:8.1f} {row['isolated_ms']:8.1f}"
        shares = f"{row['exposed_share']:6.0%} {row['efficiency']:6.0%} {row['backward_ms']:9.1f} {row['tail_ms']:6.1f}"
        cpu = f"{row['cpu_ms']:6.1f} {row['coded_ms']:6.1f}"
        print(f"{method:28s} {whole} {shares} {cpu} {row['link_share']:6.0%} {row['wire_share']:6.0%}")


def main() -> None:
    """Measure and print; with --save write a dated result file."""
    parser = network_arguments(__doc__, 2, DEFAULT)
    parser.add_argument("--batches", type=int, default=1, help="batches of the task in one step: more to compute")
    parser.add_argument("--bucket-mb", type=float, default=None, help="DDP's bucket_cap_mb; by default DDP's own")
    parser.add_argument("--grain", type=int, default=None, help="elements that are encoded together at most")
    parser.add_argument("--trace", type=Path, help="folder for traces")
    arguments = parser.parse_args()
    figures = measure(arguments)
    show(figures["methods"])
    if arguments.save:
        print("wrote", save_result(f"overlap_{arguments.task}", figures))


if __name__ == "__main__":
    main()
