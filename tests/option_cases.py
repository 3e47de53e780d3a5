"""What specs do, on a probe: bytes, collectives and the bits of every step's result. And specs to try."""

from __future__ import annotations

import functools
import itertools
import re
import typing
from collections.abc import Iterator, Mapping
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

import gradwire
from gradwire.composition import EXCHANGES
from gradwire.core.errors import CompositionError, SpecError
from gradwire.core.registry import Method
from gradwire.drivers.virtual import Gradients, VirtualRanks
from gradwire.reducers import Reducer

RANKS, STEPS, BAD_STEP, WIDE_STEP = 6, 5, 3, 2


class Probe(nn.Module):
    """Two matrices, of which low rank takes one at a high rate only, and a vector."""

    def __init__(self) -> None:
        super().__init__()
        self.large = nn.Parameter(torch.zeros(48, 40))
        self.small = nn.Parameter(torch.zeros(12, 16))
        self.vector = nn.Parameter(torch.zeros(48))


@functools.cache
def gradients(ranks: int, step: int) -> tuple[Gradients, ...]:
    """What every rank hands over: numbers of several sizes, once of very different ones, once not all finite."""
    found = tuple(_drawn(rank, step) for rank in range(ranks))
    if step == BAD_STEP:
        found[1]["vector"][7] = float("nan")
    return found


def _drawn(rank: int, step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    own = {name: torch.randn(p.shape, generator=generator) for name, p in Probe().named_parameters()}
    common = torch.Generator().manual_seed(7)
    drawn = {name: x + torch.randn(x.shape, generator=common) for name, x in own.items()}
    drawn["vector"] *= 1e-30 if step == WIDE_STEP else 1.0
    return drawn


@functools.cache
def behaviour(reducer: Reducer) -> tuple[object, ...]:
    """What a reducer sends, and all results."""
    ranks = -(-max(RANKS, reducer.fewest_ranks) // reducer.rank_multiple) * reducer.rank_multiple
    model = Probe()
    costs = [gradwire.cost(reducer, model, ranks, step=step) for step in (0, STEPS)]
    virtual, results = VirtualRanks(reducer, model, ranks), list[bytes]()
    for step in range(STEPS):
        virtual.step(gradients(ranks, step))
        for p in model.parameters():
            assert p.grad is not None
            results.append(p.grad.numpy().tobytes())
    return (*costs, *results)


def parsed(spec: str) -> Reducer | None:
    """The reducer of a spec, None where it is refused."""
    try:
        reducer = gradwire.parse(spec)
        reducer.require_ranks(max(RANKS, reducer.fewest_ranks))
    except (SpecError, CompositionError):
        return None
    return reducer


# Specs to try

COMMON = (
    *(("exchange", name) for name in EXCHANGES if name != "auto"),  # which chooses by what it measures on a link
    *(("node", ranks) for ranks in ("1", "2")),
    *(("ef", value) for value in ("on", "off", "ef21")),
    *(("decay", value) for value in ("1", "0.5")),
    *(("residual", value) for value in ("fp32", "bf16", "factored:2")),
    *(("worker_momentum", value) for value in ("0", "0.5")),
    *(("warmup", steps) for steps in ("0", "2")),
    *(("vectors", value) for value in ("on", "off")),
    *(("guard", value) for value in ("on", "off")),
    ("weights", "1/2/3/4/5/6"),
)
"""Options that every method has, and values to try."""

NUMBERS: Mapping[object, tuple[str, ...]] = {
    int: ("0", "1", "2", "3", "4", "5", "8", "16", "40", "64", "80"),
    float: ("0", "0.02", "0.1", "0.3", "0.5", "0.9", "2", "3", "8", "1000"),
}


class Tried(NamedTuple):
    """An option of a spec, and values of which each must do something, or where `any_will_do` one of them."""

    head: str
    option: str
    values: tuple[str, ...]
    any_will_do: bool = False

    def specs(self) -> Iterator[tuple[str, str]]:
        """The spec without the option, and the spec with it, for every value.

        Without a guard, unless it is what is tried: it would change what becomes of a gradient that is not finite.
        """
        unguarded = "" if self.option == "guard" else ",guard=off"
        for value in self.values:
            yield f"{self.head}{unguarded}", f"{self.head},{self.option}={value}{unguarded}"


def heads() -> Iterator[str]:
    """Each method with its argument, with and without memory; values that are quantised; rules of payloads."""
    for method in gradwire.methods().values():
        head = head_of(method)
        yield head
        if method.feedback:
            yield f"{head},ef=off"
    yield from ("topk:0.1+int8", "randomk:0.2+int8", "median+int8,ef=off", "krum:1+topk:0.1,ef=off")
    yield from ("none,exchange=twoshot", "none,node=2", "median,worker_momentum=0.5", "qsgd:15,ef=on")


def head_of(method: Method) -> str:
    """A method with an argument that is good for the probe."""
    if method.name == "dp":
        return "dp:1,noise=0"  # with noise no two runs are alike
    example = method.examples[0].split(",")[0] if method.examples else method.name
    return example.replace(":0.01", ":0.1")


def tried() -> Iterator[Tried]:
    """Every option of every method."""
    for head in heads():
        for option, pairs in itertools.groupby(COMMON, key=lambda pair: pair[0]):
            if f",{option}=" not in head:
                yield Tried(head, option, tuple(value for _, value in pairs))
        yield from own_options(head)


def own_options(head: str) -> Iterator[Tried]:
    """A method's own options."""
    method = gradwire.methods()[re.split(r"[+:,]", head)[0]]
    for name, option in method.options.items():
        if (name == method.argument and ":" in head) or f",{name}=" in head:
            continue
        if typing.get_origin(option.kind) is Literal:
            # Where the default chooses among the others, it is one of them.
            yield Tried(head, name, tuple(map(str, typing.get_args(option.kind))), any_will_do=option.default == "auto")
        elif option.kind is bool:
            yield Tried(head, name, ("on", "off"))
        else:
            yield Tried(head, name, NUMBERS[option.kind], any_will_do=True)
