"""Questions and answers as tuples of numbers and NumPy arrays, whose bytes Ray hands over as they are."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradwire.asynchronous.messages import Grant, Push
from gradwire.asynchronous.several.messages import Ask, Asked, Said, ServerAnswer

Packed = tuple[Any, ...]


def pack_ask(ask: Ask) -> Packed:
    """Return what `unpack_ask` takes.

    >>> ask = Ask(Asked.JOIN, server=1, worker=2, process=7, serial=3, clock=4)
    >>> unpack_ask(pack_ask(ask)) == ask
    True
    """
    push = ask.push
    plain = None if push is None else (tuple(push.grant), push.wire.cpu().numpy(), *push[2:])
    return (int(ask.kind), *ask[1:-1], plain)


def unpack_ask(packed: Packed) -> Ask:
    """Return the question; its tensors are copies, since Ray's arrays must not be written to."""
    kind, server, worker, process, serial, clock, plain = packed
    push = None if plain is None else Push(Grant(*plain[0]), _tensor(plain[1]), *plain[2:])
    return Ask(Asked(kind), server, worker, process, serial, clock, push)


def pack_answer(answer: ServerAnswer) -> Packed:
    """Return what `unpack_answer` takes.

    >>> unpack_answer(pack_answer(ServerAnswer(Said.HERE, clock=4)))
    ServerAnswer(kind=<Said.HERE: 1>, grant=None, values=None, text='', clock=4, life=0)
    """
    grant = None if answer.grant is None else tuple(answer.grant)
    values = None if answer.values is None else answer.values.cpu().numpy()
    return (int(answer.kind), grant, values, *answer[3:])


def unpack_answer(packed: Packed) -> ServerAnswer:
    """Return the answer; its tensors are copies."""
    kind, grant, values, *rest = packed
    return ServerAnswer(
        Said(kind), None if grant is None else Grant(*grant), None if values is None else _tensor(values), *rest
    )


def _tensor(array: Any) -> Tensor:
    return torch.from_numpy(np.array(array))
