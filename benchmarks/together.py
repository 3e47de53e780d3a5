"""All axes together over a slow link: what sending less on each saves. `python benchmarks/together.py [--save]`.

Three trainings of `gradwire train` on two emulated hosts, each with no codec, in 16 bits and in fewer:

- dense: pp 2 x dp 2 x tp 2. Stages are on two hosts, so activations and their gradients cross the link.
- experts: dp 2 x ep 2 x cp 2. Replicas are on two hosts, so gradients cross.
- sequence: tp 2, so positions cross, which ranks gather between the matrices of each layer.

Printed for each are the loss at the end beside that without a codec, the time to that loss, and what a host sends in a
step by the counters of its interface.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Mapping
from contextlib import closing
from typing import Any

import torch.distributed as dist

from common import save_result
from experts import settled
from gradwire import kernels
from gradwire.network import Network
from gradwire.network.wire import WireMeter
from gradwire.ranks.supervised import run_function
from gradwire.training import MeshTrainer, configuration_of
from pipelines import beside, in_words

HOSTS = 2
Tables = dict[str, dict[str, Any]]

DENSE: Tables = {
    "model": {"layers": 4, "width": 192, "heads": 6, "context": 128},
    "data": {"batch": 16, "micro_batches": 4},
    "pp": {"ranks": 2},
    "dp": {"ranks": 2},
    "tp": {"ranks": 2},
}
EXPERTS: Tables = {
    "model": {"layers": 2, "width": 128, "heads": 4, "context": 256, "experts": 8},
    "data": {"batch": 8},
    "dp": {"ranks": 2},
    "ep": {"ranks": 2},
    "cp": {"ranks": 2},
}
SEQUENCE: Tables = {
    "model": {"layers": 4, "width": 192, "heads": 6, "context": 128},
    "data": {"batch": 8},
    "tp": {"ranks": 2},
}

TRAININGS: dict[str, tuple[Tables, dict[str, Tables]]] = {
    "dense": (
        DENSE,
        {
            "none": {},
            "bf16": {"pp": {"codec": "bf16", "gradients": "bf16"}},
            "int8": {"pp": {"codec": "int8", "gradients": "int8"}},
        },
    ),
    "experts": (EXPERTS, {"none": {}, "bf16": {"dp": {"method": "bf16"}}, "int4": {"dp": {"method": "int4"}}}),
    "sequence": (SEQUENCE, {"none": {}, "bf16": {"tp": {"codec": "bf16"}}, "int8": {"tp": {"codec": "int8:64"}}}),
}
"""The tables of each training, and what each codec changes in them, the baseline first."""


def tables(training: str, codec: str, steps: int, seed: int) -> Tables:
    """The configuration of a training."""
    base, codecs = TRAININGS[training]
    made = {name: dict(keys) for name, keys in base.items()}
    for name, keys in codecs[codec].items():
        made[name] = made.get(name, {}) | keys
    made["data"]["seed"] = seed
    made["steps"] = {"count": steps}
    return made


def train(rank: int, world_size: int, given: Tables) -> dict[str, Any]:
    """Train, and count what this host sends."""
    kernels.warm_up()
    configuration = configuration_of(given)
    meter = WireMeter.from_environment()
    losses, times_s = list[float](), list[float]()
    with closing(MeshTrainer(configuration)) as trainer:
        before = settled(meter)
        for _ in range(configuration.steps.count):
            dist.barrier()
            began = time.perf_counter()
            losses.append(trainer.step().loss)
            dist.barrier()
            times_s.append(time.perf_counter() - began)
        sent = settled(meter).since(before).payload_tx_bytes / configuration.steps.count
    return {"losses": losses, "times_s": times_s, "sent": sent}


def show(run: Mapping[str, Any], baseline: Mapping[str, Any]) -> None:
    """A line of a training."""
    print(
        f"{run['training']:8} seed {run['seed']} {run['codec']:5} {in_words(run, baseline)}; a "
        f"host sends {run['sent'] / 1e6:.3f} MB a step, {baseline['sent'] / run['sent']:.2f} times fewer",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trainings", nargs="+", choices=TRAININGS, default=list(TRAININGS))
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rate", default="100mbit")
    parser.add_argument("--deadline", type=float, default=1200.0, help="seconds of one training")
    parser.add_argument("--save", action="store_true", help="write a dated file into benchmarks/results")
    options = parser.parse_args()
    runs, loads = list[dict[str, Any]](), [os.getloadavg()[0]]
    for training in options.trainings:
        ranks = configuration_of(TRAININGS[training][0]).ranks
        with Network(HOSTS, options.rate, ranks_per_host=ranks // HOSTS) as network:
            for seed in range(options.seeds):
                baseline: dict[str, Any] = {}
                for codec in TRAININGS[training][1]:
                    given = {"given": tables(training, codec, options.steps, seed)}
                    run = run_function(f"{__file__}:train", ranks, given, options.deadline, network)[0]
                    run |= {"training": training, "codec": codec, "seed": seed} | beside(run, baseline)
                    baseline = baseline or run
                    runs.append(run)
                    show(run, baseline)
    loads.append(os.getloadavg()[0])
    if options.save:
        print(save_result("together", {"options": vars(options), "loads": loads, "runs": runs}))


if __name__ == "__main__":
    main()
