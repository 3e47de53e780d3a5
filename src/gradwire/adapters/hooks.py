"""PyTorch's communication hooks by name, signature and meaning, on gradwire's codecs and drivers.

Each hook names a reducer; sessions run that over the buckets of whoever registered it. Hooks of one process group
share a lane: one group of its own, since DDP issues collectives on the user's, and one order for all buckets.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import GradBucket  # pyright: ignore[reportPrivateImportUsage]

from gradwire.adapters.communication import BucketPort
from gradwire.codecs import BF16, FP16, AffineInt, Identity
from gradwire.drivers.groups import deadline_of
from gradwire.reducers import AllGatherExchange, AllReduceExchange, Reducer
from gradwire.session import Session
from gradwire.session.feed import Piece
from gradwire.session.lane import Lane, group_of

# `register_comm_hook` reads the annotations of a hook, so this module must not postpone them.

PATIENCE_STEPS = 10
"""Steps after which a size of buckets that did not come again is forgotten. Models may take turns on one group."""

_NAME = "bucket"
_Size = tuple[int, torch.dtype]

Hook = Callable[[Any, GradBucket], torch.futures.Future[Tensor]]

_lanes: "weakref.WeakKeyDictionary[dist.ProcessGroup, dict[torch.device, Lane]]" = weakref.WeakKeyDictionary()


def lane_of(process_group: dist.ProcessGroup | None, device: torch.device) -> Lane:
    """Return the lane of a process group (None for the default one), made at the first call: collective then."""
    group = group_of(process_group)
    lanes = _lanes.setdefault(group, {})
    if device not in lanes:
        lane = lanes[device] = Lane(group, device, deadline_of(group, device), "its first gradwire hook")
        # Runs at exit too: the thread is joined before the interpreter takes process groups apart.
        weakref.finalize(group, lane.close)
    return lanes[device]


class _EachBucket(BucketPort):
    """A reducer that remembers nothing: every bucket is a tensor of its own, whatever parameters it holds.

    So sessions serve all models that share a process group, one session for all buckets of a size, and DDP may rebuild
    its buckets at will.
    """

    def __init__(self, lane: Lane, reducer: Reducer) -> None:
        super().__init__(lane)
        self._reducer = reducer
        self._sessions: dict[_Size, Session] = {}
        self._used: dict[_Size, int] = {}
        self._steps = 0

    def work(self, buckets: Sequence[GradBucket], last: bool) -> None:
        """Reduce the newest bucket from beginning to end."""
        flat = buckets[-1].buffer()
        feed = self._session(flat).feed
        feed.open()
        feed.ready(flat.nbytes)
        feed.put([Piece(_NAME, flat)])
        feed.end()
        if last:
            self._forget()

    def _session(self, flat: Tensor) -> Session:
        size = flat.numel(), flat.dtype
        if size not in self._sessions:
            self._sessions[size] = Session({_NAME: flat}, self._reducer, lane=self.lane, what="a gradwire hook")
        self._used[size] = self._steps
        return self._sessions[size]

    def _forget(self) -> None:
        """Drop the buffers of bucket sizes that are no more. All ranks see the same buckets, so they forget alike."""
        self._steps += 1
        for size, step in list(self._used.items()):
            if step + PATIENCE_STEPS < self._steps:
                del self._used[size], self._sessions[size]


def _reduce(
    process_group: dist.ProcessGroup | None, bucket: GradBucket, reducer: Reducer
) -> torch.futures.Future[Tensor]:
    lane = lane_of(process_group, bucket.buffer().device)
    if reducer not in lane.ports:
        lane.ports[reducer] = _EachBucket(lane, reducer)
    return lane.ports[reducer].hook(bucket)


def allreduce_hook(process_group: dist.ProcessGroup, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average gradients without compression: what DDP does without a hook.

    Args:
        process_group: whose ranks average; None for the default group.
        bucket: given by DDP.

    Example:
        ddp.register_comm_hook(None, gradwire.hooks.allreduce_hook)
    """
    return _reduce(process_group, bucket, AllReduceExchange(Identity()))


def fp16_compress_hook(process_group: dist.ProcessGroup, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average gradients in IEEE half precision: sum over ranks of fp16(x / n).

    PyTorch casts before it divides, so a gradient above 65504 overflows there and not here.

    Args:
        process_group: whose ranks average; None for the default group.
        bucket: given by DDP.

    Example:
        ddp.register_comm_hook(None, gradwire.hooks.fp16_compress_hook)
    """
    return _reduce(process_group, bucket, AllReduceExchange(FP16()))


def bf16_compress_hook(process_group: dist.ProcessGroup, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average gradients in bfloat16: sum over ranks of bf16(x / n). Works on Gloo, too.

    Args:
        process_group: whose ranks average; None for the default group.
        bucket: given by DDP.

    Example:
        ddp.register_comm_hook(None, gradwire.hooks.bf16_compress_hook)
    """
    return _reduce(process_group, bucket, AllReduceExchange(BF16()))


# DDP refuses hooks of PyTorch's own name without NCCL, for what those need; this one needs a backend that adds bf16.
bf16_compress_hook.__name__ = "gradwire_bf16_compress_hook"


def quantization_pertensor_hook(
    process_group: dist.ProcessGroup, bucket: GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Send gradients as bytes on a grid between their extremes, gather those of all ranks, and average.

    PyTorch's hook works on NCCL only, in two collectives, with one scale for a bucket and none below 1.2e-7, so that
    gradients smaller than that vanish. This one has a scale for every million elements and no such floor.

    Args:
        process_group: whose ranks average; None for the default group.
        bucket: given by DDP.

    Example:
        ddp.register_comm_hook(None, gradwire.hooks.quantization_pertensor_hook)
    """
    return _reduce(process_group, bucket, AllGatherExchange(AffineInt()))


def quantization_perchannel_hook(
    process_group: dist.ProcessGroup, bucket: GradBucket, bucket_size: int = 512
) -> torch.futures.Future[torch.Tensor]:
    """Like `quantization_pertensor_hook`, with a scale for every `bucket_size` elements.

    Args:
        process_group: whose ranks average; None for the default group.
        bucket: given by DDP.
        bucket_size: elements that share a scale.

    Example:
        ddp.register_comm_hook(None, gradwire.hooks.quantization_perchannel_hook)
    """
    return _reduce(process_group, bucket, AllGatherExchange(AffineInt(bucket_size)))


def noop_hook(_: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Send nothing: every rank keeps its own gradients. Only for measuring what communication costs.

    Example:
        ddp.register_comm_hook(None, gradwire.hooks.noop_hook)
    """
    buffer = bucket.buffer()
    future = torch.futures.Future(devices=[buffer.device] if buffer.device.type == "cuda" else [])
    future.set_result(buffer)
    return future


def fp16_compress_wrapper(hook: Hook) -> Hook:
    """Cast a bucket to half precision, call `hook` with it, and cast its result back in place.

    Args:
        hook: any communication hook, PyTorch's included. It sees gradients that are not yet divided by the number of
            ranks, as in PyTorch: large ones overflow, which `fp16_compress_hook` avoids.

    Returns:
        A hook that takes the same state.

    Example:
        ddp.register_comm_hook(state, fp16_compress_wrapper(powerSGD_hook))
    """
    return _cast_around(hook, torch.float16, "gradwire_fp16_compress_wrapper_hook")


def bf16_compress_wrapper(hook: Hook) -> Hook:
    """Cast a bucket to bfloat16, call `hook` with it, and cast its result back in place. Works on Gloo, too.

    Args:
        hook: any communication hook, PyTorch's included.

    Returns:
        A hook that takes the same state.

    Example:
        ddp.register_comm_hook(state, bf16_compress_wrapper(powerSGD_hook))
    """
    return _cast_around(hook, torch.bfloat16, "gradwire_bf16_compress_wrapper_hook")


def _cast_around(hook: Hook, dtype: torch.dtype, name: str) -> Hook:
    def cast_hook(state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        original = bucket.buffer()
        bucket.set_buffer(original.to(dtype))

        def cast_back(future: torch.futures.Future[Tensor]) -> Tensor:
            # In place, so that at the peak there is no second gradient (PyTorch issue 45968).
            original.copy_(future.value())
            bucket.set_buffer(original)
            return original

        return hook(state, bucket).then(cast_back)

    cast_hook.__name__ = cast_hook.__qualname__ = name
    return cast_hook
