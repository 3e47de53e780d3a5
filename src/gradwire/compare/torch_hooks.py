"""PyTorch's own communication hooks as peers in a comparison: `torch.fp32`, `torch.powersgd:4` and so on.

No postponed annotations in this module: DDP inspects the annotations of a hook and refuses strings.
"""

import time
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import debugging_hooks, default_hooks, powerSGD_hook
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel

from gradwire.baselines import POWERSGD_START, TorchMethod

ONE_BUCKET_MB = 100_000.0
"""PyTorch's PowerSGD hook crashes on Gloo as soon as there are two buckets; this is room for any model."""


def bucket_mb(method: TorchMethod) -> float | None:
    """Bucket size that a method needs, or None if any will do."""
    return ONE_BUCKET_MB if method.kind == "powersgd" else None


class HookClock:
    """CPU seconds that a PyTorch hook and its callbacks take.

    Callbacks are caught where futures take them, `torch.futures.Future.then`, which is changed for the whole process:
    fit for a process that exists to be measured, and for no other.
    """

    def __init__(self) -> None:
        self.seconds = 0.0

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function so that its CPU time counts; while it waits for a collective, it takes none."""

        def run(*args: Any) -> Any:
            start = time.thread_time()
            try:
                return function(*args)
            finally:
                self.seconds += time.thread_time() - start

        return run

    def watch_callbacks(self) -> None:
        """Count the CPU time of every callback that is added to a future from now on."""
        base = cast(Any, torch._C.Future)  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
        original = base.then

        def then(future: Any, callback: Callable[..., Any]) -> Any:
            return original(future, self.timed(callback))

        base.then = then


def attach_torch(ddp: DistributedDataParallel, method: TorchMethod) -> HookClock:
    """Register one of PyTorch's hooks on a DDP model, with a clock around it."""
    clock = HookClock()
    if method.kind == "fp32":
        return clock
    clock.watch_callbacks()
    if method.kind == "powersgd":
        state: object = powerSGD_hook.PowerSGDState(
            process_group=None,
            matrix_approximation_rank=method.rank,
            start_powerSGD_iter=POWERSGD_START,
        )
        hook: Callable[..., Any] = powerSGD_hook.powerSGD_hook
    else:
        state = None
        hook = {
            "fp16": default_hooks.fp16_compress_hook,
            "bf16": default_hooks.bf16_compress_hook,
            "noop": debugging_hooks.noop_hook,
        }[method.kind]
    timed = clock.timed(hook)

    def timed_hook(
        state: object,
        bucket: dist.GradBucket,  # pyright: ignore[reportPrivateImportUsage]
    ) -> torch.futures.Future[torch.Tensor]:
        return timed(state, bucket)

    ddp.register_comm_hook(state, timed_hook)
    return clock


def predicted_bytes(method: TorchMethod, model: Module, step: int, world_size: int) -> float:
    """Payload that a rank sends in a step, by arithmetic.

    Gloo's ring all-reduce sends 2 (n - 1) / n of its buffer from every rank, whatever the type.
    """
    ring = 2 * (world_size - 1) / world_size
    sizes = [p.numel() for p in model.parameters() if p.requires_grad]
    if method.kind == "noop":
        return 0.0
    if method.kind in ("fp16", "bf16"):
        return ring * 2 * sum(sizes)
    if method.kind == "powersgd" and step >= POWERSGD_START:
        shapes = [p.shape for p in model.parameters() if p.requires_grad]
        return ring * 4 * sum(powersgd_numbers(shape, method.rank) for shape in shapes)
    return ring * 4 * sum(sizes)


def powersgd_numbers(shape: torch.Size, rank: int, min_compression_rate: float = 2.0) -> int:
    """Numbers that PyTorch's PowerSGD sends for a parameter: its two factors, or all of it where that saves little.

    Example:
        >>> powersgd_numbers(torch.Size([100, 50]), 4), powersgd_numbers(torch.Size([100]), 4)
        (600, 100)
    """
    rows = shape[0] if shape else 1
    columns = shape.numel() // rows if rows else 0
    factors = (rows + columns) * rank
    if factors * min_compression_rate < rows * columns:
        return (rows + columns) * min(rows, columns, rank)
    return rows * columns
