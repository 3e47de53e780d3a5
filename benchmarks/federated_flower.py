"""The same federation in this process and on Flower: `python benchmarks/federated_flower.py [--rounds 20] [--save]`.

Ten clients with 32 examples each, ten local steps of SGD, a linear model of 64 inputs and 10 outputs. Three runs:

    in process      `Simulation`
    Flower          Flower's simulation with its own FedAvg strategy and a client that makes the same steps in torch
    ours on Flower  Flower's simulation with `FederatedStrategy` and `client_app`

Each is timed from the end of its first round, so that nothing of a start-up counts: neither Ray's, nor imports, nor the
question which node is which client. Flower's own strategy is told to leave clients' evaluation out. Each is run several
times, in turn, and the shortest time counts, since whatever else the machine does makes times longer. All three end
with the same model, to rounding; the script stops where they do not.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any, NamedTuple

os.environ |= {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from torch import Tensor, nn
from torch.nn import functional

from common import save_result
from gradwire.adapters.flower import FederatedStrategy, client_app
from gradwire.core.key import Key
from gradwire.federated import SGD, Client, Federation, Server, Simulation

CLIENTS, STEPS, LR = 10, 10, 0.1


class Run(NamedTuple):
    """What a run came to: seconds from the end of its first round, and the model."""

    seconds: float
    model: Tensor


def model() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Linear(64, 10)


def data(i: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(i)
    return torch.randn(32, 64, generator=generator), torch.randint(10, (32,), generator=generator)


def client(i: int) -> Client:
    points, labels = data(i)

    def loss(model: nn.Module, key: Key) -> Tensor:
        return functional.cross_entropy(model(points), labels)

    return Client(32, loss)


def server() -> Server:
    return Server(model(), CLIENTS, sample=CLIENTS, local=SGD(lr=LR, steps=STEPS))


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def in_process(rounds: int) -> Run:
    simulation = Simulation(server(), Federation(CLIENTS, client))
    simulation.round()
    start = time.perf_counter()
    for _ in simulation.run(rounds - 1):
        pass
    return Run(time.perf_counter() - start, flat(simulation.server.model))


def on_flower(app: ClientApp, main: Callable[[Grid, Callable[[int], None]], nn.Module]) -> Run:
    """Run Flower's simulation; `main` calls what it is given at the end of each round."""
    ends: dict[int, float] = {}
    models: list[nn.Module] = []
    server_app = ServerApp()

    @server_app.main()
    def run(grid: Grid, context: Context) -> None:
        models.append(main(grid, lambda number: ends.__setitem__(number, time.perf_counter())))

    resources = {"client_resources": {"num_cpus": 1, "num_gpus": 0}, "init_args": {"num_cpus": os.cpu_count()}}
    run_simulation(server_app, app, CLIENTS, backend_config=resources)  # pyright: ignore[reportArgumentType]
    return Run(ends[max(ends)] - ends[1], flat(models[0]))


def flowers_own_app() -> ClientApp:
    """A ClientApp as Flower's quickstart has it: the model comes, some steps are made, and it goes back."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        net = model()
        net.load_state_dict(message.content.array_records["arrays"].to_torch_state_dict())
        points, labels = data(int(context.node_config["partition-id"]))
        optimizer = torch.optim.SGD(net.parameters(), lr=LR)
        for _ in range(STEPS):
            optimizer.zero_grad()
            functional.cross_entropy(net(points), labels).backward()
            optimizer.step()
        metrics = MetricRecord({"num-examples": len(points)})
        content = RecordDict({"arrays": ArrayRecord(dict(net.state_dict())), "metrics": metrics})
        return Message(content, reply_to=message)

    return app


def flowers_own(rounds: int) -> Run:
    def main(grid: Grid, ended: Callable[[int], None]) -> nn.Module:
        net = model()
        strategy = FedAvg(fraction_evaluate=0.0, min_train_nodes=CLIENTS, min_available_nodes=CLIENTS)
        arrays = ArrayRecord(dict(net.state_dict()))
        result = strategy.start(grid, arrays, rounds, evaluate_fn=lambda number, _: ended(number))
        net.load_state_dict(result.arrays.to_torch_state_dict())
        return net

    return on_flower(flowers_own_app(), main)


def ours_on_flower(rounds: int) -> Run:
    def main(grid: Grid, ended: Callable[[int], None]) -> nn.Module:
        strategy = FederatedStrategy(server())
        strategy.start(grid, num_rounds=rounds, evaluate_fn=lambda number, _: ended(number))
        return strategy.server.model

    return on_flower(client_app(model, Federation(CLIENTS, client), local=SGD(lr=LR, steps=STEPS)), main)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--save", action="store_true", help="write a dated file into benchmarks/results")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    kinds = {"in process": in_process, "Flower": flowers_own, "ours on Flower": ours_on_flower}
    found: dict[str, list[Run]] = {name: [] for name in kinds}
    for _ in range(arguments.repeats):
        for name, kind in kinds.items():
            found[name] += [kind(arguments.rounds) for _ in range(10 if kind is in_process else 1)]
    runs = {name: min(several, key=lambda run: run.seconds) for name, several in found.items()}
    here = runs["in process"]
    rows: list[dict[str, Any]] = []
    for name, run in runs.items():
        differs = max(float((one.model - here.model).abs().max()) for one in found[name])
        assert differs < 1e-5, f"{name} ends with another model"
        ratio = run.seconds / here.seconds
        rows.append({"run": name, "seconds": round(run.seconds, 3), "times in process": round(ratio, 1)})
        print(f"{name:15} {run.seconds:8.3f} s  {ratio:6.1f} times in process, models differ by {differs:.1e}")
    if arguments.save:
        versions = {name: version(name) for name in ("flwr", "ray")}
        print(
            save_result(
                "federated_flower", {"rounds": arguments.rounds, **versions, "load": os.getloadavg()[0], "rows": rows}
            )
        )


if __name__ == "__main__":
    main()
