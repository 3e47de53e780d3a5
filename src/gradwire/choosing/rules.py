"""Which method to take in a case: the first of those that may be chosen whose step is nearly the shortest."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from gradwire.choosing.accuracy import CANDIDATES, Candidate, allowed, ended_at
from gradwire.choosing.cases import DEVICES, LAYOUTS, SLOW, call_of, fixed_case
from gradwire.choosing.forecast import Demand, Forecast, demand
from gradwire.core.errors import SpecError
from gradwire.core.figures import milliseconds, si_bits_per_s, significant
from gradwire.core.grain import ParameterSpec
from gradwire.core.link import Link
from gradwire.core.rates import count_in, shortened
from gradwire.drivers.cost import Parameters, specs_of, specs_on
from gradwire.drivers.plan import is_on_gpu

NEAR = 1.05
"""A step may take so many times the shortest one, for a method that loses less: forecasts do not tell nearer steps
apart, and neither do reports of runs."""
SHARE = 0.1
"""What messages may take of a step in the mean of a window, which is made as long as that."""
LONGEST = 100
"""Steps of a window at most: longer ones were not measured."""
LATENCY_S = 1e-4
"""What a message takes besides its bytes where no delay is told, as in `gradwire cost`; less on links of which 100 kB
take less."""
BUCKET = 25 * 2**20 // 4
"""Elements that DistributedDataParallel sends at once."""
MOST_PARAMETERS = 10**13
"""Beyond these a number is a slip of the keyboard."""
LARGEST = 1 << 33
"""Parameters that are planned at most: messages of a larger model are as many and larger."""

Coding = Callable[[str, Sequence[ParameterSpec], int], float]
"""Seconds that a method codes in a step: of a spec, of a model, among so many ranks."""


def no_coding(spec: str, model: Sequence[ParameterSpec], world_size: int) -> float:
    """Count no coding: for tables that no machine has measured."""
    return 0.0


@dataclass(frozen=True)
class Case:
    """What is to be trained, and where.

    Attributes:
        rate: of each rank's link, in bits a second.
        delay_s: of a round trip; None where nobody knows, which counts `LATENCY_S` a message.
        parameters: of the model.
        ranks: how many.
        step_s: what a step takes without communication; None where nobody knows.
        layout: one of `LAYOUTS`.
        slow: one of `SLOW`.
        accuracy: one of `ACCURACIES`.
        model: the very parameters; where there are none, square matrices of one size make up the model.
        device: one of `DEVICES`: on a GPU more is coded and sent at a time.

    Raises:
        SpecError: numbers that make no sense, or another word.

    >>> Case(rate=1e8, parameters=10**6).says
    '4 ranks, 1 M parameters, 100 Mbit/s'
    """

    rate: float
    delay_s: float | None = None
    parameters: int = 100_000_000
    ranks: int = 4
    step_s: float | None = None
    layout: str = "ddp"
    slow: str = "never"
    accuracy: str = "safe"
    model: tuple[ParameterSpec, ...] = ()
    device: str = "cpu"

    def __post_init__(self) -> None:
        for word, known in ((self.layout, LAYOUTS), (self.slow, SLOW), (self.device, DEVICES)):
            if word not in known:
                raise SpecError(f"{word!r} is none of {', '.join(known)}")
        allowed(self.accuracy)
        if not self.rate > 0 or not (self.delay_s is None or self.delay_s >= 0):
            raise SpecError("a link has a rate above 0 and a delay of 0 or more")
        if self.parameters < 1 or self.ranks < 2:
            raise SpecError("communication needs 2 ranks and a parameter at least")
        if self.step_s is not None and not 0 < self.step_s < math.inf:
            raise SpecError(f"a step without communication takes some time, not {self.step_s} s")

    @classmethod
    def of_model(cls, model: Parameters, **facts: Any) -> Case:
        """Return the case of a model that is at hand.

        Args:
            model: as in `gradwire.cost`.
            facts: the other attributes.

        >>> Case.of_model(torch.nn.Linear(9, 10), rate=1e8).parameters
        100
        """
        specs = tuple(specs_of(model))
        facts.setdefault("device", "cuda" if is_on_gpu(specs) else "cpu")
        return cls(parameters=sum(spec.numel for spec in specs), model=specs, **facts)

    @property
    def says(self) -> str:
        """The case in words."""
        found = [
            f"{self.ranks} ranks{' on GPUs' if self.device == 'cuda' else ''}",
            f"{_count(self.parameters)} parameters",
            si_bits_per_s(self.rate),
        ]
        found += [f"a round trip of {_text(self.delay_s)}"] if self.delay_s else []
        found += [f"{milliseconds(1e3 * self.step_s)} ms of computing a step"] if self.step_s is not None else []
        return ", ".join(found)


class Training(NamedTuple):
    """What to do in a case.

    Attributes:
        case: which.
        take: the method; None where it is better to use PyTorch alone, or where that depends on the step's time.
        call: what to write.
        why: in one sentence or two.
        page: of docs, where it goes on.
        forecasts: of the methods that may be chosen, in the order in which they send less; none where the link does not
            decide.
        runner_up: of those the best that is not taken; None where there is no other.
    """

    case: Case
    take: str | None
    call: str
    why: str
    page: str
    forecasts: tuple[Forecast, ...] = ()
    runner_up: Forecast | None = None


def choose(case: Case, coding: Coding = no_coding) -> Training:
    """Say which method serves a case, with which figures.

    Where ranks have the whole model each and none of them is slow, the methods are fp32, fp16, int4, PowerSGD and
    windows, each of which loses more and sends less than the one before, as far as the case's class of accuracy allows
    them. Taken is the first one whose step is predicted to be at most a twentieth longer than the shortest of all.

    Other cases are decided by `CASES`. Where the class allows nothing that is listed for a case, `why` says which class
    does, and what methods of the stricter one cost.

    Args:
        case: which.
        coding: how long a method codes, such as `gradwire.choosing.coding_s`, which measures it here.

    >>> choose(Case(rate=2e12, parameters=10**8, step_s=0.2)).take is None  # four GPUs in one box
    True
    >>> choose(Case(rate=1e9, parameters=10**7, step_s=0.1)).take
    'int4'
    >>> choose(Case(rate=1e8, layout="fsdp2", accuracy="bold")).call
    'gradwire.attach(model, "int4,parameters=int8")'
    """
    fixed = fixed_case(case.layout, case.slow, case.accuracy)
    if fixed is not None:
        return Training(case, fixed.take, fixed.call, fixed.why_in(case.accuracy), fixed.page)
    demands = _demands(case, coding)
    if case.step_s is None:
        forecasts = tuple(each.beside(0.0) for each in demands)
        return Training(case, None, "", _by_step_time(case, demands), "compare.md", forecasts)
    forecasts = _forecasts(case, demands, case.step_s)
    best, fp32 = best_of(forecasts), forecasts[0]
    runner_up = runner_up_of(forecasts, best)
    if best is fp32:
        why = (
            f"Sending gradients in fp32 adds {_share(fp32.exposed_s, fp32.step_s)} to a step, since the backward pass "
            f"hides {_text(fp32.hidden_s)} of it: no method that {case.accuracy} allows is worth what it loses."
        )
        return Training(case, None, "", why, "choosing.md", forecasts, runner_up)
    why = (
        f"A step takes {_text(best.step_s)} in place of {_text(fp32.step_s)}, and "
        f"{_share(best.exposed_s, best.step_s)} of it is sending that the backward pass does not hide."
    )
    windows = best.spec.startswith("local")
    if windows:
        why += " The longer a window, the more it can cost in accuracy: compare some."
    return Training(
        case, best.spec, call_of(best.spec), why, "sync.md" if windows else "attach.md", forecasts, runner_up
    )


def best_of(forecasts: Sequence[Forecast], near: float = NEAR) -> Forecast:
    """Return the first of the forecasts whose step is nearly as short as the shortest one.

    Args:
        forecasts: in the order in which methods lose more.
        near: how many times the shortest step it may take.

    >>> quick, slow = (Forecast(spec, 1.0, 0.0, sending_s, 0.0) for spec, sending_s in (("int4", 0.1), ("none", 0.12)))
    >>> best_of([slow, quick]).spec, best_of([slow, quick], near=1.0).spec
    ('none', 'int4')
    """
    shortest = min(found.step_s for found in forecasts)
    return next(found for found in forecasts if found.step_s <= near * shortest)


def runner_up_of(forecasts: Sequence[Forecast], taken: Forecast) -> Forecast | None:
    """Return what would be taken if the one that is taken could not be; None where there is no other."""
    others = [found for found in forecasts if found is not taken]
    return best_of(others) if others else None


def loses(spec: str) -> str:
    """Return what training ended at under a method that `choose` considers."""
    known = {candidate.spec: candidate for candidate in CANDIDATES}
    return known[spec].loses if spec in known else f"with other settings: {ended_at('local')}"


def _demands(case: Case, coding: Coding) -> tuple[Demand, ...]:
    """What the methods of every step ask for, in the order in which they lose more and send less."""
    return tuple(_demand(candidate, case, coding) for candidate in allowed(case.accuracy))


def _demand(candidate: Candidate, case: Case, coding: Coding) -> Demand:
    """What a method asks for in a step."""
    spec, beta = candidate.spec, 8 / case.rate
    link = Link(min(LATENCY_S, 1e5 * beta) if case.delay_s is None else case.delay_s / 2, beta)
    if spec == "none":
        return _in_buckets(case, link)
    model, times = _planned(case)
    coded_s = times * coding(spec, model, case.ranks)
    return demand(spec, model, case.ranks, Link(link.alpha_s, times * beta), coding_s=coded_s)


def _in_buckets(case: Case, link: Link) -> Demand:
    """What DistributedDataParallel asks for, which codes nothing: full buckets and the rest, each around a ring.

    A ring has 2 (n - 1) rounds, in which a rank sends 2 (n - 1)/n of the bytes.
    """
    full, rest = divmod(case.parameters, BUCKET)
    waves = (BUCKET,) * full + (rest,) * (rest > 0)
    nbytes = sum(each.numel * each.dtype.itemsize for each in case.model) or 4 * case.parameters
    rounds = 2 * (case.ranks - 1)
    return Demand("none", 0.0, link.seconds(nbytes * rounds / case.ranks, rounds * len(waves)), waves)


def _planned(case: Case) -> tuple[Sequence[ParameterSpec], float]:
    """The model of a case, or a part of it that can be planned, and how many times as large the model is."""
    model = case.model or square_matrices(min(case.parameters, LARGEST))
    return specs_on(case.device, model), case.parameters / sum(spec.numel for spec in model)


def _forecasts(case: Case, demands: Sequence[Demand], step_s: float) -> tuple[Forecast, ...]:
    """Of methods of every step, and of windows where the class of accuracy allows these."""
    every_step = tuple(each.beside(step_s) for each in demands)
    return every_step if case.accuracy != "bold" else (*every_step, _windows(every_step, step_s))


def _windows(every_step: Sequence[Forecast], compute_s: float) -> Forecast:
    """Models that are averaged in 4 bits, so seldom that it takes a tenth of a step in the mean; training waits."""
    (int4,) = (found for found in every_step if found.spec == "int4")
    added_s = int4.coding_s + int4.sending_s
    window = min(LONGEST, max(2, math.ceil(added_s / (SHARE * compute_s))))
    return Forecast(f"local:{window},outer=int4", compute_s, int4.coding_s / window, int4.sending_s / window, 0.0)


def square_matrices(parameters: int) -> Sequence[ParameterSpec]:
    """A model of square matrices of one size, as most of a transformer is.

    >>> sum(matrix.numel for matrix in square_matrices(10**6))
    998784
    """
    side = min(4096, max(1, math.isqrt(parameters // 24 or 1)))
    count = max(1, round(parameters / side**2))
    meta = torch.device("meta")
    return [ParameterSpec(f"layer{i}.weight", (side, side), torch.float32, meta) for i in range(count)]


def parameters_in(text: str) -> int:
    """Return how many parameters a text says.

    Raises:
        SpecError: it says none, or so many that no model has them.

    >>> parameters_in("1.85M"), parameters_in("7B")
    (1850000, 7000000000)
    """
    found = round(count_in(text) or 0)
    if not 1 <= found <= MOST_PARAMETERS:
        raise SpecError(f"--parameters {shortened(text)} is no number of parameters: write one such as 1.85M or 7B")
    return found


def boundaries(case: Case, coding: Coding = no_coding) -> dict[str, float]:
    """Return, for each method that is taken for some step, the seconds of computing from which on that is so.

    From the method of the longest steps to that of the shortest ones; the last one has no lower end.

    >>> list(boundaries(Case(rate=1e9, parameters=10**7, accuracy="bold")))
    ['none', 'fp16', 'int4', 'powersgd:8,factors=fp16', 'windows']
    """
    return _boundaries(case, _demands(case, coding))


def _boundaries(case: Case, demands: Sequence[Demand]) -> dict[str, float]:
    found: dict[str, float] = {}
    for compute_s in (10 ** (power / 20) for power in range(80, -80, -1)):  # 10,000 s to 0.1 ms
        best = best_of(_forecasts(case, demands, compute_s)).spec
        found["windows" if best.startswith("local") else best] = compute_s
    return found


def _by_step_time(case: Case, demands: Sequence[Demand]) -> str:
    """Which method is best for which step, where nobody knows how long one takes."""
    found = _boundaries(case, demands)
    *most, last = found
    said = ", ".join(f"{_called(name)} down to {_text(found[name])}" for name in most)
    least = f"{said}; {_called(last)} below" if most else f"{_called(last)} for any"
    return f"What is best depends on how long a step computes: {least}. Tell it, and one is chosen."


def _called(spec: str) -> str:
    return "PyTorch alone" if spec == "none" else spec


def _share(part_s: float, whole_s: float) -> str:
    return f"{significant(100 * part_s / whole_s, 2)} %"


def _text(seconds: float) -> str:
    return f"{significant(seconds, 3)} s" if seconds >= 1 else f"{significant(1e3 * seconds, 2)} ms"


def _count(parameters: int) -> str:
    for unit, size in (("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if parameters >= size:
            return f"{parameters / size:.3g} {unit}"
    return str(parameters)
