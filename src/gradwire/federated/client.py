"""Clients: what they have, what they are asked to do, and what they send back."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gradwire.codecs.error_memory import ErrorMemory
from gradwire.core.errors import CompositionError, FederationError
from gradwire.core.key import Key
from gradwire.core.record import Bytes, Count, Doubles, Floats, Record
from gradwire.federated.flat import FlatModel
from gradwire.federated.local import SGD
from gradwire.federated.methods import FederatedMethod, Work
from gradwire.sending import Sending

Loss = Callable[[nn.Module, Key], Tensor]


@dataclass(frozen=True)
class Client:
    """One client's data, as far as training needs it.

    Args:
        examples: n_k, what it counts for in a mean; 0 for a client that has nothing, which sits its rounds out.
        loss: the loss of a local step on this client's data, `loss(model, key)`. `key.step` is the round and
            `key.micro_batch` the local step from 0; draw batches from nothing else, so that runs can be repeated.
        steps: local steps of a round; None for as many as `SGD.steps` says.

    Raises:
        CompositionError: a number of examples that is negative or not finite, or no steps.
    """

    examples: float
    loss: Loss
    steps: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.examples < math.inf:
            raise CompositionError(f"a client with {self.examples} examples: it has 0 or more")
        if self.steps is not None and self.steps < 1:
            raise CompositionError(f"a client that makes {self.steps} local steps: it makes one at least, or None")


@dataclass(frozen=True)
class Federation:
    """Clients by number. None is made before it is drawn, and none is kept after its round.

    Args:
        clients: how many.
        client: makes client i of them, 0 <= i < clients, the same one each time.

    Raises:
        CompositionError: no client.

    >>> federation = Federation(10**6, lambda i: Client(1, lambda model, key: model(torch.ones(1)).sum()))
    >>> federation.client(123_456).examples
    1
    """

    clients: int
    client: Callable[[int], Client]

    def __post_init__(self) -> None:
        if self.clients < 1:
            raise CompositionError(f"a federation of {self.clients} clients: it has one at least")


@dataclass(frozen=True)
class Terms:
    """What server and clients agree on before the first round.

    Attributes:
        method: e.g. `FedNova()`.
        local: the clients' SGD.
        update: how updates travel.
        seed: of the run.
        fingerprint: of the model.
    """

    method: FederatedMethod
    local: SGD
    update: Sending
    seed: int
    fingerprint: str

    def key(self, client: int, round: int, name: str) -> Key:
        """The key under which a client's vector of that name travels in a round."""
        return Key(self.seed, round, f"federated.{name}", "update", client)


class Assignment(Record, frozen=True):
    """What the server asks of one client in a round.

    Attributes:
        client: its number.
        round: which round; an update says which one it is of.
        model: the parameters, (d,). Not to be changed.
        buffers: of the model, float64.
        shared: what the method shares besides. Not to be changed.
        serial: tells it from others of its client and round, where there may be several.
    """

    client: Count
    round: Count
    model: Floats
    buffers: Doubles
    shared: Mapping[str, Floats]
    serial: Count = 0


class Update(Record, frozen=True):
    """What a client sends back.

    Attributes:
        client: its number.
        round: which round it is of.
        fingerprint: of the model that was trained.
        examples: n_k.
        steps: local steps made.
        wires: bytes of each vector, as the terms' `update` makes them.
        buffers: of the trained model, float64.
        loss: the mean training loss of its local steps.
        serial: of the assignment.
    """

    client: Count
    round: Count
    fingerprint: str
    examples: float
    steps: Count
    wires: Mapping[str, Bytes]
    buffers: Doubles
    loss: float
    serial: Count = 0

    @property
    def nbytes(self) -> int:
        """Bytes of its vectors and buffers."""
        return sum(wire.nbytes for wire in self.wires.values()) + self.buffers.nbytes


class Kept(Record, frozen=True):
    """What a client keeps between its rounds, nothing before its first.

    Attributes:
        vectors: the method's, such as SCAFFOLD's control variate.
        memories: what it still owes the server, by the name of what is sent.
    """

    vectors: Mapping[str, Floats] = {}
    memories: Mapping[str, ErrorMemory] = {}

    def __bool__(self) -> bool:
        return bool(self.vectors or self.memories)


class Done(Record, frozen=True, tag=True):
    """An update, and what its client keeps once the server has taken it up; until then it keeps what it had."""

    update: Update
    kept: Kept


def train(terms: Terms, task: Assignment, client: Client, kept: Kept, model: FlatModel, share: float = 1.0) -> Done:
    """Do a client's part of a round in `model`, whatever it held before.

    Random layers draw from a key of their own, and the global generators are as they were afterwards.

    Args:
        terms: as the server has it.
        task: from the server.
        client: its data.
        kept: from its last round.
        model: the one to train in.
        share: of its local steps that it comes to; one step at least.

    Raises:
        FederationError: a client without examples, or an update that is not finite.
    """
    if not client.examples > 0:
        raise FederationError(f"client {task.client} has no examples: leave it out of the federation")
    steps = max(1, round(share * (client.steps or terms.local.steps)))
    model.values.copy_(task.model)
    model.load_buffers(task.buffers)
    loss = _local_steps(terms, task, client, kept, model, steps)
    if not bool(model.values.isfinite().all()):
        raise FederationError(
            f"client {task.client}'s model is not finite after {steps} local steps of round {task.round}: lower the "
            "local lr, or look at its data"
        )
    work = Work(task.model, model.values, steps, terms.local, task.shared, kept.vectors)
    message = terms.method.message(work)
    wires: dict[str, Tensor] = {}
    memories: dict[str, ErrorMemory] = {}
    for name, vector in message.sent.items():
        key = terms.key(task.client, task.round, name)
        wires[name], memory = terms.update.send(vector, kept.memories.get(name), key)
        memories |= {} if memory is None else {name: memory}
    update = Update(
        client=task.client,
        round=task.round,
        fingerprint=model.fingerprint,
        examples=float(client.examples),
        steps=steps,
        wires=wires,
        buffers=model.buffers(),
        loss=loss,
        serial=task.serial,
    )
    return Done(update, Kept(message.kept, memories))


@contextlib.contextmanager
def _drawing_from(key: Key, device: torch.device) -> Generator[None]:
    """Have layers such as dropout draw from a key; PyTorch's generators are afterwards as they were."""
    # `torch.manual_seed` would also queue a call for each kind of accelerator, for ever where there is none.
    seed = key.stream_seed >> 1
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.default_generator.manual_seed(seed)
        if device.type == "cuda":
            torch.cuda.manual_seed(seed)
        yield


def _local_steps(terms: Terms, task: Assignment, client: Client, kept: Kept, model: FlatModel, steps: int) -> float:
    """Train; return the mean loss."""
    key = Key(terms.seed, task.round, "federated.client", rank=task.client)
    y, g, local = model.values, model.gradient, terms.local
    velocity = torch.zeros_like(g) if local.momentum else None
    total = torch.zeros((), dtype=y.dtype, device=y.device)
    model.module.train()
    with _drawing_from(key.with_(stage="layers"), y.device):
        for step in range(steps):
            g.zero_()
            loss = client.loss(model.module, key.with_(micro_batch=step))
            loss.backward()
            with torch.no_grad():
                total += loss.detach()
                d = terms.method.direction_(g, y, task.model, task.shared, kept.vectors)
                d = d.add_(y, alpha=local.weight_decay) if local.weight_decay else d
                d = d if velocity is None else velocity.mul_(local.momentum).add_(d)
                y.add_(d, alpha=-local.lr)
    model.require_bound()
    return float(total) / steps
