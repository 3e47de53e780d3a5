"""The examination of all ranks that a launcher has started, from the moment before they have met.

Ranks meet at one port, and then connect each to each other on ports that the kernel chooses. Where a firewall lets the
first pass and not the others, making a group hangs. So hosts try such connections before there is a group.
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.rendezvous import rendezvous

from gradwire.core.errors import AttachError, first_line
from gradwire.core.figures import ranks_named
from gradwire.doctor.check_network import GLOO_PAGE, NETWORK_PAGE, PORTS
from gradwire.doctor.checks import host_outcomes
from gradwire.doctor.facts import Facts
from gradwire.doctor.finding import Examination, Finding, Outcome, Unchecked
from gradwire.doctor.reading import connected, is_loopback, probed, read_facts
from gradwire.doctor.together import (
    MEASURED_CHECKS,
    MeasuredTogether,
    diagnosed,
    examine_group,
    measured,
    of_words,
    to_words,
    topology_of,
    with_hosts,
)
from gradwire.doctor.torch_variables import ELASTIC_PAGE
from gradwire.drivers.process_group import GroupTransport
from gradwire.ranks import group_end

CPU = torch.device("cpu")
TIMEOUT_S = 30.0
_KEY = "gradwire-doctor"


def examine_ranks(timeout_s: float = TIMEOUT_S) -> Examination:
    """Examine all ranks that a launcher has started, and what lies between them; every rank must call it.

    Where a default group exists its ranks are examined. Else ranks meet as the launcher says, and part again.

    Args:
        timeout_s: seconds to wait for ranks that do not come or do not answer.

    Returns:
        The same on every rank, where they have met; else what this rank knows.

    Raises:
        AttachError: there is neither a group nor a launcher.
    """
    facts = read_facts()
    if dist.is_initialized():
        group = dist.group.WORLD
        assert group is not None
        device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else CPU
        return examine_group(GroupTransport(group), device, facts)
    if facts.rank is None:
        raise AttachError("there is no launcher, which would set RANK and MASTER_ADDR: start the command by torchrun")
    try:
        store, rank, world_size = next(iter(rendezvous("env://", timeout=timedelta(seconds=timeout_s))))
        store.set_timeout(timedelta(seconds=timeout_s))
        said = _told(store, "facts", rank, to_words(facts), range(world_size))
        ranks = with_hosts([of_words(words, each) for each, words in enumerate(said)])
    except (RuntimeError, ValueError) as error:
        return _alone(facts, error)
    try:
        unreached = _unreached(ranks, store, rank)
        found = unreached[0] if unreached else _in_a_group(ranks, store, rank, timeout_s)
    except RuntimeError as error:  # the store lost a rank
        found = _lost(error)
    _part(store, rank, world_size)
    return diagnosed(ranks, found)


def _part(store: Store, rank: int, world_size: int) -> None:
    """Let rank 0, in whose process the store may be, end last."""
    with contextlib.suppress(RuntimeError):  # whoever is gone does not need the store any more
        store.set(f"{_KEY}/done/{rank}", "")  # the last thing that a rank asks of it
        for other in range(1, world_size) if rank == 0 else ():
            store.get(f"{_KEY}/done/{other}")


def _alone(facts: Facts, error: BaseException) -> Examination:
    """What a rank knows that met no other one."""
    if facts.meeting is not None and facts.rank != 0:  # at rank 0's own port it may be itself that listens still
        facts = replace(facts, meeting=probed(facts.meeting, facts.rank))
    where = [facts.environment.get(name, f"(no {name})") for name in ("MASTER_ADDR", "MASTER_PORT")]
    finding = Finding(
        "error",
        PORTS,
        f"rank {facts.rank} did not meet the others at {':'.join(where)}",
        first_line(error),
        f"Start all {facts.world_size} ranks with this MASTER_ADDR and MASTER_PORT, and open the port between hosts.",
        ELASTIC_PAGE,
        (facts.name,),
        () if facts.rank is None else (facts.rank,),
    )
    subject = f"rank {facts.rank} on host {facts.name}"
    found = Examination.of([finding, *host_outcomes(facts)], subject, facts.world_size)
    return replace(found, have_met=False)


def _lost(error: BaseException) -> Finding:
    return Finding(
        "error",
        PORTS,
        "the ranks lost each other before they had made a group",
        first_line(error),
        "Read what the other ranks have written: the first one that failed has the reason.",
    )


def _told(store: Store, what: str, rank: int, words: Any, ranks: Sequence[int]) -> list[Any]:
    """What some ranks say, in their order. A rank that is none of them only listens.

    Raises:
        RuntimeError: one of them did not say it in time.
    """
    if rank in ranks:
        store.set(f"{_KEY}/{what}/{rank}", json.dumps(words))
    return [json.loads(store.get(f"{_KEY}/{what}/{each}")) for each in ranks]


# Connections between hosts --------------------------------------------------------------------------------------------


def gloo_address(facts: Facts) -> str | None:
    """The address that Gloo takes on a host: that of the interface that is named, or that of the host's name.

    >>> from gradwire.topology import Host, HostIdentity
    >>> gloo_address(Facts(Host(HostIdentity("a")), host_addresses=("127.0.1.1",)))
    '127.0.1.1'
    """
    named = facts.environment.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    if named:
        return facts.addresses.get(named)
    return facts.host_addresses[0] if facts.host_addresses else None


def _unreached(ranks: Sequence[Facts], store: Store, rank: int) -> list[Outcome]:
    """Why Gloo would not connect the hosts; nothing where it would. Each host tries to reach each other one."""
    heads = [group[0] for group in topology_of(ranks).groups]
    addresses = {head: gloo_address(ranks[head]) for head in heads}
    if len(heads) == 1:
        return []
    closed = [head for head, address in addresses.items() if address is None or is_loopback(address)]
    if closed:
        return [Unchecked(MEASURED_CHECKS, f"Gloo has no address of {ranks_named(closed)} that other hosts reach")]
    states = _states_of_connections(addresses, store, rank)
    return unreachable(states, {head: f"{ranks[head].name} ({addresses[head]})" for head in heads})


def _states_of_connections(addresses: Mapping[int, str | None], store: Store, rank: int) -> dict[tuple[int, int], str]:
    """What became of a connection from each host to each other one, by their ranks."""
    heads = list(addresses)
    listener = _listener(addresses[rank]) if rank in heads else None
    try:
        port = None if listener is None else listener.getsockname()[1]
        ports = dict(zip(heads, _told(store, "ports", rank, port, heads), strict=True))
        mine = {
            other: connected(str(addresses[other]), ports[other]) if ports[other] else "not listening"
            for other in heads
            if rank in heads and other != rank
        }
        said = _told(store, "reached", rank, mine, heads)  # once all have said it nobody connects any more
    finally:
        if listener is not None:
            listener.close()
    return {(head, int(other)): state for head, each in zip(heads, said, strict=True) for other, state in each.items()}


def _listener(address: str | None) -> socket.socket | None:
    """A socket that listens on a port that the kernel chooses; None where the address is none of this host's."""
    listener = socket.socket(socket.AF_INET6 if address and ":" in address else socket.AF_INET)
    try:
        listener.bind((address, 0))
        listener.listen(socket.SOMAXCONN)
    except OSError:
        listener.close()
        return None
    return listener


def unreachable(states: Mapping[tuple[int, int], str], names: Mapping[int, str]) -> list[Outcome]:
    """Connections between hosts that could not be made.

    >>> [found] = unreachable({(0, 1): "silent", (1, 0): "open"}, {0: "a", 1: "b"})
    >>> found.what
    'hosts cannot connect to each other on ports that the kernel chooses, as Gloo and NCCL do'
    >>> found.evidence
    'from a to b: silent'
    """
    failed = {pair: state for pair, state in states.items() if state != "open"}
    if not failed:
        return []
    shown = [f"from {names[one]} to {names[other]}: {state}" for (one, other), state in [*failed.items()][:8]]
    return [
        Finding(
            "error",
            PORTS,
            "hosts cannot connect to each other on ports that the kernel chooses, as Gloo and NCCL do",
            "; ".join(shown),
            "Open the ports of net.ipv4.ip_local_port_range between the hosts, or name another network's interface.",
            NETWORK_PAGE,
        )
    ]


# The group ------------------------------------------------------------------------------------------------------------


def _in_a_group(
    ranks: Sequence[Facts], store: Store, rank: int, timeout_s: float
) -> MeasuredTogether | Finding | Unchecked:
    """Make a group of all ranks, measure, and end it."""
    group_end.before_init()
    try:
        dist.init_process_group(
            "gloo",
            store=PrefixStore(_KEY, store),
            rank=rank,
            world_size=len(ranks),
            timeout=timedelta(seconds=timeout_s),
        )
    except RuntimeError as error:
        return Finding(
            "error",
            PORTS,
            "Gloo cannot connect the ranks",
            first_line(error),
            "Set GLOO_SOCKET_IFNAME on every host to the interface that reaches the others.",
            GLOO_PAGE,
        )
    group = dist.group.WORLD
    assert group is not None
    transport = GroupTransport(group)
    try:
        return measured(ranks, transport, CPU, time.time)
    finally:
        transport.close()
        del group
        group_end.destroy()
