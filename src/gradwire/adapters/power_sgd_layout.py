"""What PowerSGD sees of a model that DDP delivers in buckets: named matrices, and where each gradient lies in them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import GradBucket  # pyright: ignore[reportPrivateImportUsage]

from gradwire.core.errors import AttachError
from gradwire.core.grain import ParameterSpec


class Home(NamedTuple):
    """Where a parameter's gradient goes: elements from `begin` on of the planned matrix `name`."""

    name: str
    begin: int


class Padding(NamedTuple):
    """Elements of a planned matrix that no parameter fills."""

    name: str
    begin: int
    numel: int


class BucketLayout(NamedTuple):
    """What is planned for the buckets of a first step: matrices in registration order, and what goes where."""

    specs: list[ParameterSpec]
    homes: dict[Tensor, Home]
    padding: list[Padding]

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The matrices as tensors that take no memory."""
        return {s.name: torch.empty((), dtype=s.dtype, device=s.device).expand(s.shape) for s in self.specs}

    def pieces(self, bucket: GradBucket) -> Iterable[tuple[Home, Tensor]]:
        """Cut a bucket into the gradients of its parameters, 1-d, each with its place.

        Raises:
            AttachError: a parameter that is not planned.
        """
        flat, at = bucket.buffer(), 0
        for parameter in bucket.parameters():
            yield self._home(parameter), flat[at : at + parameter.numel()]
            at += parameter.numel()

    def _home(self, parameter: Tensor) -> Home:
        if parameter not in self.homes:
            raise AttachError(
                f"a parameter of shape {tuple(parameter.shape)} was not there in the first step: a PowerSGDState "
                "serves one model with one set of trained parameters, so make a new one when either changes"
            )
        return self.homes[parameter]

    def names_by_bucket(self, buckets: Iterable[GradBucket]) -> list[list[str]]:
        """What lies in each bucket; what lies in several, with the first."""
        seen: set[str] = set()
        order: list[list[str]] = []
        for bucket in buckets:
            names = list(dict.fromkeys(self.homes[parameter].name for parameter in bucket.parameters()))
            order.append([name for name in names if name not in seen])
            seen.update(names)
        return order


LayOut = Callable[[Sequence[GradBucket]], BucketLayout]


def by_parameter(buckets: Sequence[GradBucket]) -> BucketLayout:
    """Every parameter by itself.

    Before DDP rebuilds them, buckets are in reverse registration order and their parameters in registration order. So
    this numbers parameters as the model does, in every run, and those numbers are the names.
    """
    layout = BucketLayout([], {}, [])
    for bucket in reversed(buckets):
        dtype, device = bucket.buffer().dtype, bucket.buffer().device  # a wrapper may have cast them
        for parameter in bucket.parameters():
            name = f"{len(layout.specs)}[{'x'.join(map(str, parameter.shape))}]"
            layout.specs.append(ParameterSpec(name, tuple(parameter.shape), dtype, device))
            layout.homes[parameter] = Home(name, 0)
    return layout


def by_bucket(buckets: Sequence[GradBucket]) -> BucketLayout:
    """Each bucket of the first step as one square matrix, filled up with zeros; DDP may rebuild buckets later."""
    layout = BucketLayout([], {}, [])
    for bucket in reversed(buckets):
        flat, at = bucket.buffer(), 0
        side = math.ceil(math.sqrt(flat.numel()))
        name = f"bucket{bucket.index()}"
        layout.specs.append(ParameterSpec(name, (side, side), flat.dtype, flat.device))
        for parameter in bucket.parameters():
            layout.homes[parameter] = Home(name, at)
            at += parameter.numel()
        layout.padding.append(Padding(name, at, side * side - at))
    return layout
