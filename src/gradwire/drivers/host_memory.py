"""Residuals that lie in the host's memory between steps, for models on a GPU: copied there and back while programs run.

    kept residual --bring--> the unit's program --keep--> its new residual

Both copies are asynchronous, on a stream each beside the one where programs run. A residual is brought while the two
waves before its own are coded, and kept while those after it are. Copies change no bit, and no program sees them: it
takes a state on its device and returns one. So a method is the same wherever its residuals lie, and so is a save.
"""

from __future__ import annotations

import warnings
import weakref
from typing import Protocol

import torch
from torch import Tensor

from gradwire.core import buffers
from gradwire.core.errors import AttachError
from gradwire.core.state import Leaf, State, replace_leaves, walk
from gradwire.drivers.interpreter import Pending

WAVES_AHEAD = 2
"""How many waves before its own a residual is sent for: one is copied while another is coded."""

PLACES = ("device", "host")


class HostMemory(Protocol):
    """What copies tensors of a device to the host and back. `PinnedMemory` does so for CUDA."""

    def keep(self, tensor: Tensor) -> Tensor:
        """Start to copy a tensor to the host. What is returned holds its values after `wait`.

        Until `order` the tensor must not be written to. Nobody need hold it.
        """
        ...

    def bring(self, kept: Tensor) -> Pending:
        """Start to copy what `keep` returned to the device; waiting for it orders the stream and not the caller."""
        ...

    def order(self) -> None:
        """Put the current stream behind all copies so far: whatever was kept may be written over."""
        ...

    def wait(self) -> None:
        """Wait for all copies so far: what lies on the host may be read and written by the caller."""
        ...


class PinnedMemory:
    """Pinned memory of the host, from a pool, and two streams of a GPU: one for each direction.

    Args:
        device: whose tensors are kept.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._inward, self._outward = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def keep(self, tensor: Tensor) -> Tensor:
        """Start to copy a tensor to the host."""
        kept = buffers.pinned(tensor.shape, tensor.dtype)
        if tensor.device.type == "cpu":  # a state that was loaded; whoever brings it waits for the caller
            return kept.copy_(tensor)
        # The buffer may be one that an older residual was brought from: the current stream has waited for that.
        self._outward.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._outward):
            kept.copy_(tensor, non_blocking=True)
        tensor.record_stream(self._outward)
        return kept

    def bring(self, kept: Tensor) -> Pending:
        """Start to copy what was kept to the device."""
        self._inward.wait_stream(self._outward)
        with torch.cuda.stream(self._inward):  # its own memory, which need not wait for what the current stream does
            brought = torch.empty(kept.shape, dtype=kept.dtype, device=self._device)
            brought.copy_(kept, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record(self._inward)
        return _OnItsWay(brought, arrived)

    def order(self) -> None:
        """Put the current stream behind all copies so far."""
        current = torch.cuda.current_stream(self._device)
        current.wait_stream(self._inward)
        current.wait_stream(self._outward)

    def wait(self) -> None:
        """Wait for all copies so far."""
        self._inward.synchronize()
        self._outward.synchronize()


class _OnItsWay:
    """A tensor that is being copied to a GPU."""

    def __init__(self, brought: Tensor, arrived: torch.cuda.Event) -> None:
        self._brought, self._arrived = brought, arrived

    def wait(self) -> Tensor:
        """Have the current stream wait for it, which may use it from then on."""
        current = torch.cuda.current_stream(self._brought.device)
        current.wait_event(self._arrived)
        self._brought.record_stream(current)
        return self._brought


def host_memory(residuals: str, device: torch.device) -> HostMemory | None:
    """Return what keeps residuals away from the device of a model; None where they stay, as on a CPU.

    Args:
        residuals: "device" or "host".
        device: of the model.

    Raises:
        AttachError: another word.

    >>> host_memory("device", torch.device("cpu"))
    >>> host_memory("disk", torch.device("cpu"))
    Traceback (most recent call last):
        ...
    gradwire.core.errors.AttachError: residuals='disk': give 'device' or 'host'
    """
    if residuals not in PLACES:
        raise AttachError(f"residuals={residuals!r}: give {' or '.join(map(repr, PLACES))}")
    if residuals == "host" and device.type == "cuda":
        return PinnedMemory(device)
    if residuals == "host":
        warnings.warn(
            f"residuals='host' changes nothing for tensors on {device}: it is for a GPU, whose residuals would lie in "
            "the memory of its host between steps",
            stacklevel=4,
        )
    return None


class Residuals:
    """What a unit owes, which lies on the host between its programs.

    Args:
        host: where.
    """

    def __init__(self, host: HostMemory) -> None:
        self._host = host
        self._coming: dict[str, Pending] = {}
        self._came: list[tuple[weakref.ref[Tensor], Tensor]] = []  # weak: a program lets go of what it has read

    def send_for(self, state: State) -> None:
        """Start to bring what a state owes to the device; what is on its way already is not sent for again."""
        for path, leaf in walk(state):
            if leaf.owed and path not in self._coming:
                self._coming[path] = self._host.bring(leaf.tensor)

    def brought(self, state: State) -> State:
        """The state for a program, with all that it owes on the device."""
        self.send_for(state)
        coming, self._coming, self._came = self._coming, {}, []

        def on_device(path: str, leaf: Leaf) -> Leaf:
            if not leaf.owed:
                return leaf
            tensor = coming[path].wait()
            self._came.append((weakref.ref(tensor), leaf.tensor))
            return leaf.with_tensor(tensor)

        return replace_leaves(state, on_device)

    def kept(self, state: State) -> State:
        """The state to remember, with what it owes on the host; what a program has left as it was is there already."""
        came, self._came = self._came, []

        def on_host(path: str, leaf: Leaf) -> Leaf:
            if not leaf.owed:
                return leaf
            lies_there = next((kept for brought, kept in came if brought() is leaf.tensor), None)
            return leaf.with_tensor(self._host.keep(leaf.tensor) if lies_there is None else lies_there)

        return replace_leaves(state, on_host)

    def forget(self) -> None:
        """Forget what is on its way, for a step that broke off."""
        self._coming, self._came = {}, []
