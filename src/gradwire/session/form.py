"""How a session's tensors become grains: whole ones, which is the rule, or rows of shards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from gradwire.core.grain import ParameterSpec
from gradwire.drivers.plan import Plan, plan
from gradwire.drivers.window import DDP_CAPS, Caps
from gradwire.reducers.base import Reducer
from gradwire.reducers.requirements import require_alike
from gradwire.spec import as_method


class Form:
    """Every rank has all tensors, and wants all of their means.

    Attributes:
        times_link: whether a report estimates the step without the method, for which the link is timed.
        caps: of the buckets that DDP would send without the method.
        sends_early: whether gradients are sent while the backward pass goes on.
        fed_by: who delivers tensors, where it is not the caller of `step` and `reduce_`.
        says: what must be the same on all ranks beside the method.
        roles: what parameters are for, by name, where the session is not given the model that tells.
        uncounted: what is sent beside the method, which nobody counts.
    """

    times_link = True
    caps = DDP_CAPS
    sends_early = False
    fed_by = ""
    says = ""
    roles: Mapping[str, str] = MappingProxyType({})
    uncounted = ""

    def method(self, given: Reducer | str) -> Reducer:
        """Return the reducer that is meant.

        Raises:
            SpecError, CompositionError: as `as_method`.
        """
        return as_method(given)

    def plan(self, specs: Sequence[ParameterSpec], reducer: Reducer, grain_numel: int | None) -> Plan:
        """Return the grains that the tensors are cut into."""
        return plan(specs, reducer, grain_numel)


class Alike(Form):
    """The same for what replicas of a model are trained by.

    Args:
        caps: of DDP's buckets.
        roles: of the model's parameters, by name.
    """

    sends_early = True
    fed_by = "the backward pass of a DistributedDataParallel model"

    def __init__(self, caps: Caps, roles: Mapping[str, str]) -> None:
        self.caps, self.roles = caps, roles

    def method(self, given: Reducer | str) -> Reducer:
        """Return the reducer that is meant.

        Raises:
            SpecError, CompositionError: as `as_method`, or one whose results differ between ranks.
        """
        return require_alike(super().method(given))


WHOLE = Form()
