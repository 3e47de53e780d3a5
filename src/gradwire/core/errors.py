"""Errors: each says what is wrong and what to do about it."""

from __future__ import annotations

from collections.abc import Sequence


class GradwireError(Exception):
    """Base of every error gradwire raises on purpose."""


class SpecError(GradwireError, ValueError):
    """A method spec that cannot be read, or names something that does not exist."""


class CompositionError(GradwireError, ValueError):
    """Parts that do not fit together, found at construction and never at run time."""


class PayloadError(GradwireError, ValueError):
    """A payload that is damaged or was made by another codec."""


class AttachError(GradwireError, RuntimeError):
    """A model, optimizer or process group that gradwire cannot serve, with the reason."""


class StepError(GradwireError, RuntimeError):
    """A session that is used in the wrong order, or is given other tensors than planned."""


class StateError(GradwireError, ValueError):
    """A saved state that does not belong to this model or reducer."""


class ShardsElsewhereError(StateError):
    """What a shard's owner owes was saved by other ranks, since shards were cut otherwise."""


class RecordError(GradwireError, ValueError):
    """A record that was cut, is of another form, or was made by another program; nothing of it was taken up."""


class FlightError(GradwireError, ValueError):
    """Records of a flight recorder that are missing, cannot be read, or do not belong together."""


class FederationError(GradwireError, RuntimeError):
    """A round of a federation that cannot be made, or an update that its server refuses; nothing of it was applied."""


class PushError(GradwireError, ValueError):
    """A push that a server of `gradwire.asynchronous` refuses; nothing of it was applied."""


class CommunicationError(GradwireError, RuntimeError):
    """A rank failed or fell silent; the message names it where it is known.

    Attributes:
        ranks: the ranks at fault, by their number in the default process group; empty where none is known to be.
    """

    def __init__(self, message: str, ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


class ConnectionLost(CommunicationError):  # noqa: N818 - what was lost is the connection
    """A collective failed; a driver raises it, and an adapter finds out which rank is at fault.

    Attributes:
        what: the collective.
        waited_s: seconds since it was started.
    """

    def __init__(self, what: str, waited_s: float, cause: BaseException) -> None:
        super().__init__(f"{what} failed after {waited_s:.1f} s: {first_line(cause)}")
        self.what, self.waited_s = what, waited_s


class NonFiniteWarning(UserWarning):
    """Gradients that are not finite, where no loss scaler is known that would skip such steps."""


class AccumulationWarning(UserWarning):
    """Gradients that are exchanged in every micro-batch, where once before the optimizer's step would do."""


class DriftError(GradwireError, RuntimeError):
    """Parameters that are not the same on all ranks, where that is to stop the training."""


class DriftWarning(UserWarning):
    """Parameters that are not the same on all ranks."""


class NetworkError(GradwireError, RuntimeError):
    """The emulated network cannot be built here; the message says what is missing."""


class TopologyError(GradwireError, ValueError):
    """A description of nodes and links that cannot be read, or that contradicts what the ranks found."""


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, shortened, for a sentence; its class where it says nothing.

    >>> first_line(OSError("no way there\\nsince yesterday")), first_line(TimeoutError())
    ('no way there', 'TimeoutError')
    """
    return _lines(error)[0][:300]


def last_line(error: BaseException) -> str:
    """Return the last line, which is what counts of an error that was handed over with its traceback."""
    return _lines(error)[-1][:300]


def _lines(error: BaseException) -> list[str]:
    return str(error).strip().splitlines() or [type(error).__name__]
