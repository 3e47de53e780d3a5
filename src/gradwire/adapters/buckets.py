"""How finely DDP hands gradients over.

DDP calls its hook once a bucket, which is 25 MiB unless it was told otherwise: all of a small model, after the whole
backward pass. What is to travel during the backward pass must come in smaller pieces. Hooks on single gradients would
be finer still, but they know nothing of what DDP knows: which passes synchronise (`no_sync`, `join`), which parameters
go unused, that a shared parameter of a static graph with reentrant checkpoints is accumulated twice. So DDP's reducer
is made anew with smaller buckets, as DDP does itself where it is unpickled. It stays the only one to say what is ready.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from gradwire.drivers.window import DDP_CAPS, Caps
from gradwire.session.overlap_settings import OverlapSettings

PIECES = 16
"""Buckets to cut a model into. Each costs a call of the hook, and twice as many hid no more.

`docs/building/log/overlap.md` has the figures.
"""

SMALLEST_BYTES = 1 << 18


def bucket_bytes(model_bytes: int) -> int:
    """Bytes of a bucket for a model whose gradients are so large: a sixteenth, and 256 KiB at least.

    >>> bucket_bytes(1_000_000), bucket_bytes(8_000_000)
    (262144, 500000)
    """
    return max(SMALLEST_BYTES, model_bytes // PIECES)


def caps_of(ddp: DistributedDataParallel) -> Caps:
    """Bytes that end a bucket of `ddp` as it is: its first one is small where the user has not said otherwise."""
    others = ddp.bucket_bytes_cap
    return Caps(DDP_CAPS.first if getattr(ddp, "bucket_bytes_cap_default", False) else others, others)


def caps_by(ddp: DistributedDataParallel, overlap: OverlapSettings, model_bytes: int) -> Caps:
    """Bytes that end a bucket of `ddp` by these settings.

    Where they say nothing it is `bucket_bytes`, or less if DDP has less.

    Args:
        ddp: the model.
        overlap: the settings.
        model_bytes: of all gradients.
    """
    nbytes = overlap.bucket_bytes or min(bucket_bytes(model_bytes), ddp.bucket_bytes_cap)
    return Caps(overlap.first_bucket_bytes or nbytes, nbytes)


def deliver_in_pieces(ddp: DistributedDataParallel, caps: Caps, again: bool = False) -> None:
    """Have DDP hand gradients over in buckets that end at `caps`, before a step or between two.

    Nothing is done where DDP was made with such buckets, or with sizes of the user's own for each.
    `ddp.bucket_bytes_cap` stays: `torch.compile` cuts a model's graph by it, and pieces of graphs cost more than they
    would hide.

    Args:
        ddp: the model.
        caps: bytes that end a bucket.
        again: whether its buckets are others by now than those that it was made with.
    """
    has_own = getattr(getattr(ddp, "_bucket_config", None), "has_custom_per_bucket_caps", False)
    if not has_own and (again or caps != caps_of(ddp)):
        remake(ddp, caps)


def remake(ddp: DistributedDataParallel, caps: Caps) -> None:
    """Make DDP's reducer anew with other buckets, before a step or between two; its hooks stay.

    Versions of PyTorch without a setting for the first bucket end it as the others, or at 1 MiB where it is smaller.

    Args:
        ddp: the model.
        caps: bytes that end a bucket.
    """
    model: Any = ddp  # its configuration is private, and older versions have less of it
    config = getattr(model, "_bucket_config", None)
    other = {"bucket_bytes_cap": caps.others, "bucket_bytes_cap_default": caps.first < caps.others}
    if config is not None:
        sizes = {"bucket_bytes_cap": caps.others, "first_bucket_bytes_cap": caps.first}
        other["_bucket_config"] = dataclasses.replace(config, **sizes)
    before = {name: getattr(model, name) for name in other}
    vars(model).update(other)
    try:
        _make_reducer(model)
    finally:
        vars(model).update(before)


def _make_reducer(model: Any) -> None:
    """Make DDP's reducer anew, as `DistributedDataParallel.__setstate__` does."""
    parameters, expects_sparse = model._build_params_for_reducer()
    names = model._build_debug_param_to_name_mapping(parameters)
    model._ddp_init_helper(parameters, expects_sparse, names, model.static_graph)
    for hook, state in model._comm_hooks:  # the old reducer has taken them with it
        dist._register_comm_hook(model.reducer, state, hook)  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
    if model.static_graph:
        model.reducer._set_static_graph()
        model.logger._set_static_graph()
