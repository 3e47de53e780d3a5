"""PyTorch's own all-reduces of DDP, with spans: a hook that sums buckets as DDP does, and notes when."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import GradBucket  # pyright: ignore[reportPrivateImportUsage]
from torch.nn.parallel import DistributedDataParallel

from gradwire.drivers.traced import Span

# `register_comm_hook` reads the annotations of the hook, so this module must not postpone them.


class TorchSpans:
    """Spans of the all-reduces of a DDP that has no hook.

    Buckets are divided and summed as DDP does without a hook. DDP cannot forget one, so it stays when `close` was
    called, and notes nothing any more.

    Args:
        ddp: the model.
        clock: seconds.
    """

    def __init__(self, ddp: DistributedDataParallel, clock: Callable[[], float]) -> None:
        self._clock, self._group = clock, ddp.process_group
        self._is_open = True
        self._began: list[tuple[float, int]] = []
        self._ended: dict[int, float] = {}
        self.all_given_s = 0.0
        ddp.register_comm_hook(None, self._on_bucket)

    def _on_bucket(self, state: Any, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Sum a bucket."""
        buffer = bucket.buffer().div_(dist.get_world_size(self._group))
        number = len(self._began)
        if self._is_open:
            self._began.append((self._clock(), buffer.nbytes))
        work = dist.all_reduce(buffer, group=self._group, async_op=True)
        assert work is not None
        if self._is_open and bucket.is_last():
            self.all_given_s = self._clock()
        future: torch.futures.Future[list[Tensor]] = work.get_future()

        def ended(done: torch.futures.Future[list[Tensor]]) -> Tensor:
            self._ended[number] = self._clock()
            return done.value()[0]

        return future.then(ended)

    def take(self) -> tuple[list[Span], list[Span]]:
        """Return when the training loop waited, and what was waited for, of the step that has ended."""
        began, ended, self._began, self._ended = self._began, self._ended, [], {}
        spans, free_s = list[Span](), self.all_given_s
        for number, (began_s, nbytes) in enumerate(began):
            ended_s = ended.get(number, began_s)
            spans.append(Span("wait", "AllReduce", min(free_s, ended_s), ended_s, nbytes))
            spans.append(Span("wire", "AllReduce", began_s, ended_s, nbytes))
            free_s = max(free_s, ended_s)
        waits = [Span("wait", "DDP", self.all_given_s, free_s)] if free_s > self.all_given_s > 0 else []
        return waits, spans

    def close(self) -> None:
        """Note nothing any more."""
        self._is_open = False
