"""What stands beside a spec of `gradwire.sync` in tests, where its place wants something there."""

from __future__ import annotations

import itertools
from typing import Any

import torch.distributed as dist

from gradwire.core.places import ELASTIC
from gradwire.session.meeting import group_store
from gradwire.spec import find

_runs = itertools.count()


def where_of(spec: str) -> dict[str, Any]:
    """What `gradwire.wrap` has to be told beside a spec by each rank of the default group.

    Workers that come and go meet at that group's store, in a run of their own. All ranks ask for the same specs in one
    order.
    """
    if find(spec).place is not ELASTIC:
        return {}
    ranks = dist.get_world_size()
    return {"store": group_store(), "run": f"{spec} {next(_runs)}", "least": ranks, "begin_with": ranks}
