"""What ranks find out together: who has what, whether clocks agree, whether a sum is right, what links carry."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import torch

from gradwire.core.checked import thread_safe
from gradwire.core.collective import AllReduce
from gradwire.core.errors import CommunicationError, first_line
from gradwire.doctor.check_ranks import RANK_CHECKS, below_nominal, skewed_clocks, unlike_links, wrong_sums
from gradwire.doctor.checks import host_outcomes
from gradwire.doctor.facts import Facts
from gradwire.doctor.finding import Examination, Finding, Outcome, Unchecked
from gradwire.drivers.axes import compared_pairs
from gradwire.drivers.clocks import ClockOffset, clock_offsets
from gradwire.drivers.interpreter import Transport, ask
from gradwire.drivers.words import gathered_words
from gradwire.topology import Host, HostIdentity, Topology
from gradwire.topology.link_matrix import LinkMatrix
from gradwire.topology.pairs import MOST_IN_PAIRS, RankPair, all_pairs_in_rounds, rounds_of_pairs

SUM_NUMEL = 1 << 17
"""Elements of the sum that is checked: 1 MiB in float64, in which sums of small whole numbers are exact."""
MEASURED_CHECKS = "clocks, sums and links of ranks"


@dataclass(frozen=True)
class MeasuredTogether:
    """What was measured between ranks, alike on all of them.

    Attributes:
        offsets: of the clocks of hosts.
        wrong: elements of a sum that a rank got wrong, by rank.
        matrix: links between hosts, or with one host between its ranks; None with one rank.
    """

    offsets: tuple[ClockOffset, ...] = ()
    wrong: Mapping[int, int] | None = None
    matrix: LinkMatrix | None = None


def examine_group(
    transport: Transport, device: torch.device, facts: Facts, clock: Callable[[], float] = time.time
) -> Examination:
    """Examine the ranks of a group, which must all call this at the same place; return the same on each of them.

    Args:
        transport: of all ranks.
        device: where its tensors lie.
        facts: of this rank (`read_facts`).
        clock: of this rank, in seconds.
    """
    said = gathered_words(to_words(facts), transport, device)
    ranks = with_hosts([of_words(words, rank) for rank, words in enumerate(said)])
    return diagnosed(ranks, measured(ranks, transport, device, clock))


def measured(
    ranks: Sequence[Facts], transport: Transport, device: torch.device, clock: Callable[[], float] = time.time
) -> MeasuredTogether | Finding:
    """Compare clocks, check a sum and measure links; a finding where the ranks lose each other meanwhile."""
    try:
        topology = topology_of(ranks)
        heads = [group[0] for group in topology.groups]
        ends = heads if len(heads) > 1 else list(range(min(len(ranks), MOST_IN_PAIRS)))
        offsets = clock_offsets(heads, transport, device, clock)
        wrong = dict(enumerate(gathered_words(_wrong_elements(transport, device), transport, device)))
        pairs = compared_pairs(_rounds(topology, ends), transport, device)
    except CommunicationError as error:
        return Finding(
            "error",
            "all-reduce",
            "the ranks lost each other while they exchanged tensors",
            first_line(error),
            "Read what the other ranks have written: the first one that failed has the reason.",
        )
    names = tuple(ranks[end].name for end in ends)
    return MeasuredTogether(offsets, wrong, LinkMatrix(tuple(ends), names, pairs) if len(ends) > 1 else None)


def diagnosed(ranks: Sequence[Facts], found: MeasuredTogether | Finding | Unchecked) -> Examination:
    """What is wrong with ranks, by what they have read and what was measured between them."""
    topology = topology_of(ranks)
    hosts = len(topology.groups)
    subject = f"{len(ranks)} rank{'s' * (len(ranks) != 1)} on {hosts} host{'s' * (hosts != 1)}"
    matrix = found.matrix if isinstance(found, MeasuredTogether) else None
    return Examination.of(_outcomes(ranks, found), subject, len(ranks), matrix)


def _outcomes(ranks: Sequence[Facts], found: MeasuredTogether | Finding | Unchecked) -> Iterator[Outcome]:
    for facts in ranks:
        yield from host_outcomes(facts)
    for check in RANK_CHECKS:
        yield from check(ranks)
    if not isinstance(found, MeasuredTogether):
        yield found
        if isinstance(found, Finding):
            yield Unchecked(MEASURED_CHECKS, "the ranks have no connection that lasts")
        return
    yield from skewed_clocks(found.offsets, {each.rank or 0: each.name for each in ranks})
    yield from wrong_sums(found.wrong or {}, SUM_NUMEL)
    if found.matrix is not None:
        yield from unlike_links(found.matrix)
        yield from below_nominal(found.matrix, ranks)


def _wrong_elements(transport: Transport, device: torch.device) -> int:
    """How many elements of a sum over all ranks are not what each of them can compute alone."""
    pattern = torch.arange(SUM_NUMEL, dtype=torch.float64, device=device) % 251
    total = ask(AllReduce(pattern * (transport.rank + 1), "sum"), transport)
    ranks = transport.world_size
    return int((total != pattern * (ranks * (ranks + 1) // 2)).sum())


def _rounds(topology: Topology, ends: Sequence[int]) -> Sequence[Sequence[RankPair]]:
    if len(ends) <= MOST_IN_PAIRS:
        return all_pairs_in_rounds(ends)
    return rounds_of_pairs(topology, [level.name for level in topology.levels].index("node"))


def topology_of(ranks: Sequence[Facts]) -> Topology:
    """Which ranks share a host."""
    return Topology.of_keys([each.identity.key for each in ranks])


def with_hosts(ranks: Sequence[Facts]) -> list[Facts]:
    """The same facts, each told on how many hosts the ranks are."""
    return [each.among(len(topology_of(ranks).groups)) for each in ranks]


def to_words(facts: Facts) -> dict[str, Any]:
    """Facts as plain data, for JSON."""
    return msgspec.to_builtins(facts)


def of_words(words: dict[str, Any], rank: int) -> Facts:
    """What `to_words` made, as far as this version of gradwire knows it.

    >>> facts = Facts(Host(HostIdentity("a")), {"torch": "2.13.0"})
    >>> of_words(to_words(facts), 3) == replace(facts, rank=3)
    True
    """
    try:
        return replace(msgspec.convert(words, thread_safe(Facts)), rank=rank)
    except msgspec.ValidationError:  # another version, which the check of versions tells
        versions = {str(name): str(version) for name, version in dict(words.get("versions", {})).items()}
        return Facts(Host(HostIdentity(f"the host of rank {rank}")), versions, rank=rank)
