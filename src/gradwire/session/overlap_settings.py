"""Settings of when communication travels, as `gradwire.overlap.tune` finds them and saves keep them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta

from gradwire.core.atomic_file import write_atomically
from gradwire.core.checked import checked, facts
from gradwire.core.errors import StateError
from gradwire.core.grain import ParameterSpec
from gradwire.drivers.interpreter import WINDOW

_AT_LEAST_ONE: Any = Annotated[int, Meta(ge=1)]
_FORM = facts(
    {},
    order=list[str],
    waves_in_flight=_AT_LEAST_ONE,
    grain_numel=_AT_LEAST_ONE,
    bucket_bytes=_AT_LEAST_ONE,
    first_bucket_bytes=_AT_LEAST_ONE,
    prefetch=_AT_LEAST_ONE,
)
_REMEDY = ": give a file that the save() of these settings wrote"


@dataclass(frozen=True)
class OverlapSettings:
    """When gradients travel. None, and an empty order, mean what is so by default.

    Attributes:
        order: names in the order in which gradients become ready. By default the reverse of the order of registration.
        waves_in_flight: how many waves of grains travel at a time; one is coded while the others' bytes move.
        grain_numel: elements that are encoded together at most, and so how many waves there are. It is a part of what
            is computed, as blocks and shards are cut inside grains.
        bucket_bytes: of DDP's buckets, which deliver gradients.
        first_bucket_bytes: of the first of them, which ends first.
        prefetch: FSDP2's groups whose parameters are gathered ahead of the one that computes.

    Raises:
        StateError: a number below its least.

    >>> OverlapSettings(bucket_bytes=1 << 20).as_dict()
    {'bucket_bytes': 1048576}
    >>> OverlapSettings.of({"waves_in_flight": 0})
    Traceback (most recent call last):
        ...
    gradwire.core.errors.StateError: the overlap's waves_in_flight should be a whole number from 1, not 0
    """

    order: tuple[str, ...] = ()
    waves_in_flight: int = WINDOW
    grain_numel: int | None = None
    bucket_bytes: int | None = None
    first_bucket_bytes: int | None = None
    prefetch: int | None = None

    def __post_init__(self) -> None:
        checked(self.as_dict(), _FORM, "the overlap", StateError, "'s ")

    @classmethod
    def of(cls, found: object, remedy: str = "") -> OverlapSettings:
        """Return the settings that a mapping says.

        Raises:
            StateError: what is no such mapping; `remedy` is what the sentence ends with.
        """
        checked(found, _FORM, "the overlap", StateError, "'s ", remedy)
        assert isinstance(found, Mapping)
        known = {field.name for field in dataclasses.fields(cls)}
        said: dict[str, Any] = {str(name): value for name, value in found.items() if name in known}
        said["order"] = tuple(said.get("order", ()))
        return cls(**said)

    @classmethod
    def load(cls, path: str | Path) -> OverlapSettings:
        """Read what `save` wrote.

        Raises:
            StateError: a file that cannot be read, or that is none of settings.
        """
        try:
            text = json.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise StateError(f"{path} cannot be read: {error.strerror or error}") from error
        except ValueError as error:
            raise StateError(f"{path} holds no settings of overlap{_REMEDY}") from error
        return cls.of(text, f" ({path}){_REMEDY}")

    def save(self, path: str | Path) -> None:
        """Write them to a file of JSON, for `gradwire.attach(..., overlap=path)`."""
        write_atomically(Path(path), json.dumps(self.as_dict(), indent=1) + "\n")

    def as_dict(self) -> dict[str, Any]:
        """What is not as by default, in numbers and lists of names."""
        fields = ((field.name, field.default) for field in dataclasses.fields(self))
        told = {name: getattr(self, name) for name, default in fields if getattr(self, name) != default}
        return told | ({"order": list(self.order)} if self.order else {})

    def ordered(self, specs: Sequence[ParameterSpec]) -> list[ParameterSpec]:
        """Parameters so that a plan, which takes the last one first, takes them as they become ready.

        Those that the order does not name come after it, as they would without one.

        >>> import torch
        >>> specs = [ParameterSpec(name, (1,), torch.float32, torch.device("cpu")) for name in "abc"]
        >>> [spec.name for spec in reversed(OverlapSettings(order=("b", "c")).ordered(specs))]
        ['b', 'c', 'a']
        """
        places = {name: place for place, name in enumerate(self.order)}
        return sorted(specs, key=lambda spec: -places.get(spec.name, len(places)))


def settings_of(given: OverlapSettings | str | Path | None) -> OverlapSettings:
    """Return the settings that are meant: as they are, in a file, or those by default.

    Raises:
        StateError: as `OverlapSettings.load`.
    """
    if given is None:
        return OverlapSettings()
    return given if isinstance(given, OverlapSettings) else OverlapSettings.load(given)
