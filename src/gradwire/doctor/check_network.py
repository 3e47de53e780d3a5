"""Checks of one host's network: which interface is taken, whether it is up, rates, and where ranks meet."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from gradwire.core.rates import spoken_rate
from gradwire.doctor.check_variables import shown
from gradwire.doctor.facts import Facts
from gradwire.doctor.finding import Finding, Outcome, Unchecked
from gradwire.doctor.kinds import strtoll
from gradwire.doctor.nccl_variables import SOURCE as NCCL_PAGE
from gradwire.doctor.reading import is_loopback
from gradwire.doctor.torch_variables import DISTRIBUTED_PAGE, ELASTIC_PAGE
from gradwire.topology.interfaces import NetworkInterface

INTERFACES, LINKS, PORTS = "interfaces", "links", "ports"
NETWORK_PAGE = (
    "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting/networking_troubleshooting.html"
)
GLOO_PAGE = "https://github.com/pytorch/pytorch/pull/26166"
_UNMARKED = ("lo", "docker")
"""What NCCL takes only where there is nothing else."""


def selected(value: str, names: Sequence[str]) -> list[str]:
    """The names that a list of NCCL selects: prefixes, `=` for whole names, `^` for all others; ports do not matter.

    >>> selected("eth", ["lo", "eth0", "eth1"]), selected("=eth0", ["eth0", "eth01"]), selected("^lo", ["lo", "ib0"])
    (['eth0', 'eth1'], ['eth0'], ['ib0'])
    """
    is_excluding, value = value.startswith("^"), value.removeprefix("^")
    is_exact, value = value.startswith("="), value.removeprefix("=")
    words = [word.partition(":")[0] for word in value.split(",") if word]
    return [name for name in names if any(name == w if is_exact else name.startswith(w) for w in words) != is_excluding]


def interface_names(facts: Facts) -> Iterator[Outcome]:
    """Interfaces and devices that variables name, and that are not here."""
    known = [each.name for each in facts.host.interfaces]
    environment = facts.environment
    if not known:
        yield Unchecked(INTERFACES, facts.why_unread.get("interfaces", "no network interface can be read"))
        return
    here = f"here are {', '.join(known)}"
    value = environment.get("NCCL_SOCKET_IFNAME", "")
    if value and not selected(value, known):
        yield Finding(
            "error",
            INTERFACES,
            f"{shown('NCCL_SOCKET_IFNAME', value)} matches no interface, so NCCL fails",
            here,
            "Name the beginning of an interface that is here, or leave it out.",
            NCCL_PAGE,
        )
    for name in filter(None, environment.get("GLOO_SOCKET_IFNAME", "").split(",")):
        if name not in known:
            yield Finding(
                "error",
                INTERFACES,
                f"GLOO_SOCKET_IFNAME names {name}, which is not here, so Gloo fails",
                here,
                "Write the whole name of an interface that is here; Gloo takes no prefixes and no ^.",
                DISTRIBUTED_PAGE,
            )
    devices, wanted = [each.device for each in facts.host.rdma_ports], environment.get("NCCL_IB_HCA", "")
    if wanted and devices and not selected(wanted, devices):
        yield Finding(
            "error",
            INTERFACES,
            f"{shown('NCCL_IB_HCA', wanted)} matches no RDMA device, so NCCL goes by sockets",
            f"here are {', '.join(dict.fromkeys(devices))}",
            "Name devices that are here, or leave it out.",
            NCCL_PAGE,
        )


def gloo_on_the_loopback(facts: Facts) -> Iterator[Outcome]:
    """Gloo takes the address that the host's name resolves to, which is often that of the loopback."""
    if facts.environment.get("GLOO_SOCKET_IFNAME"):
        return
    if facts.host_addresses is None:
        yield Finding(
            "warning",
            INTERFACES,
            f"the name {facts.name} of this host does not resolve within seconds, and Gloo asks for it",
            "no answer from the name server",
            "Set GLOO_SOCKET_IFNAME to the interface that reaches the other hosts, or put the name into /etc/hosts.",
            GLOO_PAGE,
        )
    elif facts.has_several_hosts and (not facts.host_addresses or is_loopback(facts.host_addresses[0])):
        to = facts.host_addresses[0] if facts.host_addresses else "nothing"
        yield Finding(
            "error",
            INTERFACES,
            "Gloo would take the loopback, which no other host reaches",
            f"the host's name {facts.name} resolves to {to}, and GLOO_SOCKET_IFNAME is not set",
            f"Set GLOO_SOCKET_IFNAME to the interface that reaches the other hosts{_such_as(facts)}.",
            GLOO_PAGE,
        )


def _such_as(facts: Facts) -> str:
    outward = [name for name, address in facts.addresses.items() if not is_loopback(address)]
    return f", such as {outward[0]}" if outward else ""


def chosen_interface(facts: Facts) -> Iterator[Outcome]:
    """Interfaces that are named and cannot carry what is between hosts: down, the loopback, a container's bridge."""
    known = {each.name: each for each in facts.host.interfaces}
    for variable, names in _chosen(facts).items():
        for name in names:
            interface = known[name]
            if interface.state == "down":
                yield Finding(
                    "error",
                    INTERFACES,
                    f"{variable} names {name}, which is down",
                    interface.summary,
                    f"Bring it up, or name another one{_such_as(facts)}.",
                    NETWORK_PAGE,
                )
            elif facts.has_several_hosts and (interface.kind == "loopback" or name.startswith(_UNMARKED)):
                yield Finding(
                    "error",
                    INTERFACES,
                    f"{variable} names {name}, which reaches no other host, and there are {facts.hosts}",
                    interface.summary,
                    f"Name the interface that reaches the other hosts{_such_as(facts)}.",
                    NETWORK_PAGE,
                )


def _chosen(facts: Facts) -> dict[str, list[str]]:
    """The interfaces of this host that variables name."""
    known = [each.name for each in facts.host.interfaces]
    gloo = facts.environment.get("GLOO_SOCKET_IFNAME", "").split(",")
    nccl = facts.environment.get("NCCL_SOCKET_IFNAME", "")
    found = {"GLOO_SOCKET_IFNAME": [name for name in gloo if name in known]}
    # what ^ leaves over is NCCL's choice, not the user's
    found["NCCL_SOCKET_IFNAME"] = selected(nccl, known) if nccl and not nccl.startswith("^") else []
    return found


def infiniband_left_out(facts: Facts) -> Iterator[Outcome]:
    """Sockets although the host has RDMA ports that are up."""
    up = [port for port in facts.host.rdma_ports if port.state == "ACTIVE"]
    net = facts.environment.get("NCCL_NET", "").lower()
    is_off = strtoll(facts.environment.get("NCCL_IB_DISABLE", "")).value != 0
    if up and (is_off or net == "socket"):
        name = "NCCL_IB_DISABLE" if is_off else "NCCL_NET"
        yield Finding(
            "warning",
            LINKS,
            f"NCCL goes by sockets, since {shown(name, facts.environment[name])}, although RDMA ports are up",
            "; ".join(port.summary for port in up),
            f"Leave {name} out.",
            NCCL_PAGE,
        )


def rdma_ports(facts: Facts) -> Iterator[Outcome]:
    """Ports that are down beside others that are up, or slower than their neighbours."""
    if LINKS in facts.why_unread:
        yield Unchecked(LINKS, facts.why_unread[LINKS])
    ports = facts.host.rdma_ports
    up = [port for port in ports if port.state == "ACTIVE"]
    for port in ports:
        if up and port.state != "ACTIVE":
            yield Finding(
                "warning",
                LINKS,
                f"{port.device} port {port.port} is {port.state or 'in an unknown state'}, and others are up",
                port.summary,
                "Look at its cable and its switch (ibstat), or leave it out of NCCL_IB_HCA.",
                NETWORK_PAGE,
            )
    for kind, alike in itertools.groupby(sorted(up, key=lambda port: port.kind or ""), key=lambda port: port.kind):
        rates = {port.device: port.bits_per_s for port in alike if port.bits_per_s is not None}
        slow = [device for device, rate in rates.items() if rate < max(rates.values())]
        for device in slow:
            yield Finding(
                "warning",
                LINKS,
                f"{device} has {spoken_rate(rates[device])}, and other {kind or 'RDMA'} ports of this host have "
                f"{spoken_rate(max(rates.values()))}",
                ", ".join(f"{name} {spoken_rate(rate)}" for name, rate in rates.items()),
                "Its link has come up at a lower rate: look at the cable and the port of the switch.",
                NETWORK_PAGE,
            )


def ethernet_rates(facts: Facts) -> Iterator[Outcome]:
    """Interfaces that came up at less than 1 Gbit/s, and rates that NCCL has to guess."""
    for interface in facts.host.interfaces:
        if interface.kind == "ethernet" and interface.state != "down" and _is_slow(interface):
            yield Finding(
                "warning",
                LINKS,
                f"{interface.name} has come up at {spoken_rate(interface.bits_per_s or 0)}",
                interface.summary,
                "Look at the cable and the port of the switch: one of the two has not agreed on more.",
                "https://docs.kernel.org/networking/ethtool-netlink.html",
            )


def _is_slow(interface: NetworkInterface) -> bool:
    return interface.bits_per_s is not None and interface.bits_per_s < 1e9


def rdma_near_gpus(facts: Facts) -> Iterator[Outcome]:
    """GPUs on a NUMA node without an RDMA port, where another node has some."""
    ports = {port.numa_node for port in facts.host.rdma_ports if port.state == "ACTIVE" and port.numa_node is not None}
    far = [gpu for gpu in facts.host.gpus or () if gpu.numa_node is not None and gpu.numa_node not in ports]
    if ports and far:
        yield Finding(
            "note",
            LINKS,
            f"{len(far)} of {len(facts.host.gpus or ())} GPUs have no RDMA port on their NUMA node",
            ", ".join(f"GPU {gpu.index} on node {gpu.numa_node}" for gpu in far),
            "What they send crosses the link between processors; NCCL may use the NIC of another GPU instead (PXN).",
            NCCL_PAGE,
        )


def meeting_point(facts: Facts) -> Iterator[Outcome]:
    """The address where ranks meet: one that other hosts can reach, with a port that is free."""
    meeting = facts.meeting
    if meeting is None:
        return
    host, _, port = meeting.address.rpartition(":")
    if facts.has_several_hosts and is_loopback(host):
        yield Finding(
            "error",
            PORTS,
            f"MASTER_ADDR={host} is each host itself, and there are {facts.hosts} hosts",
            f"ranks meet at {meeting.address}",
            "Set MASTER_ADDR to an address of rank 0's host that all others reach.",
            ELASTIC_PAGE,
        )
    state = meeting.state
    if state in ("free", "open", "not tried"):
        return
    what, remedy = {
        "taken": (
            f"port {port} is taken by another program of this host",
            "Set another MASTER_PORT, or end what listens there (ss -ltnp).",
        ),
        "unknown host": (
            f"MASTER_ADDR={host} does not resolve on this host",
            "Write an address, or put the name into /etc/hosts on every host.",
        ),
        "silent": (
            f"nothing answers at {meeting.address}: packets get lost on the way",
            "Open the port in the firewall between the hosts, or take an address of the right network.",
        ),
    }.get(
        state,
        (
            f"{meeting.address} cannot be reached: {state}",
            "Start rank 0 first; if it runs, open the port in its firewall.",
        ),
    )
    yield Finding("error", PORTS, what, f"{meeting.address}: {state}", remedy, ELASTIC_PAGE)
