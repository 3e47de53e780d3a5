"""Ranks that are started for a table: on emulated hosts, or on this machine as it is."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Generator
from typing import Any

import torch
import torch.distributed as dist

from gradwire.bench.errors import BenchError
from gradwire.bench.measure import measure
from gradwire.bench.methods import methods_of
from gradwire.bench.options import BenchOptions
from gradwire.bench.results import BenchRow, BenchTable, OnRow
from gradwire.bench.sweep import SweepSetting, sweep_plan
from gradwire.core.errors import GradwireError
from gradwire.core.nearest import meant
from gradwire.network import Network
from gradwire.ranks.news import read_news, write_news
from gradwire.ranks.supervised import run_function

_ON_RANK = f"{__name__}:on_rank"


def launch(
    options: BenchOptions, on_network: Callable[[str], None] | None = None, on_row: OnRow | None = None
) -> tuple[BenchTable, ...]:
    """Start ranks as the options say, measure on them, and end them.

    Args:
        options: what to measure, and where: `hosts` of an emulated network, or `ranks` on this machine.
        on_network: called with the emulated network in words, before ranks are started.
        on_row: called with the table without its rows and links, and each row as soon as it is there.

    Returns:
        One table, or of a sweep one for each setting.

    Raises:
        BenchError: neither hosts nor ranks, a backend that is not here, or a sweep of another backend than NCCL.
        SpecError, CompositionError: a method that is none, with the nearest name, or cannot be built.
        NetworkError, ValueError: the network cannot be made here.
        RankFailure: a rank failed, or the deadline passed; all have been ended.

    Example:
        (table,) = gradwire.bench.launch(gradwire.bench.BenchOptions(hosts=2, rate="100mbit", max_bytes="1M"))
        print([link.bits_per_s for link in table.links])
    """
    ranks = options.hosts or options.ranks
    if ranks is None:
        raise BenchError(
            "one rank sends nothing: give --hosts 2 for emulated hosts or --ranks 2 for ranks on this machine, or "
            "start the command by torchrun"
        )
    backend = backend_of(options, ranks)
    if options.sweep and backend != "nccl":
        raise BenchError(f"--sweep sets variables of NCCL, and {backend} reads none of them: give --backend nccl")
    methods_of(options.methods, getattr(torch, options.dtype))  # refuses here what every rank would
    settings = sweep_plan() if options.sweep else (SweepSetting(),)
    with contextlib.ExitStack() as stack:
        network = None
        if options.hosts:
            network = stack.enter_context(Network(ranks, options.rate, delay=options.delay, loss=options.loss))
            if on_network is not None:
                on_network(network.description)
        return tuple(_table(options, ranks, backend, network, setting, on_row) for setting in settings)


def backend_of(options: BenchOptions, ranks: int) -> str:
    """Return the backend to measure: NCCL where this machine has a GPU for each rank, else Gloo, unless one is given.

    Raises:
        BenchError: one that PyTorch does not have here, with the nearest name.
    """
    gpus = torch.cuda.device_count()
    if options.backend is None:
        return "nccl" if gpus >= ranks and dist.is_nccl_available() else "gloo"
    known = [name for name in dist.Backend.backend_list if name != "undefined"]
    if options.backend not in known:
        raise BenchError(f"unknown backend {options.backend!r}: {meant(options.backend, known)}")
    if options.backend == "nccl" and gpus < ranks:
        raise BenchError(f"NCCL wants a GPU for each of {ranks} ranks, and there are {gpus} here: give --backend gloo")
    return options.backend


def _table(
    options: BenchOptions,
    ranks: int,
    backend: str,
    network: Network | None,
    setting: SweepSetting,
    on_row: OnRow | None,
) -> BenchTable:
    described, token = network.description if network else "", secrets.token_hex(8)
    device, variables = "cuda" if backend == "nccl" else "cpu", setting.variables or None
    empty = BenchTable(ranks, backend, device, (), network=described, variables=variables)

    def on_line(rank: int, line: str) -> None:
        if on_row is not None and (row := read_news(line, token, BenchRow)):
            on_row(empty, row)

    told = run_function(
        _ON_RANK,
        ranks,
        {"options": options.as_words(), "backend": backend, "token": token},
        options.deadline,
        network,
        [{"LOCAL_RANK": str(rank), **setting.variables} for rank in range(ranks)],
        on_line,
    )
    if "refused" in told[0]:
        raise BenchError(told[0]["refused"])
    return BenchTable.of({**told[0], "network": described, "variables": variables})


def on_rank(rank: int, world_size: int, options: dict[str, Any], backend: str, token: str) -> dict[str, Any]:
    """What each rank does: measure over a group of the backend, and return the table as plain data.

    Rank 0 prints each row as soon as it is there, for whoever has started the ranks.
    """
    given = BenchOptions.of(options)

    def tell(table: BenchTable, row: BenchRow) -> None:
        print(write_news(row, token), flush=True)

    try:
        with bench_group(backend, rank) as group:
            return measure(given, group, tell if rank == 0 else None).as_dict()
    except (GradwireError, ValueError) as error:
        if isinstance(error, RuntimeError):  # communication: other ranks do not know of it
            raise
        return {"refused": str(error)}


@contextlib.contextmanager
def bench_group(backend: str, local_rank: int) -> Generator[dist.ProcessGroup | None]:
    """The default group, which is Gloo's, or one of another backend beside it."""
    if backend == "gloo":
        yield dist.group.WORLD
        return
    if backend == "nccl":
        torch.cuda.set_device(local_rank)
    made = dist.new_group(backend=backend)
    assert isinstance(made, dist.ProcessGroup), "all ranks are members"
    try:
        yield made
    finally:
        dist.destroy_process_group(made)
