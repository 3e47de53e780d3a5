"""What workers agree on at the end of a window, as functions of a log: nothing here communicates.

The end of a window is a *round*. A round has a log in the store, to which workers append lines; the store gives all
lines one order, so whoever reads the same log concludes the same:

    came      a worker is here, with the global copy that it has. Lines after the first `closed` do not count.
    closed    the list is closed: those who came before it are the round's workers. It does not count before somebody
              has come who has the run's newest copy
    has       a trainer holds the whole mean (as a run is founded, the first model), and has changed nothing yet
    void      a worker gives up, since another one failed: does not count once all trainers have said `has`

A round in which every trainer said `has`, of the same mean, is *committed*: each survivor holds what it needs to go on.
A round that was given up before that is *void*: nobody has changed anything, and all come to the next round with what
they had. So no worker can have taken a mean that another one has not. A round's `Head` is what is known as it opens,
and follows from the round before. It names the newest copy, and only who has that one may train on: a worker that was
away meanwhile is handed the newest copy, however many others have an older one. Lines are JSON; nothing in them is
executed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from gradwire.sync.elastic.messages import (
    NO_COPY,
    AnyLine,
    Came,
    Closed,
    ExpectedWorker,
    Hands,
    Has,
    Head,
    Members,
    Void,
    parsed,
)

Lost = Literal["keep", "discard"]
"""keep: a window whose workers were lost in part is averaged among the others. discard: they train it once more."""


@dataclass(frozen=True)
class Decision:
    """What a round is about, from the moment at which its list is closed.

    Attributes:
        kind: "founding": the source's model becomes the run's. "average": of what the trainers' windows changed.
            "discard": the trainers go back to the global copy.
        source: who hands the global copy to others.
        trainers: those who have the head's copy, in order; as a run is founded, all.
        newcomers: those who will be handed the new one.
        leaving: trainers whose last window this is. One that is trained once more is nobody's last.
        lost: expected workers that did not come.
        copy: what the global copy is called once the round is committed.
        steps: of all trainers, where they are averaged.
        samples: likewise.
    """

    kind: Literal["founding", "average", "discard"]
    source: int
    trainers: tuple[int, ...]
    newcomers: tuple[int, ...]
    leaving: tuple[int, ...]
    lost: Members
    copy: int
    steps: int
    samples: int

    @property
    def staying(self) -> tuple[int, ...]:
        """Trainers who go on."""
        return tuple(worker for worker in self.trainers if worker not in self.leaving)


def holders(head: Head, came: Mapping[int, Came]) -> tuple[int, ...]:
    """Those of the workers that came who have the head's copy, in order; before a run is founded, all.

    >>> holders(Head(8, 7), {n: Came(n, "abc"[n], copy=5 + n) for n in range(3)})
    (2,)
    """
    return tuple(sorted(worker for worker, each in came.items() if each.copy == head.copy))


def decided(head: Head, came: Mapping[int, Came], lost: Lost) -> Decision:
    """What a round is about whose list is closed.

    >>> came = {n: Came(n, "abc"[n], copy=7 if n < 2 else NO_COPY, steps=8) for n in range(3)}
    >>> head = Head(8, 7, {0: ExpectedWorker("a"), 1: ExpectedWorker("b"), 5: ExpectedWorker("f")})
    >>> found = decided(head, came, "keep")
    >>> found.kind, found.trainers, found.newcomers, list(found.lost), found.steps
    ('average', (0, 1), (2,), [5], 16)
    >>> decided(head, came, "discard").kind
    'discard'
    """
    if head.copy == NO_COPY:
        source = min(came.values(), key=lambda each: (-each.windows, each.worker)).worker
        return Decision("founding", source, tuple(sorted(came)), (), (), {}, head.round, 0, 0)
    trainers = holders(head, came)
    missing = {worker: member for worker, member in head.expected.items() if worker not in came}
    all_lost = {**head.lost, **missing}
    averages = lost == "keep" or not all_lost
    leaving = tuple(worker for worker in trainers if averages and came[worker].leaving)
    return Decision(
        kind="average" if averages else "discard",
        source=min(set(trainers) - set(leaving), default=trainers[0]),
        trainers=trainers,
        newcomers=tuple(sorted(came.keys() - set(trainers))),
        leaving=leaving,
        lost=all_lost,
        copy=head.round if averages else head.copy,
        steps=sum(came[worker].steps for worker in trainers) if averages else 0,
        samples=sum(came[worker].samples for worker in trainers) if averages else 0,
    )


class Needs(NamedTuple):
    """How many workers a run wants.

    Attributes:
        least: at any time.
        begin_with: to begin.
    """

    least: int = 1
    begin_with: int = 1


def may_close(head: Head, came: Mapping[int, Came], needs: Needs, alive: Callable[[int], bool], late: bool) -> bool:
    """Whether the list of a round may be closed by somebody who has seen `came`.

    Args:
        head: of the round.
        came: who is here.
        needs: how many are wanted.
        alive: whether a worker still gives signs of life.
        late: whether those who are alive have been waited for long enough.

    >>> head, came = Head(1, 0, {0: ExpectedWorker("a"), 1: ExpectedWorker("b")}), {0: Came(0, "a", copy=0)}
    >>> [may_close(head, came, Needs(), lambda _: alive, late=False) for alive in (True, False)]
    [False, True]
    """
    if head.copy == NO_COPY:
        return len(came) >= needs.begin_with
    if len(came) < needs.least or not holders(head, came):
        return False
    return late or not any(alive(worker) for worker in head.expected if worker not in came)


class RoundLog(NamedTuple):
    """What the log of a round says so far.

    Attributes:
        head: of the round.
        came: who came before the list was closed; until then, who has come.
        decision: None while the list is open.
        state: "open" until the round is committed or void.
        owed: what each trainer owes of the mean after it, as said with `has`.
        handed: how many bytes the source hands to each newcomer; None before it said so.
        why: the reason for which a round is void.
    """

    head: Head
    came: Mapping[int, Came]
    decision: Decision | None = None
    state: Literal["open", "committed", "void"] = "open"
    owed: Mapping[int, float] = {}
    handed: int | None = None
    why: str = ""

    @property
    def members(self) -> frozenset[int]:
        """Who takes part, once the list is closed."""
        return frozenset(self.came) if self.decision else frozenset()


def read(head: Head, log: bytes, lost: Lost) -> RoundLog:
    """What the log of a round says.

    Raises:
        CommunicationError: something in it is no message of gradwire's.

    >>> from gradwire.sync.elastic.messages import line_of
    >>> log = [line_of(said) for said in (Came(0, "a", copy=3), Closed(0), Has(0, "17e5", 0.0))]
    >>> head = Head(4, 3, {0: ExpectedWorker("a")})
    >>> [read(head, "".join(log[:n]).encode(), "keep").state for n in (2, 3)]
    ['open', 'committed']
    """
    now, digests = RoundLog(head, {}), dict[int, str]()
    for line in log.splitlines():
        now = _after_line(now, parsed(line, AnyLine), digests, lost)
    return now


def _after_line(now: RoundLog, said: AnyLine, digests: dict[int, str], lost: Lost) -> RoundLog:
    decision = now.decision
    if decision is None:
        if isinstance(said, Came):
            return now._replace(came={**now.came, said.worker: said})
        closes = isinstance(said, Closed) and holders(now.head, now.came)
        return now._replace(decision=decided(now.head, now.came, lost)) if closes else now
    if isinstance(said, Hands) and said.worker == decision.source:
        return now._replace(handed=said.bytes)
    if now.state != "open":
        return now
    if isinstance(said, Void):
        return now._replace(state="void", why=said.why)
    if isinstance(said, Has) and said.worker in decision.trainers:
        digests[said.worker] = said.digest
        return _voted(now._replace(owed={**now.owed, said.worker: said.owed}), decision, digests)
    return now


def _voted(now: RoundLog, decision: Decision, digests: Mapping[int, str]) -> RoundLog:
    if len(digests) < len(decision.trainers):
        return now
    if len(set(digests.values())) > 1:
        return now._replace(state="void", why="the workers computed different means from the same messages")
    return now._replace(state="committed")


def following(ended: RoundLog) -> Head:
    """The head of the round after one that is committed or void."""
    head, decision = ended.head, ended.decision
    assert decision is not None, "the round is still open"
    here = {worker: ExpectedWorker(came.name, _owed(ended, worker)) for worker, came in ended.came.items()}
    if ended.state == "void":
        return Head(head.round + 1, head.copy, here, decision.lost, head.voids + 1)
    stay = {worker: member for worker, member in here.items() if worker not in decision.leaving}
    return Head(head.round + 1, decision.copy, stay)


def _owed(ended: RoundLog, worker: int) -> float:
    """What a worker owes after a round: in one that is void, what it owed before."""
    before = ended.head.expected.get(worker, ExpectedWorker("")).owed
    return before if ended.state == "void" else ended.owed.get(worker, 0.0)
