"""What is owed under one method, carried over to another: element by element, by the names of parameters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from gradwire.core.grain import Grain
from gradwire.core.saved import Grains, cut
from gradwire.core.state import CARRIED, Leaf, State, carried_leaf, walk


class _Debt(NamedTuple):
    """Values owed from element `start` of a parameter on, each `times` over."""

    start: int
    values: Tensor
    times: int


def carry_over(old: Grains, new: Grains, rank: int, world_size: int) -> list[State]:
    """Return the new states of one rank with what it owes under the old ones in them.

    What is conserved is the sum over ranks of residuals, plus world_size times what owners of shards owe:

        e'_i = e_i + n * s_i     where this rank owns element i and owes s_i of the mean, else e_i

    A new state with a residual has it added there. One without gets a leaf `CARRIED`, which the next step adds to the
    gradient. Which of the two it is depends on the form of the state and never on its values, so it is the same on all
    ranks.

    Args:
        old: what this rank remembers under the old method.
        new: the same parameters under the new one, before its first step; changed in place.
        rank: of the owner of these states.
        world_size: n.

    >>> import torch
    >>> from gradwire.core.grain import flat_grain
    >>> residual = State(residual=Leaf(torch.tensor([1.0, 2.0]), "element", owed=True))
    >>> owner = State(owner=Leaf(torch.tensor([0.5]), "owned", owed=True))
    >>> old = [(flat_grain(2), residual), (flat_grain(2), owner)]
    >>> [state.tensor("carried").tolist() for state in carry_over(old, [(flat_grain(2), State())], 1, 4)]
    [[1.0, 4.0]]
    """
    owing = [(grain, leaf) for grain, state in old for leaf in _owed(state)]
    if not owing:
        return [state for _, state in new]
    debts: dict[str, list[_Debt]] = {}
    for grain, leaf in owing:
        times = world_size if leaf.kind == "owned" else 1
        for name, start, values in cut(grain, leaf, rank):
            debts.setdefault(name, []).append(_Debt(start, values, times))
    return [_indebted(grain, state, debts, rank) for grain, state in new]


def _owed(state: State) -> Iterable[Leaf]:
    return (leaf for _, leaf in walk(state) if leaf.owed and not leaf.momentum)


def _indebted(grain: Grain, state: State, debts: Mapping[str, Sequence[_Debt]], rank: int) -> State:
    """The state with all debts of its parameters added to what it owes."""
    # The last one: of two in a row the first is never looked at again once its turn is over. In 16 bits much would be
    # rounded away.
    takers = [leaf for leaf in _owed(state) if leaf.kind == "element" and leaf.tensor.element_size() >= 4]
    if takers:
        taker = takers[-1]
    else:
        taker = carried_leaf(grain)
        state = State({**state, CARRIED: taker})
    for name, start, view in cut(grain, taker, rank):
        for debt in debts.get(name, ()):
            _add(view, start, debt)
    return state


def _add(view: Tensor, start: int, debt: _Debt) -> None:
    """Add the elements that both have."""
    begin, end = max(start, debt.start), min(start + view.numel(), debt.start + debt.values.numel())
    if begin < end:
        owed = debt.values[begin - debt.start : end - debt.start]
        view[begin - start : end - start].add_(owed.to(view.device), alpha=debt.times)  # either may lie on the host
