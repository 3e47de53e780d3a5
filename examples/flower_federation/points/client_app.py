"""The ClientApp, which each node runs."""

from gradwire.adapters.flower import client_app
from gradwire.federated import Federation
from points.task import CLIENTS, LOCAL, METHOD, UPDATE, client, model

app = client_app(model, Federation(CLIENTS, client), local=LOCAL, method=METHOD, update=UPDATE)
