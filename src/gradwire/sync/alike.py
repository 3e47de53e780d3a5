"""Whether all ranks begin with the same model and settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from gradwire.core.errors import AttachError
from gradwire.session.fingerprints import Fingerprints
from gradwire.session.together import Together


def require_same_start(settings: str, tensors: Mapping[str, Tensor], ranks: Together) -> None:
    """Refuse settings or values that differ between ranks.

    Raises:
        AttachError: on every rank, with the first tensor that differs.
    """
    fingerprints = Fingerprints(tensors)
    said = ranks.gather([settings, fingerprints.whole])
    _require_settings([its for its, _ in said], ranks.ranks)
    if len({whole for _, whole in said}) == 1:
        return
    if not (differing := fingerprints.differences(ranks)):
        raise AttachError("ranks have their tensors in different orders: begin with the same model on all ranks")
    name, difference = next(iter(differing.items()))
    raise AttachError(
        f"{name!r} differs between rank {ranks.ranks[0]} and rank {difference.rank}: begin with the same model on all "
        "ranks (by a seed where processors are alike, or by a broadcast), and load checkpoints after"
    )


def _require_settings(said: Sequence[str], ranks: Sequence[int]) -> None:
    for rank, its in zip(ranks, said, strict=True):
        if its != said[0]:
            raise AttachError(
                f"ranks disagree on the settings: rank {rank} has {its}, and rank {ranks[0]} has {said[0]}"
            )
