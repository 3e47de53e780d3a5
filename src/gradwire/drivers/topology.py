"""What the ranks of a group find out together about where they are."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from gradwire.core.errors import TopologyError
from gradwire.core.figures import ranks_named
from gradwire.drivers.interpreter import Transport
from gradwire.drivers.words import gathered_words
from gradwire.topology.description import described
from gradwire.topology.identity import HostIdentity
from gradwire.topology.levels import Topology


class FoundTopology(NamedTuple):
    """Where all ranks are, alike on each of them."""

    topology: Topology
    identities: tuple[HostIdentity, ...]

    @property
    def summary(self) -> str:
        """The nodes with their names, for people."""
        firsts = [self.identities[group[0]] for group in self.topology.groups]
        are_told_apart = len({each.name for each in firsts}) == len(firsts)
        names = [each.name if are_told_apart else each.full_name for each in firsts]
        lines = [
            f"  node {place}: {name}, {ranks_named(group)}"
            for place, (name, group) in enumerate(zip(names, self.topology.groups, strict=True))
        ]
        return "\n".join([self.topology.summary, *lines])


def find_topology(
    transport: Transport,
    device: torch.device,
    description: Path | None = None,
    identity: HostIdentity | None = None,
    members: Sequence[int] | None = None,
) -> FoundTopology:
    """Find out which ranks share a node; every rank must call it at the same place.

    Args:
        transport: of all ranks.
        device: where its tensors lie.
        description: a file that says what cannot be seen (`gradwire.topology.description`); the ranks that have one
            must have the same, and one of them is enough.
        identity: of this rank's host; None asks the kernel.
        members: which ranks of the description those of the transport are, where it is of more.

    Raises:
        TopologyError: on every rank, for a description that cannot be read, that differs between ranks or that
            contradicts what was found.
    """
    told = {"identity": (identity or HostIdentity.here()).to_words(), **_read(description)}
    said = gathered_words(told, transport, device)
    for rank, words in enumerate(said):
        if words["error"] is not None:
            raise TopologyError(f"rank {rank} cannot read the description: {words['error']}")
    identities = tuple(HostIdentity.of_words(words["identity"]) for words in said)
    topology = Topology.of_keys([each.key for each in identities])
    texts = {rank: words["text"] for rank, words in enumerate(said) if words["text"] is not None}
    if len(set(texts.values())) > 1:
        one, *others = texts
        other = next(rank for rank in others if texts[rank] != texts[one])
        raise TopologyError(f"ranks {one} and {other} have different descriptions: give every rank the same file")
    for rank, text in texts.items():
        return FoundTopology(described(topology, text, said[rank]["source"], members), identities)
    return FoundTopology(topology, identities)


def _read(description: Path | None) -> dict[str, Any]:
    """The text of a file, or why it cannot be read: said instead of raised, since the other ranks wait."""
    words: dict[str, Any] = {"text": None, "source": str(description), "error": None}
    if description is not None:
        try:
            words["text"] = description.read_text(encoding="utf-8")
        except (OSError, UnicodeError) as error:
            words["error"] = f"{description}: {error}"
    return words
