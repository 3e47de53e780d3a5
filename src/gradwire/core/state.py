"""What a reducer remembers between steps: a tree of tensors, each of which knows how it belongs to parameters.

A program takes a state and returns a new one. A driver commits the new state once the whole step is known to be
good; to roll a step back it forgets the new state. Saved states are keyed by parameter name, whatever grains and
buckets a run had, and load with `weights_only=True`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from operator import mul
from typing import Literal

import torch
from torch import Tensor

from gradwire.core.grain import Grain, Segment

Kind = Literal["element", "owned", "matrix", "segment", "scratch"]

CARRIED = "carried"
"""Name of the leaf of what was owed under another method: it is added to the next gradient, then dropped."""

PIECE = 1 << 18
"""Elements that are squared at a time: a whole gradient in float64 would take twice the memory that is remembered."""

ALIGNMENT = 64
"""Bytes at whose multiples a tensor of state begins: what PyTorch's own allocations on a CPU keep to."""


def canonical(tensor: Tensor) -> Tensor:
    """The same values, contiguous with the strides of a new tensor, and aligned; a copy only where they are not.

    A saved tensor is loaded with such strides into such a place. Matrix products round differently for other strides
    and other alignments, so a state that had kept its own would not be the same state once it was saved and loaded.

    >>> import torch
    >>> canonical(torch.zeros(3, 2).mT).stride(), canonical(torch.zeros(8)[1:]).data_ptr() % ALIGNMENT
    ((3, 1), 0)
    """
    if tensor.stride() == _strides(tensor.shape) and tensor.data_ptr() % ALIGNMENT == 0:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Of a new tensor. `is_contiguous` would let a dimension of one element have any other."""
    inner = [max(1, size) for size in reversed(shape[1:])]
    return tuple(accumulate(inner, mul, initial=1))[::-1] if shape else ()


@dataclass(frozen=True, eq=False)
class Leaf:
    """A tensor of state and how it maps to the grain. The leaf holds it in its `canonical` form.

    kind "element": one value per element of the grain, in its order (residuals).
    kind "owned": one value per element of the shard this rank owns (a two-shot owner's residual).
    kind "matrix": a leading dimension of one entry per matrix of the grain (factors).
    kind "segment": one value per segment of the grain (thresholds).
    kind "scratch": memory that means nothing, for a program to write its new state to; never saved.
    `owed` says that the values are gradient not yet delivered, so that a changed world size must conserve them.
    `scaled` says that the values are in the gradient's units, as what is owed is too, so that a changed loss scale must
    change them.
    `momentum` says that what is owed was counted as owed elsewhere too, or is spread over steps for ever: a change of
    method forgets it.
    `start` is where in the grain an owned shard begins; None: shards lie end to end in rank order.
    """

    tensor: Tensor
    kind: Kind
    owed: bool = False
    start: int | None = None
    scaled: bool = False
    momentum: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "tensor", canonical(self.tensor))

    def with_tensor(self, tensor: Tensor) -> Leaf:
        """The same leaf with other values."""
        return replace(self, tensor=tensor)

    def first(self, rank: int) -> int:
        """The element of the grain that the first value belongs to, on `rank`."""
        if self.kind != "owned":
            return 0
        return rank * self.tensor.numel() if self.start is None else self.start

    def of_segment(self, segment: Segment, rank: int) -> Tensor:
        """The values that belong to elements of a segment, 1-d; of kind "element" or "owned", on `rank`.

        >>> import torch
        >>> shard = Leaf(torch.arange(4.0), "owned")
        >>> shard.of_segment(Segment("bias", 0, 3, 5), rank=1)  # which owns elements 4 to 7 of the grain
        tensor([1., 2., 3.])
        """
        first = self.first(rank)
        begin, end = segment.offset - first, segment.offset + segment.numel - first
        return self.tensor.view(-1)[max(begin, 0) : max(end, 0)]


def square_sum(values: Tensor) -> float:
    """Return the sum of squares in float64, for which no copy of a large tensor is made.

    >>> import torch
    >>> square_sum(torch.full((PIECE + 2,), 2.0)) == 4 * (PIECE + 2)
    True
    """
    pieces = values.reshape(-1).split(PIECE) if values.numel() else ()
    # One number is read in the end, so that a GPU is waited for once.
    return float(sum((piece.double().square().sum() for piece in pieces), torch.zeros(())))


class State(dict[str, "Leaf | State"]):
    """A tree of leaves. Empty for a reducer that remembers nothing."""

    def tensor(self, name: str) -> Tensor:
        """The tensor of the leaf `name`."""
        leaf = self[name]
        assert isinstance(leaf, Leaf)
        return leaf.tensor

    def part(self, name: str) -> State:
        """The tree below `name`."""
        part = self[name]
        assert isinstance(part, State)
        return part


def carried_leaf(grain: Grain) -> Leaf:
    """What a grain owes from another method: nothing yet."""
    return Leaf(torch.zeros(grain.numel, dtype=torch.float32, device=grain.device), "element", owed=True)


def walk(state: State, path: str = "") -> Iterator[tuple[str, Leaf]]:
    """Yield every leaf with its path, depth first.

    >>> import torch
    >>> s = State(inner=State(factor=Leaf(torch.zeros(1), "matrix")))
    >>> [p for p, _ in walk(s)]
    ['inner/factor']
    """
    for name, node in state.items():
        here = f"{path}/{name}" if path else name
        if isinstance(node, Leaf):
            yield here, node
        else:
            yield from walk(node, here)


def replace_leaves(state: State, change: Callable[[str, Leaf], Leaf], path: str = "") -> State:
    """Return the tree with every leaf replaced by `change(path, leaf)`."""
    out = State()
    for name, node in state.items():
        here = f"{path}/{name}" if path else name
        out[name] = change(here, node) if isinstance(node, Leaf) else replace_leaves(node, change, here)
    return out


def flatten(state: State) -> Mapping[str, Tensor]:
    """Return the tensors by path, all that mean something."""
    return {path: leaf.tensor for path, leaf in walk(state) if leaf.kind != "scratch"}
