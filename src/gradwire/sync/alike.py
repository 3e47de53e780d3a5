"""Whether all ranks begin with the same model and settings."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import NoReturn

from torch import Tensor

from gradwire.core.errors import AttachError
from gradwire.session.drift import digest
from gradwire.session.together import Together


def require_same_start(settings: str, tensors: Mapping[str, Tensor], ranks: Together) -> None:
    """Refuse settings or values that differ between ranks.

    Raises:
        AttachError: on every rank, with the first tensor that differs.
    """
    digests = {name: digest(tensor) for name, tensor in tensors.items()}
    whole = hashlib.blake2b(repr(digests).encode(), digest_size=8).hexdigest()
    said = ranks.say([settings, whole])
    _require_settings([its for its, _ in said], ranks.ranks)
    if len({digest for _, digest in said}) > 1:
        _tell_the_difference(ranks.say(digests), ranks.ranks)


def _require_settings(said: Sequence[str], ranks: Sequence[int]) -> None:
    for rank, its in zip(ranks, said, strict=True):
        if its != said[0]:
            raise AttachError(
                f"ranks disagree on the settings: rank {rank} has {its}, and rank {ranks[0]} has {said[0]}"
            )


def _tell_the_difference(listed: Sequence[Mapping[str, str]], ranks: Sequence[int]) -> NoReturn:
    for name in dict.fromkeys(name for digests in listed for name in digests):
        for rank, digests in zip(ranks, listed, strict=True):
            if digests.get(name) != listed[0].get(name):
                raise AttachError(
                    f"{name!r} differs between rank {ranks[0]} and rank {rank}: begin with the same model on all "
                    "ranks (by a seed where processors are alike, or by a broadcast), and load checkpoints after"
                )
    raise AttachError("ranks have their tensors in different orders: begin with the same model on all ranks")
