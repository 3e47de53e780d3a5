"""Train a small network on Ray: its parameters lie on two servers, and four workers do not wait for each other.

    pip install 'gradwire[ray]'
    python examples/ray_servers.py

This begins Ray on this machine. With RAY_ADDRESS=auto it uses the cluster that `ray start` made. Kill processes of it
meanwhile: when a worker dies the others go on, and a server is started again from its newest snapshot in the folder,
which on a cluster must be one that all machines share.
"""

import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn

from gradwire.asynchronous import ASGD, Bounded, Gradient, Hyperbolic, Sending, Work
from gradwire.asynchronous.ray_actors import Job, run
from gradwire.asynchronous.work import trained_of


def made() -> nn.Sequential:
    """Return the network, before training."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))


def loss_of(model: nn.Module, worker: int, step: int) -> Tensor:
    """Return the squared error on a batch of this worker's own; wanted is the sign of the sum of the inputs."""
    inputs = torch.randn(64, 8, generator=torch.Generator().manual_seed(100_000 * worker + step))
    return (model(inputs) - inputs.sum(1, keepdim=True).sign()).square().mean()


def work(worker: int) -> Work:
    """Return what a worker computes, in its own process."""
    return Gradient(made(), loss_of)


def main() -> None:
    """Train, and say what came of it."""
    with tempfile.TemporaryDirectory() as folder:
        job = Job(
            trained_of(made()),
            ASGD(lr=0.1, rate=Hyperbolic()),  # a push that is late by tau updates counts 1 / (1 + tau)
            work,
            workers=4,
            pushes=600,
            pace=Bounded(8),
            sending=Sending.of("int8"),
            folder=Path(folder),
        )
        outcome = run(job, servers=2)
    trained = made()
    trained.load_state_dict(outcome.parameters)
    with torch.no_grad():
        before, after = (float(loss_of(model, worker=9, step=0)) for model in (made(), trained))
    pushes = " and ".join(str(len(history)) for history in outcome.histories)
    print(f"loss {before:.3f} before, {after:.3f} after {pushes} pushes to the two servers")


if __name__ == "__main__":
    main()
