"""Fingerprints of tensors, by which ranks find out whether theirs have the same bits."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from gradwire.session.together import Together


def digest(tensor: Tensor) -> str:
    """A fingerprint of the bits of a tensor, 8 bytes as text.

    >>> digest(torch.tensor([0.0])) == digest(torch.tensor([-0.0]))
    False
    """
    return _digest(tensor.detach().reshape(-1).contiguous().cpu().view(torch.uint8).numpy().tobytes())


class Difference(NamedTuple):
    """How a tensor differs between ranks.

    Attributes:
        rank: the first one on which it is not the same as on the first of all ranks.
        everywhere: whether all ranks have a tensor of that name.
        forms: shape and dtype as text, with the ranks that have a tensor of that form.
    """

    rank: int
    everywhere: bool
    forms: dict[str, list[int]]


class Fingerprints:
    """Those of some tensors.

    Attributes:
        each: of every tensor, by name: its shape and dtype, and the fingerprint of its bits.
        whole: one of all of them, with their names and their order.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.each = {name: [_form(tensor), digest(tensor)] for name, tensor in tensors.items()}
        self.whole = _digest(repr(self.each).encode())

    def differences(self, ranks: Together) -> dict[str, Difference]:
        """Tell all fingerprints to each other, and return the tensors that differ, by name, alike on all ranks.

        Raises:
            CommunicationError: a rank that did not come.
        """
        found: dict[str, Difference] = {}
        listed = ranks.gather(self.each)
        for name in dict.fromkeys(name for its in listed for name in its):
            differing = (n for n, its in zip(ranks.ranks, listed, strict=True) if its.get(name) != listed[0].get(name))
            if (rank := next(differing, None)) is not None:
                forms: dict[str, list[int]] = {}
                for one, its in zip(ranks.ranks, listed, strict=True):
                    if name in its:
                        forms.setdefault(its[name][0], []).append(one)
                found[name] = Difference(rank, all(name in its for its in listed), forms)
        return found


def _form(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} of {str(tensor.dtype).removeprefix('torch.')}"


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=8).hexdigest()
