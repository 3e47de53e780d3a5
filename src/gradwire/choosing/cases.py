"""Cases that the link does not decide: layouts, and ranks that are slow."""

from __future__ import annotations

from typing import NamedTuple

from gradwire.choosing.accuracy import allows
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
        accuracy: the most careful class that allows it.
        stricter: what methods of a stricter class do in this case, where none of them is listed for it.
    """

    layout: str | None
    slow: str | None
    take: str
    why: str
    page: str
    accuracy: str = "bold"
    stricter: str = ""

    @property
    def call(self) -> str:
        """What to write."""
        return self.take if "(" in self.take else call_of(self.take)

    def why_in(self, accuracy: str) -> str:
        """Why it is taken where a class was asked for, which need not allow it."""
        if allows(accuracy, self.accuracy):
            return self.why
        return f"{self.why}. It needs --accuracy {self.accuracy}: methods that {accuracy} allows {self.stricter}"


CASES = (
    FixedCase(
        "clients", None, "fedavg",
        "a federation: a server asks some clients a round, and each sends one update",
        "federated.md",
        stricter="want all clients in each step, which no federation has",
    ),
    FixedCase(
        "leaving", None, "elastic:50,update=int4",
        "models are averaged every few steps among whoever is there, and a machine that is gone holds nobody up",
        "elastic.md",
        stricter="stop when a machine comes or goes, and are started again from a save",
    ),
    FixedCase(
        None, "one", "asgd",
        "ranks push gradients and do not wait: digits came to its loss in 1.3 s, where DDP took 4.9 beside a rank "
        "that is four times slower",
        "slow_hosts.md",
        stricter="have each step wait for the slow rank",
    ),
    FixedCase(
        None, "any", "ssp:4",
        "ranks may be four pushes apart, so one that is late for a while holds nobody up",
        "slow_hosts.md",
        stricter="have each step wait for the rank that is slowest in it",
    ),
    FixedCase(
        "sites", None, "local:H=2,last=8,double_after=50,outer=topk:0.05+int4,delay=1,merge=progress",
        "models are averaged every few steps while training goes on",
        "sync.md",
        stricter="send gradients over the slow line in each step, and gradwire choose without --layout predicts how "
        "long that takes",
    ),
    FixedCase(
        "fsdp2", None, 'gradwire.attach(model, "int4,parameters=int8")',
        "gradients are scattered in 4 bits and parameters gathered in 8",
        "fsdp2.md",
    ),
    FixedCase(
        "fsdp2", None, 'gradwire.attach(model, "int4")',
        "gradients are scattered in 4 bits and parameters gathered as they are",
        "fsdp2.md", "safe",
    ),
    FixedCase(
        "fsdp2", None, 'gradwire.attach(model, "none")',
        "nothing is compressed: on Gloo it sends a quarter less than FSDP2 alone, and over NCCL FSDP2 alone will do",
        "fsdp2.md", "lossless",
    ),
)  # fmt: skip
"""The first that fits is taken, or of those for the same case the first that the class of accuracy allows. Where none
fits, ranks have the whole model each and the link decides."""


def fixed_case(layout: str, slow: str, accuracy: str) -> FixedCase | None:
    """Return what to take in a case; None where the link decides.

    Where the class of accuracy allows nothing that is listed for the case, it is what another class allows.

    >>> for accuracy in ("lossless", "safe", "bold"):
    ...     print(fixed_case("fsdp2", "never", accuracy).call)
    gradwire.attach(model, "none")
    gradwire.attach(model, "int4")
    gradwire.attach(model, "int4,parameters=int8")
    """
    fitting = [fixed for fixed in CASES if fixed.layout in (None, layout) and fixed.slow in (None, slow)]
    if not fitting:
        return None
    first = fitting[0]
    alike = (fixed for fixed in fitting if (fixed.layout, fixed.slow) == (first.layout, first.slow))
    return next((fixed for fixed in alike if allows(accuracy, fixed.accuracy)), first)


def call_of(spec: str) -> str:
    """Return the call that takes a spec.

    >>> call_of("int4")
    'gradwire.attach(ddp, "int4")'
    """
    return table()[name_of(spec)].place.call_of(spec)
