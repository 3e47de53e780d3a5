"""Cases that the link does not decide: layouts, and ranks that are slow."""

from __future__ import annotations

from typing import NamedTuple

from gradwire.core.grammar import name_of
from gradwire.core.registry import table

LAYOUTS = {
    "ddp": "every rank has the whole model and all are in one place",
    "fsdp2": "the model is sharded by fully_shard",
    "sites": "groups of ranks with a slow line between them",
    "leaving": "machines that come and go",
    "clients": "many devices that are seldom there",
}
"""How training is laid out."""

SLOW = {
    "never": "all ranks are about as fast",
    "one": "the same rank is always slower",
    "any": "ranks are slower in turn",
}
"""Who is slow."""


DEVICES = {
    "cpu": "gradients lie in the memory of processors",
    "cuda": "gradients lie on GPUs",
}
"""What a rank computes on."""


class FixedCase(NamedTuple):
    """What to take in a case that is not decided by the link.

    Attributes:
        layout, slow: the case; None for any.
        take: a spec, or a call in Python.
        why: what it does about the case, and what was measured.
        page: of docs.
    """

    layout: str | None
    slow: str | None
    take: str
    why: str
    page: str

    @property
    def call(self) -> str:
        """What to write."""
        return self.take if "(" in self.take else call_of(self.take)


CASES = (
    FixedCase(
        "clients", None, "fedavg",
        "a federation: a server asks some clients a round, and each sends one update",
        "federated.md",
    ),
    FixedCase(
        "leaving", None, "elastic:50,update=int4",
        "models are averaged every few steps among whoever is there, and a machine that is gone holds nobody up",
        "elastic.md",
    ),
    FixedCase(
        None, "one", "asgd",
        "ranks push gradients and do not wait: digits came to its loss in 1.2 s, where DDP took 4.9 beside a rank "
        "that is four times slower",
        "slow_hosts.md",
    ),
    FixedCase(
        None, "any", "ssp:4",
        "ranks may be four pushes apart, so one that is late for a while holds nobody up",
        "slow_hosts.md",
    ),
    FixedCase(
        "sites", None, "local:H=2,last=8,double_after=50,outer=topk:0.05+int4,delay=1,merge=progress",
        "models are averaged every few steps while training goes on",
        "sync.md",
    ),
    FixedCase(
        "fsdp2", None, 'gradwire.attach(model, "int4,parameters=int8")',
        "gradients are scattered in 4 bits and parameters gathered in 8",
        "fsdp2.md",
    ),
)  # fmt: skip
"""The first that fits is taken. Where none fits, ranks have the whole model each and the link decides."""


def call_of(spec: str) -> str:
    """Return the call that takes a spec.

    >>> call_of("int4")
    'gradwire.attach(ddp, "int4")'
    """
    return table()[name_of(spec)].place.call_of(spec)
