"""Parameters of one rank, and the ranks that hold copies of them: between which gradients travel."""

from __future__ import annotations

from typing import NamedTuple

from gradwire.planning.gradients import GradientTraffic, Matrix, gradient_traffic
from gradwire.planning.layout import ParallelLayout
from gradwire.planning.transformer import Transformer


class StageParameters(NamedTuple):
    """Parameters of one stage on one rank."""

    dense: float
    expert: float


def stage_parameters(model: Transformer, layout: ParallelLayout) -> StageParameters:
    """Return the parameters that a rank of the first or last stage holds; embeddings are split over `tp`."""
    share, t = 1 / layout.pp, layout.tp
    dense_layers = model.layers - model.expert_layers
    dense = model.layers * model.attention_parameters + dense_layers * model.dense_parameters
    dense += model.expert_layers * model.shared_parameters
    ends = 1 if layout.pp > 1 or model.tied else 2
    experts = model.expert_layers * model.experts * model.expert_parameters
    return StageParameters(
        (dense * share + ends * model.embedding_parameters) / t, experts * share / layout.expert_split
    )


class DataGroup(NamedTuple):
    """Parameters of a rank, and the ranks that hold copies of them.

    Attributes:
        parameters: how many.
        size, stride: of the ranks between which gradients, or averaged parameters, travel.
        matrices: of a layer, as rows and columns.
        within: ranks that add up gradients in each step where replicas are averaged every few steps, and their stride.
    """

    parameters: float
    size: int
    stride: int
    matrices: tuple[Matrix, ...]
    within: tuple[int, int] = (1, 1)


def data_groups(model: Transformer, layout: ParallelLayout, held: StageParameters) -> list[DataGroup]:
    """Return the groups of dense parameters and of experts.

    Args:
        model, layout: what is trained, and how it is spread.
        held: parameters of a rank, from `stage_parameters`.
    """
    found = [DataGroup(held.dense, layout.replicas, layout.tp, _dense_matrices(model, layout))]
    if held.expert:
        matrices = _expert_matrices(model, layout)
        found.append(DataGroup(held.expert, layout.expert_replicas, layout.expert_split, matrices))
    if layout.every == 1:
        return found
    apart = layout.tp * layout.cp  # replicas, which are `dp`, lie so far apart
    return [
        group._replace(size=layout.dp, stride=apart, within=(group.size // layout.dp, group.stride)) for group in found
    ]


def traffic_of(layout: ParallelLayout, group: DataGroup) -> GradientTraffic:
    """Return what the layout's method sends, holds and codes in a group; nothing where nobody has a copy.

    Raises:
        SpecError, CompositionError: a method that needs more ranks, or other ones.
    """
    if group.size == 1:
        return GradientTraffic((), 0.0, 0.0)
    return gradient_traffic(layout.method, group.matrices, group.size, layout.sharding != "none")


def _dense_matrices(model: Transformer, layout: ParallelLayout) -> tuple[Matrix, ...]:
    """Those of attention and of a dense feed-forward part, or of the expert that all tokens go to."""
    h, t = model.hidden, layout.tp
    queries, keys = model.heads * model.head // t, max(1, model.keys // t) * model.head
    inner = (model.shared_inner if model.experts else model.width) // t
    attention = ((queries + 2 * keys, h), (h, queries))
    return (*attention, *_feed_forward(model, inner)) if inner else attention


def _expert_matrices(model: Transformer, layout: ParallelLayout) -> tuple[Matrix, ...]:
    """Those of one expert, or of the part of it that a rank has."""
    return _feed_forward(model, model.width if layout.ep > 1 else model.width // layout.tp)


def _feed_forward(model: Transformer, inner: int) -> tuple[Matrix, ...]:
    return (((2 if model.gated else 1) * inner, model.hidden), (model.hidden, inner))
