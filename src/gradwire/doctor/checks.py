"""All checks of one process and its host, in one table."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from gradwire.doctor import check_host, check_network, check_variables
from gradwire.doctor.facts import Facts
from gradwire.doctor.finding import Outcome

Check = Callable[[Facts], Iterator[Outcome]]

HOST_CHECKS: tuple[Check, ...] = (
    check_host.versions,
    check_host.devices,
    check_host.nvlinks,
    check_host.peer_to_peer_off,
    check_host.limits,
    check_host.launcher,
    check_network.interface_names,
    check_network.gloo_on_the_loopback,
    check_network.chosen_interface,
    check_network.infiniband_left_out,
    check_network.rdma_ports,
    check_network.ethernet_rates,
    check_network.rdma_near_gpus,
    check_network.meeting_point,
    check_variables.unknown_variables,
    check_variables.misread_values,
    check_variables.old_variables,
    check_variables.contradictions,
    check_variables.debugging_left_on,
    check_variables.file_against_environment,
    check_variables.missing_files,
)
"""Each looks at the facts of one process, and yields what it finds."""


def host_outcomes(facts: Facts) -> Iterator[Outcome]:
    """What all checks of one process find, each with the host and the rank that it is of.

    >>> from gradwire.topology import Host, HostIdentity
    >>> facts = Facts(Host(HostIdentity("a")), environment={"NCCL_ALGO": "AUTO"})
    >>> [each.what for each in host_outcomes(facts) if each.check == "variables"]
    ["NCCL_ALGO=AUTO makes NCCL 2.24 and later fail, and older ones ignore it: there is no 'AUTO'"]
    """
    ranks = () if facts.rank is None else (facts.rank,)
    for check in HOST_CHECKS:
        for each in check(facts):
            yield replace(each, hosts=(facts.name,), ranks=ranks)
