"""What the ranks of a group find out together about where they are, and about the links between them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from gradwire.core.errors import TopologyError
from gradwire.core.figures import ranks_named
from gradwire.drivers.axes import measured_links
from gradwire.drivers.interpreter import Transport
from gradwire.drivers.words import gathered_words
from gradwire.topology.axis_links import AxisLinks, KeptLinks, difference, from_text, kept, to_text, with_described
from gradwire.topology.description import described
from gradwire.topology.identity import HostIdentity
from gradwire.topology.levels import Topology
from gradwire.topology.pairs import rounds_of_pairs

INTERFACE_VARIABLES = (
    "GLOO_SOCKET_IFNAME",
    "NCCL_SOCKET_IFNAME",
    "NCCL_IB_DISABLE",
    "NCCL_IB_HCA",
    "NCCL_NET",
    "NCCL_P2P_DISABLE",
)
"""Which links a backend uses: figures that were measured with other ones are of other links."""


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
) -> FoundTopology:
    """Find out which ranks share a node; every rank must call it at the same place.

    Args:
        transport: of all ranks.
        device: where its tensors lie.
        description: a file that says what cannot be seen (`gradwire.topology.description`); the ranks that have one
            must have the same, and one of them is enough.
        identity: of this rank's host; None asks the kernel.

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
        return FoundTopology(described(topology, text, said[rank]["source"]), identities)
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


def axis_links(
    found: FoundTopology, transport: Transport, device: torch.device, cache: Path | None = None, backend: str = "gloo"
) -> AxisLinks:
    """Return latency and bandwidth of the links of each level: from a file, or measured now and written to it.

    Every rank must call it at the same place, while nothing else is under way.

    Args:
        found: where the ranks are.
        transport: of all ranks.
        device: where its tensors lie.
        cache: the file, which only rank 0 reads and writes; None always measures. It is used where it was measured
            with the same hosts since they were started, the same levels, and the same choice of interfaces.
        backend: what moves the bytes.

    Raises:
        ConnectionLost: a rank ended or fell silent.
    """
    own = {name: os.environ.get(name, "") for name in INTERFACE_VARIABLES}
    said = gathered_words({"settings": own, **_cached(cache, transport.rank)}, transport, device)
    settings = {"backend": backend, "device": device.type, **_together([words["settings"] for words in said])}
    wanted = kept(found.topology, found.identities, settings)
    text, source = said[0]["text"], said[0]["source"]
    try:
        refused = None if text is None else difference(from_text(text), wanted, _to_measure(found.topology))
    except TopologyError as error:
        refused = str(error)
    if text is not None and refused is None:
        return AxisLinks(with_described(from_text(text).links, found.topology), source)
    links = measured_links(found.topology, transport, device)
    notes = () if text is None else (f"{source} is not used, since {refused}: measured anew",)
    error = _written(cache, wanted.having(links), transport.rank)
    told = gathered_words(error, transport, device)[0]
    return AxisLinks(links, "measured", (*notes, *([] if told is None else [told])))


def _to_measure(topology: Topology) -> list[str]:
    """The levels whose links are not described."""
    joined = [level for place, level in enumerate(topology.levels) if rounds_of_pairs(topology, place)]
    return [level.name for level in joined if not level.is_described]


def _together(settings: list[Mapping[str, str]]) -> dict[str, str]:
    """The values of each variable on all ranks; one that is set nowhere is left out."""
    values = {name: sorted({each[name] for each in settings}) for name in INTERFACE_VARIABLES}
    return {name: ", ".join(found) for name, found in values.items() if any(found)}


def _cached(cache: Path | None, rank: int) -> dict[str, Any]:
    words: dict[str, Any] = {"text": None, "source": str(cache)}
    if rank == 0 and cache is not None and cache.exists():
        try:
            words["text"] = cache.read_text(encoding="utf-8", errors="replace")
        except OSError as error:
            words["text"] = f"({error})"  # no JSON, so it is refused
    return words


def _written(cache: Path | None, record: KeptLinks, rank: int) -> str | None:
    """Write the file as a whole or not at all; return why that failed."""
    if rank != 0 or cache is None:
        return None
    beside = cache.with_name(f".{cache.name}.{os.getpid()}")
    try:
        cache.parent.mkdir(parents=True, exist_ok=True)
        beside.write_text(to_text(record), encoding="utf-8")
        beside.replace(cache)
    except OSError as error:
        with contextlib.suppress(OSError):
            beside.unlink()
        return f"{cache} cannot be written ({error}): the next run measures again"
    return None
