"""PyTorch's PowerSGD hooks by name, signature and meaning; what they remember is in `power_sgd_state`."""

import torch
from torch.distributed import GradBucket  # pyright: ignore[reportPrivateImportUsage]

from gradwire.adapters.power_sgd_layout import by_bucket, by_parameter

# States that were pickled before it had a module of its own are looked for here.
from gradwire.adapters.power_sgd_state import PowerSGDState

# `register_comm_hook` reads the annotations of a hook, so this module must not postpone them.


def powerSGD_hook(state: PowerSGDState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average gradients as matrices of low rank (Vogels, Karimireddy & Jaggi 2019, Algorithm 1).

    With one bucket it gives what PyTorch's hook gives, to rounding. With several it works on Gloo too, where
    PyTorch's crashes. After a step with a NaN or an infinity every rank sees NaN and nothing is remembered of that
    step, so the next clean one is clean; agreeing on it costs a byte a grain. A layer without gradient gives no NaN.

    Args:
        state: settings and memory, for this model alone.
        bucket: given by DDP.

    Example:
        state = gradwire.hooks.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=0)
        ddp.register_comm_hook(state, gradwire.hooks.powerSGD_hook)
    """
    return state.port(bucket.buffer().device, by_parameter, state.min_compression_rate).hook(bucket)


def batched_powerSGD_hook(state: PowerSGDState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average each bucket as one square matrix of low rank: faster than `powerSGD_hook`, and less exact.

    PyTorch's hook of this name stops at an assertion. Squares are those of the first step's buckets, whatever DDP
    makes of them later. `min_compression_rate` plays no part.

    Args:
        state: settings and memory, for this model alone.
        bucket: given by DDP.

    Example:
        ddp.register_comm_hook(gradwire.hooks.PowerSGDState(None), gradwire.hooks.batched_powerSGD_hook)
    """
    return state.port(bucket.buffer().device, by_bucket, 1.0).hook(bucket)
