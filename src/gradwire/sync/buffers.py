"""What becomes of a model's buffers, such as the running statistics of BatchNorm, when ranks average."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from gradwire.core.collective import AllReduce
from gradwire.core.errors import CompositionError, StateError
from gradwire.session.names import canonical_name

Policy = Literal["average", "rank0", "own"]
"""average: numbers with a fraction become their mean, others what rank 0 has. rank0: all become what rank 0 has. own:
each rank keeps its own."""

Ask = Callable[[AllReduce], Tensor]


def require_policy(policy: str) -> None:
    """Refuse what is no policy.

    Raises:
        CompositionError: with those there are.
    """
    if policy not in get_args(Policy):
        raise CompositionError(f"buffers={policy!r}: give one of {', '.join(map(repr, get_args(Policy)))}")


def persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """The buffers that a checkpoint of the model has. Others are constants or scratch, and each rank keeps its own."""
    saved = model.state_dict(keep_vars=True).keys()
    return {canonical_name(name): buffer for name, buffer in model.named_buffers() if name in saved}


class Buffers:
    """The buffers of a model, and what all ranks had in them when they last averaged.

    Means are taken of what changed since then, so buffers that never change keep their bits.

    Args:
        model: whose persistent buffers count.
        policy: what becomes of them.
        ask: does an all-reduce, on every rank.
        rank: this one.
        ranks: how many there are.
    """

    def __init__(self, model: nn.Module, policy: Policy, ask: Ask, rank: int, ranks: int) -> None:
        self._model, self._ask, self._rank, self._ranks = model, ask, rank, ranks
        self._averages = policy == "average"
        self._follows = policy != "own"
        self.copies = {name: _wide(buffer) for name, buffer in self._averaged().items()}

    def _all(self) -> dict[str, Tensor]:
        return persistent_buffers(self._model) if self._follows else {}

    def _averaged(self) -> dict[str, Tensor]:
        if not self._averages:
            return {}
        return {name: buffer for name, buffer in self._all().items() if _has_fraction(buffer)}

    @torch.no_grad()
    def average_(self) -> None:
        """Do what the policy says, on every rank at the same place."""
        for name, changed in self._summed(self._changes()).items():
            self.copies[name].add_(changed)
        for name, buffer in self._averaged().items():
            buffer.copy_(self.copies[name])
        others = {name: buffer for name, buffer in self._all().items() if name not in self.copies}
        first = self._rank == 0
        sent = {name: _sent(buffer) if first else torch.zeros_like(_sent(buffer)) for name, buffer in others.items()}
        for name, value in self._summed(sent).items():
            others[name].copy_(value)

    @torch.no_grad()
    def begin_anew(self) -> None:
        """Take what the buffers are now for what all ranks had."""
        for name, buffer in self._averaged().items():
            self.copies[name].copy_(buffer)

    def _changes(self) -> dict[str, Tensor]:
        """This rank's part of the mean change. What did not change did not change by infinity either."""
        changes: dict[str, Tensor] = {}
        for name, buffer in self._averaged().items():
            now, before = _wide(buffer), self.copies[name]
            zero = torch.zeros_like(now)
            changes[name] = torch.where(now == before, zero, now - before).mul_(1 / self._ranks)
        return changes

    def _summed(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The sum over ranks of each tensor: one all-reduce for each kind of number."""
        summed: dict[str, Tensor] = {}
        for dtype in dict.fromkeys(tensor.dtype for tensor in tensors.values()):
            alike = {name: tensor for name, tensor in tensors.items() if tensor.dtype == dtype}
            whole = self._ask(AllReduce(torch.cat([tensor.reshape(-1) for tensor in alike.values()])))
            parts = whole.split([tensor.numel() for tensor in alike.values()])
            summed |= {name: part.view(alike[name].shape) for name, part in zip(alike, parts, strict=True)}
        return summed

    def state_dict(self) -> dict[str, Tensor]:
        """What all ranks had; copies."""
        return {name: copy.clone() for name, copy in self.copies.items()}

    def check(self, saved: Mapping[str, Tensor]) -> None:
        """Refuse what belongs to other buffers.

        Raises:
            StateError: with the first that differs.
        """
        require_alike("buffer", self.copies, saved)

    def take_up(self, saved: Mapping[str, Tensor]) -> None:
        """Go on from what `check` has accepted."""
        for name, copy in self.copies.items():
            copy.copy_(saved[name])


def require_alike(what: str, here: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> None:
    """Refuse saved tensors that have other names, shapes or dtypes than those here.

    Raises:
        StateError: with the first that differs.
    """
    for name in _first_of(here.keys() ^ saved.keys()):
        where, not_there = ("this model", "the saved state") if name in here else ("the saved state", "this model")
        raise StateError(f"{where} has a {what} {name!r} and {not_there} has none: it was saved with another model")
    for name, tensor in here.items():
        its = saved[name]
        if its.shape != tensor.shape or its.dtype != tensor.dtype:
            found, wanted = f"{tuple(its.shape)} {its.dtype}", f"{tuple(tensor.shape)} {tensor.dtype}"
            raise StateError(
                f"the saved {what} {name!r} is {found}, and here {wanted}: it was saved with another model"
            )


def _first_of(names: Iterable[str]) -> list[str]:
    return sorted(names)[:1]


def _has_fraction(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _sent(tensor: Tensor) -> Tensor:
    """A tensor as every backend can sum it."""
    return _wide(tensor) if _has_fraction(tensor) else tensor.long()


def _wide(tensor: Tensor) -> Tensor:
    """A copy in 32 bits at least."""
    return tensor.detach().to(torch.promote_types(tensor.dtype, torch.float32), copy=True)
