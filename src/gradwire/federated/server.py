"""The server: draws clients, checks what they send, and makes one step of it, once."""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Unpack

from torch import Tensor, nn

from gradwire.core.errors import CompositionError, FederationError, StateError
from gradwire.core.key import Key
from gradwire.federated.aggregation import require_rows
from gradwire.federated.checks import DecodedUpdate
from gradwire.federated.client import Assignment, Update
from gradwire.federated.global_model import GlobalModel, HasModel, ModelSettings
from gradwire.federated.sampling import Sampling, Uniform, shares_of


@dataclass(frozen=True)
class Round:
    """What became of a round.

    Attributes:
        number: from 0.
        clients: whose updates were taken up, in ascending order; under a private mean there may be none.
        dropped: why the others' were not, by client.
        loss: the mean training loss of the local steps, over those clients; NaN where there are none. No noise hides a
            client in it.
        sent_bytes: from the clients to the server, by client.
        received_bytes: from the server to the clients, by client; those that were dropped had received the model too.
    """

    number: int
    clients: tuple[int, ...]
    dropped: Mapping[int, str]
    loss: float
    sent_bytes: Mapping[int, int]
    received_bytes: Mapping[int, int]


@dataclass
class _Open:
    """A round that has begun and not ended."""

    clients: frozenset[int]
    received_bytes: dict[int, int]
    rows: dict[int, DecodedUpdate] = field(default_factory=dict[int, DecodedUpdate])
    dropped: dict[int, str] = field(default_factory=dict[int, str])


class Server(HasModel):
    """A global model, and rounds in which some clients change it. It does no I/O and knows no client's data.

        for assignment in server.begin():
            ...                         # have the client train, by `client.train`
            server.receive(update)      # or server.drop(client, "why")
        round = server.end()

    A round is atomic: `end` makes one step of what was received, or raises and leaves everything as it was. An update
    that `receive` refuses changes nothing either, so its client counts as dropped unless it sends a better one. What a
    client sends counts once: an update of another round is refused, and so is a second one.

    Memory is that of some vectors as long as the model, and one more for each client of the round that is open.

    Args:
        model: the global model begins as a copy of it.
        clients: N, how many there are.
        sample: how many clients a round has, or a `Sampling`.
        quorum: updates that a round needs at least, 1 by default; a rule may need more. A private mean takes what
            comes, and a quorum is refused, since a round that is given up would tell how many clients there were.
        local: an `SGD`, the clients' local steps.
        method: what clients and server compute; `FedAvg()` by default.
        optimizer: what the server makes of the mean change, a `ServerStep`; `Mean()` by default.
        update: how clients' updates travel: a spec such as "topk:0.05", or a `Sending`.
        broadcast: how the server's changes travel, likewise.
        aggregate: "mean", or a rule such as "trimmed:1" or "dp:1". Memory of what a codec lost and rules that leave
            rows out do not make up for each other: what a rule leaves out is lost.
        seed: of everything that is drawn at random, but for what makes a mean private: its noise, and who takes part.

    Attributes:
        round: the number of the round that is open or comes next.

    Raises:
        CompositionError: parts that do not fit together, a sample larger than the federation, or a quorum larger than
            the sample.
        SpecError: a spec that cannot be read.
    """

    def __init__(
        self,
        model: nn.Module,
        clients: int,
        *,
        sample: int | Sampling,
        quorum: int | None = None,
        **settings: Unpack[ModelSettings],
    ) -> None:
        self.clients = clients
        self.sampling = Uniform(sample) if isinstance(sample, int) else sample
        super().__init__(GlobalModel(model, **settings))
        self.quorum = self._quorum_of(quorum)
        self.round, self._attempt = 0, 0
        self._open: _Open | None = None
        self._require_fitting()

    def _require_fitting(self) -> None:
        self.sampling.require(self.clients)
        require_rows(self._global.aggregation, self.sampling.expected(self.clients))
        most = self.sampling.most(self.clients)
        if not self.private and not 1 <= self.quorum <= most:
            raise CompositionError(
                f"a quorum of {self.quorum} among {most} clients a round: it is 1 at least and no larger than the "
                "sample"
            )

    def _quorum_of(self, given: int | None) -> int:
        if self.private and given not in (None, 0):
            raise CompositionError(
                f"a quorum of {given} with a private mean, where a round that is given up tells how many clients there "
                "were: leave quorum out"
            )
        return (0 if self.private else 1) if given is None else given

    @property
    def shared(self) -> dict[str, Tensor]:
        """What the method shares with clients besides the model, such as SCAFFOLD's control variate."""
        return self._global.shared

    # One round ---------------------------------------------------------------------------------------------------

    def begin(self) -> list[Assignment]:
        """Draw the clients of the next round, in ascending order.

        Raises:
            FederationError: a round is open.
        """
        if self._open is not None:
            raise FederationError(f"round {self.round} is open: call end() or abandon() before the next begin()")
        # Clients know the seed. Sampling hides them only from those who cannot draw the sample again.
        seed = secrets.randbits(63) if self.private else self.terms.seed
        key = Key(seed, self.round, "federated.sample", str(self._attempt))
        drawn = self.sampling.draw(self.clients, key)
        self._open = _Open(frozenset(drawn), {client: self._global.bytes_to(client) for client in drawn})
        for client in drawn:
            self._global.broadcast.met(client)
        return self._global.assignments(drawn, self.round)

    def receive(self, update: Update) -> None:
        """Take an update in, to be a part of the step that `end` makes.

        Raises:
            FederationError: no round is open, or the update is of another round or model, of a client that was not
                drawn or whose update is here already, not finite, without examples or steps, or damaged.
        """
        opened = self._require_open()
        if update.round != self.round:
            raise FederationError(
                f"client {update.client} sends an update of round {update.round} in round {self.round}: it is left out"
            )
        if update.client not in opened.clients:
            raise FederationError(f"client {update.client} was not drawn for round {self.round}: it is left out")
        if update.client in opened.rows:
            raise FederationError(
                f"client {update.client}'s update of round {self.round} is here already: it counts once"
            )
        opened.rows[update.client] = self._global.rows_of(update)
        opened.dropped.pop(update.client, None)

    def drop(self, client: int, reason: str) -> None:
        """Note why a client of the round sends nothing."""
        opened = self._require_open()
        if client in opened.clients and client not in opened.rows:
            opened.dropped[client] = reason

    def abandon(self) -> None:
        """Give the open round up; the next `begin` draws anew."""
        self._require_open()
        self._open, self._attempt = None, self._attempt + 1

    def end(self) -> Round:
        """Make one step of what was received.

        Raises:
            FederationError: fewer updates than the quorum, or updates whose mean is not finite. The round is given up,
                nothing of it was applied, and the next `begin` draws other clients.
        """
        opened = self._require_open()
        self._require_quorum(opened)
        rows = [opened.rows[client] for client in sorted(opened.rows)]
        shares = self._shares(rows)
        try:
            self._global.step(rows, shares, len(rows) / self.clients, self.sampling.expected(self.clients))
        except FederationError:
            self.abandon()
            raise
        done = self._report(opened, shares)
        self.round, self._attempt, self._open = self.round + 1, 0, None
        return done

    def _require_open(self) -> _Open:
        if self._open is None:
            raise FederationError("no round is open: call begin() first")
        return self._open

    def _require_quorum(self, opened: _Open) -> None:
        needed = max(self.quorum, self._global.aggregation.fewest)
        if len(opened.rows) >= needed:
            return
        reasons = "; ".join(opened.dropped[client] for client in sorted(opened.dropped)[:3])
        self.abandon()
        raise FederationError(
            f"round {self.round} has {len(opened.rows)} updates of {len(opened.clients)} clients, and it needs "
            f"{needed}: nothing was applied, and the next round draws anew"
            + (f" (among the reasons: {reasons})" if reasons else "")
        )

    def _shares(self, rows: Sequence[DecodedUpdate]) -> list[float]:
        weighted = self.terms.method.weighted and self._global.aggregation.weighted and not self.sampling.by_weight
        return shares_of([row.examples if weighted else 1.0 for row in rows]) if rows else []

    def _report(self, opened: _Open, shares: Sequence[float]) -> Round:
        clients = sorted(opened.rows)
        missing = opened.clients - opened.rows.keys()
        losses = [share * opened.rows[client].loss for share, client in zip(shares, clients, strict=True)]
        return Round(
            number=self.round,
            clients=tuple(clients),
            dropped={client: opened.dropped.get(client, "sent nothing") for client in sorted(missing)},
            loss=sum(losses) if losses else math.nan,
            sent_bytes={client: opened.rows[client].nbytes for client in clients},
            received_bytes=opened.received_bytes,
        )

    def epsilon(self, delta: float) -> float:
        """Return epsilon of the rounds made so far: their models are (epsilon, delta)-private for each client.

        What cannot be told apart are two federations of `clients` numbers that differ by `sampling.neighbours`. With
        `Poisson` a client is there in one of them alone. With a sample of one size one client is another one in them;
        this counts each sigma for half, as the mean moves by twice as much. `ByWeight` gains nothing by sampling.
        Rounds that are empty count, and those that were given up do not: nobody saw a model of them.

        Args:
            delta: well below 1 / clients.

        Raises:
            CompositionError: no private mean, dp-accounting is not installed, or a delta outside of (0, 1).
        """
        return self.sampling.epsilon(self._noise(), self.round, delta, self.clients)

    # State -------------------------------------------------------------------------------------------------------

    def _settings(self) -> dict[str, object]:
        # Older versions saved a quorum of private means too, which no longer means anything.
        quorum = {} if self.private else {"quorum": self.quorum}
        return {"sample": self.sampling, "clients": self.clients, **quorum}

    def state_dict(self) -> dict[str, Any]:
        """All that the next round depends on, in tensors, numbers and strings; tensors are copies.

        Raises:
            StateError: a round is open.
        """
        if self._open is not None:
            raise StateError(f"round {self.round} is open: call end() or abandon() before saving")
        return self._global.state_dict(self._settings(), {"round": self.round, "attempt": self._attempt})

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was called; the seed is the saved one.

        Raises:
            StateError: a state of another model or of other settings, or what is no such state. Nothing is changed.
        """
        if self._open is not None:
            raise StateError(f"round {self.round} is open: call end() or abandon() before loading")
        self._global.load_state_dict(saved, self._settings(), ("round", "attempt"))
        self.round, self._attempt = saved["round"], saved["attempt"]
