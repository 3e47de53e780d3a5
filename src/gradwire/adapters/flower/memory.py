"""What a client keeps between its rounds, in the state that Flower holds for its node and its run.

A client cannot know whether its update was taken up: the message may have been lost, the update refused, the round
given up. So it keeps two versions, what it had before its last update and what it has if that one counts. The next
order says which round of this client was taken up last; the version of that round is the right one.
"""

from __future__ import annotations

from flwr.app import RecordDict

from gradwire.adapters.flower.content import read, written
from gradwire.core.record import Count, Record
from gradwire.federated.client import Kept

SETTLED, PENDING = "gradwire.settled", "gradwire.pending"


class KeptAfter(Record, frozen=True):
    """What a client keeps if its update of a round is taken up."""

    round: Count
    kept: Kept


def recall(state: RecordDict, taken: int | None) -> Kept | None:
    """Return what was kept in the round that was taken up last, None where it is lost. Forget everything else.

    Args:
        state: of the node; it has one version afterwards, or none.
        taken: that round, None where no update of this client was ever taken up.

    Raises:
        FederationError: the state is damaged.
    """
    names = [name for name in (SETTLED, PENDING) if name in state]
    versions: list[KeptAfter] = [read(state, name, KeptAfter, "a node's state") for name in names]
    right = [version for version in versions if version.round == taken]
    for name in names:
        del state[name]
    if not right:
        return None if taken is not None else Kept()
    state[SETTLED] = written(right[-1])
    return right[-1].kept


def propose(state: RecordDict, number: int, kept: Kept) -> None:
    """Note what is kept in case that the update of a round is taken up."""
    state[PENDING] = written(KeptAfter(number, kept))
