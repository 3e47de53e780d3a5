"""What the links of a network are like, and the commands that make them so."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from gradwire.core.rates import format_rate, parse_rate

_MOST_HELD_BYTES = 2**30


@dataclass(frozen=True)
class Uplinks:
    """Groups of hosts, each of which reaches the other groups by one link that its hosts share.

    Args:
        sizes: hosts of each group, which follow each other.
        rate: of each group's link in each direction, in `tc`'s notation ("100mbit"), or None for no limit.

    Raises:
        ValueError: a group without hosts, or a rate that cannot be read.

    >>> Uplinks((1, 2, 3), "50mbit").summary
    '3 groups of 1, 2, 3 hosts behind links of 50mbit'
    """

    sizes: Sequence[int]
    rate: str | None = None

    def __post_init__(self) -> None:
        if not self.sizes or min(self.sizes) < 1:
            raise ValueError(f"every group of hosts needs at least one: sizes are {tuple(self.sizes)}")
        _ = self.bits_per_s  # refuses what cannot be read

    @property
    def bits_per_s(self) -> float | None:
        """The rate; None for no limit."""
        return None if self.rate is None else parse_rate(self.rate)

    @property
    def firsts(self) -> list[int]:
        """The first host of each group."""
        return [0, *accumulate(self.sizes)][:-1]

    def group_of(self, host: int) -> int:
        """Which group has a host."""
        return sum(first <= host for first in self.firsts) - 1

    @property
    def summary(self) -> str:
        """What it adds to a network, for people."""
        sizes = self.sizes if len(set(self.sizes)) > 1 else self.sizes[:1]
        links = "unlimited links" if self.rate is None else f"links of {self.rate}"
        return f"{len(self.sizes)} groups of {', '.join(map(str, sizes))} hosts behind {links}"


@dataclass(frozen=True)
class Links:
    """The links between hosts and switch.

    Attributes:
        rates_bits_per_s: of each host's link in each direction; None for no limit.
        delay_s: what a round trip between two hosts takes longer; half of it each way.
        loss: share of the frames that get lost between two hosts, in each direction.
        uplinks: of groups of hosts, the smallest groups first. Delay and loss are then between the largest groups.
    """

    rates_bits_per_s: Sequence[float | None]
    delay_s: float = 0.0
    loss: float = 0.0
    uplinks: Sequence[Uplinks] = ()

    def __post_init__(self) -> None:
        self._require_groups()
        held = self.delay_s / 2 * sum(rate or 0.0 for rate in self.rates_bits_per_s) / 8
        if held > _MOST_HELD_BYTES:
            raise ValueError(
                f"a delay of {1e3 * self.delay_s:g} ms cannot be emulated at these rates: up to {held / 2**30:.1f} GiB "
                "would be on their way at a time, and 1 GiB is what is kept for them; lower one or the other"
            )

    def _require_groups(self) -> None:
        """Refuse groups that are not of all hosts, or do not lie in those of the next level."""
        inside = set(range(len(self.rates_bits_per_s)))
        for each in self.uplinks:
            if sum(each.sizes) != len(self.rates_bits_per_s):
                raise ValueError(
                    f"groups of {tuple(each.sizes)} hosts are {sum(each.sizes)} hosts, and there are "
                    f"{len(self.rates_bits_per_s)}"
                )
            if not inside.issuperset(each.firsts):
                raise ValueError(
                    f"groups of {tuple(each.sizes)} hosts cut through groups of the level before: give uplinks of "
                    "the smallest groups first, and let each group lie in one group of the next"
                )
            inside = set(each.firsts)

    @property
    def ports(self) -> list[tuple[str, int]]:
        """The interfaces that what joins all hosts has, and how many hosts each leads to: groups of the last level."""
        if not self.uplinks:
            return [(f"port{host}", 1) for host in range(len(self.rates_bits_per_s))]
        level, sizes = len(self.uplinks) - 1, self.uplinks[-1].sizes
        return [(f"down{level}_{group}", size) for group, size in enumerate(sizes)]

    @property
    def by_line(self) -> bool:
        """Whether the switch must be a delay line, since a bridge can neither hold frames nor lose them."""
        return bool(self.delay_s or self.loss)

    @property
    def queue_s(self) -> float:
        """How long the queue of a link is: as long as a round trip, as routers have it, and 50 ms at least."""
        return max(_QUEUE_S, self.delay_s)

    def lifted(self) -> Links:
        """The same links with nothing that makes them slow: faster than a machine moves frames."""
        rates = [rate if rate is None else max(rate, _LIFTED_BITS_PER_S) for rate in self.rates_bits_per_s]
        lifted = format_rate(_LIFTED_BITS_PER_S)
        return Links(rates, uplinks=[replace(each, rate=each.rate and lifted) for each in self.uplinks])


_LIFTED_BITS_PER_S = 1e11


# Counters must see our traffic only, so nothing may speak unasked.
QUIET = [
    "for file in /proc/sys/net/ipv6/conf/all /proc/sys/net/ipv6/conf/default; do",
    "  if [ -e $file ]; then echo 1 > $file/disable_ipv6; fi",
    "done",
    "ip link set lo up",
]


def switch_script(hosts: Sequence[str], links: Links) -> list[str]:
    """Return the commands that make the switch and a link to each host, whose holder's process number is given."""
    lines = [] if links.by_line else _bridge("bridge")
    lines += _joined_groups(links)
    for rank, host in enumerate(hosts):
        rate = links.rates_bits_per_s[rank]
        lines += [
            f"ip link add name port{rank} mtu {MTU} type veth peer name eth0 address {_mac(rank)} "
            f"netns {host} mtu {MTU}",
            *_shape(f"port{rank}", rate, links),
            f"ip link set port{rank} {_master_of(rank, 0, links)} up",
        ]
    return lines


def uplink_name(level: int, group: int) -> str:
    """The interface in the switch by which a group of hosts reaches the others; its counters are those of the link."""
    return f"up{level}_{group}"


def _joined_groups(links: Links) -> list[str]:
    """The commands that make a bridge for each group of hosts, and a link from it to the bridge above."""
    lines: list[str] = []
    for level, group, first, rate in reversed(list(_groups(links))):  # a bridge is made before what is linked to it
        up, down = uplink_name(level, group), f"down{level}_{group}"
        lines += [
            *_bridge(f"group{level}_{group}"),
            f"ip link add name {up} mtu {MTU} type veth peer name {down} mtu {MTU}",
            *_shape(up, rate, links),
            *_shape(down, rate, links),
            f"ip link set {up} master group{level}_{group} up",
            f"ip link set {down} {_master_of(first, level + 1, links)} up",
        ]
    return lines


def _groups(links: Links) -> Iterator[tuple[int, int, int, float | None]]:
    """Level, place, first host and rate of each group, the smallest first."""
    for level, each in enumerate(links.uplinks):
        for group, first in enumerate(each.firsts):
            yield level, group, first, each.bits_per_s


def _bridge(name: str) -> list[str]:
    return [f"ip link add name {name} type bridge stp_state 0 mcast_snooping 0", f"ip link set {name} up"]


def _master_of(host: int, level: int, links: Links) -> str:
    """The words that put an interface to the bridge of the group of a level that has a host.

    Above all levels it is the bridge that joins all, or none where that is the delay line's work.
    """
    if level == len(links.uplinks):
        return "" if links.by_line else "master bridge"
    return f"master group{level}_{links.uplinks[level].group_of(host)}"


def host_script(rank: int, links: Links) -> list[str]:
    """Return the commands that set a host's end of its link up."""
    return [
        f"ip address add {address(rank)}/16 dev eth0",
        *_shape("eth0", links.rates_bits_per_s[rank], links),
        *_windows(rank, links),
        "ip link set eth0 up",
        # As a property of the route: the sysctl refuses what the machine's own list does not allow, and that
        # list is not ours to change. A kernel without cubic keeps its default.
        "ip route replace 10.77.0.0/16 dev eth0 congctl cubic || :",
    ]


def switch_limits(links: Links) -> list[str]:
    """Return the commands that limit what leaves the switch."""
    ends = [(f"port{rank}", rate) for rank, rate in enumerate(links.rates_bits_per_s)]
    for level, group, _, rate in _groups(links):
        ends += [(uplink_name(level, group), rate), (f"down{level}_{group}", rate)]
    return [line for end, rate in ends for line in _shape(end, rate, links)]


def host_limits(rank: int, links: Links) -> list[str]:
    """Return the commands that limit what leaves a host."""
    return _shape("eth0", links.rates_bits_per_s[rank], links)


def address(rank: int) -> str:
    """A host's IPv4 address."""
    return f"10.77.{(rank + 1) >> 8}.{(rank + 1) & 255}"


def _mac(rank: int) -> str:
    """A host's hardware address; the delay line reads the port off its last two bytes."""
    return f"02:77:00:00:{rank >> 8:02x}:{rank & 255:02x}"


# How a link is shaped: measured with a Gloo all_reduce of 8 MB fp32 among 4 hosts (TCP can reach 95.6% of the
# rate: 1448 of 1514 bytes) and with one message of 64 KB after a pause (ideal: 27, 5.5, 0.55 ms at the three
# rates). CPU is the time in interrupts, in hundredths of a second, over each whole run.
#
#   rate     burst     largest packet   congestion   all_reduce   64 KB     CPU
#   100mbit  16 KB     1 frame          cubic        93.5%                  357
#   100mbit  16 KB     1 frame          bbr          88.8%                  402
#   100mbit  16 KB     64 KB, cut up    cubic        93.6%                  316
#   100mbit  70 KB     64 KB            cubic        95.5%        1.1 ms     35
#   100mbit  12.6 KB   8 frames         cubic        95.0%        5.5 ms     90     <- chosen
#   100mbit  8 KB      4 frames         cubic        94.5%        5.8 ms    118
#   20mbit   70 KB     64 KB            cubic        95.5%        1.5 ms     26
#   20mbit   3.1 KB    2 frames         cubic        93.5%        27 ms     216     <- chosen
#   1gbit    125 KB    1 frame          cubic        65%                    193
#   1gbit    125 KB    1 frame          bbr          53%                    306
#   1gbit    125 KB    40 frames        cubic        95.0%        0.9 ms     21     <- chosen
#
# So: a burst of 1 ms, for a larger one gives small messages away, which flatters whoever compresses. Packets
# as large as the burst and no larger: tbf cuts up those that exceed it, and single frames cost much processor
# time. The queue charges for the framing of each frame in a large packet; the interface counts such a packet
# as one, so its bytes lack the others' framing, but bytes - 66 * packets is exactly the payload.
MTU = 1500
_FRAME_BYTES = MTU + 14
_BURST_S = 1e-3
_FRAMES = range(2, 41)  # a packet may hold 64 KB
_QUEUE_S = 50e-3  # an all_to_all of 1 MB among 4 hosts at 100mbit loses nothing (it does with 10 ms)
_MIN_QUEUE_BYTES = 65536
_MAX_QUEUE_BYTES = 2**32 - 1  # tc holds it in 32 bits


def _shape(interface: str, rate_bits_per_s: float | None, links: Links) -> list[str]:
    """Return the commands that limit what leaves by an end of a link, or change the limit that is there.

    A change keeps what is in the queue.
    """
    if rate_bits_per_s is None:
        return []
    bytes_per_s = rate_bits_per_s / 8
    burst_bytes = bytes_per_s * _BURST_S
    frames = min(max(int(burst_bytes / _FRAME_BYTES), _FRAMES[0]), _FRAMES[-1])
    burst_bytes = max(burst_bytes, frames * _FRAME_BYTES) + 66
    limit_bytes = min(max(bytes_per_s * links.queue_s, _MIN_QUEUE_BYTES) + burst_bytes, _MAX_QUEUE_BYTES)
    return [
        f"ip link set {interface} gso_max_segs {frames}",
        f"tc qdisc replace dev {interface} root tbf rate {rate_bits_per_s:.0f}bit burst {burst_bytes:.0f} "
        f"limit {limit_bytes:.0f}",
    ]


_LEAST_WINDOW_BYTES = 4 << 20
_MAX_WINDOW_BYTES = 1 << 30


def _windows(rank: int, links: Links) -> list[str]:
    """Return the commands that give TCP room for what is on its way, four times over, where its own would be less.

    Half of a buffer is the kernel's own book-keeping, and a queue may hold as much again. Where this is refused, as
    by kernels on which the limits are not a namespace's own, TCP keeps those it has.
    """
    rate_bits_per_s = links.rates_bits_per_s[rank] or 0.0
    window_bytes = min(int(4 * rate_bits_per_s / 8 * links.delay_s), _MAX_WINDOW_BYTES)
    if window_bytes <= _LEAST_WINDOW_BYTES:
        return []
    files = (("tcp_rmem", "4096 131072"), ("tcp_wmem", "4096 16384"))
    return [f"echo {least} {window_bytes} > /proc/sys/net/ipv4/{name} || :" for name, least in files]
