"""Whether parameters are still the same bits on all ranks.

The mean that ranks are given is. But what an optimizer makes of it is rounded by the instructions of each processor, so
between unlike processors parameters may drift apart by a last bit a step, and nothing repairs that.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from gradwire.core.collective import AllReduce
from gradwire.core.errors import AttachError, DriftError, DriftWarning
from gradwire.core.figures import ranks_named
from gradwire.drivers.engine import Engine
from gradwire.drivers.interpreter import Transport, ask
from gradwire.session.fingerprints import Fingerprints
from gradwire.session.lane import Lane
from gradwire.session.names import named
from gradwire.session.together import Together


class Communicating(Protocol):
    """What ranks compare parameters by: a session."""

    lane: Lane

    @property
    def engine(self) -> Engine:
        """Which counts steps, and has the transport."""
        ...


class Holder(Protocol):
    """A session, or what has one, as the optimizers of `gradwire.sync`."""

    @property
    def session(self) -> Communicating:
        """Over the ranks whose parameters are compared."""
        ...


def check_drift(holder: Holder, tensors: nn.Module | Mapping[str, Tensor], on_drift: str = "warn") -> str | None:
    """Compare parameters between the ranks of a session, and return the name of the first one that differs, if any.

    Every rank must call it at the same place, between two steps. Fingerprints of 8 bytes travel through the store;
    what takes time is reading the parameters, and on a GPU bringing them to the processor.

    Args:
        holder: a session, as `gradwire.attach` returns one, or what has one.
        tensors: a model: its parameters that require gradients; or tensors by name.
        on_drift: what happens where ranks differ. "warn": each gives a `DriftWarning`. "stop": each raises. "repair":
            the tensors that differ become those of rank 0, bit for bit, and each gives a warning. The optimizers'
            memories stay as they are, so ranks drift on, and are to be checked again.

    Raises:
        DriftError: ranks differ, and are to stop; or they have tensors of other names, shapes or dtypes, or in another
            order.
        CommunicationError: a rank that did not come within the session's deadline.
        AttachError: `on_drift` is none of these words.

    Example:
        if step % 1000 == 0:
            gradwire.check_drift(session, model, on_drift="repair")
    """
    react = _reaction(on_drift)
    session = holder.session
    given = {name: tensor.detach() for name, tensor in named(tensors).items()}
    ranks = Together("gradwire.check_drift", session.lane, DriftError)
    fingerprints = Fingerprints(given)
    if len(set(ranks.gather(fingerprints.whole))) == 1:
        return None
    differing = fingerprints.differences(ranks)
    if not differing:
        raise DriftError("ranks have their tensors in different orders: give check_drift the same model on all ranks")
    for name, difference in differing.items():
        if not difference.everywhere:
            raise DriftError(f"{name!r} is not on all ranks: give check_drift the same model on all ranks")
        if len(difference.forms) > 1:
            forms = ", and ".join(f"{form} on {ranks_named(those)}" for form, those in difference.forms.items())
            raise DriftError(f"{name!r} is {forms}: give check_drift the same model on all ranks")
    first, difference = next(iter(differing.items()))
    where = f"{first!r} is not the same on rank {difference.rank} as on rank {ranks.ranks[0]}"
    react(session, [given[name] for name in differing], f"parameter {where} after step {session.engine.index}")
    return first


def _warn(session: Communicating, tensors: Sequence[Tensor], text: str) -> None:
    warnings.warn(DriftWarning(f"{text}; on_drift='repair' would take rank 0's"), stacklevel=4)


def _stop(session: Communicating, tensors: Sequence[Tensor], text: str) -> None:
    raise DriftError(f"{text}: go on from a checkpoint that all ranks load alike, or pass on_drift='repair'")


def _repair(session: Communicating, tensors: Sequence[Tensor], text: str) -> None:
    """Take rank 0's, in the order of the session's own collectives."""

    def take_first() -> None:
        for tensor in tensors:
            tensor.copy_(of_rank_0(tensor, session.engine.transport))

    with torch.no_grad():
        session.lane.call(take_first, "gradwire.check_drift")
    warnings.warn(DriftWarning(f"{text}; all ranks have rank 0's parameters now"), stacklevel=4)


def of_rank_0(tensor: Tensor, transport: Transport) -> Tensor:
    """Return rank 0's bits of a tensor that all ranks have in the same shape and dtype.

    Bytes of rank 0 are added to zeros of all others: sums of floating-point numbers would lose the sign of a zero.

    Raises:
        ConnectionLost: a rank ended or fell silent.
    """
    own = tensor.detach().reshape(-1).contiguous().view(torch.uint8)
    given = own if transport.rank == 0 else torch.zeros_like(own)
    return ask(AllReduce(given, consumable=transport.rank != 0), transport).view(tensor.dtype).view(tensor.shape)


_REACTIONS: dict[str, Callable[[Communicating, Sequence[Tensor], str], Any]] = {
    "warn": _warn,
    "stop": _stop,
    "repair": _repair,
}


def _reaction(word: str) -> Callable[[Communicating, Sequence[Tensor], str], Any]:
    if word not in _REACTIONS:
        raise AttachError(f"on_drift={word!r} is unknown: choose one of {', '.join(_REACTIONS)}")
    return _REACTIONS[word]


def require_reaction(on_drift: str) -> None:
    """Refuse a word that `check_drift` would refuse, before anything is done.

    Raises:
        AttachError: it is none of "warn", "stop" and "repair".
    """
    _reaction(on_drift)
