"""A transport that notes when a rank coded, and when it waited for what."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from torch import Tensor

from gradwire.core.collective import Collective
from gradwire.drivers.interpreter import Pending, Transport, WrappedTransport, is_here


class Span(NamedTuple):
    """What a rank did from `began_s` to `ended_s`, by one clock.

    Attributes:
        kind: "encode" is coding that ends with a collective being started: in a later half of an exchange it begins
            with decoding and summing. "decode" is coding after which nothing is sent. "wire" is a collective from its
            start until its result was taken, "wait" the part of that in which the rank did nothing else, "train" what a
            training loop notes itself.
        what: the collective that came next, or that was waited for.
        nbytes: that this rank handed over.
        peers: the ranks that took part, where these were not all.
    """

    kind: Literal["encode", "decode", "wire", "wait", "train"]
    what: str
    began_s: float
    ended_s: float
    nbytes: int = 0
    peers: tuple[int, ...] = ()

    @property
    def length_s(self) -> float:
        """How many seconds it took."""
        return self.ended_s - self.began_s


def covered_s(spans: Iterable[Span], outer: Span) -> float:
    """Seconds of `outer` that lie within any of `spans`, each moment counted once.

    >>> outer = Span("train", "backward", 1.0, 3.0)
    >>> covered_s([Span("wire", "a", 0.0, 1.5), Span("wire", "b", 1.25, 2.0), Span("wire", "c", 2.75, 9.0)], outer)
    1.25
    """
    total, until = 0.0, outer.began_s
    for span in sorted(spans, key=lambda span: span.began_s):
        begin, end = max(span.began_s, until), min(span.ended_s, outer.ended_s)
        if end > begin:
            total, until = total + end - begin, end
    return total


def in_flight_s(spans: Sequence[Span]) -> float:
    """Seconds that lie within any of `spans`, each moment counted once.

    >>> in_flight_s([Span("wire", "a", 0.0, 2.0), Span("wire", "b", 1.0, 4.0), Span("wire", "c", 5.0, 6.0)])
    5.0
    """
    if not spans:
        return 0.0
    began_s, ended_s = min(span.began_s for span in spans), max(span.ended_s for span in spans)
    return covered_s(spans, Span("train", "whole", began_s, ended_s))


class Traced(WrappedTransport):
    """Wraps any transport and keeps `spans`. Between two of a rank's events, it codes.

    Args:
        inner: what moves tensors.
        clock: seconds.

    Attributes:
        unit_bytes: that this rank has sent, by the unit of the engine that is watched, as `Stats.wire_bytes` counts.

    >>> from gradwire.core.collective import AllReduce
    >>> from gradwire.drivers.interpreter import ask
    >>> from gradwire.drivers.lockstep import Meeting, VirtualTransport
    >>> import torch
    >>> traced = Traced(VirtualTransport(Meeting(1), 0))
    >>> ask(AllReduce(torch.ones(2)), traced)
    tensor([1., 1.])
    >>> [(span.kind, span.what, span.nbytes) for span in traced.spans]
    [('decode', 'AllReduce', 0), ('wait', 'AllReduce', 8), ('wire', 'AllReduce', 8)]
    """

    def __init__(self, inner: Transport, clock: Callable[[], float] = time.perf_counter) -> None:
        super().__init__(inner)
        self.clock = clock
        self.spans: list[Span] = []
        self.unit_bytes: Counter[int] = Counter()
        self._codes_since: float | None = None

    def begin(self) -> None:
        """Say that the rank goes on: from here it codes."""
        self._codes_since = self.clock()

    def pause(self) -> None:
        """Say that the rank has nothing to do until more gradients come, or until its next step."""
        self._coded("decode", "pause")
        self._codes_since = None

    def issue(self, request: Collective) -> Pending:
        """Start a collective, and note when."""
        what = type(request).__name__
        self._coded("encode", what)
        began_s = self.clock()
        pending = self.inner.issue(request)
        self._codes_since = self.clock()
        peers = request.axis.members(self.rank) if request.axis is not None else ()
        return _Watched(self, pending, what, request.nbytes, began_s, peers)

    def take(self) -> list[Span]:
        """Return the spans so far, and keep none of them: called where no step is under way."""
        spans, self.spans = self.spans, []
        return spans

    def _coded(self, kind: Literal["encode", "decode"], what: str) -> None:
        """End a span of coding, if one is under way."""
        if self._codes_since is not None:
            self.spans.append(Span(kind, what, self._codes_since, self.clock()))

    def about_to_wait(self, pending: _Watched) -> float:
        """Note that a wait begins, and return when."""
        self._coded("decode", pending.what)
        return self.clock()

    def waited(self, pending: _Watched, began_s: float) -> None:
        """Note a wait that has ended."""
        self._codes_since = ended_s = self.clock()
        self.spans.append(Span("wait", pending.what, began_s, ended_s, *pending.sent))
        self.spans.append(Span("wire", pending.what, pending.began_s, ended_s, *pending.sent))


@dataclass(frozen=True, eq=False)
class _Watched:
    """A collective under way, and who wants to know."""

    traced: Traced
    pending: Pending
    what: str
    nbytes: int
    began_s: float
    peers: tuple[int, ...]

    @property
    def sent(self) -> tuple[int, tuple[int, ...]]:
        """How much, and to whom."""
        return self.nbytes, self.peers

    def is_here(self) -> bool:
        return is_here(self.pending)

    def wait(self) -> Tensor:
        began_s = self.traced.about_to_wait(self)
        result = self.pending.wait()
        self.traced.waited(self, began_s)
        return result
