"""Engines: where the clients of a round train. All of them give what `client.train` gives."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Protocol

from torch import nn

from gradwire.core.errors import GradwireError
from gradwire.core.record import Count, Record
from gradwire.federated.client import Assignment, Done, Federation, Kept, Terms, train
from gradwire.federated.flat import FlatModel


class ClientJob(Record, frozen=True):
    """A client's part of a round.

    Attributes:
        task: what the server asks.
        kept: what the client kept.
        share: of its local steps that it comes to.
    """

    task: Assignment
    kept: Kept
    share: float = 1.0


class Lost(Record, frozen=True, tag=True):
    """A client that sends nothing, and why."""

    client: Count
    reason: str


Outcome = Done | Lost


class ClientEngine(Protocol):
    """Runs the jobs of a round; yields one outcome for each, in any order."""

    def run(self, terms: Terms, jobs: Sequence[ClientJob]) -> Iterator[Outcome]:
        """Train the clients of `jobs`."""
        ...

    def close(self) -> None:
        """Free what the engine holds."""
        ...


class LocalTrainer:
    """One model to train in, one client after another."""

    def __init__(self, model: nn.Module, federation: Federation) -> None:
        self._model, self._federation = FlatModel(copy.deepcopy(model)), federation

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the model's names and shapes."""
        return self._model.fingerprint

    def do(self, terms: Terms, job: ClientJob) -> Outcome:
        """Do a job; whatever a client's code raises loses that client and no other."""
        client, job = job.task.client, job.on(self._model.values.device)
        try:
            return train(terms, job.task, self._federation.client(client), job.kept, self._model, job.share)
        except GradwireError as error:
            return Lost(client, str(error))
        except Exception as error:
            reason = f"client {client} raised {type(error).__name__}: {error}"
            return Lost(client, reason.encode(errors="backslashreplace").decode())  # names of files may be no UTF-8


class InProcess(LocalTrainer):
    """Clients train one after another in this process, in one copy of the model.

    So memory does not depend on how many clients there are.
    """

    def run(self, terms: Terms, jobs: Sequence[ClientJob]) -> Iterator[Outcome]:
        """One job after another."""
        for job in jobs:
            yield self.do(terms, job)

    def close(self) -> None:
        """There is nothing to free."""
