"""Options that would change nothing: a spec with one of them is refused, with a sentence that says what to do.

A user who writes an option expects an effect. A value that asks for no effect, such as `warmup=0` or `node=1`, is
accepted.
"""

from __future__ import annotations

import torch

from gradwire.codecs.base import Codec
from gradwire.core.errors import CompositionError
from gradwire.core.grain import ParameterSpec
from gradwire.reducers.base import Reducer
from gradwire.reducers.exchange import PLAIN
from gradwire.reducers.power_sgd import PowerSGD

_VECTOR = ParameterSpec("bias", (1 << 20,), torch.float32, torch.device("cpu"))


def require_loss(spec: str, reducer: Reducer, option: str) -> None:
    """Refuse memory of what was not sent where all is sent.

    Raises:
        CompositionError: a reducer that loses nothing.
    """
    if reducer.lossless:
        raise CompositionError(f"{option} in {spec!r} has nothing to remember, since all is sent: leave it out")


def require_warming(spec: str, reducer: Reducer) -> None:
    """Refuse steps of uncompressed all-reduce before steps of the same.

    Raises:
        CompositionError: an uncompressed all-reduce.
    """
    if reducer == PLAIN:
        raise CompositionError(
            f"warmup in {spec!r} would send uncompressed what is uncompressed anyway: leave it out, or name what is to "
            "follow, as in 'int4,warmup=100'"
        )


def require_vectors(spec: str, reducer: Reducer) -> None:
    """Refuse to send vectors uncompressed that are uncompressed anyway.

    Raises:
        CompositionError: a reducer that leaves vectors to an uncompressed all-reduce.
    """
    if reducer.assign(_VECTOR) == PLAIN:
        raise CompositionError(
            f"vectors=off in {spec!r} changes nothing, since biases and norms go uncompressed anyway: leave it out"
        )


def require_memory(spec: str, reducer: Reducer) -> None:
    """Refuse `sent=` where there is no error feedback.

    Raises:
        CompositionError: `PowerSGD` with another `sent` than its own.
    """
    if isinstance(reducer, PowerSGD) and reducer.sent != PowerSGD.sent:
        raise CompositionError(
            f"sent={reducer.sent} in {spec!r} says what error feedback takes for sent, and there is none: leave one of "
            "sent and ef=off out"
        )


def require_room(spec: str, codec: Codec) -> None:
    """Refuse `allgatherv` where all payloads are full.

    Raises:
        CompositionError: a codec that uses all bytes of every payload.
    """
    if type(codec).used_bytes is Codec.used_bytes:
        raise CompositionError(
            f"exchange=allgatherv in {spec!r} leaves out what payloads do not use, and these use all: write "
            "exchange=allgather"
        )
