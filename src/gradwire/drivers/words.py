"""A few words from every rank to all, as JSON: nothing in them is executed."""

from __future__ import annotations

import json
from typing import Any

import torch

from gradwire.core.collective import AllGather, AllReduce
from gradwire.core.errors import CommunicationError
from gradwire.drivers.interpreter import Transport, ask


def gathered_words(words: Any, transport: Transport, device: torch.device) -> list[Any]:
    """Return what every rank says, in rank order: two small collectives.

    Every rank must call it at the same place.

    Args:
        words: anything that JSON can carry.
        transport: of all ranks.
        device: where its tensors lie.

    Raises:
        CommunicationError: what came is no JSON, so the ranks are at different places of their programs.

    >>> from gradwire.drivers.lockstep import Meeting, VirtualTransport
    >>> gathered_words({"host": "a"}, VirtualTransport(Meeting(1), 0), torch.device("cpu"))
    [{'host': 'a'}]
    """
    text = json.dumps(words).encode()
    longest = int(ask(AllReduce(torch.tensor([len(text)], device=device), "max"), transport))
    row = torch.frombuffer(bytearray(text.ljust(longest)), dtype=torch.uint8)
    rows = ask(AllGather(row.to(device)), transport).cpu()
    try:
        return [json.loads(bytes(row.tolist())) for row in rows]
    except ValueError as error:
        raise CommunicationError("what other ranks say cannot be read: every rank must make the same calls") from error
