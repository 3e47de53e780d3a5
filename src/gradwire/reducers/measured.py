"""Bits for each layer, by errors that are measured on the run's own gradients, at a budget of bytes."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from typing_extensions import override

from gradwire.codecs.base import Codec, layout_of
from gradwire.codecs.block_int import BlockInt
from gradwire.core.agreement import Total
from gradwire.core.errors import CompositionError
from gradwire.core.grain import Grain, ParameterSpec
from gradwire.core.state import Leaf, State, walk
from gradwire.reducers.base import Reducer
from gradwire.reducers.budget import allocate
from gradwire.reducers.scatter_reduce import Scatter, ShardwiseScatterReduce
from gradwire.reducers.step import Program, Step
from gradwire.reducers.two_shot import TwoShot

WIDTHS = range(2, 9)
"""Bits that a layer may have."""
FIRST = 10
"""The first steps are not measured: gradients change too quickly there for what a measurement says to last."""
SMALLEST = 4096
"""Elements of a parameter that is a layer by itself. The others are one layer together, with one width."""
_PROBE = 1 << 20


@dataclass(frozen=True)
class MeasuredBits(Reducer):
    """Integers of 2 to 8 bits, as many for each layer as the least total error at a budget of bytes wants.

    Every `every` steps each rank encodes what each layer l sends in every width b, and measures what is lost of it:

        E_l(b) = sum over ranks i of ||x_il - decode(C_b(x_il))||^2

    x_il is what rank i sends of layer l, residual included. The sums are taken in rank order, so they are the same bits
    on every rank, and every rank computes the same widths from them (`allocate`): those with the least sum of E_l(b_l)
    whose payloads fit into the budget. They serve from the next step on. Before the first measurement, in step 10, all
    layers have the widest integers that fit. A measurement encodes seven times and sends 14 numbers for each layer. A
    step whose gradients are not finite changes nothing.

    A layer is a parameter of at least 4,096 elements. All smaller ones, biases and norms among them, are one more layer
    together. Under FSDP2 each group of parameters has a share of the budget, and chooses among its own layers.

    Where it deviates: L-GreCo limits the error and minimises the bytes, by dynamic programming; here the bytes are
    limited, since a link is what is given. It also adds up gradients over the steps between two measurements.

    Args:
        codec: integers with their block and rounding; the bits are chosen.
        budget: a codec, for as many bytes as it takes of all parameters; or a share of float32's bytes.
        every: steps between two measurements.
        shardwise: each rank ends with its shard of the mean, as FSDP2 wants it.
        layers, layer: what a plan fills in: the names of layers, and which of them this reducer serves.

    Raises:
        CompositionError: a budget below what 2 bits take, or at which all layers could have 8; fewer steps than 1.

    References:
        Markov et al. 2024, "L-GreCo: Layerwise-adaptive gradient compression for efficient data-parallel deep
        learning", Section 3. Agarwal et al. 2021, "Accordion: Adaptive gradient communication via critical learning
        regime identification", on why one measurement does not serve for a whole run.

    >>> from gradwire.reducers import MeasuredBits
    >>> MeasuredBits(BlockInt(4), budget=BlockInt(4)).limit(1_000_000)
    515632
    """

    codec: BlockInt
    budget: Codec | float
    every: int = 100
    shardwise: bool = False
    layers: tuple[str, ...] = field(default=(), repr=False)
    layer: int = 0

    def __post_init__(self) -> None:
        if self.every < 1:
            raise CompositionError(f"measure={self.every}: there must be 1 step or more between two measurements")
        least, most = (
            layout_of(self._wide(bits), _PROBE, torch.float32).nbytes / (4 * _PROBE) for bits in (WIDTHS[0], WIDTHS[-1])
        )
        share = self.limit(_PROBE) / (4 * _PROBE)
        if share < least:
            raise CompositionError(
                f"budget={self.budget} is {share:.3f} of float32's bytes, and integers of 2 bits, the fewest, take "
                f"{least:.3f}: give a larger budget, or take a method that sends less, such as topk:0.01"
            )
        if share >= most:
            raise CompositionError(
                f"budget={self.budget} has room for 8 bits in every layer, so there is nothing to choose: write int8, "
                "or give a smaller budget"
            )

    def limit(self, numel: int) -> int:
        """Bytes of payloads that `numel` elements may take, once through the network."""
        if isinstance(self.budget, Codec):
            return layout_of(self.budget, numel, torch.float32).nbytes
        return int(4 * numel * self.budget)

    def _wide(self, bits: int) -> BlockInt:
        return replace(self.codec, bits=bits)

    @functools.cached_property
    def exchanges(self) -> tuple[TwoShot | ShardwiseScatterReduce, ...]:
        """What serves a layer, by its width."""
        kind = ShardwiseScatterReduce if self.shardwise else TwoShot
        return tuple(kind(self._wide(bits)) for bits in WIDTHS)

    @functools.cached_property
    def start(self) -> int:
        """The number of the widest integers that all layers may have."""
        sizes = [layout_of(self._wide(bits), _PROBE, torch.float32).nbytes for bits in WIDTHS]
        return sum(size <= self.limit(_PROBE) for size in sizes) - 1

    @override
    def children(self) -> tuple[Reducer, ...]:
        return self.exchanges

    def scattered(self) -> Reducer:
        """The same, in halves."""
        return replace(self, shardwise=True)

    @override
    def owned(self, grain: Grain, step: Step) -> slice:
        return self.exchanges[0].owned(grain, step)

    def of_model(self, parameters: Collection[ParameterSpec]) -> Reducer:
        """The same, with the layers of a model."""
        return replace(self, layers=tuple(p.name for p in parameters if p.numel >= SMALLEST))

    def assign(self, parameter: ParameterSpec) -> Reducer:
        """The same for the layer of a parameter."""
        known = {name: number for number, name in enumerate(self.layers)}
        return replace(self, layer=known.get(parameter.name, len(known)))

    @property
    @override
    def travels_with(self) -> Reducer:
        """All layers: else each would have a wave of its own, and a round of collectives."""
        return replace(self, layer=0)

    def init(self, grain: Grain, step: Step) -> State:
        """The width, on the CPU, where it is read without waiting; and what the exchange keeps in any width."""
        bits = torch.full((len(grain.segments),), float(WIDTHS[self.start]))
        return State(bits=Leaf(bits, "segment"), exchange=self.exchanges[0].init(grain, step))

    @override
    def reduce(self, grain: Grain, x: Tensor, state: State, step: Step) -> Program:
        return self._program(grain, x, state, step, keeping=False)

    def reduce_keeping(self, grain: Grain, x: Tensor, state: State, step: Step) -> Program:
        """The same, with the subtraction done by the encoder."""
        return self._program(grain, x, state, step, keeping=True)

    def _program(self, grain: Grain, x: Tensor, state: State, step: Step, keeping: bool) -> Program:
        now = round(float(state.tensor("bits")[0])) - WIDTHS[0]
        exchange = self.exchanges[now]
        measures = step.index % self.every == min(self.every, FIRST) - 1
        found = self._measured(grain, x, step) if measures else None
        run = exchange.reduce_keeping if keeping else exchange.reduce
        reduced = yield from run(grain, x, state.part("exchange"), step)
        chosen = now
        if found is not None:
            table = yield Total(found, of=self.travels_with)
            chosen = now if table.is_meta else self._chosen(table.cpu(), step.world_size, now)
        bits = torch.full((len(grain.segments),), float(WIDTHS[chosen]))
        return reduced._replace(state=State(bits=Leaf(bits, "segment"), exchange=reduced.state))

    def _measured(self, grain: Grain, x: Tensor, step: Step) -> Tensor:
        """This grain's row of a table of all layers: errors by width, bytes by width, elements. float64."""
        table = torch.zeros(len(self.layers) + 1, 2 * len(WIDTHS) + 1, dtype=torch.float64, device=x.device)
        flat, key = x.reshape(-1).float(), step.key(grain, "measure")
        for i, exchange in enumerate(self.exchanges):
            decoded = exchange.codec.decode(exchange.codec.encode(flat, key), flat, key)
            table[self.layer, i] = decoded.sub_(flat).square_().sum(dtype=torch.float64)
            scatter = exchange if isinstance(exchange, Scatter) else exchange.scatter
            row = scatter.sharded(grain.numel, step.world_size, torch.float32).nbytes
            table[self.layer, len(WIDTHS) + i] = row * step.world_size
        table[self.layer, -1] = grain.numel
        return table

    def _chosen(self, table: Tensor, ranks: int, now: int) -> int:
        """The width of this layer, by its number, from the sums over ranks; as it is where they are not finite."""
        if not bool(table.isfinite().all()):
            return now
        rows: list[list[float]] = table.tolist()
        numel = round(sum(row[-1] for row in rows) / ranks)
        used = [i for i, row in enumerate(rows) if row[-1]]
        chosen = _allocated(tuple(tuple(rows[i]) for i in used), ranks, self.limit(numel))
        return chosen[used.index(self.layer)]


def chosen_bits(states: Iterable[tuple[Grain, State]]) -> dict[str, int]:
    """Return the bits that each parameter has in the next step, from every grain and its state; empty without any."""
    found: dict[str, int] = {}
    for grain, state in states:
        for path, leaf in walk(state):
            if path.split("/")[-1] == "bits" and leaf.kind == "segment":
                found |= {segment.name: round(float(leaf.tensor[0])) for segment in grain.segments}
    return found


@functools.lru_cache(maxsize=8)
def _allocated(rows: Sequence[Sequence[float]], ranks: int, limit: int) -> list[int]:
    """What all layers of a step get: computed once, since each grain asks."""
    errors = [row[: len(WIDTHS)] for row in rows]
    nbytes = [[size / ranks for size in row[len(WIDTHS) : -1]] for row in rows]
    return allocate(errors, nbytes, limit)
