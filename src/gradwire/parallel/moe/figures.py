"""What layers of experts have routed, dropped and sent."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from typing_extensions import override

from gradwire.core.figures import si_bytes
from gradwire.drivers.interpreter import Traffic
from gradwire.session.module_figures import ModuleFigures


@dataclass(eq=False)
class Tally:
    """What a layer has done on this rank since it was made, or since `expert_report` was told to begin anew.

    Attributes:
        experts: how many there are, E.
        load: (E,): choices of each expert by the tokens of this rank.
        rows: that the experts of this rank were given.
        passes: forward passes, recomputed ones left out.
        dropped: choices that were dropped here, before the exchange or after it.
        traffic: bytes and seconds of the exchanges, recomputed ones too.
    """

    experts: int
    load: Tensor = field(init=False)
    rows: int = 0
    passes: int = 0
    dropped: int = 0
    traffic: Traffic = field(default_factory=Traffic)

    def __post_init__(self) -> None:
        self.load = torch.zeros(self.experts, dtype=torch.int64)

    def add(self, experts: Tensor, rows: int, dropped: int) -> None:
        """Count a pass."""
        self.load += torch.bincount(experts.flatten(), minlength=self.experts).cpu()
        self.rows, self.passes, self.dropped = self.rows + rows, self.passes + 1, self.dropped + dropped


@dataclass(frozen=True)
class LayerFigures(ModuleFigures):
    """Figures of one layer of experts on this rank. `Session.add_to_report` adds them to the report of a session.

    Attributes:
        name: of the layer in its model.
        passes: forward passes.
        load: choices of each expert by the tokens of this rank.
        rows: that the experts of this rank were given.
        dropped: choices that were dropped here.
        wire_bytes: sent to other ranks.
        coding_s: seconds of coding and laying out.
        wait_s: seconds of waiting for other ranks.
    """

    name: str
    passes: int
    load: tuple[int, ...]
    rows: int
    dropped: int
    wire_bytes: int
    coding_s: float
    wait_s: float

    @property
    def imbalance(self) -> float:
        """The largest load over the mean: 1 is even, and E is one expert for all."""
        return max(self.load) * len(self.load) / max(sum(self.load), 1)

    @property
    def drop_rate(self) -> float:
        """Dropped choices over all choices of this rank."""
        return self.dropped / max(sum(self.load), 1)

    @property
    def pass_bytes(self) -> float:
        """Bytes sent for a forward pass and its backward pass."""
        return self.wire_bytes / max(self.passes, 1)

    @property
    @override
    def row(self) -> tuple[str, str, str]:
        meaning = f"a pass of experts; largest load {self.imbalance:.2f} of the mean, {self.drop_rate:.2%} dropped"
        return self.name or "experts", si_bytes(self.pass_bytes), meaning

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.passes} passes, largest load {self.imbalance:.2f} of the mean, "
            f"{self.drop_rate:.2%} dropped, {self.wire_bytes:,} bytes sent, {self.wait_s:.3f} s waited"
        )


def expert_report(model: nn.Module, *, begin_anew: bool = False) -> tuple[LayerFigures, ...]:
    """Return the figures of each layer of experts of a model, on this rank.

    `session.add_to_report(lambda: expert_report(model))` has `session.report()` tell them too; `attach_experts` does so
    for its session.

    Args:
        model: with layers of experts.
        begin_anew: count from here on.

    >>> from gradwire.parallel.exchange import ExchangeAxis
    >>> from gradwire.parallel.moe import Experts, MoE, SoftmaxTopK
    >>> axis = ExchangeAxis()
    >>> layer = MoE(SoftmaxTopK(8, 4, 2), Experts(8, 16, 4, axis), axis)
    >>> _ = layer(torch.randn(10, 8))
    >>> (figures,) = expert_report(nn.ModuleDict({"feed": layer}))
    >>> figures.name, sum(figures.load), figures.rows, figures.dropped, figures.wire_bytes
    ('feed', 20, 20, 0, 0)
    """
    found: list[LayerFigures] = []
    for name, module in model.named_modules():
        tally = getattr(module, "tally", None)
        if isinstance(tally, Tally):
            found.append(_figures(name, tally))
            if begin_anew:
                tally.__init__(tally.experts)
    return tuple(found)


def _figures(name: str, tally: Tally) -> LayerFigures:
    sent = tally.traffic
    load = tuple(tally.load.tolist())
    return LayerFigures(
        name, tally.passes, load, tally.rows, tally.dropped, sent.wire_bytes, sent.encode_s, sent.wait_s
    )
