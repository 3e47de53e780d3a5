"""Which save of a folder all ranks take: each says what it finds there, and all conclude the same."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from gradwire.core.errors import StateError
from gradwire.core.save_folder import Manifest, file_name
from gradwire.session.together import Together


class Offer(NamedTuple):
    """A finished save as one rank sees it.

    Attributes:
        number, token: which save it is.
        step: at which it was made.
        world_size: of the run that made it.
        missing: ranks whose files this rank needs and does not find.
    """

    number: int
    token: str
    step: int
    world_size: int
    missing: list[int]


class Shelf(NamedTuple):
    """What one rank finds, and where it looked."""

    where: str
    offers: list[Offer]


def choose(shelves: Sequence[Shelf], ranks: Sequence[int] | None = None) -> Offer:
    """Return the newest save that every rank can load, alike on all ranks.

    Args:
        shelves: what each rank finds.
        ranks: what errors call these ranks, by default 0, 1 and so on.

    Raises:
        StateError: there is none; the message says what which rank lacks of the newest, and what to do.

    >>> old, new = Offer(1, "x", 10, 2, []), Offer(2, "y", 20, 2, [])
    >>> choose([Shelf("/a", [new, old]), Shelf("/b", [old])])
    Offer(number=1, token='x', step=10, world_size=2, missing=[])
    """
    everything = {(offer.number, offer.token): offer for shelf in shelves for offer in shelf.offers}
    ordered = [everything[key] for key in sorted(everything, reverse=True)]
    for offer in ordered:
        if all(_lack(offer, shelf) is None for shelf in shelves):
            return offer
    if not ordered:
        raise StateError(f"there is no finished save of gradwire's in {shelves[0].where}")
    newest = ordered[0]
    seen = zip(ranks or range(len(shelves)), shelves, strict=True)
    lacks = [f"rank {rank} {lack}" for rank, shelf in seen if (lack := _lack(newest, shelf))]
    remedy = "copy it from the host that wrote it"
    if newest.world_size != len(shelves):
        remedy = (
            f"{len(shelves)} ranks load what {newest.world_size} saved, so each needs all files: put them into one "
            f"folder that all ranks see, or run `gradwire reshard FOLDER --ranks {len(shelves)}` where all of them are"
        )
    raise StateError(f"the save of step {newest.step} cannot be loaded: {'; '.join(lacks[:3])}. {remedy}")


def _lack(offer: Offer, shelf: Shelf) -> str | None:
    """What a rank lacks of a save, if anything."""
    mine = next((own for own in shelf.offers if own[:2] == offer[:2]), None)
    if mine is None:
        return f"finds no gradwire-{offer.number}/manifest.json of it in {shelf.where}"
    if not mine.missing:
        return None
    names = ", ".join(file_name(rank) for rank in mine.missing[:4]) + (", ..." if len(mine.missing) > 4 else "")
    return f"finds no {names} of full size in gradwire-{offer.number} in {shelf.where}"


def offer_of(manifest: Manifest, here: Path, ranks: Together) -> Offer:
    """A save as this rank sees it; with as many ranks as saved it needs its own file only."""
    if manifest.world_size == ranks.world_size:
        missing = [] if manifest.has(here, ranks.rank) else [ranks.rank]
    else:
        missing = manifest.missing(here)
    return Offer(manifest.number, manifest.token, manifest.step, manifest.world_size, missing)
