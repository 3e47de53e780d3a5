"""`gradwire federate`: one task trained by a federation on this machine, and what came of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from gradwire.core.errors import CompositionError, FederationError
from gradwire.core.key import Key
from gradwire.federate.options import FederateOptions
from gradwire.federate.results import FederationEvaluation, Own, Results
from gradwire.federated import SGD, Client, Conditions, Federation, Poisson, Round, Server, Simulation, Uniform
from gradwire.federated.names import parse_method, parse_partition
from gradwire.federated.sampling import Sampling
from gradwire.network.environment import machine
from gradwire.option_fields import check_fields, stored
from gradwire.tasks.builtin import make_task
from gradwire.tasks.task import Examples, Task, TaskError, count, measure

MOST_FAILURES = 10
"""Rounds in a row below the quorum, after which a run is given up."""
MOST_SHOWN = 200
"""Clients whose own examples the final model is tried on."""


class FederationNews(NamedTuple):
    """How far a run has come."""

    round: Round
    value: float
    sent_bytes: int


class Shares:
    """Makes the clients of a task: client i has the examples `parts[i]`."""

    def __init__(self, task: Task, parts: list[Tensor], options: FederateOptions) -> None:
        self.task, self.parts, self.options = task, parts, options
        self.examples = examples_of(task, options.task)

    def __call__(self, i: int) -> Client:
        """The share of client i."""
        own = self.parts[i]
        per_epoch = -(-own.numel() // self.options.batch)

        def loss(model: nn.Module, key: Key) -> Tensor:
            epoch, at = divmod(key.micro_batch or 0, per_epoch)
            order = torch.randperm(own.numel(), generator=_generator(key.with_(micro_batch=None, stage=f"{epoch}")))
            chosen = own[order[at * self.options.batch : (at + 1) * self.options.batch]]
            inputs, targets = self.examples.batch(chosen, _generator(key))
            return self.task.loss(model(inputs), targets)

        return Client(own.numel(), loss, steps=self.options.epochs * per_epoch)


def _generator(key: Key) -> torch.Generator:
    return torch.Generator().manual_seed(key.stream_seed >> 1)


def examples_of(task: Task, name: str) -> Examples:
    """The task's examples.

    Raises:
        TaskError: it does not say what they are.
    """
    if task.examples is None:
        raise TaskError(
            f"task {name} does not say how its data is dealt out: give its Task examples=gradwire.tasks.task.Examples"
            "(count, labels, batch)"
        )
    return task.examples


def prepare(options: FederateOptions) -> tuple[Task, Shares, Simulation]:
    """Check all options and make what they name.

    Raises:
        GradwireError: an option that makes no sense; the message says which.
    """
    check_fields(options, CompositionError)
    task = make_task(options.task, options.seed, options.text)
    examples = examples_of(task, options.task)
    known = examples.count if examples.labels is None else examples.labels
    key = Key(options.seed, name="federated.partition")
    shares = Shares(task, parse_partition(options.partition).split(known, options.clients, key), options)
    method, optimizer = parse_method(options.method)
    server = Server(
        task.model,
        options.clients,
        sample=sampling_of(options),
        local=SGD(options.lr, momentum=options.momentum),
        method=method,
        optimizer=optimizer,
        update=options.update,
        broadcast=options.broadcast,
        aggregate=options.aggregate,
        quorum=options.quorum,
        seed=options.seed,
    )
    conditions = Conditions(options.drop, options.slow)
    return task, shares, Simulation(server, Federation(options.clients, shares), conditions=conditions)


def sampling_of(options: FederateOptions) -> Sampling:
    """How the clients of a round are drawn.

    Raises:
        CompositionError: a sample larger than the federation.
    """
    fixed = Uniform(options.sample)
    fixed.require(options.clients)
    return Poisson(options.sample / options.clients) if options.sampling == "poisson" else fixed


class FederationRun:
    """A run that can be watched, and stopped between two rounds.

    Args:
        options: what to train.

    Attributes:
        results: what is known by now.
    """

    def __init__(self, options: FederateOptions) -> None:
        self.options = options
        self.task, self.shares, self.simulation = prepare(options)
        facts = {name: getattr(self.task, name) for name in ("metric_name", "higher_is_better")}
        size = f"{options.task}: {count(self.task.model):,} parameters, {self.shares.examples.count:,} examples"
        self.results = Results(
            task={"name": options.task, "description": size, **facts},
            options=stored(options) | {"quorum": self.simulation.server.quorum},
            environment=machine(),
            rounds=[],
            failures=[],
            evaluations=[],
            clients=[],
        )
        self._bytes = [0, 0]
        self._evaluate(0)

    def train(self, tell: Callable[[FederationNews], None]) -> None:
        """Make all rounds, and try the final model on clients' own examples.

        Raises:
            FederationError: so many rounds in a row were below the quorum that there is no going on.
        """
        start = time.monotonic()
        for number in range(1, self.options.rounds + 1):
            done = self._round()
            self._bytes[0] += sum(done.sent_bytes.values())
            self._bytes[1] += sum(done.received_bytes.values())
            self.results.rounds.append(done)
            if number % self._every() == 0 or number == self.options.rounds:
                self._evaluate(number)
            self.results.seconds = time.monotonic() - start
            tell(FederationNews(done, self.results.evaluations[-1].value, self._bytes[0]))

    def _every(self) -> int:
        return max(1, self.options.rounds // 50)

    def _round(self) -> Round:
        for attempt in range(MOST_FAILURES):
            try:
                return self.simulation.round()
            except FederationError as error:
                self.results.failures.append(str(error))
                if attempt == MOST_FAILURES - 1:
                    raise
        raise AssertionError("the loop returns or raises")

    @torch.no_grad()
    def _evaluate(self, rounds: int) -> None:
        model = self.simulation.server.model.eval()
        self.results.evaluations.append(
            FederationEvaluation(rounds, measure(self.task.metric, model).value, *self._bytes)
        )

    @torch.no_grad()
    def finish(self) -> Results:
        """Try the model on clients' own examples, and tell what privacy costs; return all results."""
        self.results.privacy = self._privacy()
        shown = range(0, self.options.clients, -(-self.options.clients // MOST_SHOWN))
        self.results.clients = [self._own(client) for client in shown]
        return self.results

    def _privacy(self) -> str | None:
        """What is known of a client by those who see the models, in a sentence; None where nothing hides it."""
        server, delta = self.simulation.server, self.options.delta
        if not server.private:
            return None
        try:
            epsilon = f"epsilon is {server.epsilon(delta):.3g}"
        except CompositionError as error:
            epsilon = f"epsilon is not known ({error})"
        return (
            f"After {server.round} rounds {epsilon} at delta {delta:g}, for {server.sampling.neighbours}. That is for "
            "the models: losses, bytes and clients on this page are not noisy."
        )

    def _own(self, client: int) -> Own:
        part, examples = self.shares.parts[client], self.shares.examples
        rounds = [done for done in self.results.rounds if client in done.sent_bytes]
        inputs, targets = examples.batch(part[:1000], _generator(Key(self.options.seed, name="federated.own")))
        outputs = self.simulation.server.model.eval()(inputs)
        labels = None if examples.labels is None else examples.labels[part]
        return Own(
            client=client,
            examples=part.numel(),
            labels=None if labels is None else labels.unique().numel(),
            rounds=len(rounds),
            sent_bytes=sum(done.sent_bytes[client] for done in rounds),
            loss=float(self.task.loss(outputs, targets)),
            accuracy=None if labels is None else _accuracy(outputs, labels[:1000]),
        )


def _accuracy(outputs: Tensor, labels: Tensor) -> float | None:
    """Percent of labels that are the greatest output, where outputs are one row of scores an example."""
    if outputs.dim() != 2 or outputs.shape[0] != labels.shape[0]:
        return None
    return 100 * float((outputs.argmax(dim=1) == labels).float().mean())
