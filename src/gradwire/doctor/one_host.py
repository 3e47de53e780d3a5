"""The examination of this host alone."""

from __future__ import annotations

from dataclasses import replace

from gradwire.doctor.checks import host_outcomes
from gradwire.doctor.facts import Facts
from gradwire.doctor.finding import Examination
from gradwire.doctor.reading import probed, read_facts
from gradwire.doctor.seen import seen


def examine_host(facts: Facts | None = None) -> Examination:
    """Check the settings of this process and its host: versions, devices, links, interfaces, limits, variables.

    Nothing is sent, but for one attempt to connect where MASTER_ADDR and MASTER_PORT say where ranks meet.

    Args:
        facts: what to look at; None reads what is here.

    >>> from gradwire.topology import Host, HostIdentity
    >>> facts = Facts(Host(HostIdentity("a")), environment={"NCCL_IB_DISABLE": "true"})
    >>> print(examine_host(facts).findings[-1].text())  # doctest: +ELLIPSIS
    NOTE     numba is not installed, so kernels for CPUs run in plain PyTorch, several times slower
    ...
    """
    if facts is None:
        facts = read_facts()
        if facts.meeting is not None:
            facts = replace(facts, meeting=probed(facts.meeting, facts.rank))
    return replace(Examination.of(host_outcomes(facts), f"host {facts.name}"), seen=seen(facts))
