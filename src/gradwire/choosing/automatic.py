"""`auto`: which method a run takes by what it has measured itself. Asking ranks, and changing, is the session's part.

auto              the same as auto:safe
auto:lossless     what may be lost, see `ACCURACIES`
auto:safe
auto:bold
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from gradwire.choosing.accuracy import allowed
from gradwire.choosing.forecast import Demand, Forecast, PlanMessages
from gradwire.choosing.rules import NEAR, runner_up_of
from gradwire.core.errors import SpecError
from gradwire.core.figures import milliseconds
from gradwire.core.grammar import name_of, read
from gradwire.core.link import Link
from gradwire.drivers.contention import Contention

AUTO = "auto"

GAIN = 0.9
"""A method is left for one whose step is predicted to take so many times its own, or less: a change costs a step or
two, and a link that changes to and fro would cost them again and again."""


def accuracy_of(method: object) -> str | None:
    """Return the class of accuracy that an `auto` has; None where `method` is another one.

    Raises:
        SpecError: another class, or options, which `auto` has none of.

    >>> accuracy_of("auto"), accuracy_of("auto:bold"), accuracy_of("int4")
    ('safe', 'bold', None)
    """
    if not isinstance(method, str) or name_of(method) != AUTO:
        return None
    part, *others = read(method)
    options = [name for name in part.options if name != "accuracy"]
    if others or options or (part.value is not None and part.options):
        raise SpecError(
            f"{method!r} says more than what may be lost: write auto, auto:lossless, auto:safe or auto:bold"
        )
    accuracy = part.value or part.options.get("accuracy", "safe")
    allowed(accuracy)
    return accuracy


class StepPace(NamedTuple):
    """What a rank has measured of its own steps, in seconds.

    Attributes:
        compute_s: a step without what communication added at its end. Where gradients are sent during the backward
            pass, coding and serving the network are in it.
        backward: the share of it in which gradients become ready one after the other; 0 where they are sent at its end.
        coding_s: of each candidate, by a rank that has its cores for itself.
        exposed_s: what communication added to a step under the method at hand.
        worked_s: of a processor that the thread of the training loop had in a step. Coding and messages are the work of
            other threads.
        crowding: how many times longer coding takes where all ranks code (`Processors.crowding`).
    """

    compute_s: float
    backward: float
    coding_s: tuple[float, ...]
    exposed_s: float = 0.0
    worked_s: float = 0.0
    crowding: float = 1.0

    @classmethod
    def slowest(cls, paces: Sequence[StepPace]) -> StepPace:
        """Return the pace that all ranks keep: the steps of the rank that computes longest, and the longest coding.

        >>> StepPace.slowest([StepPace(1.0, 0.5, (0.1,)), StepPace(2.0, 0.25, (0.0,))])
        StepPace(compute_s=2.0, backward=0.25, coding_s=(0.1,), exposed_s=0.0, worked_s=0.0, crowding=1.0)
        """
        coding_s = tuple(map(max, zip(*(pace.coding_s for pace in paces), strict=True)))
        slow = max(paces, key=lambda pace: pace.compute_s)
        return slow._replace(coding_s=coding_s)

    def alone(self, held: Demand) -> tuple[float, float]:
        """Return what a step computes without coding and serving the network, and which share of that is its pass.

        What of the messages is not exposed has travelled during the pass. What all methods ask for alike, such as DDP's
        own copies, is left in, so predictions of other methods have it too.

        Where ranks share cores, some wait for the link while others compute, and more so the longer messages take. A
        method that sends less has them compute at the same time. So what counts there is crowding * worked, if that is
        more.

        Args:
            held: what the method asks for under which this was measured.

        >>> held = Demand("none", 0.1, 0.4, (1,), work_s=0.2)
        >>> pace = StepPace(1.0, 0.5, (0.0,), exposed_s=0.3, worked_s=0.9)
        >>> [round(part, 3) for part in pace.alone(held)]  # a quarter is hidden
        [0.85, 0.412]
        >>> round(pace._replace(crowding=2.0).alone(held)[0], 3)
        1.8
        """
        hidden = max(1 - self.exposed_s / held.sending_s, 0.0) if held.sending_s else 0.0
        beside_s = held.coding_s + hidden * held.served_s if self.backward else 0.0
        compute_s = max(self.compute_s - beside_s, self.compute_s / 2)
        share = min(max(self.backward * self.compute_s - beside_s, 0.0) / compute_s, 1.0)
        if self.crowding > 1:
            compute_s = max(compute_s, self.crowding * self.worked_s)
        return compute_s, share


class Chosen(NamedTuple):
    """A method that a run has taken.

    Attributes:
        step: from which on.
        spec: the method.
        why: in a sentence.
        runner_up: what would have been taken in its place, and its step; empty where there is no other.
    """

    step: int
    spec: str
    why: str
    runner_up: str = ""


def demands_of(
    messages: Mapping[str, PlanMessages],
    link: Link,
    pace: StepPace,
    beside: Contention | None = None,
) -> tuple[Demand, ...]:
    """Return what each candidate asks of the processors and of the link, in order.

    Args:
        messages: of each candidate, by its spec.
        link: what a message and a byte cost in time.
        beside: what messages and computing take from each other.
        pace: of the slowest rank.
    """
    return tuple(
        sent.demand(spec, link, coding_s=pace.crowding * coding_s, beside=beside)
        for (spec, sent), coding_s in zip(messages.items(), pace.coding_s, strict=True)
    )


def decide(demands: Sequence[Demand], pace: StepPace, step: int, now: str) -> Chosen:
    """Return the method to go on with.

    That is the first whose predicted step is nearly the shortest (`NEAR`) and worth a change, or the method at hand
    where there is none. One that loses more is worth it if its step is a tenth shorter than that of the method at hand
    (`GAIN`), and one that loses less if the step at hand is not near to its own. All ranks decide alike by equal
    arguments.

    Args:
        demands: of the candidates, in the order in which they lose more.
        pace: of the slowest rank.
        step: the next one.
        now: the method at hand, which is one of the candidates.

    >>> none, int4 = Demand("none", 0.0, 2.0, (1, 1)), Demand("int4", 0.1, 0.3, (1, 1))
    >>> decide([none, int4], StepPace(1.0, 0.5, (0.0, 0.1)), 10, "none").spec
    'int4'
    >>> print(decide([none, int4], StepPace(100.0, 0.5, (0.0, 0.1)), 10, "none").why)
    its step takes 101,000 ms: 100,000 computing, 0.0 coding, 2,000 sending, of which 1,000 are hidden
    """
    alone = pace.alone(next(each for each in demands if each.spec == now))
    forecasts = [each.beside(*alone) for each in demands]
    shortest_s = min(each.step_s for each in forecasts)
    at_hand = next(i for i, each in enumerate(forecasts) if each.spec == now)
    best = held = forecasts[at_hand]
    for i, each in enumerate(forecasts):
        gain = 1 / NEAR if i < at_hand else GAIN
        if each.step_s <= NEAR * shortest_s and (each is held or each.step_s <= gain * held.step_s):
            best = each
            break
    other = runner_up_of(forecasts, best)
    runner_up = f"{other.spec}, with {milliseconds(1e3 * other.step_s)} ms a step" if other else ""
    return Chosen(step, best.spec, _why(best), runner_up)


def _why(found: Forecast) -> str:
    whole, computing, coding, serving, sending, hidden = (
        milliseconds(1e3 * seconds)
        for seconds in (
            found.step_s,
            found.compute_s,
            found.coding_s,
            found.serving_s,
            found.sending_s,
            found.hidden_s,
        )
    )
    served = f" {serving} serving the network," if found.serving_s else ""
    return (
        f"its step takes {whole} ms: {computing} computing, {coding} coding,{served} {sending} sending, of which "
        f"{hidden} are hidden"
    )
