"""What a layer of experts chose, kept where the forward pass is made again."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Generator
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass, field

from torch import Tensor

from gradwire.core.errors import StepError
from gradwire.parallel.moe.ordering import Grouped
from gradwire.parallel.rows import RowCounts


@dataclass(frozen=True, eq=False)
class RoutedChoice:
    """One pass of a layer.

    Attributes:
        experts: (tokens, k): the experts of each token.
        noise: what was added to logits, or None.
        order: (rows,): the choices in the order in which their rows travel; a choice is token k + j.
        rows: of each chunk.
        grouped: of each chunk, what is received by expert.
        draw: the number of this pass, for codecs that draw.
    """

    experts: Tensor
    noise: Tensor | None
    order: Tensor
    rows: tuple[RowCounts, ...]
    grouped: tuple[Grouped, ...]
    draw: int


@dataclass(eq=False)
class _Kept:
    choices: deque[RoutedChoice] = field(default_factory=deque[RoutedChoice])
    repeats: bool = False


_kept: ContextVar[_Kept | None] = ContextVar("gradwire_choices", default=None)


def keep_choices() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return the contexts that make recomputation repeat the choice of experts: `context_fn` of PyTorch's `checkpoint`.

    A router that chose again could choose otherwise where two scores are almost equal, and rows would have other
    places. So the first pass writes its choices down, and the second one reads them, counts nothing, and tells nobody
    how many rows will come.

    Raises:
        StepError: a second pass with more layers of experts than the first one.

    Example:
        y = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False, context_fn=keep_choices)
    """
    choices: deque[RoutedChoice] = deque()
    return _keeping(_Kept(choices)), _keeping(_Kept(choices, repeats=True))


@contextlib.contextmanager
def _keeping(kept: _Kept) -> Generator[None]:
    token = _kept.set(_Kept(deque(kept.choices), True) if kept.repeats else kept)
    try:
        yield
    finally:
        _kept.reset(token)


def repeated() -> RoutedChoice | None:
    """What was chosen before, where the pass at hand is made again; None where it is the first.

    Raises:
        StepError: more layers than in the first pass.
    """
    kept = _kept.get()
    if kept is None or not kept.repeats:
        return None
    if not kept.choices:
        raise StepError(
            "the recomputed pass has more layers of experts than the first one: give each checkpoint contexts of its "
            "own, context_fn=keep_choices"
        )
    return kept.choices.popleft()


def keep(choice: RoutedChoice) -> None:
    """Write a choice down, where it will be repeated."""
    kept = _kept.get()
    if kept is not None and not kept.repeats:
        kept.choices.append(choice)
