"""PyTorch's `post_localSGD_hook` by name, signature and meaning, on lanes of the group and of its sub-group."""

import logging
import socket
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import GradBucket  # pyright: ignore[reportPrivateImportUsage]

from gradwire.adapters.hooks import allreduce_hook, lane_of, noop_hook
from gradwire.core.checked import checked, facts
from gradwire.core.errors import StateError
from gradwire.core.record import Count
from gradwire.drivers.groups import new_group
from gradwire.session.lane import group_of

# `register_comm_hook` reads the annotations of a hook, so this module must not postpone them.

logger = logging.getLogger(__name__)


class PostLocalSGDState:
    """Settings of `post_localSGD_hook`, and the steps it has counted.

    Arguments and attributes are PyTorch's. What differs: without a `subgroup` the ranks of one host are one, also where
    hosts have no GPU; and `iter` can be saved, since a resumed run would else average over all ranks once more for
    `start_localSGD_iter` steps. `pickle` takes it too, without groups.

    Args:
        process_group: whose ranks average gradients at first; None for the default group.
        subgroup: whose ranks average them afterwards; None for the ranks of this host.
        start_localSGD_iter: how many steps "at first" are.
        post_local_gradient_allreduce: whether gradients are averaged at all afterwards.

    >>> PostLocalSGDState(None, None, start_localSGD_iter=100).iter
    0
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None,
        subgroup: dist.ProcessGroup | None,
        start_localSGD_iter: int,
        post_local_gradient_allreduce: bool = True,
    ) -> None:
        self.process_group, self.subgroup = process_group, subgroup
        self.start_localSGD_iter = start_localSGD_iter
        self.post_local_gradient_allreduce = post_local_gradient_allreduce
        self.iter = 0

    def maybe_increase_iter(self, bucket: GradBucket) -> None:
        """Count a step with its last bucket."""
        if bucket.is_last():
            self.iter += 1
            if self.iter == self.start_localSGD_iter:
                logger.info("Local SGD begins after %d steps", self.iter)

    def state_dict(self) -> dict[str, int]:
        """Return what a resumed run needs: the steps counted."""
        return {"iter": self.iter}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on from `state_dict`.

        Raises:
            StateError: it has no number of steps.
        """
        remedy = ": pass what PostLocalSGDState.state_dict() gave"
        self.iter = checked(state, facts({"iter": Count}), "the saved state", StateError, "'s ", remedy).iter

    def __getstate__(self) -> dict[str, Any]:
        """Everything but process groups, which cannot be pickled: set them anew where they are no default ones."""
        return {**vars(self), "process_group": None, "subgroup": None}


def post_localSGD_hook(state: PostLocalSGDState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average gradients over all ranks for the first steps, then over the sub-group, or not at all.

    Args:
        state: settings; one for each model.
        bucket: given by DDP.

    Example:
        state = PostLocalSGDState(None, subgroup, start_localSGD_iter=100)
        ddp.register_comm_hook(state, post_localSGD_hook)
        optimizer = PostLocalSGDOptimizer(local_optimizer, PeriodicModelAverager(period=4, warmup_steps=100))
    """
    if state.iter < state.start_localSGD_iter:
        state.maybe_increase_iter(bucket)
        return allreduce_hook(group_of(state.process_group), bucket)
    if not state.post_local_gradient_allreduce:
        return noop_hook(None, bucket)
    if state.subgroup is None:
        state.subgroup = _of_this_host(state.process_group, bucket.buffer().device)
    return allreduce_hook(state.subgroup, bucket)


def _of_this_host(process_group: dist.ProcessGroup | None, device: torch.device) -> dist.ProcessGroup:
    """A group of the ranks on this host, which every rank of the group asks for at the same place."""
    group = group_of(process_group)
    lane = lane_of(group, device)
    hosts = lane.meeting.exchange("post_localSGD_hook", socket.gethostname(), lane.deadline_s)
    ranks = dist.get_process_group_ranks(group)
    here = [rank for rank, host in zip(ranks, hosts, strict=True) if host == socket.gethostname()]
    return new_group(group, here, lane.deadline_s, "post_localSGD_hook")
