"""One vector cut into as many parts as there are servers, and what the server of each keeps."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from gradwire.asynchronous.job import Job
from gradwire.asynchronous.server import ParameterServer
from gradwire.core.errors import CompositionError
from gradwire.core.flat_layout import FlatLayout


def sizes(numel: int, servers: int) -> list[int]:
    """Elements of each server's part, as even as can be.

    Raises:
        CompositionError: no server, or more servers than elements.

    >>> sizes(10, 4)
    [3, 3, 2, 2]
    """
    if not 1 <= servers <= numel:
        raise CompositionError(f"{servers} servers for {numel} parameters: give 1 or more, and no more than parameters")
    return [numel // servers + (part < numel % servers) for part in range(servers)]


def seed_of(seed: int, part: int) -> int:
    """The seed of a part: codecs draw other random bits for each."""
    return seed + 1_000_003 * part


def named_parts(like: Mapping[str, Tensor], servers: int) -> list[dict[str, Tensor]]:
    """Return for each part the one tensor (d_p,) that its server keeps.

    Its name tells the model and the elements, so that what is meant for another server or model is refused.

    Args:
        like: all parameters, by name. In their order they are one vector, which is cut as evenly as can be.
        servers: S.

    Raises:
        CompositionError: no server, or more of them than parameters.

    >>> import torch
    >>> for part in named_parts({"x": torch.zeros(2), "y": torch.ones(3)}, 2):
    ...     [(name, tensor)] = part.items()
    ...     print(name.split(" of ")[0], tensor)
    elements 0 to 3 tensor([0., 0., 1.])
    elements 3 to 5 tensor([1., 1.])
    """
    names, found, begin = FlatLayout(like), list[dict[str, Tensor]](), 0
    for piece in names.flat(like).split(sizes(names.numel, servers)):
        end = begin + piece.numel()
        found.append({f"elements {begin} to {end} of {names.numel} of {names.fingerprint}": piece})
        begin = end
    return found


def server_of(job: Job, part: int, servers: int) -> ParameterServer:
    """Return the core of a part's server, as the job begins.

    Raises:
        CompositionError: as `named_parts` and `ParameterServer`.
    """
    return job.server(named_parts(job.parameters, servers)[part], seed_of(job.seed, part))
