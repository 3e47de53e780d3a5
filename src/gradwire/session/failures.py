"""What ranks tell each other when communication has failed, so that every error names the rank and the cause.

A rank whose collective fails raises an alarm in the rendezvous store. Each rank has a thread that looks for one, so
also a rank that computes, or sleeps, answers with what it is doing. From the answers all ranks conclude the same:

    a rank that failed by itself    it is at fault, and its error is passed on as text
    a rank that left a pass         the same, where others wait in that pass; where all have left it they go on
    a rank that does not answer     it has ended, or its host cannot be reached
    a rank that trains no more      it is alive, but handed over no gradients for so long
    a rank that is stuck            it trains, but has started fewer collectives than others, and waits for none
    none of these                   the link is down, or slower than the deadline allows

Whoever reaches the store's port can write there. So everything in it is text, in JSON, and is never unpickled.
"""

import json
import threading
import time
import traceback
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import get_type_hints

import msgspec
import torch.distributed as dist
from torch.distributed import PrefixStore  # pyright: ignore[reportPrivateImportUsage]

from gradwire.core.checked import facts, printable, thread_safe
from gradwire.core.errors import CommunicationError, ConnectionLost
from gradwire.core.figures import listed, ranks_named
from gradwire.flight.doing import doing_in_trouble
from gradwire.flight.recorder import recorder
from gradwire.session.records import note_trouble, tell_death

TICK_S = 0.5
"""Between two looks for an alarm."""

ANSWER_S = 2.5
"""How long an alarm waits for answers: several ticks."""

_PAUSE_S = 0.02

_LIMIT = 8000
"""Characters of a text that are passed on."""

_ALARM, _LEFT = "alarm", "left"
_FAILED, _WAITED, _BROKEN, _TRAINING, _IDLE = "failed", "waited", "broken", "training", "idle"
_DEEDS = (_FAILED, _WAITED, _BROKEN, _TRAINING, _IDLE)


@dataclass(frozen=True)
class RankAnswer:
    """What one rank says of itself, as text.

    Attributes:
        rank: whose answer it is.
        doing: "failed" by itself, "waited" until the deadline, "broken" (one of its connections), "training" (a
            backward pass is under way), or "idle" (it is not).
        seconds: for how long.
        started: how many collectives it has started.
        waits: whether it waits for one.
        type: of the error, where it failed or left a pass.
        message: of the error.
        traceback: of the error.
        at: what it does, and where its main thread is, in a sentence.
        stack: of its main thread.
    """

    rank: int
    doing: str
    seconds: float = 0.0
    started: int = 0
    waits: bool = False
    type: str = ""
    message: str = ""
    traceback: str = ""
    at: str = ""
    stack: str = ""

    def to_json(self) -> str:
        """Return it as JSON, long texts cut."""
        fields = {key: value[:_LIMIT] if isinstance(value, str) else value for key, value in vars(self).items()}
        return json.dumps(fields)

    @classmethod
    def from_json(cls, raw: bytes | str, rank: int) -> "RankAnswer":
        """Read the answer of `rank`.

        Raises:
            ValueError: it is none.
        """
        found = msgspec.convert(json.loads(raw), thread_safe(_ANSWER))
        if found.rank != rank or found.doing not in _DEEDS:
            raise ValueError("an answer of another rank, or to another question")
        texts = map(_text, (found.type, found.message, found.traceback, found.at, found.stack))
        return cls(rank, found.doing, found.seconds, found.started, found.waits, *texts)


_ANSWER = facts(get_type_hints(RankAnswer))
"""What an answer must say, all of it."""


def _described(error: BaseException) -> tuple[str, str, str]:
    """Type, message and traceback."""
    return type(error).__name__, str(error), "".join(traceback.format_exception(error))[-_LIMIT:]


def _left(answers: Collection[RankAnswer]) -> list[RankAnswer]:
    """Ranks that have left a pass, and have started less than others, which wait in it."""
    furthest = max(answer.started for answer in answers)
    return [answer for answer in answers if answer.type and answer.started < furthest]


def _two_numbers(raw: bytes) -> tuple[int, int]:
    """Those of a rank that has left a pass; of what is no message of gradwire's, numbers that say nothing."""
    try:
        number, started = json.loads(raw)
        return int(number), int(started)
    except (ValueError, TypeError, RecursionError):
        return -1, 0


def _text(value: str) -> str:
    """A text without what would move a terminal's cursor."""
    return printable(value[:_LIMIT])


class FailureBoard:
    """One rank's view of what went wrong in a process group, and the thread that answers for it.

    Args:
        group: whose ranks tell each other.
        deadline_s: seconds after which a silent rank is an error.
        what: the call that made the group.

    Attributes:
        error: what this rank is to raise, once an alarm has been looked into.
        log: what this rank has started and waits for.
    """

    def __init__(self, group: dist.ProcessGroup, deadline_s: float, what: str = "a group") -> None:
        self.rank = dist.get_rank()
        self.ranks = dist.get_process_group_ranks(group)
        self.deadline_s = deadline_s
        self.error: BaseException | None = None
        store = dist.distributed_c10d._get_default_store()  # pyright: ignore[reportPrivateUsage]
        self._store = PrefixStore(f"gradwire/failure/{group.group_name}", store)
        self.log = recorder().lane(group.group_name, what, self.ranks)
        self._doing, self._since = _IDLE, time.monotonic()
        self._pass = 0
        self._left: BaseException | None = None
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="gradwire-watch", daemon=True)
        self._thread.start()

    def begin(self) -> None:
        """Note that a backward pass has begun to hand over gradients."""
        self._doing, self._since = _TRAINING, time.monotonic()

    def end(self) -> None:
        """Note that it has ended."""
        self._doing, self._since = _IDLE, time.monotonic()

    # Passes ------------------------------------------------------------------------------------------------------

    def enter_pass(self) -> None:
        """Note that another pass begins, which every rank has: all start the same collectives in it, or leave it."""
        self._pass += 1

    def leave_pass(self, error: BaseException) -> None:
        """Tell the other ranks that this one starts no more collectives in the pass at hand.

        Where others have started more of them, that is a failure of this rank by `error`. Where all leave it alike,
        they go on.
        """
        self._left = error
        self._set(f"{_LEFT}/{self.rank}", json.dumps([self._pass, self.log.issued]))

    def end_pass(self) -> None:
        """Note that a pass has ended well: what left one before it has done no harm."""
        self._left = None

    def wait_for_leaving(self) -> None:
        """Wait until all ranks have left the pass that this one has left: what they start then is paired again.

        Raises:
            CommunicationError: they wait in that pass, or did not leave it within the deadline.
        """
        end = time.monotonic() + self.deadline_s
        while self.error is None and not all(self._left_by(rank) is not None for rank in self.ranks):
            if time.monotonic() > end:
                self._looked_into(None, "")
            time.sleep(_PAUSE_S)
        if self.error is not None:
            raise self.error

    def _left_by(self, rank: int) -> int | None:
        """How many collectives a rank had started when it left the pass at hand; None where it has not."""
        if not self._store.check([f"{_LEFT}/{rank}"]):
            return None
        number, started = _two_numbers(self._store.get(f"{_LEFT}/{rank}"))
        return started if number >= self._pass else None

    def _is_left_alone(self) -> bool:
        """Whether this rank waits for a collective that another one left the pass before."""
        if not self.log.waits or not self._pass:
            return False
        left = [self._left_by(rank) for rank in self.ranks if rank != self.rank]
        return any(started is not None and started < self.log.issued for started in left)

    def close(self, timeout_s: float) -> None:
        """End the thread that watches for alarms."""
        self.log.end()
        self._stop.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)

    def explain(self, error: BaseException, where: str = "") -> BaseException:
        """Tell the other ranks of an error of this rank's; return what to raise here.

        Args:
            error: itself if it arose on this rank. A lost connection becomes an error that names who is at fault.
            where: the step in which it happened.
        """
        if isinstance(error, ConnectionLost):
            return self._looked_into(error, where)
        if self.error is None or not isinstance(error, CommunicationError):  # else others know what it follows from
            self.tell(error)
        with self._lock:
            self.error = self.error or error
        return error

    def tell(self, error: BaseException) -> None:
        """Tell the other ranks that this one has failed, be it by what ranks of another group have done."""
        self.leave_word(error)
        self._set(_ALARM, str(self.rank))

    def leave_word(self, error: BaseException) -> None:
        """Write down why this rank is about to end, for others that will wonder; raise no alarm."""
        kind, message, trace = _described(error)
        answer = RankAnswer(self.rank, _FAILED, started=self.log.issued, type=kind, message=message, traceback=trace)
        self._set(str(self.rank), answer.to_json())
        tell_death(error)

    def _watch(self) -> None:
        while not self._stop.wait(TICK_S):
            try:
                alarm = self._store.check([_ALARM]) or self._is_left_alone()
            except Exception:
                return  # the store went with who held it; connections that break will say so
            if alarm:
                self._looked_into(None, "")
                return

    def _looked_into(self, lost: ConnectionLost | None, where: str) -> BaseException:
        """Answer, wait for the answers of the others, and conclude; once, whichever thread comes first."""
        with self._lock:
            if self.error is None:
                seen = note_trouble()  # as it is now: answers may take seconds to come
                self.error = self._conclusion(lost, where)
                tell_death(self.error, seen)
            return self.error

    def _conclusion(self, lost: ConnectionLost | None, where: str) -> BaseException:
        own = self._answer(lost)
        try:
            if not self._store.check([str(self.rank)]):  # else this rank has failed by itself, and said so
                self._store.set(str(self.rank), own.to_json())
            self._store.set(_ALARM, str(self.rank))
        except Exception:
            return CommunicationError(_STORE_GONE + self._waited(lost, where))
        answers: dict[int, RankAnswer] = {}
        try:
            self._collect(answers)
        except _Damaged as damaged:
            return damaged.error
        failed = [answer for answer in answers.values() if answer.doing == _FAILED and answer.rank != self.rank]
        left = _left(answers.values())
        if others := failed or [answer for answer in left if answer.rank != self.rank]:
            return _passed_on(others[0])
        if left:
            text = f"the other ranks wait in a pass that this rank ({self.rank}) left: {own.type}: {own.message}"
            return CommunicationError(text, (self.rank,))
        return self._blamed(answers, self._waited(lost, where))

    def _answer(self, lost: ConnectionLost | None) -> RankAnswer:
        at, stack = doing_in_trouble(self.deadline_s)
        said = (*(("", "", "") if self._left is None else _described(self._left)), at, stack[-_LIMIT:])
        issued, waits = self.log.issued, self.log.waits
        if lost is None:
            return RankAnswer(self.rank, self._doing, time.monotonic() - self._since, issued, waits, *said)
        late = lost.waited_s >= 0.9 * self.deadline_s
        return RankAnswer(self.rank, _WAITED if late else _BROKEN, lost.waited_s, issued, True, *said)

    def _collect(self, answers: dict[int, RankAnswer]) -> None:
        """Read answers as they come, until all are here or the time is over."""
        end = time.monotonic() + ANSWER_S
        while len(answers) < len(self.ranks) and time.monotonic() < end:
            for rank in self.ranks:
                if rank in answers:
                    continue
                try:
                    raw = self._store.get(str(rank)) if self._store.check([str(rank)]) else None
                except Exception:
                    return  # the store ended with its rank, which the others may have heard out before
                if raw is not None:
                    answers[rank] = self._read(raw, rank)
            if self._stop.wait(_PAUSE_S):
                return
        time.sleep(2 * _PAUSE_S)  # let slower ranks read the last answers before a rank that holds the store ends

    def _read(self, raw: bytes, rank: int) -> RankAnswer:
        try:
            return RankAnswer.from_json(raw, rank)
        except (ValueError, TypeError, RecursionError) as error:
            raise _Damaged(rank) from error

    def _blamed(self, answers: dict[int, RankAnswer], waited: str) -> CommunicationError:
        silent = [rank for rank in self.ranks if rank not in answers]
        waits = [answer.seconds for answer in answers.values() if answer.doing == _WAITED]
        idle = [
            r for r, answer in answers.items() if waits and answer.doing == _IDLE and 2 * answer.seconds > max(waits)
        ]
        if silent:
            text = f"{ranks_named(silent)} did not answer: it has ended, or its host cannot be reached"
            return CommunicationError(f"{text}; look at its output first.{waited}", silent)
        if self.rank in idle:
            seconds = answers[self.rank].seconds
            text = f"the other ranks gave up on this rank ({self.rank}), which handed over no gradients for"
            return CommunicationError(f"{text} {seconds:.0f} s with deadline_s={self.deadline_s:g}{_PATIENCE}", idle)
        if idle:
            seconds = max(answers[rank].seconds for rank in idle)
            text = f"{ranks_named(idle)} answers, but has handed over no gradients for {seconds:.0f} s{_PATIENCE}"
            return _located(text, waited, [answers[rank] for rank in idle])
        furthest = max(answer.started for answer in answers.values())
        busy = [(rank, each) for rank, each in answers.items() if each.doing == _TRAINING and not each.waits]
        stuck = [rank for rank, each in busy if each.started < furthest]
        if stuck:
            text = f"{ranks_named(stuck)} answers, but is stuck: it has started {answers[stuck[0]].started} collectives"
            return _located(f"{text} and others {furthest}.", waited, [answers[rank] for rank in stuck])
        broke = any(answer.doing == _BROKEN for answer in answers.values())
        link = "broke" if broke else f"is down, or slower than deadline_s={self.deadline_s:g} allows"
        return CommunicationError(f"no rank has failed, but the link between some of them {link}.{waited}")

    def _waited(self, lost: ConnectionLost | None, where: str) -> str:
        if lost is None:
            return f" Another rank of {listed(self.ranks)} raised the alarm (deadline_s={self.deadline_s:g})."
        return f" Rank {self.rank}{where}, deadline_s={self.deadline_s:g}: {lost}"

    def _set(self, key: str, text: str) -> None:
        try:
            self._store.set(key, text)
        except Exception:
            return  # the store went with who held it: the others find out by their own broken connections


class _Damaged(Exception):  # noqa: N818
    """What stands in the store is not what gradwire writes there."""

    def __init__(self, rank: int) -> None:
        self.error = CommunicationError(
            f"what the rendezvous store holds as the answer of rank {rank} is no message of gradwire's: versions "
            "differ between ranks, or somebody else writes to the store (docs/trust.md says how to keep others out)",
            (rank,),
        )


_PATIENCE = "; if a pause of that length is meant (an evaluation, a checkpoint), pass attach a longer deadline_s."
_STORE_GONE = (
    "a connection broke, and the rendezvous store does not answer either: the process that holds it (rank 0, or the "
    "launcher) has ended, or its host cannot be reached."
)


def _located(text: str, waited: str, answers: Sequence[RankAnswer]) -> CommunicationError:
    """An error that blames some ranks, with what each does and the stack of its main thread."""
    told = [answer for answer in answers if answer.at]
    said = "".join(f" Rank {answer.rank} {answer.at}." for answer in told)
    error = CommunicationError(text + said + waited, [answer.rank for answer in answers])
    for answer in told:
        error.add_note(f"gradwire asked rank {answer.rank} what it does. {answer.stack}")
    return error


def _passed_on(answer: RankAnswer) -> CommunicationError:
    said = f"rank {answer.rank} failed with {answer.type}: {answer.message}"
    error = CommunicationError(said, (answer.rank,))
    error.add_note(f"gradwire passed this on from rank {answer.rank}, where it was raised as:\n{answer.traceback}")
    return error
