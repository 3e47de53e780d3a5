"""Methods: what clients do in a local step, what they send, and what the server makes of the mean of that.

A method is a frozen dataclass of settings. It holds nothing: what a client keeps from round to round and what server
and clients share besides the model are handed in and handed back, as vectors by name. x is the model that a client
got, y what its local steps made of it, g a gradient, tau_i the local steps of client i, p_i its share of the weights.
Everything that is random, sent or stored is done elsewhere, so methods compose with every `ServerStep`, every codec
and, where they allow it, every rule of aggregation.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from gradwire.core.errors import CompositionError
from gradwire.federated.local import SGD, normaliser

Vectors = Mapping[str, Tensor]
MODEL = "model"
CONTROL = "control"


class Work(NamedTuple):
    """What a client has done in a round.

    Attributes:
        x: the model that it got.
        y: what it became.
        steps: tau_i.
        local: the settings of its local steps.
        shared: what it got besides the model.
        kept: what it kept from the last round it took part in; empty in its first.
    """

    x: Tensor
    y: Tensor
    steps: int
    local: SGD
    shared: Vectors
    kept: Vectors


class ClientMessage(NamedTuple):
    """What a client sends, by name, and what it keeps once the server has taken that up."""

    sent: dict[str, Tensor]
    kept: dict[str, Tensor]


class FederatedMethod(ABC):
    """See the module's text. Changes named `MODEL` are those of the parameters.

    Attributes:
        weighted: whether clients count by their number of examples; alike otherwise.
        mu: of the proximal term, 0 for none.
    """

    weighted: ClassVar[bool] = True

    mu: float = 0.0

    def shared(self, x: Tensor) -> dict[str, Tensor]:
        """What the server sends besides the model, before the first round."""
        return {}

    def direction_(self, g: Tensor, y: Tensor, x: Tensor, shared: Vectors, kept: Vectors) -> Tensor:
        """What a local step takes for the gradient `g`, which may be changed in place."""
        return g

    @abstractmethod
    def message(self, work: Work) -> ClientMessage:
        """What is sent after the last local step."""

    def change(self, mean: Tensor, local: SGD, steps: Sequence[int], shares: Sequence[float]) -> Tensor:
        """What the server's step takes for the mean change of the model, from the mean of what was sent."""
        return mean

    def share(self, shared: dict[str, Tensor], mean: Vectors, fraction: float) -> dict[str, Tensor]:
        """What the server sends from now on besides the model; `fraction` of all clients took part."""
        return shared

    def _require_mu(self) -> None:
        if not 0 <= self.mu < float("inf"):
            raise CompositionError(f"mu={self.mu} of {type(self).__name__}: a proximal term is 0 or more and finite")


@dataclass(frozen=True)
class FedAvg(FederatedMethod):
    """y -= lr g;  x += sum_i p_i (y_i - x), p_i by numbers of examples (McMahan et al. 2017, Algorithm 1).

    p_i = n_i / sum of the n_j of those clients whose updates are here, as in the paper's last version. The paper counts
    local work in epochs E over batches of size B; here it is counted in steps (`Client.steps`). A client that fails is
    left out of the mean, of which the paper says nothing.

    Clients that make more steps pull harder: on F_i = |x - e_i|^2 / 2 it ends at weights p_i (1 - (1 - lr)^tau_i) of
    the e_i, and not at p_i.

    References:
        McMahan, Moore, Ramage, Hampson & Aguera y Arcas 2017, "Communication-efficient learning of deep networks from
        decentralized data".
    """

    def message(self, work: Work) -> ClientMessage:
        """The change y - x."""
        return ClientMessage({MODEL: work.y - work.x}, {})


@dataclass(frozen=True)
class FedProx(FedAvg):
    """y -= lr (g + mu (y - x)), averaged as by `FedAvg`: clients stay near the global model (Li et al. 2020).

    Algorithm 2 of the paper has clients minimise h_i(y) = F_i(y) + mu/2 |y - x|^2 inexactly; these are SGD's steps on
    it. On quadratic clients as in `FedAvg` it ends at weights p_i (1 - (1 - lr (1 + mu))^tau_i).

    Who takes part differs. Algorithm 2 draws client i with probability p_i, and all who were drawn count alike. By
    default clients are drawn uniformly here and count by their examples, which is what the authors' code does; both
    have the same mean where the number of examples of a sample hardly varies. `sample=ByWeight(K, examples)` is
    Algorithm 2, but that nobody is drawn twice in a round. As in the paper a straggler's partial work counts, and gamma
    is the share of its steps that it makes (`Conditions`).

    Args:
        mu: 0 or more; 0 is `FedAvg`.

    Raises:
        CompositionError: a negative mu.

    References:
        Li, Sahu, Zaheer, Sanjabi, Talwalkar & Smith 2020, "Federated optimization in heterogeneous networks".
    """

    mu: float = 0.1

    def __post_init__(self) -> None:
        self._require_mu()

    def direction_(self, g: Tensor, y: Tensor, x: Tensor, shared: Vectors, kept: Vectors) -> Tensor:
        """The gradient of the loss with the proximal term."""
        return g.add_(y, alpha=self.mu).sub_(x, alpha=self.mu) if self.mu else g


@dataclass(frozen=True)
class FedNova(FedProx):
    """x += tau_eff sum_i p_i (y_i - x) / |a_i|_1,  tau_eff = sum_i p_i |a_i|_1 (Wang et al. 2020, section 5).

    |a_i|_1 is how far a client's steps reach (`local.normaliser`): tau_i for SGD, more with momentum, less with a
    proximal term. So clients that make more steps pull no harder, as long as they make small ones: quadratic clients
    end at `FedAvg`'s weights over |a_i|_1. The quotient is what clients send, so that error memory is owed in units
    that do not depend on a round's steps; the server computes |a_i|_1 from tau_i by itself.

    The paper leaves tau_eff open. This one keeps the mean step as long as `FedAvg`'s or `FedProx`'s. So does the
    authors' code without a proximal term. With one it takes sum_i p_i tau_i, which is longer: it makes up for how much
    shorter mu makes the steps. The limit is the same. Where there are a proximal term and momentum, the authors' code
    adds 1 to their |a_i|_1 a second time in each step; here it is exact. Under a private mean (`aggregate="dp:1"`)
    tau_eff is that of `SGD.steps`, since the clients' own numbers are not noisy. The paper's momentum of the server is
    `FedAvgM`.

    Args:
        mu: of a proximal term in the local steps, 0 for none.

    Raises:
        CompositionError: a negative mu.

    References:
        Wang, Liu, Liang, Joshi & Poor 2020, "Tackling the objective inconsistency problem in heterogeneous federated
        optimization".
    """

    mu: float = 0.0

    def message(self, work: Work) -> ClientMessage:
        """The change over how far the steps reach."""
        return ClientMessage({MODEL: (work.y - work.x) / normaliser(work.local, self.mu, work.steps)}, {})

    def change(self, mean: Tensor, local: SGD, steps: Sequence[int], shares: Sequence[float]) -> Tensor:
        """tau_eff times the mean."""
        reached = [normaliser(local, self.mu, count) for count in steps]
        return mean * sum(share * reach for share, reach in zip(shares, reached, strict=True))


@dataclass(frozen=True)
class Scaffold(FederatedMethod):
    """Control variates take out what clients' gradients differ by (Karimireddy et al. 2020, Algorithm 1, option II).

        y -= lr (g - c_i + c)
        c_i' = c_i - c + (x - y) / (tau_i lr)
        x += 1/|S| sum_i (y_i - x),    c += 1/N sum_i (c_i' - c_i)

    S are the clients that took part, N is all of them; clients count alike. Quadratic clients end at the optimum of
    their mean, however many steps each makes. With local momentum |a_i|_1 (`local.normaliser`) stands for tau_i, so
    that c_i' still is a mean of gradients; the paper has none. eta_g of the paper is the `lr` of the server's `Mean`.
    The paper has one number of steps K for all clients, and no weights of examples. Its option I, a gradient of all of
    a client's data at x, is not here. Where both are compressed (`update=`), the server's c is no longer exactly the
    mean of the c_i: it lacks what clients still owe.

    A client keeps its c_i, a vector as long as the model, from the first round that it takes part in, and sends the
    change of it beside that of the model: twice `FedAvg`'s bytes in both directions.

    References:
        Karimireddy, Kale, Mohri, Reddi, Stich & Suresh 2020, "SCAFFOLD: stochastic controlled averaging for federated
        learning".
    """

    weighted: ClassVar[bool] = False

    @override
    def shared(self, x: Tensor) -> dict[str, Tensor]:
        return {CONTROL: torch.zeros_like(x)}

    def direction_(self, g: Tensor, y: Tensor, x: Tensor, shared: Vectors, kept: Vectors) -> Tensor:
        """g - c_i + c."""
        g.add_(shared[CONTROL])
        return g.sub_(kept[CONTROL]) if kept else g

    def message(self, work: Work) -> ClientMessage:
        """The changes of y and of c_i."""
        before = kept_control(work)
        reach = work.local.lr * normaliser(work.local, 0.0, work.steps)
        after = before - work.shared[CONTROL] + (work.x - work.y) / reach
        return ClientMessage({MODEL: work.y - work.x, CONTROL: after - before}, {CONTROL: after})

    def share(self, shared: dict[str, Tensor], mean: Vectors, fraction: float) -> dict[str, Tensor]:
        """c + |S|/N times the mean change of the c_i."""
        return {CONTROL: shared[CONTROL] + fraction * mean[CONTROL]}


def kept_control(work: Work) -> Tensor:
    """c_i before the round: zeros in the first one."""
    return work.kept[CONTROL] if work.kept else torch.zeros_like(work.x)
