"""Files of JSON from elsewhere: read up to a limit of size, and refused with a sentence where they cannot be used."""

from __future__ import annotations

import gzip
import json
import zlib
from pathlib import Path
from typing import Any, cast

from gradwire.core.checked import printable
from gradwire.core.errors import GradwireError


def read_json(path: Path, refusal: type[GradwireError], most_bytes: int, remedy: str = "") -> Any:
    """Return what a file of JSON holds; one whose name ends with `.gz` is unpacked.

    Args:
        path: of the file.
        refusal: the class of the error.
        most_bytes: that are read, after unpacking.
        remedy: what the sentence ends with.

    Raises:
        GradwireError: of the class `refusal`: there is no such file, it is too large, cut off, or no JSON.
    """
    packed = path.suffix == ".gz"
    try:
        with gzip.open(path) if packed else path.open("rb") as file:
            content = file.read(most_bytes + 1)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise refusal(f"{path} is cut off, or was not packed by gzip: it cannot be read{remedy}") from error
    except OSError as error:
        raise refusal(f"{path} cannot be read: {error.strerror or error}") from error
    if len(content) > most_bytes:
        raise refusal(f"{path} has more than {most_bytes >> 20} MiB, so it is not read{remedy}")
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        raise refusal(f"{path} is cut off, or no JSON: it cannot be read{remedy}") from error


def printable_data(data: Any) -> Any:
    """Return the same with every text free of control characters: names and errors come from other processes."""
    if isinstance(data, str):
        return printable(data)
    if isinstance(data, list):
        return [printable_data(value) for value in cast(list[Any], data)]
    if isinstance(data, dict):
        return {key: printable_data(value) for key, value in cast(dict[Any, Any], data).items()}
    return data
