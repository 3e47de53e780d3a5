# pyright: basic
"""How kernels for CPUs are compiled with numba, kept on disk, and registered to be compiled before they are needed.

Kernels are serial, run without the GIL and are spread over threads by `pool`. Inner loops are written to be vectorised,
and in float32 without reassociation or contraction, so that they agree bit for bit with the references; only sums may
differ, and are taken in float64 for it.

numba promotes uint32 arithmetic to 64 bits: each step is cast back, and LLVM narrows it again. Counters derived from
loop indices stay 64-bit and do not vectorise, so random loops keep their own uint32 counter.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import numba
import numpy as np
from numba.core.compiler_lock import global_compiler_lock
from torch import Tensor

from gradwire.kernels.runtime import team

try:
    import fcntl
except ImportError:  # not a POSIX system
    fcntl = None


# NaN and infinity in, NaN and infinity out, where Python would raise on 1 / 0.
_OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy"}
inline: Callable[[Callable[..., Any]], Callable[..., Any]] = numba.njit(forceinline=True, **_OPTIONS)


# Sums only: their order is free, and float64 hides it.
sum_in_any_order: Callable[[Callable[..., Any]], Callable[..., Any]] = numba.njit(
    fastmath={"reassoc", "nsz"}, **_OPTIONS
)


@functools.cache
def digest_of_sources() -> str:
    """A digest of all files in `gradwire.kernels`: constants and functions that a kernel takes in are in one of them.

    Finding out which would save little, since only developers change any.
    """
    return digest_of(pathlib.Path(__file__).parents[1])


def digest_of(folder: pathlib.Path) -> str:
    """A digest of the names and contents of all Python files in a folder and those below."""
    digest = hashlib.sha256()
    for file in sorted(folder.rglob("*.py")):
        content = file.read_bytes()
        digest.update(f"{file.relative_to(folder).as_posix()} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:8]


class CompiledKernel:
    """A compiled function of one signature, kept on disk under a name that changes with the sources.

    numba itself looks at the file a function stands in, and kernels take in functions of other files.

    numba writes its index of compiled code before the code itself, so a second process that starts just then
    may run what an older version of gradwire left under that name. The first call therefore compiles or loads
    under a lock that all processes share; of many ranks on a fresh machine one compiles, the others load.
    """

    def __init__(self, function: Callable[..., Any], signature: str) -> None:
        functools.update_wrapper(self, function)
        function.__qualname__ += "_" + digest_of_sources()
        self.signature = signature
        try:
            self._dispatcher: Any = numba.njit(cache=True, **_OPTIONS)(function)
        except RuntimeError:  # nowhere to write
            self._dispatcher = numba.njit(**_OPTIONS)(function)
        self._ready = False
        self._entry: team.CompiledEntry | None = None
        COMPILED.append(self)

    def compile(self) -> None:
        """Compile it for its signature, or load it from disk, where that was not done.

        From then on numba converts numbers of other types, where it would compile the kernel once more for them.
        """
        with global_compiler_lock:  # two threads may want it first
            if not self._dispatcher.overloads:
                with _file_lock(self._dispatcher.stats.cache_path):
                    self._dispatcher.compile(self.signature)
                self._dispatcher.disable_compile()
            self._ready = True

    def __call__(self, *args: Any) -> Any:
        """Call the kernel, which compiles or loads it first where that was not done."""
        if not self._ready:
            self.compile()
        return self._dispatcher(*args)

    @property
    def at_once(self) -> team.CompiledEntry | None:
        """Several calls of it on torch's own threads, where that can be: see `team`."""
        if self._entry is None and team.available():
            self.compile()
            self._entry = team.entry_of(self._dispatcher)
        return self._entry if team.available() else None


COMPILED: list[CompiledKernel] = []
"""All kernels of the modules that are imported, to be compiled before they are needed."""


@contextlib.contextmanager
def _file_lock(folder: str | None) -> Iterator[None]:
    if fcntl is None or folder is None:
        yield
        return
    try:
        file = os.open(os.path.join(folder, "gradwire.lock"), os.O_RDWR | os.O_CREAT, 0o666)
    except OSError:  # a read-only cache: nothing will be written either
        yield
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
    finally:
        os.close(file)


def compiled(signature: str) -> Callable[[Callable[..., Any]], CompiledKernel]:
    """Make a kernel of a function, for arguments of these types and no others."""
    return lambda function: CompiledKernel(function, signature)


def compile_nothing() -> None:
    """Compile a function without content, so that numba imports what it needs to compile and to load."""
    numba.njit("void()")(lambda: None)


def array_of(x: Tensor) -> np.ndarray[Any, Any]:
    """The elements of a tensor on the CPU as numpy sees them."""
    return (x.detach() if x.requires_grad else x).numpy()


def raw_bits_of(x: Tensor) -> np.ndarray[Any, Any]:
    """The bits of a float32 tensor, as unsigned integers."""
    return array_of(x).view(np.uint32)
