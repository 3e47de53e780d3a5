"""The forms of sessions over sharded models: grains are columns of rows of chunks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from gradwire.adapters.fsdp2.groups import Group, ShardedParameter
from gradwire.core.errors import CompositionError
from gradwire.core.grain import ParameterSpec
from gradwire.core.spoken import called
from gradwire.drivers.parts import Chunked, PartPlan, plan_parts
from gradwire.reducers.base import Reducer
from gradwire.reducers.hierarchical import Hierarchical
from gradwire.reducers.requirements import require_alike
from gradwire.session.form import Form
from gradwire.spec import as_method


class PartForm(Form):
    """Parts are groups of parameters.

    Args:
        groups: of the model.
        roles: of its parameters, by name.
        rows: which of a parameter's chunks are reduced.
        says: what else must be the same on all ranks.
        uncounted: what FSDP2 sends by itself.
    """

    times_link = False
    fed_by = "the backward pass of a sharded model"

    def __init__(
        self, groups: Sequence[Group], roles: Mapping[str, str], rows: range, says: str, uncounted: str = ""
    ) -> None:
        self._parts = [[(p.name, p.chunk) for p in group.trained] for group in groups]
        self.roles, self._rows, self.says, self.uncounted = roles, rows, says, uncounted

    def plan(self, specs: Sequence[ParameterSpec], reducer: Reducer, grain_numel: int | None) -> PartPlan:
        """Return the columns of all groups."""
        named = {spec.name: spec for spec in specs}
        parts = [[Chunked(named[name], chunk) for name, chunk in part] for part in self._parts]
        return plan_parts(parts, reducer, self._rows, grain_numel)


class ReplicaForm(PartForm):
    """One row, the shard that this rank and its replicas have; each of them gets all of its mean."""

    def method(self, given: Reducer | str) -> Reducer:
        """Return a method that leaves replicas as they were to each other: the same.

        Raises:
            SpecError, CompositionError: a method that cannot be read, or that does not.
        """
        method = require_alike(as_method(given))
        if method.weighs:
            raise CompositionError(
                "weights=given does not go with replicate=: inside of a copy FSDP2 has averaged already, and counts "
                "all ranks alike; shard over all ranks, or multiply each rank's loss by its weight"
            )
        return method


class ShardedForm(PartForm):
    """All rows; each rank gets its own one of the mean."""

    def method(self, given: Reducer | str) -> Reducer:
        """Return the half of a method that leaves each rank with its shard.

        Raises:
            SpecError, CompositionError: a method that cannot be read, or one without that half.
        """
        return sharded_method(given)


def sharded_method(given: Reducer | str) -> Reducer:
    """Return the half of a method that leaves each rank with its shard of the mean.

    Raises:
        SpecError, CompositionError: a method that cannot be read, or one without that half.
    """
    whole = as_method(given)
    if knows_nodes(whole):
        raise CompositionError(
            f"{_short(given)} compresses between nodes, and a model that is sharded over one axis has no copies there: "
            'shard inside nodes, by fully_shard(..., mesh=mesh["shard"]) on a mesh of nodes by ranks of a node, with '
            'axes "replicate" and "shard", and attach with replicate=mesh["replicate"]'
        )
    try:
        return whole if whole.scatters else called(whole.scattered(), str(whole))
    except CompositionError as error:
        raise CompositionError(
            f"FSDP2 needs a method that ends with shards of the mean, and {_short(given)} has no such half: use "
            "int8, int4, fp8, sign, topk:0.01, qsgd:15, bf16, none, or a rule such as median or krum:1; options ef=, "
            "residual=bf16 and weights= are served"
        ) from error


def knows_nodes(reducer: Reducer) -> bool:
    """Whether a method tells ranks of one node from others, by a number or by `node=auto`."""
    return isinstance(reducer, Hierarchical) or any(map(knows_nodes, reducer.children()))


def tensors_of(groups: Sequence[Group]) -> dict[str, Tensor]:
    """The trained parameters as tensors that take no memory. Sums are taken in float32, whatever gradients come in."""
    return {p.name: _like(p, group.device) for group in groups for p in group.trained}


def _like(parameter: ShardedParameter, device: torch.device) -> Tensor:
    wide = parameter.shard.dtype == torch.float64
    return torch.empty((), dtype=torch.float64 if wide else torch.float32, device=device).expand(parameter.shape)


def _short(given: Reducer | str) -> str:
    text = str(given)
    return repr(text) if len(text) <= 60 else type(given).__name__
