"""A saved state as a file of plain numbers, in the safetensors format: nothing in it can be executed.

The text in its header (`gradwire.core.tensor_table`) is the JSON of everything in the saved state but its parameters.
A tensor's name is `path@start@parameter`, as in `element:residual@0@layer.weight`. Any reader of safetensors shows what
is in such a file.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from io import BufferedReader
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradwire.core.errors import StateError
from gradwire.core.record import Count
from gradwire.core.saved_schema import Saved
from gradwire.core.tensor_table import LENGTH, header_of, read_header

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_LONGEST_HEADER = 100_000_000  # bytes; as the format says


class Written(NamedTuple):
    """What tells a file from all others."""

    size: Count
    sha256: str


def write(path: Path, saved: Mapping[str, Any]) -> Written:
    """Write a saved state to a new file and wait until it is on the disk.

    Raises:
        StateError: a header that readers would refuse.
        OSError: as the file system says.
    """
    tensors = dict(_tensors(saved))
    header = _header(saved, tensors)
    if len(header) > _LONGEST_HEADER:
        raise StateError(
            f"the numbers and names of this state take {len(header)} bytes, and readers of safetensors take at most "
            f"{_LONGEST_HEADER}: keep large tensors of whole numbers in your own checkpoint"
        )
    digest = hashlib.sha256()
    with path.open("wb") as file:
        for part in (len(header).to_bytes(LENGTH, "little"), header, *map(_bytes, tensors.values())):
            file.write(part)
            digest.update(part)
        file.flush()
        os.fsync(file.fileno())
        return Written(file.tell(), digest.hexdigest())


def read(path: Path, expected: Written) -> Saved:
    """Return the saved state in a file, if it is the one that was written.

    Raises:
        StateError: a file that is missing, has another size or digest, or holds no saved state.
    """
    try:
        with path.open("rb") as file:
            return _read(file, path, expected)
    except OSError as error:
        raise StateError(f"{path} cannot be read: {error.strerror or error}") from error


def _tensors(saved: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    for name, leaves in saved["parameters"].items():
        for path, pieces in leaves.items():
            for piece in pieces:
                yield f"{path}@{piece['start']}@{name}", piece["values"].detach().cpu().contiguous()


def _header(saved: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> bytes:
    head = json.dumps({key: value for key, value in saved.items() if key != "parameters"})
    text = header_of(tensors, _DTYPES, head)
    return text + b" " * (-len(text) % 8)


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.view(-1).view(torch.uint8).numpy().data


def _read(file: BufferedReader, path: Path, expected: Written) -> Saved:
    size = os.fstat(file.fileno()).st_size
    if size != expected.size:
        raise StateError(f"{path} has {size} bytes and was written with {expected.size}: copy it anew")
    digest = hashlib.sha256()
    first = file.read(LENGTH)
    length = int.from_bytes(first, "little")
    if length > min(size - LENGTH, _LONGEST_HEADER):
        raise StateError(f"{path} is no file of gradwire's: its header would be longer than the file")
    text = file.read(length)
    digest.update(first + text)
    try:
        saved, tensors = _empty(text, size - LENGTH - length)
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise StateError(f"{path} is no file of gradwire's: {error!r} in its header") from error
    for tensor in tensors:
        file.readinto(_bytes(tensor))
        digest.update(_bytes(tensor))
    if digest.hexdigest() != expected.sha256:
        raise StateError(f"{path} is damaged: what it holds is not what was written; copy it anew")
    return saved


def _empty(text: bytes, nbytes: int) -> tuple[Saved, list[Tensor]]:
    """The state that a header describes, and its tensors in the order of their bytes, still to be read."""
    head, entries = read_header(text, nbytes, _DTYPES)
    saved: Saved = json.loads(head)
    parameters: dict[str, dict[str, list[dict[str, Any]]]] = {}
    tensors: list[Tensor] = []
    for key, entry in entries.items():
        path, start, name = key.split("@", 2)
        tensors.append(torch.empty(entry.shape, dtype=entry.dtype))
        piece = {"start": int(start), "values": tensors[-1]}
        parameters.setdefault(name, {}).setdefault(path, []).append(piece)
    return {**saved, "parameters": parameters}, tensors
