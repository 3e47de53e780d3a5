"""The ServerApp, which runs the rounds."""

import torch
from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp

from gradwire.adapters.flower import FederatedStrategy
from gradwire.federated import Server
from points.task import CLIENTS, LOCAL, METHOD, UPDATE, accuracy, model

app = ServerApp()


def server() -> Server:
    """Return the server of this federation; it can be tried in one process with `gradwire.federated.Simulation` too."""
    return Server(model(), CLIENTS, sample=CLIENTS, quorum=8, local=LOCAL, method=METHOD, update=UPDATE)


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the rounds; save the model where `out` names a file."""
    strategy = FederatedStrategy(server())

    def evaluated(number: int, arrays: ArrayRecord) -> MetricRecord:
        return MetricRecord({"accuracy": accuracy(strategy.server.model)})

    strategy.start(grid, num_rounds=int(context.run_config.get("rounds", 20)), timeout=300, evaluate_fn=evaluated)
    print(f"{len(strategy.rounds)} rounds held, accuracy {accuracy(strategy.server.model):.3f}", flush=True)
    if out := context.run_config.get("out"):
        torch.save(strategy.server.model.state_dict(), str(out))
