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

from torch.nn.parallel import DistributedDataParallel

from gradwire.drivers.window import DDP_CAPS, Caps

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


def deliver_in_pieces(ddp: DistributedDataParallel, nbytes: int) -> None:
    """Have DDP hand gradients over in buckets of at most `nbytes`, unless it has smaller ones, or sizes of its own.

    `ddp.bucket_bytes_cap` stays: `torch.compile` cuts a model's graph by it, and pieces of graphs cost more than they
    would hide. Call it before a hook is registered, which the old reducer would take with it.
    """
    model: Any = ddp  # its configuration is private, and older versions have less of it
    cap, config = model.bucket_bytes_cap, getattr(model, "_bucket_config", None)
    if nbytes >= cap or getattr(config, "has_custom_per_bucket_caps", False):
        return
    smaller = {"bucket_bytes_cap": nbytes, "bucket_bytes_cap_default": False}
    if config is not None:
        smaller["_bucket_config"] = dataclasses.replace(config, bucket_bytes_cap=nbytes, first_bucket_bytes_cap=nbytes)
    before = {name: getattr(model, name) for name in smaller}
    vars(model).update(smaller)
    try:
        _make_reducer(model)
    finally:
        vars(model).update(before)


def _make_reducer(model: Any) -> None:
    """Make DDP's reducer anew, as `DistributedDataParallel.__setstate__` does."""
    parameters, expects_sparse = model._build_params_for_reducer()
    names = model._build_debug_param_to_name_mapping(parameters)
    model._ddp_init_helper(parameters, expects_sparse, names, model.static_graph)
    if model.static_graph:
        model.reducer._set_static_graph()
        model.logger._set_static_graph()
