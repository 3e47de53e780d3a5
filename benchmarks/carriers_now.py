"""The side of `carriers.py` that runs this tree."""

from __future__ import annotations

import contextlib
import os
import tempfile
import warnings
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, cast

import torch

from carriers_loop import SECRET, ServerProcess, Stopwatch, answer, pushed_us
from gradwire.asynchronous import ASGD, Result, Work
from gradwire.asynchronous.job import Job
from gradwire.asynchronous.remote_servers import RemoteServers
from gradwire.asynchronous.several.client import WorkerClient
from gradwire.asynchronous.several.messages import ServerReply
from gradwire.asynchronous.several.part_server import PartServer
from gradwire.asynchronous.several.worker import PartedWorker
from gradwire.peers.local import LocalConnections
from gradwire.peers.protocol import Connections
from gradwire.peers.sockets import Address, SharedRows, SocketConnections, SocketServer

MOST = 1 << 40


def no_work(worker: int) -> Work:
    raise AssertionError("the benchmark computes")


def job_of(numel: int, pushes: int) -> Job:
    return Job({"x": torch.zeros(numel)}, ASGD(1e-3), no_work, workers=1, pushes=pushes)


@contextlib.contextmanager
def serving(job: Job, address: Address, rows: SharedRows | None) -> Generator[Address]:
    """A server at sockets."""
    server = SocketServer(PartServer(job, 0, 1), address, SECRET, rows=rows)
    server.start()
    yield server.address
    server.close()


@contextlib.contextmanager
def socket_connections(
    server: ServerProcess, job: Job, address: Address, rows: SharedRows | None = None
) -> Generator[Connections]:
    with server.serving(serving, job, address, rows) as there:
        pairs = [] if rows is None else [rows]
        connections = SocketConnections(ServerReply, [there], SECRET, 0, most_bytes=MOST, rows=pairs)
        yield connections
        connections.close()


@contextlib.contextmanager
def local(server: ServerProcess, job: Job) -> Generator[Connections]:
    yield LocalConnections([PartServer(job, 0, 1)])


@contextlib.contextmanager
def tcp(server: ServerProcess, job: Job) -> Generator[Connections]:
    with socket_connections(server, job, ("127.0.0.1", 0)) as connections:
        yield connections


@contextlib.contextmanager
def unix(server: ServerProcess, job: Job) -> Generator[Connections]:
    with tempfile.TemporaryDirectory() as home, socket_connections(server, job, f"{home}/server") as connections:
        yield connections


@contextlib.contextmanager
def shared(server: ServerProcess, job: Job) -> Generator[Connections]:
    size = 4 * job.parameters["x"].numel() + (1 << 16)
    rows = SharedRows.of(1, size, size)
    with tempfile.TemporaryDirectory() as home, socket_connections(server, job, f"{home}/server", rows) as connections:
        yield connections


@contextlib.contextmanager
def ray_actor(server: ServerProcess, job: Job) -> Generator[Connections]:
    import ray

    from gradwire.asynchronous.ray_actors.actors import ActorConnections, ServerActor

    if not ray.is_initialized():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            folders = [str(Path(__file__).parent), os.environ["PYTHONPATH"]]
            environment = {"env_vars": {"PYTHONPATH": os.pathsep.join(folders)}}
            ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, runtime_env=environment)
    actor = cast("Any", ray.remote(ServerActor)).remote(job, 0, 1)
    yield ActorConnections([actor])
    ray.kill(actor)


CARRIERS: dict[str, Callable[[ServerProcess, Job], contextlib.AbstractContextManager[Connections]]] = {
    "local": local,
    "tcp": tcp,
    "unix": unix,
    "shared": shared,
    "ray": ray_actor,
}


def measure(server: ServerProcess, carrier: str, numel: int, pushes: int) -> float:
    """Microseconds of a push; workers of processes run by themselves, and those of ranks are called by a script."""
    job = job_of(numel, pushes if carrier == "shared" else 1 << 62)
    change = torch.full((numel,), 1e-3)
    with CARRIERS[carrier](server, job) as connections:
        if carrier == "shared":
            watch = Stopwatch(Result({"x": change}, 0.0))
            WorkerClient(PartedWorker(0, watch, job.parameters, servers=1), connections, 60.0).run()
            return watch.microseconds()
        worker = PartedWorker(0, None, job.parameters, servers=1)
        servers = RemoteServers(worker, cast("SocketConnections", connections), 60.0)
        servers.join()
        return pushed_us(lambda: servers.push(change, 0.0, 0.0), pushes)


if __name__ == "__main__":
    answer(measure)
