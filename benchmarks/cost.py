"""Seconds that it takes to price a step of a model of 6.7 billion parameters, and its collectives.

python benchmarks/cost.py
"""

from __future__ import annotations

import time

import torch

import gradwire
from gradwire.core.grain import ParameterSpec

SPECS = ("none", "int4", "topk:0.01", "powersgd:8,factors=fp16", "int4,node=8")
RANKS = (8, 1024, 16_384)


def transformer(layers: int = 32, hidden: int = 4096, inner: int = 11_008, words: int = 32_000) -> list[ParameterSpec]:
    """The parameters of a transformer with gated layers and no biases, of the size of Llama 7B."""
    shapes: dict[str, tuple[int, ...]] = {"embed": (words, hidden)}
    for i in range(layers):
        shapes |= {f"{i}.{name}": (hidden, hidden) for name in ("query", "key", "value", "out")}
        shapes |= {f"{i}.gate": (inner, hidden), f"{i}.up": (inner, hidden), f"{i}.down": (hidden, inner)}
        shapes |= {f"{i}.norm1": (hidden,), f"{i}.norm2": (hidden,)}
    shapes |= {"norm": (hidden,), "head": (words, hidden)}
    return [ParameterSpec(name, shape, torch.bfloat16, torch.device("meta")) for name, shape in shapes.items()]


def main() -> None:
    """Print one line for each spec and number of ranks."""
    model = transformer()
    print(f"{sum(p.numel for p in model):,} parameters")
    gradwire.cost("int4", model[:1], 2)  # what torch imports at its first operation is no part of it
    for spec in SPECS:
        for ranks in RANKS:
            began = time.perf_counter()
            found = gradwire.cost(spec, model, ranks)
            taken = time.perf_counter() - began
            print(f"{spec:24} {ranks:6} ranks  {taken:6.3f} s  {found.collectives:5} collectives")


if __name__ == "__main__":
    main()
