"""Checks of ranks against each other: versions, variables, clocks, what they have summed up, links."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence

from gradwire.core.figures import ranks_named
from gradwire.core.rates import spoken_rate
from gradwire.doctor.check_network import NETWORK_PAGE
from gradwire.doctor.check_variables import VARIABLES, shown
from gradwire.doctor.facts import Facts
from gradwire.doctor.finding import Finding, Outcome, Severity
from gradwire.doctor.torch_variables import DISTRIBUTED_PAGE
from gradwire.drivers.clocks import ClockOffset
from gradwire.topology.link_matrix import LinkMatrix, bits_per_s, said_of, shared_end, slow_links

VERSIONS, VARIABLES_CHECK, CLOCKS, SUM, LINKS = "versions", "variables", "clocks", "all-reduce", "links"
LARGEST_SKEW_S = 0.5
"""Logs and traces of hosts cannot be read side by side beyond that, and NTP keeps clocks a thousand times closer."""
SHARE_OF_NOMINAL = 0.3
"""Gloo reaches two thirds and more of a link; less than this share of what an interface says is another fault."""

_UNLIKE: dict[str, tuple[Severity, str]] = {
    "torch": ("error", "what they send each other and how they round may differ"),
    "gradwire": ("error", "payloads and requests of one version are not those of another"),
    "nccl": ("error", "NCCL refuses to connect unlike versions"),
    "python": ("warning", "pickled objects may not be read"),
    "numba": ("warning", "compiled kernels may round differently"),
    "triton": ("warning", "compiled kernels may round differently"),
    "numpy": ("warning", "data may be drawn and rounded differently"),
}

RankCheck = Callable[[Sequence[Facts]], Iterator[Outcome]]


def unlike_versions(ranks: Sequence[Facts]) -> Iterator[Outcome]:
    """Packages of which ranks have unlike versions."""
    for name, (severity, why) in _UNLIKE.items():
        values = {each.rank or 0: each.versions.get(name, "none") for each in ranks}
        if len(set(values.values())) > 1:
            yield Finding(
                severity,
                VERSIONS,
                f"ranks have unlike versions of {name}: {why}",
                by_value(values),
                f"Install the same version of {name} on every host.",
            )


def unlike_variables(ranks: Sequence[Facts]) -> Iterator[Outcome]:
    """Variables that must be alike on all ranks, and are not."""
    names = {name for each in ranks for name in each.environment if name in VARIABLES and VARIABLES[name].alike}
    for name in sorted(names):
        values = {each.rank or 0: each.environment.get(name) for each in ranks}
        if len(set(values.values())) > 1:
            texts = {rank: "not set" if value is None else shown(name, value) for rank, value in values.items()}
            stops = name in ("NCCL_ALGO", "NCCL_PROTO", "WORLD_SIZE", "MASTER_PORT")
            yield Finding(
                "error" if stops else "warning",
                VARIABLES_CHECK,
                f"ranks have unlike values of {name}, by which all of them must decide alike",
                by_value(texts),
                f"Set {name} alike on every host, or nowhere.",
                VARIABLES[name].source,
            )
    counts = {each.rank or 0: len(each.environment.get("GLOO_SOCKET_IFNAME", "").split(",")) for each in ranks}
    if len(set(counts.values())) > 1:
        yield Finding(
            "error",
            VARIABLES_CHECK,
            "ranks name unlike numbers of interfaces in GLOO_SOCKET_IFNAME",
            by_value({rank: str(count) for rank, count in counts.items()}),
            "Name as many on every host: Gloo takes them in turn.",
            DISTRIBUTED_PAGE,
        )


def unlike_hosts(ranks: Sequence[Facts]) -> Iterator[Outcome]:
    """Hosts whose fastest port is slower than that of others, or that see fewer GPUs."""
    firsts = list({each.identity.key: each for each in reversed(ranks)}.values())[::-1]
    rates = {each.rank or 0: _fastest(each) for each in firsts}
    known = {rank: rate for rank, rate in rates.items() if rate is not None}
    if known and len(set(known.values())) > 1:
        slowest = [rank for rank, rate in known.items() if rate == min(known.values())]
        yield Finding(
            "warning",
            LINKS,
            f"the host of {ranks_named(slowest)} has a slower port than others: all wait for it",
            by_value({rank: spoken_rate(rate) for rank, rate in known.items()}),
            "Look at its cable and its switch, or leave the host out.",
            NETWORK_PAGE,
        )
    gpus = {each.rank or 0: len(each.host.gpus) for each in firsts if each.host.gpus is not None}
    if len(set(gpus.values())) > 1:
        yield Finding(
            "warning",
            "devices",
            "hosts have unlike numbers of GPUs",
            by_value({rank: str(count) for rank, count in gpus.items()}),
            "Look at nvidia-smi on the host that has fewer: a GPU may have fallen off its bus.",
            NETWORK_PAGE,
        )


def _fastest(facts: Facts) -> float | None:
    ports = [port.bits_per_s for port in facts.host.rdma_ports if port.bits_per_s is not None]
    own = [each.bits_per_s for each in facts.host.interfaces if each.bits_per_s is not None]
    return max(ports or own, default=None)


def same_gpu(ranks: Sequence[Facts]) -> Iterator[Outcome]:
    """Ranks of a host with the same LOCAL_RANK, which would share a GPU."""
    places: defaultdict[tuple[str, str], list[int]] = defaultdict(list)
    for each in ranks:
        if each.devices.usable and "LOCAL_RANK" in each.environment:
            places[each.identity.key, each.environment["LOCAL_RANK"]].append(each.rank or 0)
    for (_, local), found in places.items():
        if len(found) > 1:
            yield Finding(
                "error",
                "launcher",
                f"{ranks_named(found)} of one host have the same LOCAL_RANK, so they would use the same GPU",
                f"LOCAL_RANK={local}",
                "Let torchrun set it, or count it from 0 on each host.",
                "https://docs.pytorch.org/docs/stable/elastic/run.html",
            )


RANK_CHECKS: tuple[RankCheck, ...] = (unlike_versions, unlike_variables, unlike_hosts, same_gpu)
"""Each looks at the facts of all ranks, in their order."""


def skewed_clocks(offsets: Sequence[ClockOffset], names: Mapping[int, str]) -> Iterator[Outcome]:
    """Clocks that are far from that of rank 0.

    >>> [each.what for each in skewed_clocks([ClockOffset(3, 3600.0, 0.001, 0.0)], {3: "node3"})]
    ['the clock of node3 is 3,600 s ahead of that of rank 0']
    """
    for rank, seconds, error_s, _ in offsets:
        if abs(seconds) - error_s > LARGEST_SKEW_S:
            side = "ahead of" if seconds > 0 else "behind"
            far = f"{abs(seconds):,.0f} s" if abs(seconds) >= 10 else f"{abs(seconds):.2g} s"
            yield Finding(
                "warning",
                CLOCKS,
                f"the clock of {names[rank]} is {far} {side} that of rank 0",
                f"rank {rank}: {seconds:+.3f} s, found to {1e3 * error_s:.2g} ms",
                "Run an NTP client on every host (timedatectl, chronyc tracking): logs and certificates go by clocks.",
                "https://datatracker.ietf.org/doc/html/rfc5905",
                hosts=(names[rank],),
                ranks=(rank,),
            )


def wrong_sums(wrong: Mapping[int, int], numel: int) -> Iterator[Outcome]:
    """Ranks that got wrong elements of a sum that every one of them can compute by itself."""
    bad = {rank: count for rank, count in wrong.items() if count}
    if bad:
        yield Finding(
            "error",
            SUM,
            f"an all-reduce gave {ranks_named(sorted(bad))} a wrong sum",
            ", ".join(f"rank {rank}: {count:,} of {numel:,} elements" for rank, count in bad.items()),
            "Memory or the network changes bits: test the memory of these hosts, and attach with checksum=True.",
            "https://github.com/gradwire/gradwire/blob/main/docs/trouble.md",
            ranks=tuple(sorted(bad)),
        )


def unlike_links(matrix: LinkMatrix) -> Iterator[Outcome]:
    """Links between hosts that are slow or late among the others."""
    found = slow_links(matrix.pairs)
    names = dict(zip(matrix.ranks, matrix.names, strict=True))
    for is_rate in (True, False):
        slow = [each for each in found if each.is_rate == is_rate]
        if not slow:
            continue
        end = shared_end(slow, matrix.pairs)
        said = "slow" if is_rate else "late"
        pairs = ", ".join(f"{one} and {other}" for one, other in (each.pair for each in slow[:8]))
        what = (
            f"all links of {names[end]} (rank {end}) are {said}" if end is not None else f"{said} links: ranks {pairs}"
        )
        yield Finding(
            "warning",
            LINKS,
            f"{what} among the others",
            "; ".join(said_of(each) for each in slow[:8]),
            "Look at cable, switch port and other traffic of that host; every step waits for its slowest link.",
            "https://github.com/gradwire/gradwire/blob/main/docs/slow_hosts.md",
            hosts=() if end is None else (names[end],),
            ranks=() if end is None else (end,),
        )


def below_nominal(matrix: LinkMatrix, ranks: Sequence[Facts]) -> Iterator[Outcome]:
    """Pairs that reach a small share of what their interfaces say: another interface is in use, or another limit."""
    facts = {each.rank or 0: each for each in ranks}
    for pair in matrix.pairs:
        rate = bits_per_s(pair)
        nominal = [_gloo_rate(facts[rank]) for rank in pair.ranks if rank in facts]
        if rate is None or not nominal or any(each is None for each in nominal):
            continue
        least = min(each for each in nominal if each is not None)
        if rate < SHARE_OF_NOMINAL * least:
            yield Finding(
                "warning",
                LINKS,
                f"{ranks_named(pair.ranks)} reach {spoken_rate(rate)} over interfaces of {spoken_rate(least)}",
                f"measured by Gloo over {' and '.join(_gloo_interface(facts[rank]) for rank in pair.ranks)}",
                "Look for other traffic, a limit of the provider, a wrong MTU, or a processor that is busy.",
                NETWORK_PAGE,
            )


def _gloo_interface(facts: Facts) -> str:
    """The interface that Gloo takes: the first one that is named, or that with the address of the host's name."""
    named = facts.environment.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    own = facts.host_addresses or ()
    return named or next((name for name, address in facts.addresses.items() if address in own), "an unknown interface")


def _gloo_rate(facts: Facts) -> float | None:
    name = _gloo_interface(facts)
    return next((each.bits_per_s for each in facts.host.interfaces if each.name == name), None)


def by_value(values: Mapping[int, str | None]) -> str:
    """Values with the ranks that have them, that of most ranks first.

    >>> by_value({0: "2.13.0", 1: "2.13.0", 2: "2.12.1"})
    '2.13.0 on ranks 0 and 1; 2.12.1 on rank 2'
    """
    found: defaultdict[str | None, list[int]] = defaultdict(list)
    for rank, value in values.items():
        found[value].append(rank)
    ordered = sorted(found.items(), key=lambda item: (-len(item[1]), item[1]))
    return "; ".join(f"{value} on {ranks_named(ranks)}" for value, ranks in ordered)
