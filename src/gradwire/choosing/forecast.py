"""How long a step takes under a method: computing, coding, and the messages that the backward pass does not hide."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from gradwire.core.link import Link
from gradwire.drivers.contention import Contention
from gradwire.drivers.cost import Parameters, require_world, specs_of
from gradwire.drivers.parts import PartPlan
from gradwire.drivers.plan import Plan, plan
from gradwire.drivers.timing import Links, waves_s
from gradwire.reducers.base import Reducer
from gradwire.reducers.step import PAST_WARM_UPS
from gradwire.spec import as_method

BACKWARD = 2 / 3
"""Share of a step's computing that is the backward pass, which multiplies twice where the forward pass does once."""

SETTLES = 20
"""Rounds after which the length of a backward pass that also serves the network is known well enough."""


class Forecast(NamedTuple):
    """What a step is predicted to take, in seconds.

    Attributes:
        spec: the method.
        compute_s: a step that neither codes nor sends.
        coding_s: encoding, decoding and summing of one rank.
        sending_s: the messages of a step, one after the other.
        hidden_s: of these, what travels while the backward pass goes on.
        serving_s: what the processors that compute work for the network meanwhile.

    >>> found = Forecast("int4", compute_s=0.10, coding_s=0.01, sending_s=0.04, hidden_s=0.03, serving_s=0.02)
    >>> round(found.step_s, 3), round(found.exposed_s, 3)
    (0.14, 0.01)
    """

    spec: str
    compute_s: float
    coding_s: float
    sending_s: float
    hidden_s: float
    serving_s: float = 0.0

    @property
    def exposed_s(self) -> float:
        """Seconds of sending that lengthen the step."""
        return self.sending_s - self.hidden_s

    @property
    def step_s(self) -> float:
        """compute_s + coding_s + serving_s + exposed_s."""
        return self.compute_s + self.coding_s + self.serving_s + self.exposed_s


class Demand(NamedTuple):
    """What a method asks of the processor and of the link in a step, whatever else the step does.

    Attributes:
        spec: the method.
        coding_s: encoding, decoding and summing of one rank.
        sending_s: the messages of a step, one after the other.
        waves: elements of each wave of gradients, in the order in which they become ready.
        work_s: computing that sending takes away where all of it is beside computing; next to none on a spare core.
        busy_s: what the messages take where all of them travel while the ranks compute; counts as `sending_s` at least.
    """

    spec: str
    coding_s: float
    sending_s: float
    waves: tuple[int, ...]
    work_s: float = 0.0
    busy_s: float = 0.0

    @property
    def served_s(self) -> float:
        """`work_s`, which is no more than the messages take."""
        return min(self.work_s, max(self.busy_s, self.sending_s))

    def contended(self, beside: Contention | None, priced: Callable[[Link], float]) -> Demand:
        """Return the same with what its messages and computing take from each other, if that is known.

        Args:
            beside: of a message.
            priced: the seconds of all messages of a step, by those of one.
        """
        return self if beside is None else self._replace(work_s=priced(beside.work), busy_s=priced(beside.link))

    def beside(self, compute_s: float, backward: float = BACKWARD) -> Forecast:
        """Return the forecast of a step that computes so long.

        Gradients become ready evenly during the backward pass, which coding lengthens by all it takes, since on a CPU
        both want the same cores. A wave is sent once it is ready and the one before it is sent. So of W equal waves
        that take s each

            step = forward + max(backward + coding, the time at which W - 1 waves are sent) + s

        Without coding this is the model of Agarwal et al. (MLSys 2022) for PyTorch's DDP. Their model of compression,
        computing + coding + sending, hides nothing; here waves of a compressed gradient travel during the backward pass
        too.

        Where no core is spare, the processor that computes also copies what is sent and received, sums it up and runs
        the kernel's network stack. So messages take longer while it computes, busy_s in place of sending_s for all of
        them, and the backward pass is longer by

            serving = work_s * the share of the messages that travel during the pass

        Messages after the pass take what they take alone.

        Args:
            compute_s: a step that neither codes nor sends.
            backward: the share of it that is the backward pass.

        References:
            Agarwal et al., On the Utility of Gradient Compression in Distributed Training Systems, MLSys 2022.

        >>> Demand("none", 0.0, 4.0, (1, 1, 1, 1)).beside(3.0).step_s  # a forward pass of 1 s, one wave after 0.5 s
        5.5
        >>> Demand("none", 0.0, 0.4, (1, 1, 1, 1)).beside(3.0).step_s  # all waves but the last one are hidden
        3.1
        >>> Demand("int4", 0.5, 0.4, (1, 1, 1, 1)).beside(3.0).step_s
        3.6
        >>> round(Demand("int4", 0.5, 0.4, (1, 1, 1, 1), work_s=0.2).beside(3.0).step_s, 3)  # three quarters hidden
        3.75
        >>> Demand("none", 0.0, 4.0, (1, 1, 1, 1), busy_s=6.0).beside(3.0).step_s  # the first wave takes 1.5 s
        6.0
        """
        pass_s = backward * compute_s + self.coding_s
        sent = self._sent(pass_s)
        for _ in range(SETTLES if self.work_s else 0):  # a longer pass hides more, which lengthens it further
            sent = self._sent(pass_s + self.served_s * sent.during)
        serving_s, hidden_s = self.served_s * sent.during, self.sending_s - sent.after_s
        return Forecast(self.spec, compute_s, self.coding_s, self.sending_s, hidden_s, serving_s)

    def _sent(self, pass_s: float) -> _Sent:
        """How messages travel about a backward pass of so many seconds, in which waves become ready evenly."""
        total, ready, during, now_s = sum(self.waves), 0, 0.0, -pass_s
        for numel in self.waves:
            ready += numel
            share = numel / total
            busy_s, alone_s = share * max(self.busy_s, self.sending_s), share * self.sending_s
            now_s = max(now_s, pass_s * (ready / total - 1))
            inside_s = min(busy_s, max(-now_s, 0.0))
            done = inside_s / busy_s if busy_s else 1.0
            now_s += inside_s + (1 - done) * alone_s
            during += done * share
        return _Sent(during, max(now_s, 0.0))


class _Sent(NamedTuple):
    """The share of messages that travel during the pass, and the seconds that they take after it."""

    during: float
    after_s: float


def demand(
    method: Reducer | str,
    model: Parameters,
    world_size: int,
    link: Link,
    links: Links | None = None,
    *,
    coding_s: float = 0.0,
    beside: Contention | None = None,
    step: int = PAST_WARM_UPS,
    grain_numel: int | None = None,
) -> Demand:
    """Return what a method asks of the processor and the link in a step of a model.

    Args:
        method: a reducer, or a spec.
        model: whose gradients, as in `gradwire.cost`.
        world_size: ranks.
        link: of every rank to every other.
        links: of those axes that have another, such as a fast one inside nodes; `beside` knows none of them.
        coding_s: what it codes in a step, as `gradwire.choosing.coding_s` measures it.
        beside: what messages and computing take from each other (`gradwire.drivers.contention`); None: nothing.
        step: which.
        grain_numel: as in `gradwire.attach`.

    Raises:
        SpecError, CompositionError: a method that cannot be built, or that needs more ranks; no model.

    >>> import torch
    >>> found = demand("none", torch.nn.Linear(1000, 1000), 2, Link(0.0, 1e-6))
    >>> round(found.sending_s, 2), len(found.waves)
    (4.0, 9)
    """
    reducer, specs = as_method(method), specs_of(model)
    require_world(reducer, world_size)
    planned = plan(specs, reducer, grain_numel)
    return plan_demand(str(method), planned, world_size, link, links, coding_s=coding_s, beside=beside, step=step)


def plan_demand(
    spec: str,
    planned: Plan,
    world_size: int,
    link: Link,
    links: Links | None = None,
    *,
    coding_s: float = 0.0,
    beside: Contention | None = None,
    step: int = PAST_WARM_UPS,
) -> Demand:
    """Return the same for grains that are planned already, those of a sharded model for instance.

    Args:
        spec: the method.
        planned: by which its gradients travel.
        world_size, link, links, coding_s, beside, step: as of `demand`.
    """
    found = Demand(spec, coding_s, waves_s(planned, world_size, link, links, step), _elements(planned))
    return found.contended(beside, lambda each: waves_s(planned, world_size, each, step=step))


class PlanMessages(NamedTuple):
    """What the messages of a step are, on any link that all ranks have alike.

    Finding it out runs the program of every rank, and pricing it on another link is a multiplication. That holds where
    all ranks send alike, as under all that `auto` may choose; of trees the longest way would depend on the link.

    Attributes:
        rounds: messages that follow each other.
        nbytes: of all of them together.
        waves: as of `Demand`.

    >>> from gradwire.drivers.plan import plan
    >>> import torch
    >>> planned = plan(specs_of(torch.nn.Linear(60, 50)), as_method("none"))
    >>> messages = PlanMessages.of(planned, 2)
    >>> messages.rounds, messages.nbytes, 4 * 61 * 50
    (2.0, 12200.0, 12200)
    """

    rounds: float
    nbytes: float
    waves: tuple[int, ...]

    @classmethod
    def of(cls, planned: Plan, world_size: int) -> PlanMessages:
        """Return those of a plan whose collectives join all ranks."""
        rounds, nbytes = (waves_s(planned, world_size, link, step=PAST_WARM_UPS) for link in (_ROUND, _BYTE))
        return cls(rounds, nbytes, _elements(planned))

    def demand(self, spec: str, link: Link, *, coding_s: float = 0.0, beside: Contention | None = None) -> Demand:
        """Return what a method asks for that sends them; arguments are those of `demand`."""
        found = Demand(spec, coding_s, link.seconds(self.nbytes, self.rounds), self.waves)
        return found.contended(beside, lambda each: each.seconds(self.nbytes, self.rounds))


_ROUND, _BYTE = Link(1.0, 0.0), Link(0.0, 1.0)
"""Links on which time is a number of messages, and a number of bytes."""


def _elements(planned: Plan) -> tuple[int, ...]:
    """Elements of each wave that is sent while the backward pass goes on."""
    waves = tuple(sum(unit.grain.numel for unit in wave) for wave in planned.waves)
    # A part ends before the backward pass goes on, so next to nothing is hidden.
    return (sum(waves),) if isinstance(planned, PartPlan) else waves
