"""Memory on a CPU that is used again: payloads, what is received, means, and residuals of models on a GPU.

What is fresh from the system is filled page by page. A page of 4 KiB costs about 2 us, so a mean in fresh memory costs
2 ns an element, where `powersgd:8` needs 2 ns for the rest (`benchmarks/large_model.py`). On a GPU PyTorch's allocator
keeps memory itself, and so do the functions here: they ask it.

There is one pool a process, as there is one allocator: what a session has done with, another one may have. Memory that
is pinned, so that a GPU copies it while the caller goes on, has a pool of its own: it is dear to ask the system for.
"""

from __future__ import annotations

import math
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

SMALLEST = 1 << 16
"""Bytes from which on memory is pooled. Smaller pieces malloc keeps: it asks the system only for 128 KiB and more."""

PIECE = 1 << 16
"""Elements that are worked on at once where something is made in a wider type than it is kept in."""

_STEPS = 4
"""Sizes of buffers between one power of two and the next: at most a quarter of a buffer is not asked for."""


Allocate = Callable[[Sequence[int], torch.dtype], Tensor]
"""Takes memory of a shape and a dtype from the system."""


class PoolUse(NamedTuple):
    """What a pool has done so far.

    Attributes:
        hits: requests that were served by memory at hand.
        misses: those for which the system was asked.
        held_bytes: of all its buffers.
        idle_bytes: of those that nobody holds.
    """

    hits: int
    misses: int
    held_bytes: int
    idle_bytes: int


class _Buffer:
    """A piece of memory. Whoever was given it or a view of it holds a reference to its storage."""

    def __init__(self, nbytes: int, allocate: Allocate) -> None:
        self.nbytes = nbytes
        self._views = {torch.uint8: allocate((nbytes,), torch.uint8)}
        self._storage = self._views[torch.uint8].untyped_storage()
        self._own = self._references()
        self.used = 0  # when it was last given away

    def given(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return its first elements; a view of each dtype is kept, since making one takes longer than the rest."""
        if dtype not in self._views:  # it is idle, so all references are its own
            self._views[dtype] = self._views[torch.uint8].view(dtype)
            self._own = self._references()
        flat = self._views[dtype].narrow(0, 0, math.prod(shape))
        return flat if len(shape) == 1 else flat.view(shape)

    def _references(self) -> tuple[int, int]:
        """How many tensors have the storage, and how many variables of Python have it itself."""
        place = self._storage._cdata  # pyright: ignore[reportPrivateUsage]
        return torch._C._storage_Use_Count(place), sys.getrefcount(self._storage)  # type: ignore[attr-defined]

    @property
    def is_idle(self) -> bool:
        """Whether nobody else holds it. Nobody can come to hold it either then, but by the pool."""
        return self._references() == self._own


class BufferPool:
    """Buffers that are given again once nobody holds a view of them any more. Threads may share one.

    Nothing has to be given back: the pool asks PyTorch how many tensors hold the memory, views of views and arrays of
    numpy among them. It is bounded: idle buffers have at most as many bytes as were ever in use at once, and those that
    were idle for longest are let go first.

    Args:
        allocate: where it has its memory from.

    >>> pool = BufferPool()
    >>> mean = pool.empty((512, 1024), torch.float32)
    >>> half, before = mean[:256].view(-1), mean.data_ptr()
    >>> del mean
    >>> other = pool.empty((512, 1024), torch.float32)
    >>> other.data_ptr() == before  # a view is still held
    False
    >>> del half
    >>> pool.empty((512, 1024), torch.float32).data_ptr() == before
    True
    >>> pool.use()
    PoolUse(hits=1, misses=2, held_bytes=4194304, idle_bytes=2097152)
    """

    def __init__(self, allocate: Allocate | None = None) -> None:
        self._allocate = allocate or _ordinary
        self._lock = threading.Lock()
        self._buffers: dict[int, deque[_Buffer]] = {}
        self._hits = self._misses = self._most_used = 0

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return memory on the CPU whose values are not set.

        Args:
            shape: of the tensor.
            dtype: of the tensor.
        """
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes < SMALLEST:
            with torch.inference_mode(False):
                return self._allocate(shape, dtype)
        if torch.is_inference_mode_enabled():  # no step outside of it could write to what is made in it
            with torch.inference_mode(False):
                return self._given(nbytes, shape, dtype)
        return self._given(nbytes, shape, dtype)

    def _given(self, nbytes: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        with self._lock:
            return self._buffer(size_for(nbytes)).given(shape, dtype)

    def _buffer(self, nbytes: int) -> _Buffer:
        buffers = self._buffers.setdefault(nbytes, deque())
        # The search goes on where it last ended: most often that buffer is idle again, and what is held for good, such
        # as a state, is passed once in a round. With 90 states of one size a search from the start takes 50 us.
        for _ in range(len(buffers)):
            if buffers[0].is_idle:
                self._hits += 1
                break
            buffers.rotate(-1)
        else:
            self._misses += 1
            self._make_room(nbytes)
            buffers.appendleft(_Buffer(nbytes, self._allocate))
        buffers[0].used = self._hits + self._misses
        return buffers[0]

    def _make_room(self, nbytes: int) -> None:
        """Let go of idle buffers beyond the most that was ever in use, where so many bytes are about to be."""
        idle = self._idle()
        idle_bytes = sum(buffer.nbytes for buffer in idle)
        self._most_used = max(self._most_used, self._held_bytes() - idle_bytes + nbytes)
        for buffer in sorted(idle, key=lambda each: each.used):
            if idle_bytes <= self._most_used:
                break
            self._buffers[buffer.nbytes].remove(buffer)
            idle_bytes -= buffer.nbytes

    def _idle(self) -> list[_Buffer]:
        return [buffer for buffers in self._buffers.values() for buffer in buffers if buffer.is_idle]

    def _held_bytes(self) -> int:
        return sum(nbytes * len(buffers) for nbytes, buffers in self._buffers.items())

    def use(self) -> PoolUse:
        """Count what was asked for and what is held."""
        with self._lock:
            idle_bytes = sum(buffer.nbytes for buffer in self._idle())
            return PoolUse(self._hits, self._misses, self._held_bytes(), idle_bytes)

    def let_go(self) -> None:
        """Give memory that nobody holds back to the system, unless another call is under way."""
        # The garbage collector may close a session while this very thread has the lock.
        if self._lock.acquire(blocking=False):
            try:
                held = {size: [b for b in all_of if not b.is_idle] for size, all_of in self._buffers.items()}
                self._buffers = {size: deque(some) for size, some in held.items()}
                self._most_used = 0
            finally:
                self._lock.release()


def _ordinary(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="cpu")


def _pinned(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=True)


def size_for(nbytes: int) -> int:
    """Return the size of the buffer that serves a request: a power of two, or 5, 6 or 7 quarters of one.

    >>> [size_for(n) for n in (65536, 65537, 100_000, 130_000)]
    [65536, 81920, 114688, 131072]
    """
    step = max((1 << (nbytes - 1).bit_length()) // (2 * _STEPS), 64)
    return -(-nbytes // step) * step


POOL = BufferPool()
"""That of this process."""

PINNED = BufferPool(_pinned)
"""The same of pinned memory, which only a process with a GPU has."""


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return memory whose values are not set, on a CPU from the pool.

    Args:
        shape: of the tensor.
        dtype: of the tensor.
        device: where it is.
    """
    return POOL.empty(shape, dtype) if device.type == "cpu" else torch.empty(shape, dtype=dtype, device=device)


def pinned(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return pinned memory of the host whose values are not set, from its pool.

    Args:
        shape: of the tensor.
        dtype: of the tensor.
    """
    return PINNED.empty(shape, dtype)


def let_go() -> None:
    """Give memory that nobody holds back to the system, from both pools."""
    POOL.let_go()
    PINNED.let_go()


def zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return `empty` memory that is filled with zeros."""
    return empty(shape, dtype, device).zero_()


def like(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return `empty` memory of a tensor's shape, contiguous.

    Args:
        tensor: whose shape and device count.
        dtype: of the memory, by default the tensor's.
    """
    return empty(tensor.shape, dtype or tensor.dtype, tensor.device)


def times(tensor: Tensor, factor: float) -> Tensor:
    """Return factor * tensor in `empty` memory, the same bits as `tensor * factor`."""
    return torch.mul(tensor, factor, out=like(tensor))


def copied(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return the same values, contiguous, in `empty` memory.

    Args:
        tensor: of any strides.
        dtype: of the copy, by default the tensor's.

    >>> copied(torch.ones(2, 3).T, torch.float64).stride()
    (2, 1)
    """
    return like(tensor, dtype).copy_(tensor)


def as_dtype(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the same values as `dtype`: the tensor itself where it is one, else `copied`."""
    return tensor if tensor.dtype == dtype else copied(tensor, dtype)


def contiguous(tensor: Tensor) -> Tensor:
    """Return the same values, contiguous: the tensor itself where it is, else `copied`."""
    return tensor if tensor.is_contiguous() else copied(tensor)


def joined(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Return tensors of one dtype end to end along a dimension, in `empty` memory, as `torch.cat` does.

    >>> joined([torch.zeros(2, 1), torch.ones(2, 2)], dim=-1)
    tensor([[0., 1., 1.],
            [0., 1., 1.]])
    """
    first, shape = tensors[0], list(tensors[0].shape)
    shape[dim] = sum(tensor.shape[dim] for tensor in tensors)
    return torch.cat(list(tensors), dim=dim, out=empty(shape, first.dtype, first.device))


def padded(flat: Tensor, numel: int) -> Tensor:
    """Return a 1-d tensor with zeros behind its end, so that it has `numel` elements; itself where it has them.

    >>> padded(torch.ones(2), 3)
    tensor([1., 1., 0.])
    """
    if flat.numel() == numel:
        return flat
    whole = empty((numel,), flat.dtype, flat.device)
    whole[: flat.numel()] = flat
    whole[flat.numel() :] = 0
    return whole


def write_rounded(out: Tensor, x: Tensor, dtype: torch.dtype, compute: Callable[[Tensor, Tensor], object]) -> None:
    """Write what is made of `x` over `out`, both 1-d, where `out` has a narrower type than what is made.

    On a CPU PyTorch would make all of it in the wider type, in memory of its own, and then round it.

    Args:
        out: what is written to.
        x: of as many elements.
        dtype: of what is made.
        compute: given some elements of `x`, and memory of `dtype` to write what it makes of them to.

    >>> out = torch.empty(2, dtype=torch.bfloat16)
    >>> write_rounded(out, torch.ones(2), torch.float32, lambda piece, made: torch.div(piece, 2, out=made))
    >>> out
    tensor([0.5000, 0.5000], dtype=torch.bfloat16)
    """
    numel = min(PIECE, x.numel()) if x.device.type == "cpu" else x.numel()
    made = empty((numel,), dtype, x.device)
    for piece, target in zip(x.split(max(numel, 1)), out.split(max(numel, 1)), strict=True):
        compute(piece, made[: piece.numel()])
        target.copy_(made[: piece.numel()])
