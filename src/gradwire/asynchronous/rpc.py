"""A job whose processes meet at one address. It goes with the next release, in favour of `gradwire.asynchronous.tcp`.

torch.distributed.rpc joined these processes before. Now they only agree on a secret and on addresses here, and are
joined by TCP.
"""

from __future__ import annotations

import json
import secrets
import warnings
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from gradwire.asynchronous.job import Job
from gradwire.asynchronous.several.outcome import ServersOutcome
from gradwire.asynchronous.tcp import ServerProcess, address_of, own_address, require_rank, work
from gradwire.core.errors import CommunicationError, first_line
from gradwire.peers.greeting import SECRET_BYTES

__all__ = ["Job", "ServersOutcome", "run"]


def run(
    job: Job, *, rank: int, servers: int = 1, address: str = "127.0.0.1:29500", deadline_s: float = 600.0
) -> ServersOutcome | None:
    """Take part in a job; every process calls this, with the same arguments but its rank.

    Ranks 0 to servers - 1 are the servers, and those behind them the workers. Rank 0 waits until every server has
    applied the job's pushes, and is the only one to get what came of it. All the rest is as `tcp.run` says, but that
    nobody comes back where rank 0 has died, and that whoever reaches the address can take part: use it in a network of
    your own.

    Args:
        job: what to do; its patience is also how long processes wait for each other in the beginning.
        rank: of this process, from 0.
        servers: S.
        address: host and port at rank 0, where all meet.
        deadline_s: seconds that rank 0 waits for the last push.

    Raises:
        CompositionError: a rank, an address or a number of servers that cannot be.
        CommunicationError: a port in use, processes that did not come, a server that is away for too long, no worker
            left, or the deadline.
        StateError: a snapshot of another job.
    """
    warnings.warn(
        "gradwire.asynchronous.rpc goes with the next release: use gradwire.asynchronous.tcp, whose processes have a "
        "secret of yours",
        FutureWarning,
        stacklevel=2,
    )
    require_rank(job, rank, servers)
    host, port = address_of(address)
    store = _met(host, port, rank, servers + job.workers, job.patience_s)
    secret = bytes.fromhex(store.get("secret").decode())
    if rank >= servers:
        return work(job, rank - servers, _places(store, servers), secret)
    key = f"place/{rank}"
    place = _place(store, key) if store.check([key]) else (own_address(host), 0)  # the old one, if it was started again
    process = ServerProcess(job, rank, servers, place, secret)
    store.set(key, json.dumps(process.host.address))
    return process.run(_places(store, servers), deadline_s)


def _place(store: TCPStore, key: str) -> tuple[str, int]:
    host, port = json.loads(store.get(key))
    return str(host), int(port)


def _places(store: TCPStore, servers: int) -> list[tuple[str, int]]:
    """Where all servers listen, once they do.

    Raises:
        CommunicationError: one does not.
    """
    try:
        return [_place(store, f"place/{part}") for part in range(servers)]
    except (dist.DistStoreError, RuntimeError) as error:
        raise CommunicationError(
            f"a server does not say where it listens: look at its output ({first_line(error)})"
        ) from error


def _met(host: str, port: int, rank: int, world: int, patience_s: float) -> TCPStore:
    """Wait for all at rank 0's store."""
    patience = timedelta(seconds=patience_s)
    try:
        store = TCPStore(host, port, world, rank == 0, timeout=patience, wait_for_workers=False)
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        at = f"{host}:{port}"
        what = f"port {port} of {host} is in use: give another address" if rank == 0 else f"rank 0 is not at {at}"
        raise CommunicationError(f"{what} ({first_line(error)})") from error
    if rank == 0:
        store.set("secret", secrets.token_hex(SECRET_BYTES))
    store.set(f"here/{rank}", "")
    for other in range(world):
        try:
            store.wait([f"here/{other}"])
        except (dist.DistStoreError, RuntimeError) as error:
            raise CommunicationError(f"rank {other} of {world} did not come within {patience_s:g} s") from error
    return store
