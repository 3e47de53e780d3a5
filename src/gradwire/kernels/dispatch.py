"""Which of its implementations a kernel takes: plain torch, numba or Triton.

A family of kernels is a folder. Its `reference` says in plain torch what each kernel does, on any device. Beside it may
stand modules that are named after a type of device, `cpu` (numba), `cuda` (Triton) and `meta` (shapes only), with
functions of the same names. The family's contract declares which of these there are:

    _encode = Kernel(reference.block_int_encode, "cpu", "cuda")
    ...
    _encode.on(x.device, x.numel())(x, bits, block, key, packed, scales)

`on` imports what it needs at first use, since numba takes a second. `GRADWIRE_KERNELS=reference` and a missing numba or
Triton lead to the reference.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import warnings
from collections.abc import Callable, Generator, Sequence
from contextvars import ContextVar
from types import ModuleType
from typing import Generic, ParamSpec, TypeVar, cast

import torch

from gradwire.kernels.runtime import choice
from gradwire.kernels.runtime.pool import SERIAL_NUMEL

P = ParamSpec("P")
R_co = TypeVar("R_co", covariant=True)
COMPILERS = {"cpu": "numba", "cuda": "triton"}
"""What implementations for a type of device are written in."""


class SlowKernelsWarning(UserWarning):
    """numba or triton is missing, and a tensor came by that is large enough for it to matter."""


class Kernel(Generic[P, R_co]):
    """One function in several implementations.

    Args:
        reference: the function in plain torch, in the module `reference` of a family.
        devices: the types of device for which modules of the family hold a function of the same name.
        in_torch: those of them where that function is made of torch's operators too, but of others than the reference.
    """

    def __init__(self, reference: Callable[P, R_co], *devices: str, in_torch: Sequence[str] = ()) -> None:
        self.reference = reference
        self.in_torch = frozenset(in_torch)
        self.devices = devices
        self.name = reference.__name__
        self.package = reference.__module__.rpartition(".")[0]
        KERNELS.append(self)

    @property
    def family(self) -> str:
        """The name of the folder."""
        return self.package.rpartition(".")[2]

    def runs_in(self, kind: str) -> str:
        """What it is written in for a type of device that has a compiler: "numba", "triton", or else "torch"."""
        return COMPILERS[kind] if kind in self.devices and kind not in self.in_torch else "torch"

    def on(self, device: torch.device, numel: int) -> Callable[P, R_co]:
        """The fastest implementation for tensors of `numel` elements on a device.

        Warns:
            SlowKernelsWarning: once, where what it is compiled with is missing and the tensor is large.

        Raises:
            SpecError: GRADWIRE_KERNELS names no kernels.
        """
        if (asked := _asked.get()) is not None:
            asked.add(self)
            return self.reference
        kind = device.type
        if kind not in self.devices:
            return self.reference
        module = implementations(self.package, kind)
        if module is None:
            if numel > SERIAL_NUMEL:
                warn_slow(kind)
            return self.reference
        return cast("Callable[P, R_co]", getattr(module, self.name))


KERNELS: list[Kernel[..., object]] = []
"""All kernels of the families that are imported."""


_asked: ContextVar[set[Kernel[..., object]] | None] = ContextVar("_asked", default=None)


@contextlib.contextmanager
def recorded() -> Generator[set[Kernel[..., object]]]:
    """Collect the kernels that are asked for meanwhile; the references answer, so that nothing is compiled for it.

    >>> from gradwire.kernels import random
    >>> with recorded() as asked:
    ...     numbers = random.gaussian(7, (5,), torch.device("cpu"))
    >>> [kernel.name for kernel in asked]
    ['gaussian']
    """
    asked: set[Kernel[..., object]] = set()
    token = _asked.set(asked)
    try:
        yield asked
    finally:
        _asked.reset(token)


@functools.cache
def implementations(package: str, kind: str) -> ModuleType | None:
    """The implementations of a family for a type of device, or None where they are unwanted or cannot be had."""
    if kind in COMPILERS and choice.reference_only():
        return None
    try:
        return importlib.import_module(f"{package}.{kind}")
    except ImportError:
        return None


@functools.cache
def warn_slow(kind: str) -> None:
    """Say once that a compiler is missing, unless the environment asks for plain torch."""
    if choice.reference_only():
        return
    compiler = COMPILERS[kind]
    place, factor = ("the CPU", "many times") if kind == "cpu" else ("the GPU", "several times")
    warnings.warn(
        f"{compiler} is not installed, so compression on {place} runs in plain torch, {factor} slower: "
        f"`pip install {compiler}`, or set GRADWIRE_KERNELS=reference to say that this is meant",
        SlowKernelsWarning,
        stacklevel=4,
    )


def implementation_table() -> list[tuple[str, str, str, str]]:
    """Return a row for each kernel: its family, its name, and what it runs in on a CPU and on a GPU.

    >>> [row for row in implementation_table() if row[1].startswith("ternary_enc")]
    [('ternary', 'ternary_encode', 'numba', 'torch')]
    """
    return sorted((kernel.family, kernel.name, kernel.runs_in("cpu"), kernel.runs_in("cuda")) for kernel in KERNELS)
