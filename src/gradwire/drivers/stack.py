"""What each layer of a stack saves: the same step with one method after another put on top."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from gradwire.codecs import Codec
from gradwire.codecs.base import layout_of
from gradwire.core.grain import ParameterSpec
from gradwire.core.grammar import split
from gradwire.drivers.cost import Parameters, cost, planned_bytes, require_world, specs_of
from gradwire.drivers.parts import Chunked, plan_parts
from gradwire.reducers.step import PAST_WARM_UPS
from gradwire.spec import ForShards, parse

GATHERS = 2
"""Times that `fully_shard` gathers a module's parameters in a step: for the forward pass and for the backward pass."""
SMALLEST_CHUNK = 256
"""Elements of a rank's chunk of a parameter from which on it is coded."""
_POLICIES = ("layers", "budget", "measure", "vectors", "node", "exchange")
"""Options that change what is sent, and stand in a layer of their own."""


class StackLevel(NamedTuple):
    """A step with all layers up to this one.

    Attributes:
        added: what this layer is, as it is written; "fp32" is what the others stand on.
        gradient_bytes: what a rank sends of gradients.
        parameter_bytes: what it sends of parameters; 0 where they are not sharded.
    """

    added: str
    gradient_bytes: int
    parameter_bytes: int = 0

    @property
    def wire_bytes(self) -> int:
        """What a rank sends in a step."""
        return self.gradient_bytes + self.parameter_bytes


def stack(spec: str, model: Parameters, world_size: int, step: int = PAST_WARM_UPS) -> list[StackLevel]:
    """Return the bytes of a step for each layer of a stack, beginning with float32.

    Layers are the codecs that a "+" joins, options that change what is sent (`layers=`, `node=`, `exchange=`), and
    `parameters=`. With the last one all levels are those of a sharded model: each rank sends the parts of gradients
    that others own, and its shard of the parameters twice. Bytes are those of `gradwire.cost`: exact for methods of
    fixed size. All parameters are taken for one group of `fully_shard`.

    Args:
        spec: as `attach` takes it.
        model: as `gradwire.cost` takes it.
        world_size: how many ranks.
        step: which one, for methods that begin otherwise than they go on.

    Raises:
        SpecError, CompositionError: as `gradwire.cost`; with `parameters=`, a method without a scatter half.

    >>> levels = stack("topk:0.01+int8", torch.nn.Linear(100, 100), world_size=2)
    >>> [(level.added, level.wire_bytes) for level in levels]
    [('fp32', 40400), ('topk:0.01', 520), ('+int8', 224)]
    """
    whole = parse(spec)
    shards = isinstance(whole, ForShards)
    specs = specs_of(model)
    levels = [StackLevel("fp32", *_bytes("none", specs, world_size, step, shards))]
    for added, so_far in _layers(spec):
        levels.append(StackLevel(added, *_bytes(so_far, specs, world_size, step, shards)))
    return levels


def _layers(spec: str) -> Iterator[tuple[str, str]]:
    """What each layer adds, and the spec with all up to it."""
    head, *options = split(spec, ",")
    first, *others = split(head, "+")
    kinds = {option: option.partition("=")[0].strip() for option in options}
    own = [option for option in options if kinds[option] not in (*_POLICIES, "parameters")]
    so_far = first
    yield ",".join([first, *own]), ",".join([so_far, *own])
    for other in others:
        so_far = f"{so_far}+{other}"
        yield f"+{other}", ",".join([so_far, *own])
    policies = [option for option in options if kinds[option] in _POLICIES]
    if policies:
        yield "," + ",".join(policies), ",".join([so_far, *own, *policies])
    for option in options:
        if kinds[option] == "parameters":
            yield f",{option}", spec


def _bytes(spec: str, specs: Sequence[ParameterSpec], ranks: int, step: int, shards: bool) -> tuple[int, int]:
    """What a rank sends of gradients and of parameters."""
    made = parse(spec)
    if not shards:
        return cost(made, specs, ranks, step).wire_bytes, 0
    reducer, codec = (made.gradients, made.parameters) if isinstance(made, ForShards) else (made, None)
    require_world(reducer, ranks)
    half = reducer.scattered()
    chunks = [Chunked(spec, _chunk(spec, ranks)) for spec in specs]
    planned = plan_parts([chunks], half, range(ranks))
    row = sum(_gathered(chunked, codec) for chunked in chunks)
    return planned_bytes(planned, specs, ranks, step).wire_bytes, GATHERS * (ranks - 1) * row


def _chunk(spec: ParameterSpec, ranks: int) -> int:
    """Elements of a rank's chunk: FSDP2 cuts the first dimension, and fills up the last chunk."""
    rows = spec.shape[0] if spec.shape else 1
    return -(-rows // ranks) * (spec.numel // rows if rows else 0)


def _gathered(chunked: Chunked, codec: Codec | None) -> int:
    """Bytes of a chunk when it is gathered; a byte of those that are coded tells whether they came out finite."""
    spec, chunk = chunked
    if codec is None or chunk < SMALLEST_CHUNK or len(spec.shape) < 2:
        return chunk * spec.dtype.itemsize
    return layout_of(codec, chunk, torch.float32).nbytes + 1
