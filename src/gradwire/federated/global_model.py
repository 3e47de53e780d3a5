"""The global model with all that moves along with it, and the one place where updates become a step of it."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Required, TypedDict

import torch
from torch import Tensor, nn

from gradwire.core.errors import CompositionError, FederationError, StateError
from gradwire.core.renamed import same
from gradwire.core.saved_schema import part_of, tensors_like
from gradwire.federated.aggregation import Aggregation, as_aggregation
from gradwire.federated.broadcast import Broadcast
from gradwire.federated.checks import DecodedUpdate, rows_of
from gradwire.federated.client import Assignment, Terms, Update
from gradwire.federated.flat import FlatModel
from gradwire.federated.local import SGD
from gradwire.federated.methods import MODEL, FedAvg, FederatedMethod
from gradwire.federated.optimizers import Mean, ServerStep
from gradwire.reducers.aggregate import PrivateMean, Rule
from gradwire.sending import Sending

BUFFERS = "buffers"


class ModelSettings(TypedDict, total=False):
    """What every server is told of its model; `Server` says what it means. What is left out has the default."""

    local: Required[SGD]
    method: FederatedMethod | None
    optimizer: ServerStep | None
    update: str | Sending
    broadcast: str | Sending
    aggregate: str | Rule | PrivateMean | Aggregation | None
    seed: int


class GlobalModel:
    """Parameters, buffers, the server step's memory, what the method shares, and what clients know of all that.

    It draws nobody and waits for nobody: servers do. For the arguments see `ModelSettings`.

    Attributes:
        terms: what clients need to know.
        flat: the model.
        shared: what the method shares with clients besides the model.
        broadcast: what clients know.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        local: SGD,
        method: FederatedMethod | None = None,
        optimizer: ServerStep | None = None,
        update: str | Sending = "none",
        broadcast: str | Sending = "none",
        aggregate: str | Rule | PrivateMean | Aggregation | None = None,
        seed: int = 0,
    ) -> None:
        self.optimizer, self.aggregation = optimizer or Mean(), as_aggregation(aggregate)
        self.flat = FlatModel(copy.deepcopy(model))
        self.terms = Terms(method or FedAvg(), local, Sending.of(update), seed, self.flat.fingerprint)
        self.shared = self.terms.method.shared(self.flat.values)
        self._memory = self.optimizer.memory(self.flat.values)
        self._last: dict[str, Tensor] = {}
        self.broadcast = Broadcast(Sending.of(broadcast), self.vectors())
        if self.aggregation.private and (self.shared or self.flat.buffers().numel()):
            raise CompositionError(
                f"{self.aggregation} hides one vector a client, and here each sends more: take a method without "
                "control variates, and a model without running statistics (GroupNorm in place of BatchNorm)"
            )

    def vectors(self) -> dict[str, Tensor]:
        """The parameters and what the method shares, alive, by name."""
        return {MODEL: self.flat.values, **self.shared}

    def assignments(self, clients: Sequence[int], number: int) -> list[Assignment]:
        """What these clients are to do in the round of that number."""
        known, buffers = self.broadcast.known, self.flat.buffers()
        shared = {name: vector for name, vector in known.items() if name != MODEL}
        return [Assignment(client, number, known[MODEL], buffers, shared) for client in clients]

    def bytes_to(self, client: int) -> int:
        """Bytes that a client needs to know what `assignments` says."""
        return self.broadcast.bytes_to(client) + self.flat.buffers().nbytes

    def rows_of(self, update: Update) -> DecodedUpdate:
        """Check and decode an update.

        Raises:
            FederationError: as `checks.rows_of`.
        """
        return rows_of(update, self.terms, self.vectors(), self.flat.buffers())

    @torch.no_grad()
    def step(self, rows: Sequence[DecodedUpdate], shares: Sequence[float], fraction: float, expected: float) -> None:
        """Make one step of what clients sent.

        Args:
            rows: one a client; none at all under a private aggregation alone.
            shares: what each counts for, summing to 1.
            fraction: of all clients that these are.
            expected: how many were expected before anybody was drawn.

        Raises:
            FederationError: their mean is not finite. Nothing is changed.
        """
        means = {
            name: self._combined([row.vectors[name] for row in rows], shares, expected, name, like)
            for name, like in self.vectors().items()
        }
        if (buffers := self.flat.buffers()).numel():
            means[BUFFERS] = self._combined([row.buffers for row in rows], shares, expected, BUFFERS, buffers)
        if bad := [name for name, mean in means.items() if not bool(mean.isfinite().all())]:
            raise FederationError(
                f"the mean {bad[0]} is not finite, though each update is: nothing was applied; lower the learning rates"
            )
        change = self._change(means[MODEL], [row.steps for row in rows], shares)
        self.optimizer.move_(self.flat.values, change, self._memory)
        self.shared = self.terms.method.share(self.shared, means, fraction)
        if BUFFERS in means:
            self.flat.load_buffers(buffers + means[BUFFERS])
        self._last = means if self.aggregation.remembers else {}
        self.broadcast.publish(self.vectors(), self.terms.seed)

    def _combined(
        self, rows: Sequence[Tensor], shares: Sequence[float], expected: float, name: str, like: Tensor
    ) -> Tensor:
        stacked = torch.stack(list(rows)) if rows else like.new_empty((0, like.numel()))
        return self.aggregation.combine(stacked, shares, self._last.get(name), expected)

    def _change(self, mean: Tensor, steps: Sequence[int], shares: Sequence[float]) -> Tensor:
        # How many steps clients made would tell of them without noise: a private mean knows only what was agreed on.
        if self.aggregation.private:
            steps, shares = [self.terms.local.steps], [1.0]
        return self.terms.method.change(mean, self.terms.local, steps, shares)

    # State -------------------------------------------------------------------------------------------------------

    def _settings(self) -> dict[str, str]:
        parts = {"method": self.terms.method, "local": self.terms.local, "update": self.terms.update}
        parts |= {"optimizer": self.optimizer, "aggregate": self.aggregation, "broadcast": self.broadcast.sending}
        return {name: repr(part) for name, part in parts.items()} | {"model": self.terms.fingerprint}

    def _tensors(self) -> dict[str, dict[str, Tensor]]:
        return {
            "model": {MODEL: self.flat.values, BUFFERS: self.flat.buffers()},
            "shared": self.shared,
            "known": self.broadcast.known,
            "optimizer": self._memory,
            "last": self._last,
        }

    def state_dict(self, settings: Mapping[str, object], numbers: Mapping[str, int]) -> dict[str, Any]:
        """All of it, with the settings and numbers of the server whose model it is; tensors are copies."""
        seen = [list(pair) for pair in self.broadcast.seen.items()]
        own = {"seed": self.terms.seed, "version": self.broadcast.version, "seen": seen}
        named = self._settings() | {name: repr(value) for name, value in settings.items()}
        copies = {
            group: {name: tensor.clone() for name, tensor in tensors.items()}
            for group, tensors in self._tensors().items()
        }
        return {"settings": named, **numbers, **own, **copies}

    def load_state_dict(self, saved: Mapping[str, Any], settings: Mapping[str, object], numbers: Sequence[str]) -> None:
        """Take up what `state_dict` returned; the server takes its numbers, which are there and whole, by itself.

        Raises:
            StateError: a state of another model or of other settings, or what is no such state. Nothing is changed.
        """
        theirs = part_of(saved, "settings", Mapping[str, Any])
        for name, here in (self._settings() | {name: repr(value) for name, value in settings.items()}).items():
            if not same(there := theirs.get(name), here):
                raise StateError(
                    f"the saved state is of a server with {name} {_short(there)}, and here it is {_short(here)}"
                )
        for name in ("seed", "version", *numbers):
            part_of(saved, name, int)
        seen = pairs_of(saved, "seen")
        own = self._tensors()
        last = {MODEL: self.flat.values, **self.shared, BUFFERS: own["model"][BUFFERS]}
        last = {name: vector for name, vector in last.items() if vector.numel()}
        like = {**own, "last": last if saved.get("last") else {}}
        found = {
            group: tensors_like(part_of(saved, group, Mapping[str, Any]), tensors, group)
            for group, tensors in like.items()
        }
        self.flat.values.copy_(found["model"][MODEL])
        self.flat.load_buffers(found["model"][BUFFERS])
        self.shared, self._memory, self._last = found["shared"], found["optimizer"], found["last"]
        self.broadcast.known, self.broadcast.version = found["known"], saved["version"]
        self.broadcast.seen = dict(seen)
        self.terms = replace(self.terms, seed=saved["seed"])


class HasModel:
    """A server around a global model."""

    def __init__(self, model: GlobalModel) -> None:
        self._global = model

    @property
    def terms(self) -> Terms:
        """What clients need to know."""
        return self._global.terms

    @property
    def model(self) -> nn.Module:
        """The global model, alive: look at it between steps and change nothing."""
        return self._global.flat.module

    @property
    def private(self) -> bool:
        """Whether noise hides what a client had to do with the models."""
        return self._global.aggregation.private

    def _noise(self) -> float:
        """Sigma of the private aggregation."""
        if (noise := self._global.aggregation.noise) is None:
            raise CompositionError(f'{self._global.aggregation} hides no client: take aggregate="dp:CLIP"')
        return noise


def pairs_of(saved: Mapping[str, Any], name: str) -> list[tuple[int, int]]:
    """Return the part of a saved state that is pairs of a client and a whole number.

    Raises:
        StateError: it is something else.
    """
    what = f"{name!r}, or its {name!r} are no pairs of a client and a whole number"
    return part_of(saved, name, list[tuple[int, int]], what)


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 80 else text[:80] + "..."
