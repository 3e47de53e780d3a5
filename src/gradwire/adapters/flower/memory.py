"""What a client keeps between its rounds, in the state that Flower holds for its node and its run.

A client cannot know whether its update was taken up: the message may have been lost, the update refused, the round
given up. So it keeps two versions, what it had before its last update and what it has if that one counts. The next
order says which round of this client was taken up last; the version of that round is the right one.
"""

from __future__ import annotations

from typing import NamedTuple

from flwr.app import RecordDict

from gradwire.adapters.flower.content import read, write
from gradwire.federated.client import Kept
from gradwire.federated.packing import Record
from gradwire.federated.records import Look, joined, kept_of, of_kept, part

SETTLED, PENDING = "gradwire.settled", "gradwire.pending"


class Recalled(NamedTuple):
    """What a client has kept.

    Attributes:
        kept: as of the round that was asked for; nothing where it is lost.
        lost: whether there should be something.
    """

    kept: Kept
    lost: bool


def recall(state: RecordDict, taken: int | None) -> Recalled:
    """Return what was kept in the round that was taken up last, and forget everything else.

    Args:
        state: of the node; it has one version afterwards, or none.
        taken: that round, None where no update of this client was ever taken up.

    Raises:
        FederationError: the state is damaged.
    """
    versions = {name: _version(state, name) for name in (SETTLED, PENDING) if f"{name}.numbers" in state}
    right = [record for number, record in versions.values() if number == taken]
    for name in versions:
        del state[f"{name}.arrays"], state[f"{name}.numbers"]
    if taken is None or not right:
        return Recalled(Kept(), lost=taken is not None)
    write(state, SETTLED, right[-1])
    return Recalled(kept_of(part(right[-1], "kept")), lost=False)


def propose(state: RecordDict, number: int, kept: Kept) -> None:
    """Note what is kept in case that the update of a round is taken up."""
    write(state, PENDING, joined({"round": number}, kept=of_kept(kept)))


def _version(state: RecordDict, name: str) -> tuple[int, Record]:
    record = read(state, name)
    return Look(record, "a node's state").count("round"), record
