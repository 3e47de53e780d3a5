"""Which method, for which link, model, layout and slow ranks; and when it is better to use none.

`gradwire methods --for` and docs/choosing.md show it. Times on the link are those of `gradwire.drivers.timing`: exact
bytes at the link's rate, with nothing hidden behind computation and without coding. What methods lose is what the
catalogue says of them, where it was measured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from gradwire.catalogue import Recommended, entry
from gradwire.core.errors import SpecError
from gradwire.core.figures import milliseconds, si_bits_per_s, significant
from gradwire.core.grain import ParameterSpec
from gradwire.core.grammar import name_of
from gradwire.core.link import Link
from gradwire.core.registry import table
from gradwire.drivers.timing import step_s

__all__ = [
    "CASES",
    "LAYOUTS",
    "NEAR",
    "SLOW",
    "Case",
    "FixedCase",
    "Timed",
    "Training",
    "boundaries",
    "choose",
    "square_matrices",
]

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

NEAR = 1.25
"""A step may take so many times the shortest one, for a method that loses less: runs differ by as much."""
SHARE = 0.1
"""What messages may take of a step in the mean of a window, which is made as long as that."""
LONGEST = 100
"""Steps of a window at most: longer ones were not measured."""
LATENCY_S = 1e-4
"""What a message takes besides its bytes where no delay is told, as in `gradwire cost`; less on links of which 100 kB
take less."""
BUCKET = 25 * 2**20 // 4
"""Elements that DistributedDataParallel sends at once."""
MEASURED = 1 << 26
"""Parameters that are timed at most: messages of a larger model are more of the same."""


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
        return self.take if "(" in self.take else _call(self.take)


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


@dataclass(frozen=True)
class Case:
    """What is to be trained, and where.

    Attributes:
        rate: of each rank's link, in bits a second.
        delay_s: of a round trip.
        parameters: of the model.
        ranks: how many.
        step_s: what a step takes without communication; None where nobody knows.
        layout: one of `LAYOUTS`.
        slow: one of `SLOW`.

    Raises:
        SpecError: numbers that make no sense, or another word.

    >>> Case(rate=1e8, parameters=10**6).says
    '4 ranks, 1 M parameters, 100 Mbit/s'
    """

    rate: float
    delay_s: float = 0.0
    parameters: int = 100_000_000
    ranks: int = 4
    step_s: float | None = None
    layout: str = "ddp"
    slow: str = "never"

    def __post_init__(self) -> None:
        for word, known in ((self.layout, LAYOUTS), (self.slow, SLOW)):
            if word not in known:
                raise SpecError(f"{word!r} is none of {', '.join(known)}")
        if not self.rate > 0 or not self.delay_s >= 0:
            raise SpecError("a link has a rate above 0 and a delay of 0 or more")
        if self.parameters < 1 or self.ranks < 2:
            raise SpecError("communication needs 2 ranks and a parameter at least")
        if self.step_s is not None and not 0 < self.step_s < math.inf:
            raise SpecError(f"a step without communication takes some time, not {self.step_s} s")

    @property
    def says(self) -> str:
        """The case in words."""
        found = [f"{self.ranks} ranks", f"{_count(self.parameters)} parameters", si_bits_per_s(self.rate)]
        found += [f"a round trip of {milliseconds(1e3 * self.delay_s)} ms"] if self.delay_s else []
        found += [f"{milliseconds(1e3 * self.step_s)} ms of computing a step"] if self.step_s is not None else []
        return ", ".join(found)


class Timed(NamedTuple):
    """A method on the link of a case.

    Attributes:
        spec: the method.
        link_s: seconds of communication a step, in the mean of a window where there are windows.
        loses: what it ended at where it was measured.
    """

    spec: str
    link_s: float
    loses: str


class Training(NamedTuple):
    """What to do in a case.

    Attributes:
        case: which.
        take: the method; None where it is better to use PyTorch alone, or where that depends on the step's time.
        call: what to write.
        why: in one sentence or two.
        page: of docs, where it goes on.
        timed: methods on the link, in the order in which they send less; none where the link does not decide.
    """

    case: Case
    take: str | None
    call: str
    why: str
    page: str
    timed: tuple[Timed, ...] = ()


def choose(case: Case) -> Training:
    """Say which method serves a case, with which figures.

    Where ranks have the whole model each and none of them is slow, the methods are fp32, fp16, int4, PowerSGD and
    windows, each of which loses more and sends less than the one before. Taken is the first one whose step is at most
    a quarter longer than the shortest of all, as if nothing were hidden behind computation.

    >>> choose(Case(rate=2e12, parameters=10**8, step_s=0.2)).take is None  # four GPUs in one box
    True
    >>> choose(Case(rate=1e9, parameters=10**7, step_s=0.5)).take
    'int4'
    >>> choose(Case(rate=1e8, layout="fsdp2")).call
    'gradwire.attach(model, "int4,parameters=int8")'
    """
    for fixed in CASES:
        if fixed.layout in (None, case.layout) and fixed.slow in (None, case.slow):
            return Training(case, fixed.take, fixed.call, fixed.why, fixed.page)
    every_step = _timed(case)
    if case.step_s is None:
        return Training(case, None, "", _by_step_time(case), "compare.md", every_step)
    timed = (*every_step, _windows(every_step, case.step_s))
    best, fp32 = _best(timed, case.step_s), timed[0]
    whole, alone = case.step_s + best.link_s, case.step_s + fp32.link_s
    if best is fp32:
        why = (
            f"Gradients in fp32 take {_share(fp32.link_s, alone)} of a step if nothing of that is hidden, and "
            "DistributedDataParallel hides most of it: no method is worth what it loses."
        )
        return Training(case, None, "", why, "choosing.md", timed)
    why = (
        f"A step takes {_text(whole)} in place of {_text(alone)}, and {_share(best.link_s, whole)} of it is "
        "communication, if nothing is hidden behind computation and coding takes no time."
    )
    if best is timed[-1]:
        why += " The longer a window, the more it can cost in accuracy: compare some."
    return Training(case, best.spec, _call(best.spec), why, "sync.md" if best is timed[-1] else "attach.md", timed)


def _best(timed: Sequence[Timed], busy_s: float) -> Timed:
    """The first method whose step is nearly as short as the shortest one."""
    shortest = busy_s + min(found.link_s for found in timed)
    return next(found for found in timed if busy_s + found.link_s <= NEAR * shortest)


def _timed(case: Case) -> tuple[Timed, ...]:
    """Methods of every step, in the order in which they lose more and send less."""
    powersgd = "powersgd:8,factors=fp16"
    return (
        Timed("none", _seconds("none", case, BUCKET), "fp32 as it is"),
        Timed("fp16", _seconds("fp16", case, BUCKET), "byte-GPT: the same held-out loss as fp32, 2.599"),
        Timed("int4", _seconds("int4", case), _loses("int4")),
        Timed(powersgd, _seconds(powersgd, case), _loses("powersgd")),
    )


def _windows(every_step: Sequence[Timed], busy_s: float) -> Timed:
    """Models that are averaged in 4 bits, so seldom that it takes a tenth of a step in the mean."""
    (int4,) = (found.link_s for found in every_step if found.spec == "int4")
    window = min(LONGEST, max(2, math.ceil(int4 / (SHARE * busy_s))))
    return Timed(f"local:{window},outer=int4", int4 / window, f"with other settings: {_loses('local')}")


def _loses(name: str) -> str:
    """What the catalogue says that a method ended at."""
    use = entry(name).use
    assert isinstance(use, Recommended)
    return use.cost


def _seconds(spec: str, case: Case, grain_numel: int | None = None) -> float:
    """Seconds of communication a step."""
    beta = 8 / case.rate
    link = Link(max(case.delay_s / 2, min(LATENCY_S, 1e5 * beta)), beta)
    timed = min(case.parameters, MEASURED)
    seconds = step_s(spec, square_matrices(timed), case.ranks, link, step=10**6, grain_numel=grain_numel)
    return seconds * case.parameters / timed


def square_matrices(parameters: int) -> Sequence[ParameterSpec]:
    """A model of square matrices of one size, as most of a transformer is.

    >>> sum(matrix.numel for matrix in square_matrices(10**6))
    998784
    """
    side = min(4096, max(1, math.isqrt(parameters // 24 or 1)))
    count = max(1, round(parameters / side**2))
    meta = torch.device("meta")
    return [ParameterSpec(f"layer{i}.weight", (side, side), torch.float32, meta) for i in range(count)]


def boundaries(case: Case) -> dict[str, float]:
    """Return, for each method that is taken for some step, the seconds of computing from which on that is so.

    From the method of the longest steps to that of the shortest ones; the last one has no lower end.

    >>> list(boundaries(Case(rate=1e9, parameters=10**7)))
    ['none', 'fp16', 'int4', 'powersgd:8,factors=fp16', 'windows']
    """
    every_step = _timed(case)
    found: dict[str, float] = {}
    for busy_s in (10 ** (power / 20) for power in range(80, -80, -1)):  # 10,000 s to 0.1 ms
        best = _best((*every_step, _windows(every_step, busy_s)), busy_s).spec
        found["windows" if best.startswith("local") else best] = busy_s
    return found


def _by_step_time(case: Case) -> str:
    """Which method is best for which step, where nobody knows how long one takes."""
    found = boundaries(case)
    *most, last = found
    said = ", ".join(f"{'PyTorch alone' if name == 'none' else name} down to {_text(found[name])}" for name in most)
    return f"What is best depends on how long a step computes: {said}; {last} below. Tell it, and one is chosen."


def _call(spec: str) -> str:
    return table()[name_of(spec)].place.call_of(spec)


def _share(part_s: float, whole_s: float) -> str:
    return f"{significant(100 * part_s / whole_s, 2)} %"


def _text(seconds: float) -> str:
    return f"{significant(seconds, 3)} s" if seconds >= 1 else f"{significant(1e3 * seconds, 2)} ms"


def _count(parameters: int) -> str:
    for unit, size in (("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if parameters >= size:
            return f"{parameters / size:.3g} {unit}"
    return str(parameters)
