"""A job whose servers and workers are processes that were started by hand or by a launcher, joined by rpc."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import TCPStore, rpc  # pyright: ignore[reportPrivateImportUsage]

from gradwire.asynchronous.job import Job
from gradwire.asynchronous.rpc import served
from gradwire.asynchronous.several.client import WorkerClient
from gradwire.asynchronous.several.cut import sizes
from gradwire.asynchronous.several.outcome import ServersOutcome
from gradwire.asynchronous.several.part_server import PartServer
from gradwire.asynchronous.several.watching import ServerWatch
from gradwire.asynchronous.several.worker import PartedWorker
from gradwire.core.errors import CommunicationError, CompositionError, last_line
from gradwire.core.flat_layout import FlatLayout

_TICK_S = 0.1
_LINGER_S = 10.0


def run(
    job: Job, *, rank: int, servers: int = 1, address: str = "127.0.0.1:29500", deadline_s: float = 600.0
) -> ServersOutcome | None:
    """Take part in a job; every process calls this, with the same arguments but its rank.

    Ranks 0 to servers - 1 are the servers, and those behind them the workers. Rank 0 waits until every server has
    applied the job's pushes, and is the only one to get what came of it.

    A worker that dies is missed at once, and the others go on. A process that has died cannot come back, since rpc has
    no way in for it: where a server dies, all end with a sentence; start all again, and with a folder the servers go on
    from their snapshots. rpc pickles what it sends, and unpickles what it receives from whoever reaches its ports: use
    it in a network of your own.

    Args:
        job: what to do; its patience is also how long processes wait for each other in the beginning.
        rank: of this process, from 0.
        servers: S.
        address: host and port at rank 0, where all meet.
        deadline_s: seconds that rank 0 waits for the last push.

    Raises:
        CompositionError: a rank or a number of servers that cannot be, or a PyTorch without rpc.
        CommunicationError: a port in use, processes that did not come, a server that died, no worker left, or the
            deadline.
    """
    warnings.warn(
        "gradwire.asynchronous.rpc goes with the next release, since torch.distributed.rpc unpickles what it receives: "
        "use gradwire.asynchronous.tcp",
        FutureWarning,
        stacklevel=2,
    )
    world = servers + job.workers
    sizes(FlatLayout(job.parameters).numel, servers)  # refuses a number that cannot be before anything is started
    if not 0 <= rank < world:
        raise CompositionError(f"rank {rank} of {servers} servers and {job.workers} workers: it is 0 to {world - 1}")
    _require_rpc()
    if rank < servers:
        return _serve(job, rank, servers, address, deadline_s)
    return _work(job, rank, servers, address)


def _require_rpc() -> None:
    if not rpc.is_available():
        raise CompositionError("this PyTorch was built without torch.distributed.rpc: use Ray, or processes.run")


# A worker ---------------------------------------------------------------------------------------------------------


def _work(job: Job, rank: int, servers: int, address: str) -> None:
    number = rank - servers
    worker = PartedWorker(number, job.work(number), job.parameters, servers=servers, sending=job.sending, seed=job.seed)
    ended = served.HERE.ended = torch.futures.Future()  # before anybody may ask for it
    with _joined(job, rank, servers, address):
        WorkerClient(worker, _connections(servers), job.patience_s).run()
        ended.set_result(None)


def _connections(servers: int) -> served.RpcConnections:
    return served.RpcConnections([_name(part) for part in range(servers)])


# A server ---------------------------------------------------------------------------------------------------------


def _serve(job: Job, rank: int, servers: int, address: str, deadline_s: float) -> ServersOutcome | None:
    served.HERE.served = PartServer(job, rank, servers)
    with _joined(job, rank, servers, address):
        workers = _Workers(job, servers)
        watch = ServerWatch(job, _connections(servers if rank == 0 else 1), _missed)
        outcome = _led(job, watch, workers, deadline_s) if rank == 0 else _followed(watch, workers)
        workers.linger()
    return outcome


def _missed(part: int, error: Exception) -> None:
    raise CommunicationError(
        f"server {part} does not answer: start all processes again, and give the job a folder to go on from "
        f"snapshots ({last_line(error)})"
    ) from error


class _Workers:
    """What a server sees of the workers: calls to them that end when those do."""

    def __init__(self, job: Job, servers: int) -> None:
        self._ends = [
            rpc.rpc_async(_name(servers + number), served.end_of_worker, timeout=served.FOREVER)
            for number in range(job.workers)
        ]

    def dead(self) -> list[int]:
        """Workers that have ended."""
        return [number for number, end in enumerate(self._ends) if end.done()]

    def linger(self) -> None:
        """Wait until workers have heard that all is done: a reply that is under way must not be cut off."""
        _linger(lambda: len(self.dead()) == len(self._ends))


def _followed(watch: ServerWatch, workers: _Workers) -> None:
    """Serve until rank 0 says that all is done, or is gone."""
    while not served.part_server().is_done:
        try:
            watch.poll(workers.dead(), _TICK_S)
        except CommunicationError:
            if not served.part_server().is_done:  # it may have gone once all was done
                raise
    _linger(lambda: served.HERE.is_released)  # the last reply to rank 0 may be under way still


def _linger(done: Callable[[], bool]) -> None:
    """Wait until it is `done`, but no longer than a few seconds: a reply may wait for a process that has died."""
    end_s = time.monotonic() + _LINGER_S
    while not done() and time.monotonic() < end_s:
        time.sleep(_TICK_S)


def _led(job: Job, watch: ServerWatch, workers: _Workers, deadline_s: float) -> ServersOutcome:
    end_s = time.monotonic() + deadline_s
    while min(watch.versions) < job.pushes:
        watch.poll(workers.dead(), _TICK_S)
        where = f"push {min(watch.versions)} of {job.pushes}"
        if min(watch.versions) < job.pushes and len(workers.dead()) == job.workers:
            raise CommunicationError(f"no worker is left at {where}")
        if time.monotonic() > end_s:
            raise CommunicationError(f"{where} was the last after {deadline_s:g} s")
    outcome = watch.outcome(workers.dead())
    for part in range(1, len(watch.versions)):
        with suppress(Exception):  # it may be gone before it has replied to this
            rpc.rpc_sync(_name(part), served.release)
    return outcome


# Meeting ----------------------------------------------------------------------------------------------------------


def _name(rank: int) -> str:
    return f"gradwire-{rank}"


@contextmanager
def _joined(job: Job, rank: int, servers: int, address: str) -> Generator[None]:
    """All processes have met, and leave when each is done: rpc would wait for the dead."""
    world = servers + job.workers
    store = _met(job, rank, world, address)
    options = rpc.TensorPipeRpcBackendOptions(rpc_timeout=job.patience_s, init_method=f"tcp://{address}")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="You are using a Backend", category=UserWarning)  # rpc's own
        try:
            rpc.init_rpc(_name(rank), rank=rank, world_size=world, rpc_backend_options=options)
        except RuntimeError as error:
            raise CommunicationError(f"rank {rank} could not join the others by rpc: {str(error)[:150]}") from error
    try:
        yield
    finally:
        rpc.shutdown(graceful=False)
        del store


def _met(job: Job, rank: int, world: int, address: str) -> TCPStore:
    """Wait for all at rank 0's store, which rpc then uses too."""
    host, _, port = address.rpartition(":")
    patience = timedelta(seconds=job.patience_s)
    if not host or not port.isdigit():
        raise CompositionError(f"address {address!r}: give host:port, as in 127.0.0.1:29500")
    try:
        store = TCPStore(host, int(port), world, rank == 0, timeout=patience, wait_for_workers=False, multi_tenant=True)
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        what = f"port {port} of {host} is in use: give another address" if rank == 0 else f"rank 0 is not at {address}"
        raise CommunicationError(f"{what} ({str(error).strip().splitlines()[0][:120]})") from error
    _require_all(store, rank, world, job.patience_s)
    return store


def _require_all(store: TCPStore, rank: int, world: int, patience_s: float) -> None:
    store.set(f"here/{rank}", "")
    for other in range(world):
        try:
            store.wait([f"here/{other}"])
        except (dist.DistStoreError, RuntimeError) as error:
            raise CommunicationError(f"rank {other} of {world} did not come within {patience_s:g} s") from error
