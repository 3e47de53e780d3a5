"""What a strategy and its nodes say to each other: records, each of which is one of Flower's arrays of bytes.

Flower cuts arrays into chunks and sends a chunk that goes to many nodes once. Each array says in which version of
gradwire it was written. Nothing is unpickled.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from flwr.app import Array, ArrayRecord, RecordDict

from gradwire.core.errors import FederationError, RecordError
from gradwire.core.record import Count, Record, pack, unpack
from gradwire.core.version import VERSION
from gradwire.federated.client import Assignment, Terms
from gradwire.federated.engines import Outcome

MESSAGE, ROUND = "gradwire", "gradwire.round"
"""The names of our records in a message: what is one client's, and what all clients of a round are told."""
WHO = "query.gradwire"
"""The type of the message that asks a node which client it is."""
LONGEST = 256
"""Letters of what others have written that a sentence of ours repeats."""
WRITER = f"gradwire {VERSION}"


class Order(Record, frozen=True):
    """What a strategy asks of one client.

    Attributes:
        client: its number.
        taken: the last round whose update of this client was taken up, None where none ever was.
    """

    client: Count
    taken: Count | None


class RoundOrder(Record, frozen=True):
    """What a strategy tells all clients of a round.

    Attributes:
        task: what the server asks of each of them, with 0 in place of the client's number.
        token: of the round; an answer has to repeat it.
        seed: of the run, in digits, since a number of a record has 64 bits.
        settings: of the terms, as text, which have to be the client's own.
    """

    task: Assignment
    token: str
    seed: Annotated[str, msgspec.Meta(pattern=r"^-?\d{1,1000}$")]
    settings: Mapping[str, str]


class NodeAnswer(Record, frozen=True):
    """What a client answers to an order.

    Attributes:
        token: of the order, "" where it could not be read.
        outcome: an update, or why there is none; what the client keeps is not in it.
        forgot: whether the client has lost what it owed the server.
    """

    token: str
    outcome: Outcome
    forgot: bool = False


class NodeIdentity(Record, frozen=True, tag=True):
    """Which client a node is."""

    client: Count


def settings_of(terms: Terms) -> dict[str, str]:
    """What server and clients have to agree on, as text."""
    parts = {"method": terms.method, "local": terms.local, "update": terms.update}
    return {**{name: repr(part) for name, part in parts.items()}, "model": terms.fingerprint}


def written(record: Record) -> ArrayRecord:
    """A record in Flower's form, which may be a part of several messages."""
    packed = pack(record)
    return ArrayRecord({"record": Array("uint8", (len(packed),), WRITER, packed)})


def read(content: RecordDict, name: str, kind: Any, whose: str) -> Any:
    """Return the record of a name in a message or a state.

    Raises:
        FederationError: there is none, or it is damaged, of another kind or of another version of gradwire.
    """
    array = content.array_records.get(name, {}).get("record")
    if array is None:
        raise FederationError(f"{whose} has no record that {WRITER} could read: it is left out")
    if array.stype != WRITER:
        raise FederationError(
            f"{whose} was written by {plain(array.stype)}, and this is {WRITER}: give server and nodes one version"
        )
    try:
        return unpack(array.data, kind)
    except RecordError as error:
        raise FederationError(f"{whose} is {plain(error)}") from error


def plain(text: object) -> str:
    """What somebody else has written: one line without control characters, and not too long."""
    line = "".join(letter if letter.isprintable() else " " for letter in str(text))
    return " ".join(line.split())[:LONGEST]
