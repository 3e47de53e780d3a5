"""Somebody's own program, unchanged, on the hosts of an emulated network."""

from __future__ import annotations

import math
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from gradwire.core.errors import NetworkError
from gradwire.network import Network
from gradwire.ranks.supervised import run_ranks


class Executed(NamedTuple):
    """What a program's run came to.

    Attributes:
        network: the network in words.
        seconds: from the first start to the last end.
        sent_bytes: by each host through its interface, headers and acknowledgements included.
        received_bytes: likewise.
    """

    network: str
    seconds: float
    sent_bytes: tuple[int, ...]
    received_bytes: tuple[int, ...]


def execute(
    command: Sequence[str],
    *,
    hosts: int = 2,
    rate: str = "100mbit",
    delay: str = "0",
    loss: str = "0",
    deadline_s: float | None = None,
    logs: Path | None = None,
    on_line: Callable[[int, str], None] | None = None,
    on_network: Callable[[str], None] | None = None,
) -> Executed:
    """Run a program once on each of several hosts of an emulated network, and wait for all of them.

    Each copy finds the variables that launchers set, for one process a host: MASTER_ADDR, MASTER_PORT, RANK,
    WORLD_SIZE, LOCAL_RANK, and GLOO_SOCKET_IFNAME. `torchrun` without arguments of its own takes the same from
    PET_NNODES, PET_NODE_RANK, PET_MASTER_ADDR and PET_MASTER_PORT. All copies see the same files.

    Args:
        command: the program with its arguments.
        hosts: how many, from 1 to 1000.
        rate, delay, loss: of the links, see `gradwire.network.Network`.
        deadline_s: seconds after which all are ended; None waits for ever.
        logs: a folder for what each host writes, `rank0.log` and so on; None keeps nothing.
        on_line: called with (host, line) for each line that one of them writes.
        on_network: called with the network in words, before anything is started.

    Raises:
        ValueError: no command, or numbers that make no sense.
        NetworkError: no such program, or network namespaces cannot be made here.
        RankFailure: one of them ended with a status other than 0, or the deadline passed; all have been ended.

    Example:
        execute(["torchrun", "train.py"], hosts=2, rate="1gbit", on_line=lambda host, line: print(host, line))
    """
    if not command:
        raise ValueError("there is no program to run: write it behind --, as in gradwire net exec -- torchrun train.py")
    if shutil.which(command[0]) is None:
        raise NetworkError(f"there is no program {command[0]!r} to run here")
    with ExitStack() as stack:
        folder = logs or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gradwire-exec-")))
        network = stack.enter_context(Network(hosts, rate, delay=delay, loss=loss))
        if network.mode == "paced":
            raise NetworkError(f"such a program needs hosts of its own, and here is only {network.description}")
        if on_network is not None:
            on_network(network.description)
        places = [_for_torchrun(network.environment(host), hosts) for host in range(hosts)]
        before = [_counters(network, host) for host in range(hosts)]
        began = time.monotonic()
        run_ranks(
            [network.command(host, command) for host in range(hosts)],
            places,
            log_dir=folder,
            deadline_s=math.inf if deadline_s is None else deadline_s,
            on_line=on_line,
        )
        seconds = time.monotonic() - began
        after = [_counters(network, host) for host in range(hosts)]
    received, sent = zip(*((b[0] - a[0], b[1] - a[1]) for a, b in zip(before, after, strict=True)), strict=True)
    return Executed(network.description, seconds, sent, received)


def _for_torchrun(place: Mapping[str, str], hosts: int) -> dict[str, str]:
    """A host's variables, and the same for `torchrun`, which reads its arguments from variables of these names."""
    return {
        **place,
        "PET_NNODES": str(hosts),
        "PET_NODE_RANK": place["RANK"],
        "PET_MASTER_ADDR": place["MASTER_ADDR"],
        "PET_MASTER_PORT": place["MASTER_PORT"],
    }


def _counters(network: Network, host: int) -> tuple[int, int]:
    """Bytes that a host's interface has received and sent so far."""
    said = subprocess.run(
        network.command(host, ["cat", "/proc/self/net/dev"]), capture_output=True, text=True, timeout=20, check=True
    ).stdout
    (fields,) = (line.partition(":")[2].split() for line in said.splitlines() if line.strip().startswith("eth0:"))
    return int(fields[0]), int(fields[8])
