"""Hogwild! by one and by two processes; a part of `asynchronous.py`, whose text says what is measured."""

from __future__ import annotations

import functools
import math
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numba
import numpy as np
import torch
from torch import Tensor

from gradwire.asynchronous.processes import hogwild
from gradwire.core.key import Key
from pages import markdown, shown

EXAMPLES, FEATURES, NONZEROS, EPOCHS = 400_000, 1_000_000, 40, 6
LOOKS = 3
"""How often an epoch's parameters are kept."""
JUDGED = 100_000
"""Examples that the loss is taken from."""
RATE = 0.5


@numba.njit(cache=True)
def pass_over(w: Any, columns: Any, labels: Any, order: Any, lr: float) -> None:
    """SGD over the examples of `order`; each has NONZEROS features of value 1, scaled."""
    scale = 1.0 / math.sqrt(columns.shape[1])
    for example in order:
        margin = 0.0
        for column in columns[example]:
            margin += w[column] * scale
        pull = lr * scale * labels[example] / (1.0 + math.exp(labels[example] * margin))
        for column in columns[example]:
            w[column] += pull


@functools.cache
def sparse_data() -> tuple[Tensor, Tensor]:
    """Columns (EXAMPLES, NONZEROS), drawn so that some are frequent, and noisy labels of a hidden model, +1 or -1."""
    draw = np.random.default_rng(Key(name="sparse").stream_seed)
    columns = (FEATURES * draw.random((EXAMPLES, NONZEROS)) ** 2).astype(np.int32)
    margins = draw.standard_normal(FEATURES)[columns].sum(1) / math.sqrt(NONZEROS)
    labels = np.where(draw.random(EXAMPLES) < 1 / (1 + np.exp(-4 * margins)), 1.0, -1.0)
    return torch.from_numpy(columns), torch.from_numpy(labels)


def sparse_work(parameters: Mapping[str, Tensor], process: int, processes: int) -> None:
    """This process's share of every epoch; process 0 keeps a copy of w several times in each."""
    w, columns, labels = (parameters[name].numpy() for name in ("w", "columns", "labels"))
    mine = np.arange(process, EXAMPLES, processes)
    pass_over(w.copy(), columns, labels, mine[:10], RATE)
    orders = [np.random.default_rng(Key(step=n, rank=process).stream_seed).permutation(mine) for n in range(EPOCHS)]
    pieces = [piece for order in orders for piece in np.array_split(order, LOOKS)]
    parameters["ready"][process] = 1
    while int(parameters["ready"].sum()) < processes:
        pass
    began, processor_began = time.perf_counter(), time.process_time()
    for look, piece in enumerate(pieces):
        pass_over(w, columns, labels, piece, RATE)
        if process == 0:
            parameters["seconds"][look] = time.perf_counter() - began
            parameters["kept"][look] = parameters["w"]
    parameters["processor"][process] = time.process_time() - processor_began


@numba.njit(cache=True)
def loss_of(w: Any, columns: Any, labels: Any) -> float:
    """Mean logistic loss of the first JUDGED examples."""
    total = 0.0
    for example in range(JUDGED):
        margin = 0.0
        for column in columns[example]:
            margin += w[column]
        total += math.log1p(math.exp(-labels[example] * margin / math.sqrt(NONZEROS)))
    return total / JUDGED


class Curve(NamedTuple):
    """Seconds and loss as training went on, and the seconds of processor time of the busiest process."""

    points: list[tuple[float, float]]
    processor_s: float


def curve(processes: int) -> Curve:
    """Train."""
    columns, labels = sparse_data()
    zeros = functools.partial(torch.zeros, dtype=torch.float64)
    looks = EPOCHS * LOOKS
    start = {"w": zeros(FEATURES), "columns": columns, "labels": labels, "ready": zeros(processes)}
    start |= {"seconds": zeros(looks), "kept": zeros(looks, FEATURES), "processor": zeros(processes)}
    shared = hogwild(start, sparse_work, processes=processes)
    losses = [loss_of(w, columns.numpy(), labels.numpy()) for w in shared["kept"].numpy()]
    return Curve(list(zip(shared["seconds"].tolist(), losses, strict=True)), float(shared["processor"].max()))


def to_loss(found: Sequence[tuple[float, float]], target: float) -> float:
    """Seconds until a loss, between looks by a straight line; infinite where it was not reached."""
    before_s, before = 0.0, math.log(2)
    for seconds, loss in found:
        if loss <= target:
            return before_s + (seconds - before_s) * (before - target) / max(before - loss, 1e-12)
        before_s, before = seconds, loss
    return math.inf


def hogwild_speed(seeds: int) -> dict[str, Any]:
    """One process, two, one, two: `seeds` turns, three at least."""
    rows = list[dict[str, float]]()
    for turn in range(max(seeds, 3)):
        load = os.getloadavg()[0]
        one, two = curve(1), curve(2)
        target = max(one.points[-1][1], two.points[-1][1])
        row = {"one_s": to_loss(one.points, target), "two_s": to_loss(two.points, target), "loss": target}
        row |= {"ratio": row["one_s"] / row["two_s"], "one_end": one.points[-1][1], "two_end": two.points[-1][1]}
        row |= {"one_wall_s": one.points[-1][0], "one_processor_s": one.processor_s}
        row |= {"two_wall_s": two.points[-1][0], "two_processor_s": two.processor_s, "load": load}
        rows.append(row)
        print(f"hogwild, turn {turn}: " + ", ".join(f"{name} {value:.4g}" for name, value in row.items()), flush=True)
    ratio = statistics.median(row["ratio"] for row in rows)
    work = statistics.median(row["one_processor_s"] / row["two_processor_s"] for row in rows)
    print(f"hogwild: median ratio of times to equal loss {ratio:.2f}, of processor times for all epochs {work:.2f}")
    return {"turns": rows, "ratio": ratio, "processor_ratio": work}


def table(found: dict[str, Any]) -> str:
    """What docs/asynchronous.md has."""
    head = ["turn", "loss", "one process, s", "two, s", "ratio", "ratio of processor times", "load before"]
    columns = ("loss", "one_s", "two_s", "ratio")
    cells = list[list[str]]()
    for turn, row in enumerate(found["turns"]):
        work = row["one_processor_s"] / row["two_processor_s"]
        cells.append([str(turn + 1), *(shown(row[column]) for column in columns), shown(work), shown(row["load"])])
    cells.append(["median", "", "", "", shown(found["ratio"]), shown(found["processor_ratio"]), ""])
    return markdown(head, cells)
