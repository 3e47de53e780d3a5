"""How many rounds of CHOCO bring ranks ten times nearer to each other, by codec and gossip step size.

Eight virtual ranks on a ring begin with 2,048 Gaussian numbers each, in float64. The rate is that of the consensus
distance between the two ends of the window in which it shrinks steadily: after the first 40 rounds, until ranks are
10^5 times nearer or `--most` rounds are over.

    python benchmarks/gossip.py --save
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from common import save_result
from gradwire.core.grain import flat_grain
from gradwire.drivers.lockstep import Lockstep
from gradwire.sync.gossip import CHOCO, DPSGD, GossipMethod, OnGraph, Ring

RANKS, NUMEL, SETTLED = 8, 2048, 40
SPECS = ("int8", "int4", "int2", "qsgd:7", "topk:0.1", "topk:0.1+int4", "topk:0.01")
GAMMAS = (1.0, 0.5, 0.2, 0.1, 0.05, 0.02)


def apart(xs: Sequence[Tensor]) -> float:
    """The root of the consensus distance."""
    stacked = torch.stack(list(xs))
    return math.sqrt(float((stacked - stacked.mean(0)).square().sum(1).mean()))


def tenfold(method: GossipMethod, most: int) -> float | None:
    """Rounds in which ranks come ten times nearer; None where they do not, or move apart."""
    on = OnGraph(Ring(RANKS), method)
    lockstep = Lockstep(on, flat_grain(NUMEL, dtype=torch.float64), RANKS)
    generator = torch.Generator().manual_seed(RANKS)
    xs: list[Tensor] = [torch.randn(NUMEL, generator=generator, dtype=torch.float64) for _ in range(RANKS)]
    start = began = now = apart(xs)
    for done in range(1, most + 1):
        xs = lockstep.step(xs)
        now = apart(xs)
        if done == SETTLED:
            began = now
        if not now < 10 * start:
            return None
        if done > SETTLED and now < 1e-5 * began:
            return (done - SETTLED) / math.log10(began / now)
    return (most - SETTLED) / math.log10(began / now) if now < began / 10 else None


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table of docs/gossip.md."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--most", type=int, default=4000, help="rounds")
    parser.add_argument("--save", action="store_true", help="write a dated file into benchmarks/results")
    options = parser.parse_args(arguments)
    plain = tenfold(DPSGD(), options.most)
    print(f"dpsgd {plain:.0f}", flush=True)
    table: dict[str, dict[str, float | None]] = {}
    for spec in SPECS:
        table[spec] = {f"{gamma:g}": tenfold(CHOCO(spec, gamma), options.most) for gamma in GAMMAS}
        print(spec, *("-" if found is None else f"{found:,.0f}" for found in table[spec].values()), flush=True)
    if options.save:
        setting = {"ranks": RANKS, "numel": NUMEL, "most": options.most}
        print(save_result("gossip", {**setting, "dpsgd": plain, "rounds to a tenth": table}))


if __name__ == "__main__":
    main()
