"""`attach`: any reducer as the communication of a model that is trained in parallel already."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradwire.adapters.ddp import attach_ddp
from gradwire.adapters.drift import require_watchable, watch_drift
from gradwire.adapters.fsdp2.attach import attach_fsdp2
from gradwire.adapters.unwrapped import attach_unwrapped
from gradwire.choosing.automatic import accuracy_of
from gradwire.codecs import Codec
from gradwire.core.errors import AttachError
from gradwire.reducers.base import Reducer
from gradwire.session import DEADLINE_S, Session
from gradwire.session.names import is_fsdp2
from gradwire.session.overlap_settings import OverlapSettings, settings_of
from gradwire.spec import ForShards, for_shards

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def attach(
    model: nn.Module,
    reducer: Reducer | ForShards | str,
    *,
    parameters: Codec | str | None = None,
    replicate: DeviceMesh | dist.ProcessGroup | None = None,
    seed: int = 0,
    deadline_s: float = DEADLINE_S,
    grain_numel: int | None = None,
    scaler: torch.amp.GradScaler | None = None,
    checksum: bool = False,
    check_every: int | None = None,
    on_drift: str = "warn",
    on_non_finite: str = "warn",
    overlap: OverlapSettings | str | Path | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    records: str | Path | None = None,
    residuals: str = "device",
) -> Session:
    """Let `reducer` combine the gradients of `model` from the next backward pass on.

    The model is a `DistributedDataParallel`, the root of one that was given to FSDP2's `fully_shard`, or one that
    nobody wraps. Call it on every rank, after the model is made and before the first step. Communication goes over a
    process group of its own with the same ranks; where nobody wraps the model these are all ranks.

    Where nobody wraps it, the model must begin with the same parameters on all ranks, and its buffers stay each rank's
    own. Its first step communicates after the backward pass. From then on gradients travel in the order in which those
    of rank 0 became ready.

    Args:
        model: the model.
        reducer: a reducer, or a spec such as `"topk:0.01"`; or `"auto"`, which chooses by what it measures in the first
            steps, within a class of accuracy: `"auto:lossless"`, `"auto:safe"` or `"auto:bold"`. FSDP2 wants each rank
            to have its shard of the mean, so there it must be one that can be stopped there; `auto` knows.
        parameters: with FSDP2, a codec such as `"int8"` that parameters are gathered in, which a spec may say as well;
            the shards, which optimizers work on, stay as they are. None: FSDP2 gathers them as it does alone.
        replicate: with FSDP2 over a mesh of one dimension, the ranks that have the same shard of other copies of the
            model. Then `reducer` is any method, and averages between these; inside a copy FSDP2 reduces as it does
            alone. Save one folder for each shard.
        seed: of all random choices, the same on every rank.
        deadline_s: seconds after which a silent rank is an error.
        grain_numel: elements that are encoded together at most (default: a quarter of the model, up to 2^20; on a GPU
            also a quarter, from 2^20 to 2^24).
        scaler: the loss scaler of the training loop, if it has one: gradients, and so residuals, are in its units, and
            when the scale changes residuals are multiplied accordingly.
        checksum: send a CRC-32 with each payload of an all-gather or an all-to-all. A rank that gets a damaged one
            raises `PayloadError` with the sender, and the others are told. Sums are not covered. On a CPU only; it
            takes about a nanosecond a byte, and 4 bytes a message that statistics do not count. Without checksums a
            damaged payload decodes to something else, alike on all ranks that got it; with `node=` these are the ranks
            of one node, which then differ from the others.
        check_every: steps between two comparisons of the parameters of all ranks, and
        on_drift: what happens where they differ, as for `gradwire.watch_drift`; for DDP. None: they are not compared.
        on_non_finite: what happens where the mean of a step is not finite, and no loss scaler is there to skip it.
            "warn": a `NonFiniteWarning` says once whose gradient it was, and the optimizer gets NaN. "skip": `.grad` of
            all parameters is None after such a pass, on every rank, so that optimizers do nothing, and what the method
            remembers is as it was before. The report counts these steps. Not with `replicate=`.

        overlap: when gradients travel, as `gradwire.overlap.tune` has found it: its settings, or the file that they
            were saved to.
        optimizer: the script's own, of `torch.optim`: each parameter is stepped by it as soon as its mean has come,
            while others travel, and `optimizer.step()` leaves those out. The bits are those of a step after the pass.
            Nothing can be done with the whole gradient then, such as clipping its norm. Not for FSDP2.
        records: the folder that each rank's flight record is written into when the run dies, for `gradwire stacks`;
            None: that of `GRADWIRE_RECORDS` in the environment, if there is one.
        residuals: where what the method owes lies between steps. "host": in pinned memory of the host, for models on a
            GPU; copies run beside the pass, and no bit changes. On a CPU that changes nothing, and a warning says so.

    Returns:
        A session with statistics, state and `close`. What the method compiles is compiled by then.

    Raises:
        AttachError: a model that cannot be served, with the reason.
        CommunicationError: a rank that did not attach within `deadline_s`, by its number.
        SpecError, CompositionError: a method that cannot be built, or that does not fit the model.

    Example:
        session = gradwire.attach(ddp, "int4")
        session = gradwire.attach(fully_shard(model), "int4,parameters=int8")
        session = gradwire.attach(model, "int4", optimizer=optimizer)
    """
    if isinstance(reducer, str) and accuracy_of(reducer) is not None:
        method: Reducer | str = reducer
        if replicate is not None:
            raise AttachError(
                "auto chooses for all ranks of a model alike, and with replicate= each shard's copies would choose for "
                "themselves: name a method, such as 'int4,node=auto'"
            )
    else:
        method, parameters = for_shards(reducer, parameters)
    options: dict[str, Any] = {
        "seed": seed,
        "deadline_s": deadline_s,
        "grain_numel": grain_numel,
        "scaler": scaler,
        "checksum": checksum,
        "on_non_finite": on_non_finite,
        "overlap": settings_of(overlap),
        "records": records,
        "residuals": residuals,
    }
    if is_fsdp2(model):
        if optimizer is not None:
            raise AttachError("optimizer= is for DDP and for models that nobody wraps: leave it out with fully_shard")
        if check_every is not None:
            raise AttachError("check_every= is for DDP: of a sharded model no two ranks have the same parameters")
        return attach_fsdp2(model, method, parameters, replicate, **options)
    if parameters is not None or replicate is not None:
        raise AttachError("parameters= and replicate= are for models of fully_shard: leave them out")
    if not isinstance(model, DistributedDataParallel):
        return attach_unwrapped(model, method, optimizer, check_every=check_every, on_drift=on_drift, **options)
    if check_every is None:
        return attach_ddp(model, method, optimizer, **options)
    require_watchable(model, check_every, on_drift)
    session = attach_ddp(model, method, optimizer, **options)
    watch_drift(model, session, check_every, on_drift)
    return session
