"""What must be the same on all ranks of a session, and what to say where it is not."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from gradwire.core.collective import AllReduce
from gradwire.core.errors import AttachError
from gradwire.core.grain import ParameterSpec
from gradwire.drivers.interpreter import Transport, ask
from gradwire.drivers.plan import Plan
from gradwire.session.together import Together


class Configuration(NamedTuple):
    """What one rank is about to do: its method with all that belongs to it, its tensors, and its grains, as texts.

    `spec` is what people call the method.
    """

    method: str
    spec: str
    tensors: tuple[str, ...]
    grains: str

    @property
    def digest(self) -> int:
        """A number of 56 bits that says the same."""
        text = repr([self.method, *self.tensors, self.grains])
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "little")


def configuration(method: str, spec: str, specs: Sequence[ParameterSpec], planned: Plan) -> Configuration:
    """Return what must be the same on all ranks. Of a device only its kind: ranks of one host have different ones."""
    tensors = [f"{s.name!r} {tuple(s.shape)} {s.dtype} on {s.device.type}" for s in specs]
    grains = [(g.segments, g.shape, g.dtype, g.device.type, reducer) for g, reducer in planned.units]
    return Configuration(method, spec, tuple(tensors), repr(grains))


def is_alike(digest: int, transport: Transport, device: torch.device) -> bool:
    """Whether all ranks have the same number: one small collective."""
    high, low = ask(AllReduce(torch.tensor([digest, -digest], device=device), "max"), transport).tolist()
    return high == -low


def tell_the_difference(mine: Configuration, ranks: Together) -> None:
    """Refuse configurations that differ between ranks, which would hang later: say in what and on which rank.

    Raises:
        AttachError: on every rank.
    """
    said = ranks.gather({"method": mine.method, "spec": mine.spec, "tensors": mine.tensors})
    raise AttachError(f"ranks disagree on {difference(said, ranks.ranks)}")


def difference(said: Sequence[dict[str, Any]], ranks: Sequence[int]) -> str:
    """What the words of some `ranks` differ in first, from those of the first one.

    >>> one, other = {"method": "AllReduceExchange(FP16())", "spec": "fp16"}, {"method": "...", "spec": "bf16"}
    >>> difference([one, other], [0, 1])
    'the method: rank 1 has bf16, and rank 0 has fp16'
    >>> difference([one | {"tensors": ["x"]}, one | {"tensors": ["x", "y"]}], [0, 1])
    'the tensors: number 1 is y on rank 1, and nothing on rank 0'
    """
    first, *others = said
    for rank, words in zip(ranks[1:], others, strict=True):
        if words["method"] != first["method"]:
            shown = "spec" if words["spec"] != first["spec"] else "method"
            return f"the method: rank {rank} has {words[shown]}, and rank {ranks[0]} has {first[shown]}"
        for i, (theirs, its) in enumerate(itertools.zip_longest(words["tensors"], first["tensors"], fillvalue=None)):
            if theirs != its:
                other, own = theirs or "nothing", its or "nothing"
                return f"the tensors: number {i} is {other} on rank {rank}, and {own} on rank {ranks[0]}"
    return "grain_numel=, or the version of gradwire"
