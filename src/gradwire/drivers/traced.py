"""A transport that notes when a rank coded, and when it waited for what."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from torch import Tensor

from gradwire.core.collective import Collective
from gradwire.drivers.interpreter import Pending, Transport, WrappedTransport, is_here


class Span(NamedTuple):
    """What a rank did from `began_s` to `ended_s`, by one clock.

    Attributes:
        kind: "code" is encoding, decoding and summing, "wire" a collective from its start until its result was taken,
            "wait" the part of that in which the rank did nothing else, "train" what a training loop notes itself.
        what: the collective that came next, or that was waited for.
        nbytes: that this rank handed over.
    """

    kind: Literal["code", "wire", "wait", "train"]
    what: str
    began_s: float
    ended_s: float
    nbytes: int = 0

    @property
    def length_s(self) -> float:
        """How many seconds it took."""
        return self.ended_s - self.began_s


class Traced(WrappedTransport):
    """Wraps any transport and keeps `spans`. Between two of a rank's events, it codes.

    Args:
        inner: what moves tensors.
        clock: seconds.

    >>> from gradwire.core.collective import AllReduce
    >>> from gradwire.drivers.interpreter import ask
    >>> from gradwire.drivers.lockstep import Meeting, VirtualTransport
    >>> import torch
    >>> traced = Traced(VirtualTransport(Meeting(1), 0))
    >>> ask(AllReduce(torch.ones(2)), traced)
    tensor([1., 1.])
    >>> [(span.kind, span.what, span.nbytes) for span in traced.spans]
    [('code', 'AllReduce', 0), ('wait', 'AllReduce', 8), ('wire', 'AllReduce', 8)]
    """

    def __init__(self, inner: Transport, clock: Callable[[], float] = time.perf_counter) -> None:
        super().__init__(inner)
        self.clock = clock
        self.spans: list[Span] = []
        self._codes_since: float | None = None

    def begin(self) -> None:
        """Say that the rank goes on: from here it codes."""
        self._codes_since = self.clock()

    def pause(self) -> None:
        """Say that the rank has nothing to do until more gradients come, or until its next step."""
        self.coded("pause")
        self._codes_since = None

    def issue(self, request: Collective) -> Pending:
        """Start a collective, and note when."""
        what = type(request).__name__
        self.coded(what)
        began_s = self.clock()
        pending = self.inner.issue(request)
        self._codes_since = self.clock()
        return _Watched(self, pending, what, request.nbytes, began_s)

    def coded(self, what: str) -> None:
        """End a span of coding, if one is under way."""
        if self._codes_since is not None:
            self.spans.append(Span("code", what, self._codes_since, self.clock()))

    def waited(self, pending: _Watched, began_s: float) -> None:
        """Note a wait that has ended."""
        self._codes_since = ended_s = self.clock()
        self.spans.append(Span("wait", pending.what, began_s, ended_s, pending.nbytes))
        self.spans.append(Span("wire", pending.what, pending.began_s, ended_s, pending.nbytes))


@dataclass(frozen=True, eq=False)
class _Watched:
    """A collective under way, and who wants to know."""

    traced: Traced
    pending: Pending
    what: str
    nbytes: int
    began_s: float

    def is_here(self) -> bool:
        return is_here(self.pending)

    def wait(self) -> Tensor:
        self.traced.coded(self.what)
        began_s = self.traced.clock()
        result = self.pending.wait()
        self.traced.waited(self, began_s)
        return result


def write_chrome_trace(path: Path | str, ranks: Iterable[Iterable[Span]]) -> None:
    """Write the spans of all ranks for `chrome://tracing` or Perfetto: a process a rank, a line a kind."""
    events = [
        {
            "name": span.what,
            "ph": "X",
            "pid": rank,
            "tid": span.kind,
            "ts": 1e6 * span.began_s,
            "dur": 1e6 * span.length_s,
            "args": {"bytes": span.nbytes},
        }
        for rank, spans in enumerate(ranks)
        for span in spans
    ]
    Path(path).write_text(json.dumps({"traceEvents": events}))
