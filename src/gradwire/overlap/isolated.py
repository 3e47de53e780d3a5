"""The communication of a step by itself: what there is to be hidden."""

from __future__ import annotations

from collections.abc import Mapping

import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from gradwire.session import Session, SessionStep


def reduce_alone(session: Session, gradients: Mapping[str, Tensor]) -> None:
    """Reduce gradients as a step of a session's does, all of them at once and with no backward pass beside it.

    It is a step of the session: what it remembers afterwards is what this step has left.

    Args:
        session: of whole tensors, whoever feeds it.
        gradients: by name, all that the session has planned; each holds its mean afterwards.

    Raises:
        StepError: a step is under way, or gradients that were not planned.
        CommunicationError: a rank failed or fell silent, by its number.
    """
    step = SessionStep(session.feed, session.lane, lambda: session.is_open, lambda: None)
    step.require_fit(gradients)
    with step:
        step.deliver_all(gradients)


def all_reduce_alone(ddp: DistributedDataParallel) -> None:
    """All-reduce tensors of the sizes of a model's buckets, as DDP does without a hook, and wait for all of them."""
    group = ddp.process_group
    assert group is not None, "DDP over a device mesh has no group of its own yet"
    buckets = ddp.reducer._get_zeros_like_grad_buckets()  # pyright: ignore[reportPrivateUsage]
    works = [dist.all_reduce(bucket.buffer(), group=group, async_op=True) for bucket in buckets]
    for work in works:
        if work is not None:
            work.wait()
