"""The store that survives every worker: a process of its own, which holds who is there and what rounds have said."""

from __future__ import annotations

import contextlib
import itertools
import signal
import threading
from collections.abc import Callable, Generator, Sequence
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from gradwire.core.errors import AttachError, CommunicationError, CompositionError, first_line
from gradwire.core.version import VERSION
from gradwire.sync.elastic.messages import parsed, written

PORT = 29400
CONNECT_S = 30.0
"""How long a worker tries to reach the store: it may be started a little later."""


def serve(port: int = PORT, announce: Callable[[int], None] = lambda _: None) -> None:
    """Hold a store until SIGINT or SIGTERM comes: what `gradwire store` does. Call it in the main thread.

    Args:
        port: to listen on, on all interfaces; 0 for one that is free.
        announce: is told the port, once workers may come.

    Raises:
        CommunicationError: the port is taken.
    """
    ended = threading.Event()
    try:
        store = TCPStore("0.0.0.0", port, is_master=True, wait_for_workers=False)
    except (dist.DistError, RuntimeError) as error:
        raise CommunicationError(
            f"the store cannot listen on port {port}, which may be in use: {first_line(error)}"
        ) from None

    def end(number: int, frame: object) -> None:
        ended.set()

    before = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        announce(store.port)
        ended.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def connected(store: str | Store, run: str, connect_s: float = CONNECT_S) -> Store:
    """A client of the store, for the keys of one run.

    Args:
        store: "host:port" of a `gradwire store`, or a store that is there already.
        run: its name.
        connect_s: how long to try.

    Raises:
        CompositionError: no address.
        CommunicationError: nobody answers there.
    """
    if isinstance(store, str):
        host, _, port = store.rpartition(":")
        if not host or not port.isdigit():
            raise CompositionError(f"store={store!r} is no address: give host:port, as gradwire store prints it")
        with reaching(f" at {store}"):
            store = TCPStore(
                host, int(port), is_master=False, wait_for_workers=False, timeout=timedelta(seconds=connect_s)
            )
    return PrefixStore(f"gradwire/elastic/{run}", store)


def require_alike_run(store: Store, described: Sequence[str]) -> None:
    """Refuse a worker whose version, settings or model are not those of the run.

    The first worker of a run writes them down: a line for gradwire's version, and then those of `described`.

    Raises:
        AttachError: with the first line that differs.
        CommunicationError: something else was written there.
    """
    mine = [f"gradwire {VERSION}", *described]
    with reaching():
        theirs = parsed(store.compare_set("run", "", written(mine)), list[str])
    for its, own in itertools.zip_longest(theirs, mine, fillvalue="nothing"):
        if its != own:
            raise AttachError(f"this worker is not of this run, which has {its}, and this worker {own}")


@contextlib.contextmanager
def reaching(where: str = "") -> Generator[None]:
    """In a `with` block, say in a sentence that the store is out of reach.

    Raises:
        CommunicationError: it is.
    """
    try:
        yield
    except dist.DistError as error:
        raise CommunicationError(
            f"the store{where} cannot be reached: start it with `gradwire store`, and look whether its host and port "
            f"can be reached from here ({first_line(error)})"
        ) from error
