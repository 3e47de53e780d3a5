"""What the server makes of the rows that clients sent, one row a client: a weighted mean, or a rule.

The rules are those that ranks use among each other (`gradwire.reducers.aggregate`). Here one server holds all rows, so
distances between whole updates are at hand and nothing is exchanged. A rule that guards against bad clients lets no
client count for more by claiming many examples, so rules leave weights out.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from gradwire.core.errors import CompositionError
from gradwire.kernels import robust
from gradwire.reducers.aggregate import PrivateMean, Rule
from gradwire.spec import parse_rule


class Aggregation(ABC):
    """How rows (n, numel), float32 or float64, become one. A frozen dataclass."""

    @property
    def fewest(self) -> int:
        """Rows that it needs at least."""
        return 1

    @property
    def weighted(self) -> bool:
        """Whether clients count by their weights."""
        return False

    @property
    def remembers(self) -> bool:
        """Whether `combine` wants the last result, zeros before the first."""
        return False

    @property
    def noise(self) -> float | None:
        """Sigma of the noise that hides a client, in units of what one client may add; None where there is none."""
        return None

    @property
    def private(self) -> bool:
        """Whether it hides that a client took part."""
        return self.noise is not None

    @abstractmethod
    def combine(self, rows: Tensor, shares: Sequence[float], last: Tensor | None, expected: float) -> Tensor:
        """Return what the rows become, (numel,).

        Args:
            rows: (n, numel), one a client; none at all for a private aggregation alone.
            shares: what each counts for, summing to 1.
            last: the last result, where that is remembered.
            expected: how many rows were expected before anybody was drawn.
        """


@dataclass(frozen=True)
class WeightedMean(Aggregation):
    """sum_i p_i x_i, summed in float64 in the order of the clients.

    >>> WeightedMean().combine(torch.tensor([[1.0], [5.0]]), [0.75, 0.25], None, 2)
    tensor([2.])
    """

    @property
    @override
    def weighted(self) -> bool:
        return True

    @override
    def combine(self, rows: Tensor, shares: Sequence[float], last: Tensor | None, expected: float) -> Tensor:
        out = torch.empty(rows.shape[1], dtype=rows.dtype, device=rows.device)
        robust.weighted_sum(rows, torch.tensor(shares, dtype=torch.float64, device=rows.device), out)
        return out


@dataclass(frozen=True)
class ByRule(Aggregation):
    """What a rule makes of the rows: a median, a trimmed mean, Krum's choice.

    >>> from gradwire.reducers.aggregate import Median
    >>> ByRule(Median()).combine(torch.tensor([[1.0], [2.0], [900.0]]), [1 / 3] * 3, None, 3)
    tensor([2.])
    """

    rule: Rule

    @property
    def fewest(self) -> int:
        """The rule's fewest ranks."""
        return self.rule.fewest_ranks

    @property
    @override
    def remembers(self) -> bool:
        return self.rule.remembers

    def combine(self, rows: Tensor, shares: Sequence[float], last: Tensor | None, expected: float) -> Tensor:
        """The rule on whole rows."""
        if self.rule.remembers:
            before = torch.zeros_like(rows[0]) if last is None else last
            rows = torch.cat([rows, before.view(1, -1)])
        return self.rule.combine(rows, robust.squared_distances(rows) if self.rule.geometric else None)


@dataclass(frozen=True)
class Private(Aggregation):
    """1/(q W) sum_i x_i min(1, clip / |x_i|) + N(0, (noise clip / (q W))^2): `PrivateMean.mean_of`.

    q W is the number of clients that is expected in a round (`Sampling.expected`), or FedBuff's K, and not how many
    send something. So a client that was not drawn, fails or is refused adds nothing, and changes nothing else. The
    server adds the noise, from the system's entropy, so clients trust it with their updates. What is private is a
    client's whole part in all rounds, towards whoever sees the models; `Server.epsilon` says how well it is hidden.
    """

    rule: PrivateMean

    @property
    @override
    def fewest(self) -> int:
        return 0

    @property
    @override
    def noise(self) -> float:
        return self.rule.noise

    def combine(self, rows: Tensor, shares: Sequence[float], last: Tensor | None, expected: float) -> Tensor:
        """The noisy mean of the clipped rows."""
        return self.rule.mean_of(rows, expected)


def as_aggregation(given: str | Rule | PrivateMean | Aggregation | None) -> Aggregation:
    """Read "mean" or None, a spec of a rule such as "trimmed:1", a rule, or an aggregation.

    Raises:
        SpecError, CompositionError: as `gradwire.spec.parse_rule`.
    """
    if given is None or given == "mean":
        return WeightedMean()
    if isinstance(given, Aggregation):
        return given
    rule = parse_rule(given) if isinstance(given, str) else given
    return Private(rule) if isinstance(rule, PrivateMean) else ByRule(rule)


def require_rows(aggregation: Aggregation, sample: float) -> None:
    """Refuse a sample, or the expected size of one, that is too small for its rule.

    Raises:
        CompositionError: with how many clients it needs.
    """
    if sample < aggregation.fewest:
        raise CompositionError(
            f"{aggregation} needs {aggregation.fewest} clients a round and would get {sample:g}: draw a larger sample"
        )
