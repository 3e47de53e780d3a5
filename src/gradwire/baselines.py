"""PyTorch's own methods, which `gradwire compare` measures others against: `torch.fp32`, `torch.powersgd:4`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gradwire.core.errors import SpecError
from gradwire.core.grammar import arguments, read
from gradwire.core.options import Option
from gradwire.core.places import BASELINES
from gradwire.core.registry import SpecMethod

POWERSGD_START = 2
"""Steps that PowerSGD makes uncompressed: PyTorch refuses fewer while it warm-starts and feeds errors back."""


@dataclass(frozen=True)
class TorchMethod:
    """One of PyTorch's methods.

    Attributes:
        kind: fp32, fp16, bf16, powersgd or noop.
        rank: of PowerSGD.

    >>> import gradwire
    >>> gradwire.parse("torch.powersgd:4")
    TorchMethod(kind='powersgd', rank=4)
    """

    kind: str
    rank: int = 0

    place = BASELINES

    @property
    def label(self) -> str:
        """What it is, in words."""
        rank = f", rank {self.rank}, start_powerSGD_iter={POWERSGD_START}, one bucket" if self.rank else ""
        return f"{_SUMMARIES[self.kind]}{rank}"


_SUMMARIES = {
    "fp32": "DistributedDataParallel, no hook",
    "fp16": "default_hooks.fp16_compress_hook",
    "bf16": "default_hooks.bf16_compress_hook",
    "powersgd": "powerSGD_hook",
    "noop": "debugging_hooks.noop_hook: nothing is sent, each rank trains alone",
}


class _Baseline(SpecMethod):
    """A name of one of PyTorch's methods."""

    place, build = BASELINES, TorchMethod

    def __init__(self, kind: str) -> None:
        has_rank = kind == "powersgd"
        self._kind, self.summary = kind, _SUMMARIES[kind]
        self.argument = "rank" if has_rank else None
        self.example = "torch.powersgd:4" if has_rank else f"torch.{kind}"
        self.options: Mapping[str, Option] = {"rank": Option(int)} if has_rank else {}

    def made(self, spec: str) -> TorchMethod:
        """The method with its rank."""
        (part,) = read(spec, joins=False)
        made = TorchMethod(self._kind, **arguments(spec, part, self))
        if self.argument and made.rank < 1:
            raise SpecError(f"{spec!r}: PowerSGD wants a rank of at least 1, as in {self.example}")
        return made


TORCH: Mapping[str, SpecMethod] = {f"torch.{kind}": _Baseline(kind) for kind in _SUMMARIES}
