"""What coding costs: `python benchmarks/codecs.py [--numel N] [--filter TEXT] [--save]`.

For every example of every method in the registry that one rank can run: one step of the whole program (error
feedback, encode, decode of what comes back, residual) on a world of one rank, in multiples of copying the same tensor,
beside `torch.topk`. The exchange itself costs nothing here, so this is the processor's share of a step. Copies are
timed in turn with the methods, in the same run, since neighbours disturb; a step's figure is the median of several.

The tensor is cut into grains as it is in training. A codec's own encode and decode are shown beside, and which
fraction of the memory roofline they reach: the time in which this machine copies as many bytes as they must read and
write, over the time they take. Encoding must read each element (exact top-k twice: once to find the threshold) and
write the payload; decoding must read the payload and write each element, and, where most are zero, once more what is
scattered. Of both times the least is taken, of as many rounds that go through all codecs. The bar is a half for
deterministic codecs and a quarter for those that draw random numbers. Transforms are set aside: they are held against
the products they need.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import gradwire
from common import Alone, save_result
from gradwire import kernels
from gradwire.codecs import Chain, Codec, DCTTopK, Hadamard, RandomK, Threshold, TopK
from gradwire.core.grain import ParameterSpec
from gradwire.core.key import Key
from gradwire.core.state import State
from gradwire.drivers.interpreter import run_program
from gradwire.drivers.plan import GRAIN_NUMEL, Plan, plan
from gradwire.reducers import AdaptiveThreshold, Reducer, Step

ROUNDS = 21
BARS = {"deterministic": 0.5, "stochastic": 0.25}
"""The fraction of the roofline that a codec of each class is to reach."""


def seconds(run: Callable[[], object]) -> float:
    """Wall time of one call."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


class Training:
    """The coding of one parameter of `numel` elements, step after step, with its states."""

    def __init__(self, reducer: Reducer, gradient: Tensor) -> None:
        columns = 1000
        shape = (gradient.numel() // columns, columns) if reducer.scope == "tensor" else (gradient.numel(),)
        spec = ParameterSpec("w", shape, gradient.dtype, gradient.device)
        self.plan: Plan = plan([spec], reducer, GRAIN_NUMEL)
        self.gradient, self.index = gradient, 0
        step = Step(0, 0, 1)
        self.buffers = [torch.empty(unit.grain.numel) for unit in self.plan.units]
        self.states: list[State] = [unit.reducer.init(unit.grain, step) for unit in self.plan.units]

    def step(self) -> None:
        """Deliver, reduce and keep: what an engine does, without a network."""
        at = 0
        for i, (grain, reducer) in enumerate(self.plan.units):
            x = self.buffers[i].copy_(self.gradient[at : at + grain.numel])
            at += grain.numel
            old = self.states[i]
            reduced = run_program(reducer.reduce(grain, x.view(grain.shape), old, Step(self.index, 0, 1)), Alone())
            self.states[i] = reduced.state
            self.buffers[i] = residual(old, x) if residual(reduced.state, x).data_ptr() == x.data_ptr() else x
        self.index += 1


def residual(state: State, default: Tensor) -> Tensor:
    """The error feedback's residual, if there is any."""
    leaf = state.get("residual")
    return default if leaf is None or isinstance(leaf, State) else leaf.tensor


def codec_of(reducer: Any, x: Tensor) -> Codec | None:
    """The codec inside all wrappers, if there is one; a threshold that follows the gradient stands where it would."""
    while reducer is not None and not isinstance(getattr(reducer, "codec", None), Codec):
        reducer = getattr(reducer, "inner", None)
    if isinstance(reducer, AdaptiveThreshold):
        grain = x[:GRAIN_NUMEL].abs()
        tau = float(grain.kthvalue(round((1 - reducer.density) * grain.numel())).values)
        return dataclasses.replace(reducer.codec, tau=tau)
    return None if reducer is None else reducer.codec


def round_trip(codec: Codec, x: Tensor, out: Tensor) -> Callable[[], None]:
    """Encode and decode in grains, as training does."""
    key = Key(name="bench")

    def run() -> None:
        for source, target in zip(x.split(GRAIN_NUMEL), out.split(GRAIN_NUMEL), strict=True):
            codec.decode_into(codec.encode(source, key), target, key)

    return run


def class_of(codec: Codec) -> str:
    """Which bar a codec is held against."""
    if isinstance(codec, (Hadamard, DCTTopK)):
        return "transform"
    return "stochastic" if codec.keyed else "deterministic"


def least_copies(codec: Codec, x: Tensor) -> float:
    """The bytes that encoding and decoding `x` must move, in those of a copy."""
    selection = codec.first if isinstance(codec, Chain) else codec
    moved = 0
    for grain in x.split(GRAIN_NUMEL):
        reads = 2 if isinstance(selection, TopK) else 1
        moved += (reads + 1) * grain.nbytes + 2 * codec.payload_bytes(grain.numel(), grain.dtype)
        if isinstance(selection, (TopK, RandomK, Threshold)):
            decoded = codec.decode(codec.encode(grain), grain)
            moved += grain.itemsize * int(decoded.count_nonzero())
    return moved / (2 * x.nbytes)


def in_copies(run: Callable[[], object], copy: Callable[[], object]) -> float:
    """Median time of `run` in copies, the two timed in turn; two warm-up calls first."""
    run()
    run()
    return statistics.median(seconds(run) / statistics.median(seconds(copy) for _ in range(3)) for _ in range(ROUNDS))


def measure(numel: int, only: str) -> dict[str, Any]:
    """Return the figures of every example of every method."""
    x = torch.randn(numel, generator=torch.Generator().manual_seed(0)) ** 3
    target = torch.empty_like(x)

    def copy() -> object:
        return target.copy_(x)

    copy()
    k = numel // 100
    reducers = {
        spec: reducer
        for method in gradwire.methods().values()
        for spec in method.examples
        if only in spec and (reducer := gradwire.parse(spec)).fewest_ranks == 1
    }
    codecs = {spec: codec for spec, reducer in reducers.items() if (codec := codec_of(reducer, x)) is not None}
    rows = {spec: against_roofline(codecs[spec], x, copies) for spec, copies in round_trips(codecs, x, copy).items()}
    head = f"{'method':32s} {'step':>8s} {'encode+decode':>14s} {'roofline':>9s}  bar"
    print(f"{head}; copies of {numel / 1e6:.0f} M floats")
    found: dict[str, Any] = {"copy_s": min(seconds(copy) for _ in range(ROUNDS)), "copies": {}}
    show(found, "torch.topk 1%", {"step": in_copies(lambda: torch.topk(x.abs(), k, sorted=False), copy)})
    for spec, reducer in reducers.items():
        show(found, spec, {"step": in_copies(Training(reducer, x).step, copy), **rows.get(spec, {})})
    return found


def round_trips(codecs: dict[str, Codec], x: Tensor, copy: Callable[[], object]) -> dict[str, float]:
    """The least time of encoding and decoding `x` by each codec, in copies.

    Rounds go through all codecs, so that each is timed over minutes: a neighbour on the machine slows what computes,
    for tens of seconds, and hardly what copies. So the fastest rounds say what the code does.
    """
    out = torch.empty_like(x)
    runs = {spec: round_trip(codec, x, out) for spec, codec in codecs.items()}
    times: dict[str, list[tuple[float, float]]] = {spec: [] for spec in runs}
    for _ in range(ROUNDS):
        for spec, run in runs.items():
            run()  # the first time some allocate; and what the codec before left in the caches is not this one's
            times[spec].append((seconds(run), seconds(copy)))
    return {
        spec: min(own) / min(copies) for spec, (own, copies) in ((s, zip(*t, strict=True)) for s, t in times.items())
    }


def against_roofline(codec: Codec, x: Tensor, copies: float) -> dict[str, Any]:
    """The codec's own encode and decode, and whether they reach their bar."""
    fraction, kind = least_copies(codec, x) / copies, class_of(codec)
    met = fraction >= BARS[kind] if kind in BARS else None
    return {"encode_decode": copies, "roofline": fraction, "class": kind, "met": met}


def show(rows: dict[str, Any], name: str, row: dict[str, Any]) -> None:
    """Print a row and keep it."""
    kept = {key: round(value, 2) if isinstance(value, float) else value for key, value in row.items()}
    rows["copies"][name] = kept
    text = f"{name:32s} {row['step']:8.1f}"
    if "class" in row:
        verdict = {True: "met", False: "missed", None: ""}[row["met"]]
        bar = f"{row['class']} {BARS.get(row['class'], '')} {verdict}".rstrip()
        text += f" {row['encode_decode']:14.1f} {row['roofline']:9.2f}  {bar}"
    print(text, flush=True)


def main() -> None:
    """Measure and print; with --save write a dated result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numel", type=int, default=25_000_000)
    parser.add_argument("--filter", default="", help="only specs that contain this text")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/codecs_DATE.json")
    arguments = parser.parse_args()
    kernels.warm_up()
    rows = measure(arguments.numel, arguments.filter)
    if arguments.save:
        print("wrote", save_result("codecs", rows))
    else:
        print(json.dumps(rows["copy_s"]))


if __name__ == "__main__":
    main()
