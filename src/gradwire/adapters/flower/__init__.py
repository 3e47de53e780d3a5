"""Federations on Flower: a strategy around our `Server`, and a ClientApp around `gradwire.federated.train`.

    strategy = FederatedStrategy(Server(model(), clients=10, sample=5, **SETTINGS))     # in the ServerApp's main
    app = client_app(model, Federation(10, client), **SETTINGS)                         # the ClientApp

Flower brings messages from one to the other; what is computed, drawn, checked and counted is ours, so a run has the
results of `Simulation` in one process.
"""

from gradwire.core.errors import CompositionError

try:
    from gradwire.adapters.flower.client import client_app
    from gradwire.adapters.flower.strategy import FederatedStrategy
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] != "flwr":
        raise
    raise CompositionError("federations on Flower need flwr: pip install 'gradwire[flower]'") from error

__all__ = ["FederatedStrategy", "client_app"]
