"""The side of `carriers.py` that runs a tree of before carriers were one: its modules are those of gradwire 0.2."""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
import threading
from collections.abc import Generator
from importlib import import_module
from typing import Any

import torch

from carriers_loop import SECRET, ServerProcess, Stopwatch, answer, pushed_us

MOST = 1 << 40


def of(module: str) -> Any:
    return import_module(f"gradwire.asynchronous.{module}")


def no_work(worker: int) -> Any:
    raise AssertionError("the benchmark computes")


def job_of(numel: int, pushes: int) -> Any:
    return of("job").Job({"x": torch.zeros(numel)}, of("rules").ASGD(1e-3), no_work, workers=1, pushes=pushes)


@contextlib.contextmanager
def serving_tcp(job: Any) -> Generator[Any]:
    host = of("sockets.host").Host(of("several.cut").server_of(job, 0, 1), "127.0.0.1", SECRET)
    yield host.address
    host.close()


@contextlib.contextmanager
def serving_shared(job: Any, shared: Any, path: str) -> Generator[None]:
    thread = threading.Thread(target=of("processes.job_server").serve, args=(job, shared, path, ()))
    thread.start()
    yield
    thread.join(60)


def tcp_us(server: ServerProcess, numel: int, pushes: int) -> float:
    job = job_of(numel, 1 << 62)
    with server.serving(serving_tcp, job) as address:
        connection = of("sockets.connection").RemoteConnection(tuple(address), SECRET, MOST, 60.0)
        parts = of("several.cut").named_parts(job.parameters, 1)
        servers = of("remote_servers").RemoteServers(
            [connection], parts, 0, sending=job.sending, seed=0, deadline_s=60.0
        )
        servers.join()
        change = torch.full((numel,), 1e-3)
        found = pushed_us(lambda: servers.push(change, 0.0, 0.0), pushes)
        servers.close()
    return found


def shared_us(server: ServerProcess, numel: int, pushes: int) -> float:
    job = job_of(numel, pushes)
    shared = of("processes.job").SharedTensors.of(job)
    watch = Stopwatch(of("work").Result({"x": torch.full((numel,), 1e-3)}, 0.0))
    with tempfile.TemporaryDirectory() as home, server.serving(serving_shared, job, shared, f"{home}/server"):
        working = dataclasses.replace(job, work=watch.for_worker)
        of("processes.remote").Remote(working, shared, f"{home}/server", 0).run()
    return watch.microseconds()


def measure(server: ServerProcess, carrier: str, numel: int, pushes: int) -> float:
    return {"tcp": tcp_us, "shared": shared_us}[carrier](server, numel, pushes)


if __name__ == "__main__":
    answer(measure)
