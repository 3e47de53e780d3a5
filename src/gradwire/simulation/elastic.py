"""Hosts that are lost and come back, among ranks that average at the end of windows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class Away:
    """How hosts come and go.

    Attributes:
        mtbf_s: mean seconds until a host is lost, at a constant rate; infinite where none is.
        away_s: seconds until it is back.
        detection_s: seconds until the others know that it is lost.
        ranks_per_host: which are lost together.
    """

    mtbf_s: float
    away_s: float
    detection_s: float
    ranks_per_host: int = 1


@dataclass
class ElasticTimeline:
    """What rounds took, in seconds; sums are over all ranks that ended a round.

    Attributes:
        round_s: of each round.
        present: ranks that ended each.
        computed_s, coded_s, waited_s, exposed_s: computing, coding, waiting for slower or lost ranks, messages.
    """

    round_s: list[float] = field(default_factory=list[float])
    present: list[int] = field(default_factory=list[int])
    computed_s: float = 0.0
    coded_s: float = 0.0
    waited_s: float = 0.0
    exposed_s: float = 0.0


def train_elastic(
    times: Iterator[Tensor],
    ranks: int,
    every: int,
    rounds: int,
    messages_s: Callable[[int], float],
    coding_s: float,
    away: Away,
    generator: torch.Generator,
) -> ElasticTimeline:
    """Let those ranks that are here compute a window and average, round after round.

    A host that is lost in a round takes its ranks' windows with it. The others wait until they know that, and average
    without it. It takes part in the next round that begins after it is back. Where all are lost, the run waits for the
    first one to come back.

    Args:
        times: of each step, one element a rank.
        ranks: how many; whole hosts.
        every: steps of a round.
        rounds: how many.
        messages_s: of an average, by the number of ranks.
        coding_s: of an average, on each rank.
        away: how hosts come and go.
        generator: of what is drawn.

    >>> never = Away(float("inf"), 0.0, 0.0)
    >>> steps = iter(torch.tensor([[1.0, 2.0], [1.0, 2.0]]))
    >>> train_elastic(steps, 2, 2, 1, lambda n: 0.5, 0.0, never, torch.Generator()).round_s
    [4.5]
    """
    kept, now_s = ElasticTimeline(), 0.0
    hosts = ranks // away.ranks_per_host
    back_s = torch.zeros(hosts, dtype=torch.float64)
    lost_s = _lifetimes(hosts, away, generator)
    for _ in range(rounds):
        window = torch.stack([next(times) for _ in range(every)]).sum(dim=0) + coding_s
        began_s = now_s
        now_s = max(now_s, float(back_s.min()))
        here = back_s <= now_s
        ready = torch.where(here, now_s + window.view(hosts, -1).amax(dim=1), 0.0)
        left = here & (lost_s < ready.max() + messages_s(_count(here, away)))
        ends = here & ~left
        last_s = float(torch.where(ends, ready, 0.0).max())
        if left.any():
            noticed_s = lost_s + away.detection_s
            last_s = max(last_s, float(torch.where(left, noticed_s, 0.0).max()))
        count = _count(ends, away)
        travels_s = messages_s(count) if count else 0.0
        now_s = max(last_s, now_s) + travels_s
        worked_s = float(window[ends.repeat_interleave(away.ranks_per_host)].sum())
        kept.round_s.append(now_s - began_s)
        kept.present.append(count)
        kept.computed_s += worked_s - coding_s * count
        kept.coded_s += coding_s * count
        kept.exposed_s += travels_s * count
        kept.waited_s += max(0.0, (now_s - began_s - travels_s) * count - worked_s)
        if left.any():
            back_s = torch.where(left, lost_s + away.away_s, back_s)
            lost_s = torch.where(left, back_s + _lifetimes(hosts, away, generator), lost_s)
    return kept


def _count(hosts: Tensor, away: Away) -> int:
    return int(hosts.sum()) * away.ranks_per_host


def _lifetimes(hosts: int, away: Away, generator: torch.Generator) -> Tensor:
    """Seconds until each host is lost: exponential."""
    uniform = torch.rand(hosts, generator=generator, dtype=torch.float64)
    return -away.mtbf_s * torch.log1p(-uniform.clamp(min=2.0**-54))
