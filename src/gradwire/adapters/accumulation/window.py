"""`accumulate`: micro-batches of one optimizer step, whose gradients are combined once and weighted by tokens."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradwire.adapters.accumulation.gradient_sync import GradientSync, sync_of
from gradwire.adapters.accumulation.rank_sums import Finish
from gradwire.core.errors import CommunicationError, StepError
from gradwire.session import Session
from gradwire.sync.averager import Averager

M = TypeVar("M")

Tokens = Callable[[M], Any] | Sequence[float]
"""What a micro-batch counts for: a function of it, or one number for each."""


def accumulate(
    trained: nn.Module | Session | Optimizer | Averager,
    micro_batches: Iterable[M],
    tokens: Tokens[M],
    *,
    across_ranks: bool | None = None,
    keep_sharded: bool = False,
) -> AccumulationWindow[M]:
    """Accumulate the gradients of several micro-batches, combine them once, and weight losses by tokens.

    With micro-batches m of ranks r, token losses l and T tokens in all of them, the gradient after the block is that of

        (sum over r, m and the tokens i of m: l_i) / T

    on every rank, however micro-batches and tokens are spread. The mean of the micro-batches' means is another number.
    Every rank calls it at the same place, once for each step of the optimizer. The tokens of all ranks are summed as
    one all-reduce of 40 bytes, behind the first forward pass where that sends nothing itself.

    For sessions and models that nobody wraps: where one rank leaves the block by an exception before its last backward
    pass, no rank exchanges gradients. The others raise a `StepError` that names it, gradients are None on all ranks,
    and the next window is whole. With DDP and FSDP2, whose forward passes communicate, an exception on one rank is as
    without a window: the rank raises it at once, and the others learn of it when its process ends.

    Args:
        trained: a `DistributedDataParallel`; the root of a model of `fully_shard`; what `gradwire.attach` or
            `gradwire.Session` has returned; an optimizer of `gradwire.wrap`, or an averager of `gradwire.sync`. In a
            process that trains alone any model will do.
        micro_batches: of this rank, in any form; all are fetched at once. Ranks may have different numbers of them,
            except with FSDP2, which gathers parameters in every pass.
        tokens: returns the number of tokens of a micro-batch that its loss sums up: those that are not masked. Or these
            numbers in a sequence. Samples are counted alike.
        across_ranks: whether the tokens of all ranks count, or each rank divides by its own. None: of all where
            gradients are combined, and its own where models are averaged, since a rank steps alone there.
        keep_sharded: of HSDP alone. True: every micro-batch is reduce-scattered among the shards of a copy, so that
            gradients stay sharded, and copies are summed once. False: whole gradients are kept, and all is sent once.

    Returns:
        A window, for a `with` block.

    Raises:
        AttachError: what combines no gradients, or options that do not fit it.
        StepError: a session that is closed.

    Example:
        >>> model = torch.nn.Linear(3, 2)
        >>> batches = [(torch.randn(n, 3), torch.randint(2, (n,))) for n in (4, 1, 7)]
        >>> with accumulate(model, batches, tokens=lambda batch: len(batch[1])) as window:
        ...     for inputs, targets in window:
        ...         loss = torch.nn.functional.cross_entropy(model(inputs), targets, reduction="sum")
        ...         window.loss(loss).backward()
        >>> inputs, targets = map(torch.cat, zip(*batches))
        >>> mean = torch.nn.functional.cross_entropy(model(inputs), targets)
        >>> torch.testing.assert_close(model.weight.grad, torch.autograd.grad(mean, model.weight)[0])
    """
    return AccumulationWindow(sync_of(trained, across_ranks, keep_sharded), list(micro_batches), tokens)


class AccumulationWindow(Generic[M]):
    """The micro-batches of one optimizer step, see `gradwire.accumulate`, which makes it.

    Args:
        sync: how gradients are synchronised.
        micro_batches: of this rank.
        tokens: as given.

    Attributes:
        micro_batches: of this rank.
    """

    def __init__(self, sync: GradientSync, micro_batches: list[M], tokens: Tokens[M]) -> None:
        self.micro_batches = micro_batches
        self._sync, self._tokens_of = sync, tokens
        self._own = 0.0
        self._finish: Finish | None = None
        self._total: float | None = None
        self._at = -1
        self._has_loss, self._has_agreed = True, False

    def __len__(self) -> int:
        return len(self.micro_batches)

    def __enter__(self) -> Self:
        if self._at >= 0 or self._finish is not None:
            raise StepError("a window of micro-batches is used once: call gradwire.accumulate for another one")
        try:
            self._own = float(sum(_counted(self._tokens_of, self.micro_batches)))
        except Exception:  # the others come to this sum, and are told by it
            self._own = math.nan
            self._begin_sum()
            with contextlib.suppress(StepError, CommunicationError):
                self._wait_for_total()
            raise
        self._begin_sum()
        if self._sync.passes_communicate or not self.micro_batches:
            self._wait_for_total()
        if len(self.micro_batches) > 1:
            self._sync.hold()
        return self

    def __iter__(self) -> Iterator[M]:
        if self._at >= 0:
            raise StepError("micro-batches of a window are gone through once: call gradwire.accumulate for another one")
        for at, micro_batch in enumerate(self.micro_batches):
            self._require_loss()
            self._at, self._has_loss = at, False
            if self.is_last:
                self._sync.release()
            yield micro_batch

    @property
    def is_last(self) -> bool:
        """Whether the micro-batch at hand is the last one of this rank, whose backward pass exchanges gradients."""
        return self._at == len(self.micro_batches) - 1

    @property
    def tokens(self) -> float:
        """The tokens of all micro-batches of the window, of all ranks where these count.

        Raises:
            StepError: on all ranks, as `loss`.
        """
        return self._wait_for_total()

    def loss(self, total: Tensor) -> Tensor:
        """Return what `backward` is to be called on, from the loss of this micro-batch.

        Args:
            total: the sum of the losses of the micro-batch's tokens, as with `reduction="sum"`. A mean over its tokens
                must be multiplied by their number. It may be the output of a `GradScaler`.

        Returns:
            total * d / T, where d is what the ranks' gradients are divided by as they are combined.

        Raises:
            StepError: it is called outside of the loop, or with more than one number; or on all ranks, where one has
                left the window, has no micro-batch or no count of its tokens, where there is no token at all, or under
                FSDP2 where ranks have different numbers of micro-batches.
            CommunicationError: a rank failed or fell silent.
        """
        if self._at < 0:
            raise StepError('call window.loss inside of the loop "for micro_batch in window:"')
        if total.numel() != 1:
            raise StepError(f"window.loss takes a sum of token losses, and this tensor has shape {tuple(total.shape)}")
        scale = self._scale()
        if self.is_last and not self._has_agreed:
            self._agree()
            self._sync.weigh(self._own)
        self._has_loss = True
        return total * scale

    def _scale(self) -> float:
        """By what a sum of token losses is multiplied."""
        total = self._wait_for_total()
        if self._sync.takes_means:
            return 1.0 / self._own if self._own else 0.0
        return self._sync.divisor / total

    def _require_loss(self) -> None:
        if not self._has_loss:
            raise StepError("window.loss was not called in a micro-batch: pass it the sum of that one's token losses")

    # What ranks tell each other ----------------------------------------------------------------------------------

    def _begin_sum(self) -> None:
        """Begin to sum this rank's tokens and numbers of micro-batches with those of all others."""
        count = len(self.micro_batches)
        mine = torch.tensor([self._own, 1.0, count, count**2, count == 0], dtype=torch.float64)
        self._finish = self._sync.sums.start(mine)

    def _wait_for_total(self) -> float:
        """The tokens of all ranks; what is wrong with them is raised on all."""
        if self._total is None:
            if self._finish is None:
                raise StepError('a window of micro-batches has not begun: write "with gradwire.accumulate(...):"')
            total, ranks, count, squares, empty = self._finish().tolist()
            # A sum of squares is least where all numbers are equal, so this tells of any that differ.
            uneven = self._sync.passes_communicate and squares * ranks != count**2
            if (wrong := _wrong(total, bool(empty), uneven)) is not None:
                self._has_agreed = True  # all ranks raise it
                raise StepError(wrong)
            self._total = float(total)
        return self._total

    def _agree(self, has_left: bool = False) -> None:
        """Find out whether all ranks have come as far as the exchange of gradients.

        Raises:
            StepError: a rank has left the window, by its number.
        """
        self._has_agreed = True
        if not self._sync.tells_of_exceptions:
            return
        sums = self._sync.sums
        left = int(sums.largest(torch.tensor([sums.rank + 1.0 if has_left else 0.0], dtype=torch.float64)))
        if left:
            raise StepError(
                f"rank {left - 1} has left this window of micro-batches by an exception, which its output shows: no "
                "rank has exchanged gradients, and they are None on all; go on with the next window"
            )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._sync.release()
        if error is None:
            try:
                self._require_whole()
            except StepError as cut_short:
                self._leave(cut_short)
                raise
        else:
            self._leave(error)

    def _require_whole(self) -> None:
        """Refuse a window that was left before its gradients were exchanged."""
        self._require_loss()
        if not self.is_last:
            raise StepError(
                f"the block of gradwire.accumulate ended after {self._at + 1} of {len(self)} micro-batches, before "
                "gradients were exchanged: they are None now; loop over all of the window"
            )

    def _leave(self, error: BaseException) -> None:
        """Drop what has added up, and tell the others, which come as far as the exchange and wait there."""
        self._sync.forget()
        if not isinstance(error, Exception) or isinstance(error, CommunicationError) or self._has_agreed:
            return
        if not self._sync.tells_of_exceptions:
            return
        with contextlib.suppress(StepError, CommunicationError):  # what this rank raises is its own error
            self._wait_for_total()
            if not self._has_agreed:
                self._agree(has_left=True)


def _counted(tokens: Tokens[M], micro_batches: Sequence[M]) -> list[float]:
    """The tokens of each micro-batch.

    Raises:
        StepError: a count that is negative or no number, or another number of counts than micro-batches.
    """
    given = list(map(tokens, micro_batches)) if callable(tokens) else list(tokens)
    if len(given) != len(micro_batches):
        raise StepError(f"tokens= has {len(given)} numbers for {len(micro_batches)} micro-batches: give one for each")
    return [_number(at, count) for at, count in enumerate(given)]


def _number(at: int, count: Any) -> float:
    """The tokens of a micro-batch."""
    try:
        number = float(count)
    except (TypeError, ValueError, RuntimeError):  # the last one of a tensor of several elements
        number = math.nan
    if not 0.0 <= number < math.inf:
        raise StepError(f"micro-batch {at} counts {count!r} tokens: give a number that is 0 or more")
    return number


def _wrong(total: float, empty: bool, uneven: bool) -> str | None:
    """What is wrong with the tokens and micro-batches of all ranks, in a sentence; None where nothing is."""
    if not math.isfinite(total):
        return "a rank could not count the tokens of its micro-batches, as its output shows: no rank begins this window"
    if empty:
        return (
            "a rank has no micro-batch in this window, so it could not exchange gradients: end the epoch on all ranks "
            "at the same window, or give it a micro-batch that counts 0 tokens"
        )
    if uneven:
        return (
            "ranks have different numbers of micro-batches, and FSDP2 gathers parameters in each of them: give all "
            "ranks equally many, some of which may count 0 tokens"
        )
    if total == 0.0:
        return "no micro-batch of this window has a token on any rank, so there is no mean: leave the window out"
    return None
