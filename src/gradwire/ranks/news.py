"""News of a run: lines among whatever else a rank prints, told by the run's own token."""

from __future__ import annotations

import contextlib
import json
from typing import NamedTuple, TypeVar

import msgspec

from gradwire.core.checked import thread_safe

T = TypeVar("T")

PROGRESS = "@gradwire "


class News(NamedTuple):
    """How far the run in progress has come.

    Attributes:
        step: steps made.
        loss: rank 0's training loss, in a comparison the mean over as many steps as its losses are smoothed over.
        time_s: seconds of training.
        tx_bytes: bytes rank 0 has sent.
    """

    step: int
    loss: float
    time_s: float
    tx_bytes: float


def write_news(news: object, token: str) -> str:
    """News as a line of output: any fields that msgspec makes plain data of."""
    return f"{PROGRESS}{token} {json.dumps(msgspec.to_builtins(news))}"


def write_timed(token: str) -> str:
    """The line that says that the time of a step is known, and that the links may lose their limits."""
    return f"{PROGRESS}{token} timed"


def read_news(line: str, token: str, kind: type[T]) -> T | None:
    """The news of a kind that a line of output holds; None for whatever else has been printed.

    Example:
        >>> read_news(write_news(News(3, 2.5, 0.1, 800.0), "f00d"), "f00d", News)
        News(step=3, loss=2.5, time_s=0.1, tx_bytes=800.0)
        >>> read_news("@gradwire is what I train with", "f00d", News)
    """
    start = f"{PROGRESS}{token} "
    if not line.startswith(start):
        return None
    with contextlib.suppress(ValueError):
        return msgspec.convert(json.loads(line.removeprefix(start)), thread_safe(kind))
    return None
