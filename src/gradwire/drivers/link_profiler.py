"""What the links of a group carry: measured when somebody first asks, and kept for all that ask after that."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from gradwire.core.atomic_file import write_atomically
from gradwire.core.errors import TopologyError
from gradwire.core.spoken import called_as
from gradwire.drivers.axes import measured_links
from gradwire.drivers.interpreter import Transport
from gradwire.drivers.measure import Bench, curves
from gradwire.drivers.probing import reduction_times
from gradwire.drivers.topology import FoundTopology, find_topology
from gradwire.drivers.window import DDP_CAPS, Caps
from gradwire.drivers.words import gathered_words
from gradwire.reducers.auto import Auto
from gradwire.reducers.base import Reducer, with_parts
from gradwire.reducers.hierarchical import Hierarchical
from gradwire.topology.axis_links import AxisLinks, with_described
from gradwire.topology.identity import HostIdentity
from gradwire.topology.link_profile import LinkProfile, difference
from gradwire.topology.pairs import rounds_of_pairs
from gradwire.topology.reduction_times import ReductionTimes

INTERFACE_VARIABLES = (
    "GLOO_SOCKET_IFNAME",
    "NCCL_SOCKET_IFNAME",
    "NCCL_IB_DISABLE",
    "NCCL_IB_HCA",
    "NCCL_NET",
    "NCCL_P2P_DISABLE",
)
"""Which links a backend uses: figures that were measured with other ones are of other links."""


class LinkProfiler:
    """Topology, links of each level, times of routes and times of all-reduces of one group, alike on every rank.

    Nothing is measured before somebody asks, and nothing twice. With a file, what was measured is written to it, and
    taken from it where it was measured with the same hosts since they were started, the same levels, and the same
    choice of interfaces. So a run that is resumed there begins at once, and `exchange=auto` takes the routes that it
    took before, which makes the resumed run equal bit for bit.

    Every rank must make the same calls at the same places, while nothing else is under way.

    Args:
        transport: of all ranks.
        device: where its tensors lie.
        file: of the profile; only rank 0 reads and writes it, and all ranks must name one or none. None keeps what was
            measured in memory alone.
        description: a file that says what cannot be seen, see `find_topology`.
        identity: of this rank's host; None asks the kernel.
        backend: what moves the bytes.
        members: which ranks of the description those of the transport are, where it is of more.

    Attributes:
        notes: why a file that was there was not used, or could not be written: a sentence each.
    """

    def __init__(
        self,
        transport: Transport,
        device: torch.device,
        file: Path | None = None,
        description: Path | None = None,
        identity: HostIdentity | None = None,
        backend: str = "gloo",
        members: Sequence[int] | None = None,
    ) -> None:
        self._transport, self._device, self._file, self._backend = transport, device, file, backend
        self._bench = Bench(transport, device)
        self._description, self._identity, self._members = description, identity, members
        self._found: FoundTopology | None = None
        self._profile: LinkProfile | None = None
        self._is_from_file = False
        self.notes: tuple[str, ...] = ()

    @property
    def has_file(self) -> bool:
        """Whether what is measured is kept for other runs."""
        return self._file is not None

    def topology(self) -> FoundTopology:
        """Find out which ranks share a node.

        Raises:
            TopologyError: on every rank, for a description that cannot be used, see `find_topology`.
        """
        if self._found is None:
            self._found = find_topology(self._transport, self._device, self._description, self._identity, self._members)
        return self._found

    def axis_links(self) -> AxisLinks:
        """Return latency and bandwidth of the links of each level.

        Raises:
            ConnectionLost: a rank ended or fell silent.
        """
        topology, profile = self.topology().topology, self._kept()
        joined = [level for place, level in enumerate(topology.levels) if rounds_of_pairs(topology, place)]
        if all(profile.has_link(level) for level in joined):
            source = str(self._file) if self._is_from_file else "measured"
            return AxisLinks(with_described(profile.links, topology), source, self.notes)
        links = measured_links(topology, self._transport, self._device)
        self._keep(profile.with_links(links))
        return AxisLinks(links, "measured", self.notes)

    def reduction_times(self, nbytes: int, caps: Caps = DDP_CAPS, *, again: bool = False) -> ReductionTimes | None:
        """Return how long the all-reduce of a model's gradients takes; None with one rank.

        Args:
            nbytes: of all gradients.
            caps: of DDP's buckets.
            again: measure, also where it was measured before: links change.
        """
        profile = self._kept()
        found = None if again else profile.reduction_of(nbytes, caps)
        if found is None:
            found = reduction_times(self._bench, nbytes, caps)
            if found is not None:
                self._keep(profile.with_reduction(found, caps))
        return found

    def with_times(self, reducer: Reducer) -> Reducer:
        """Return `reducer` with every `Auto` in it told how long its routes take; without one, as it is.

        Args:
            reducer: equal on all ranks.
        """
        return self._with_times(reducer, self._bench)

    def _with_times(self, part: Any, bench: Bench) -> Any:
        if isinstance(part, Auto):
            return self._timed(part, bench)
        inside = bench.between(part) if isinstance(part, Hierarchical) else bench
        return with_parts(part, lambda each: self._with_times(each, inside))

    def _timed(self, auto: Auto, bench: Bench) -> Auto:
        profile, groups, names = self._kept(), bench.groups, [type(each).__name__ for each in auto.candidates]
        found = profile.routes_of(groups, repr(auto), names)
        if found is None:
            found = curves(auto, bench)
            self._keep(profile.with_routes(groups, repr(auto), dict(zip(names, found, strict=True))))
        return called_as(replace(auto, curves=found), auto)

    # The profile, and its file ----------------------------------------------------------------------------------------

    def _kept(self) -> LinkProfile:
        """What was measured so far, here or by the run that wrote the file."""
        if self._profile is None:
            self._profile = self._read() if self._file is not None else LinkProfile()
        return self._profile

    def _read(self) -> LinkProfile:
        found = self.topology()
        own = {name: os.environ.get(name, "") for name in INTERFACE_VARIABLES}
        said = gathered_words({"settings": own, **self._text()}, self._transport, self._device)
        settings = {"backend": self._backend, "device": self._device.type}
        settings |= _together([each["settings"] for each in said])
        wanted, text = LinkProfile.of_ranks(found.topology, found.identities, settings), said[0]["text"]
        if text is None:
            return wanted
        try:
            kept = LinkProfile.from_text(text)
            refused = difference(kept, wanted)
        except TopologyError as error:
            kept, refused = wanted, str(error)
        if refused is not None:
            self.notes = (f"{said[0]['source']} is not used, since {refused}: measured anew",)
            return wanted
        self._is_from_file = True
        return kept

    def _text(self) -> dict[str, Any]:
        words: dict[str, Any] = {"text": None, "source": str(self._file)}
        if self._transport.rank == 0 and self._file is not None and self._file.exists():
            try:
                words["text"] = self._file.read_text(encoding="utf-8", errors="replace")
            except OSError as error:
                words["text"] = f"({error})"  # no JSON, so it is refused
        return words

    def _keep(self, profile: LinkProfile) -> None:
        """Take over what was measured, and have rank 0 write it."""
        self._profile = profile
        if self._file is not None:
            error = _written(self._file, profile) if self._transport.rank == 0 else None
            told = gathered_words(error, self._transport, self._device)[0]
            self.notes = self.notes if told is None or told in self.notes else (*self.notes, told)


def _together(settings: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """The values of each variable on all ranks; one that is set nowhere is left out."""
    values = {name: sorted({each[name] for each in settings}) for name in INTERFACE_VARIABLES}
    return {name: ", ".join(found) for name, found in values.items() if any(found)}


def _written(file: Path, profile: LinkProfile) -> str | None:
    """Write the file as a whole or not at all; return why that failed."""
    try:
        write_atomically(file, profile.to_text())
    except OSError as error:
        return f"{file} cannot be written ({error}): the next run measures again"
    return None
