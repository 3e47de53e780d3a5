"""Values that are not finite: on which rank they arose, in which parameter, and what becomes of the step."""

from __future__ import annotations

import json
import time
import warnings
from typing import NamedTuple

import torch
from torch.distributed import PrefixStore, Store  # pyright: ignore[reportPrivateImportUsage]

from gradwire.core.errors import AttachError, NonFiniteWarning
from gradwire.drivers.engine import Engine
from gradwire.drivers.window import Window
from gradwire.flight.record import NotFinite
from gradwire.flight.recorder import recorder

REACTIONS = ("warn", "skip")
_PATIENCE_S = 1.0
"""How long a rank waits to hear whose gradient it was: all ranks come to this place at the same time, once in a run."""
_FIRST = "first"


def require_reaction(on_non_finite: str, scaler: torch.amp.GradScaler | None) -> None:
    """Refuse what is no reaction, and two things that skip steps.

    Raises:
        AttachError: with what to do.
    """
    if on_non_finite not in REACTIONS:
        raise AttachError(f"on_non_finite={on_non_finite!r}: give one of {', '.join(map(repr, REACTIONS))}")
    if on_non_finite == "skip" and scaler is not None and scaler.is_enabled():
        raise AttachError(
            "a GradScaler skips steps that are not finite by itself, and fails where a step has no gradients: leave "
            'out on_non_finite="skip"'
        )


class Culprit(NamedTuple):
    """The first gradient of a run that was not finite before it was combined with those of other ranks."""

    step: int
    rank: int
    parameter: str


BEFORE, AFTER = "before the exchange", "after the exchange"
UNSEEN = "in the exchange or before it: on a GPU gradients are not looked at before"


class Culprits:
    """Where the ranks of a session tell each other whose gradient was not finite first.

    Whoever reaches the store's port can write there: what it holds is text, in JSON.

    Args:
        store: of the process group that the ranks belong to.
        name: of this place, the same on all ranks and used for no other.
        rank: of this process in the group.
    """

    def __init__(self, store: Store, name: str, rank: int) -> None:
        self._store, self._rank = PrefixStore(f"gradwire/non-finite/{name}", store), rank

    def first(self, step: int, parameter: str | None) -> Culprit | None:
        """Whose gradient it was, once this rank has said whether it was one of its own.

        Args:
            step: in which it was found.
            parameter: of this rank's gradient that was not finite, or None.

        Returns:
            None where no rank has said so in time: each gradient was finite, and their mean was not; or the store is
            gone.
        """
        try:
            if parameter is not None:
                self._store.compare_set(_FIRST, "", json.dumps(Culprit(step, self._rank, parameter)))
            until = time.monotonic() + _PATIENCE_S
            while not self._store.check([_FIRST]):
                if time.monotonic() > until:
                    return None
                time.sleep(0.02)
            step, rank, name = json.loads(self._store.get(_FIRST))
            return Culprit(int(step), int(rank), str(name)[:200])
        except Exception:  # the store went with who held it, or has something else: the warning says less then
            return None

    def told(self, engine: Engine) -> NotFinite | None:
        """Which tensor was not finite first, in which step, on which rank, and on which side of the exchange. None
        where nobody knows. The flight recorder keeps it.
        """
        if (culprit := self.first(engine.index - 1, engine.not_finite)) is not None:
            found = NotFinite(culprit.step, culprit.rank, culprit.parameter, BEFORE)
        elif (bad := engine.bad_mean()) is not None:
            step, grain = bad
            names = ", ".join(dict.fromkeys(segment.name for segment in grain.segments))
            found = NotFinite(step, None, names[:200], AFTER if grain.device.type == "cpu" else UNSEEN)
        else:
            return None
        recorder().not_finite = recorder().not_finite or found
        return found


class NonFiniteWatch:
    """Says once that a gradient was not finite, where no loss scaler is known that would skip such steps.

    Args:
        culprits: where ranks tell each other whose gradient it was.
        scaler: the loss scaler of the training loop, if it has one.
        on_non_finite: what becomes of such a step.
        device: where gradients lie.

    Attributes:
        is_expected: set it where a loss scaler is at work that scales nothing of what is combined here: then no
            `NonFiniteWarning` is given.
    """

    def __init__(
        self, culprits: Culprits, scaler: torch.amp.GradScaler | None, on_non_finite: str, device: torch.device
    ) -> None:
        self.is_expected = False
        self._culprits, self._scaler, self._on_non_finite = culprits, scaler, on_non_finite
        self._norm_is_known = device.type == "cpu"  # a GPU would be waited for
        self._has_warned = False

    def look(self, engine: Engine, window: Window, skipped: bool) -> None:
        """Look at the step that has just ended.

        Args:
            engine: that ran it.
            window: in which its gradients' norm is.
            skipped: whether the optimizer is to skip it.
        """
        scaled = self._scaler is not None and self._scaler.is_enabled()
        if scaled or self.is_expected or self._has_warned:
            return
        if engine.not_finite or skipped or engine.found_bad() or (self._norm_is_known and window.found_bad()):
            self._has_warned = True
            text = warning_text(self._culprits.told(engine), self._on_non_finite)
            warnings.warn(NonFiniteWarning(text), stacklevel=3)


def warning_text(first: NotFinite | None, on_non_finite: str) -> str:
    """What a `NonFiniteWarning` says.

    >>> warning_text(NotFinite(7, 1, "head.weight", BEFORE), "skip")[:98]
    "rank 1's gradient of 'head.weight' was not finite in step 7, before the exchange, so all ranks ski"
    """
    if first is None:
        found = "a mean of gradients was not finite, though no rank has told of a gradient that was not"
    else:
        found = first.said
    if first is not None and first.where == AFTER:
        found += " (every rank's gradient was finite, so it overflowed on its way, as float16 does)"
    if on_non_finite == "skip":
        return (
            f"{found}, so all ranks skip such steps: gradients are None, and the report counts them. Where it happens "
            "often, lower the learning rate, clip gradients, or look at the batch that this rank had"
        )
    return (
        f"{found}, so the mean is NaN on all ranks unless the method is a rule that leaves it out, and an optimizer "
        'that uses NaN spoils the model: pass on_non_finite="skip" to attach or Session, or the GradScaler of the '
        "training loop (scaler=), which both skip such steps"
    )
