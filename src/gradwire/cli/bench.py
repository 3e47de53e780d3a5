"""`gradwire bench`: how fast collectives, exchanges and methods are on the network at hand."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable
from typing import TYPE_CHECKING

from rich.console import Console

from gradwire.bench.options import BenchOptions
from gradwire.cli.commands import Commands, add
from gradwire.cli.option_arguments import add_options, read_options

if TYPE_CHECKING:
    from gradwire.bench.results import BenchRow, BenchTable

OK, FAILED = 0, 1

BENCH_HELP = """\
The columns are those of nccl-tests: GB are 1e9 bytes, the size is n times the count where ranks gather or scatter, and
busbw is what the slowest link must have carried. Bandwidths are of the slowest rank's time. Of a method, algbw is what
the uncompressed tensor would have, with what is really sent beside it, and the error of the first call in place of
#wrong. Latency and rate of the links are those of gradwire topology.

Sizes up to 64M take minutes on a slow link: 64M are 6 seconds a call at 100 Mbit/s.

examples
  gradwire bench --hosts 2 --rate 100mbit --max-bytes 4M
  gradwire bench --hosts 4 --rate 1gbit --delay 10ms --methods int4 topk:0.01 none,exchange=ring --json bench.json
  torchrun --nnodes 2 --nproc-per-node 1 ... -m gradwire bench --collectives all_reduce all_gather --cache links.json
  gradwire bench --ranks 8 --backend nccl --sweep --collectives all_reduce
"""


def add_command(commands: Commands) -> None:
    """Add it to the command line."""
    bench = add(
        commands,
        "bench",
        help="how fast collectives and methods are on this network, under torchrun or on emulated hosts",
        description="Measure how fast collectives, exchanges and methods are on the network at hand, and its links.",
        epilog=BENCH_HELP,
    )
    add_options(bench, BenchOptions)
    bench.set_defaults(run=run_bench)


def run_bench(arguments: argparse.Namespace, console: Console) -> int:
    """Run `gradwire bench` and return its exit status: 1 where a result was wrong.

    Raises:
        BenchError: options that make no sense, or one rank.
        SpecError, CompositionError: a method that is none, or cannot be built.
        GradwireError: what `gradwire.bench.measure` and `launch` raise.
    """
    from gradwire.bench import BenchError, launch, write_tables
    from gradwire.cli.lines import say

    options = read_options(arguments, BenchOptions)
    printer = RowPrinter(console, (*options.collectives_in_order, *options.methods))
    if "RANK" in os.environ and options.hosts is None and options.ranks is None:
        tables = _on_ranks(options, printer)
    else:
        try:
            tables = launch(options, on_network=lambda text: say(console, text), on_row=printer.row)
        except ValueError as error:
            raise BenchError(str(error)) from error
    for table in tables:
        printer.end(table)
    if tables and options.json is not None:
        write_tables(tables, options.json)
        say(console, f"\nresult: {options.json}")
    return FAILED if any(table.wrong for table in tables) else OK


def _on_ranks(options: BenchOptions, printer: RowPrinter) -> tuple[BenchTable, ...]:
    """What rank 0 shows of the ranks that a launcher has started; nothing on the others."""
    from datetime import timedelta

    import torch.distributed as dist

    from gradwire.bench import BenchError, measure
    from gradwire.bench.launch import backend_of, bench_group

    if options.sweep:
        raise BenchError("--sweep starts processes of its own for each setting: give --ranks 8, without torchrun")
    backend = backend_of(options, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    dist.init_process_group("gloo", timeout=timedelta(seconds=options.deadline))
    try:
        with bench_group(backend, int(os.environ.get("LOCAL_RANK", "0"))) as group:
            table = measure(options, group, printer.row if dist.get_rank() == 0 else None)
        return (table,) if dist.get_rank() == 0 else ()
    finally:
        dist.destroy_process_group()


class RowPrinter:
    """Prints tables row by row, each row as soon as it is there: its columns have widths that most figures fit into.

    Args:
        console: where to.
        names: of collectives and methods, as they are given.
    """

    def __init__(self, console: Console, names: Iterable[str]) -> None:
        self._console, self._width = console, max(_NAME_WIDTH, *map(len, names))
        self._begun: tuple[BenchTable, str] | None = None

    def row(self, table: BenchTable, row: BenchRow) -> None:
        """Print a row, under the headings where it is the first one of its kind in a table."""
        from gradwire.cli.lines import say

        begun, self._begun = self._begun, (table, row.kind)
        if begun is None or begun[0] != table:
            say(self._console, f"\n{_title(table)}")
        if begun != self._begun:
            say(self._console, (self._line(row.kind, *_headings(row.kind)), "bold"))
        figures = _figures(row) if row.times else ["-"] * (len(_headings(row.kind)) - 5)
        about = (str(row.size_bytes), str(row.count), row.dtype, row.redop, str(row.root))
        say(self._console, self._line(row.name, *about, *figures))
        if row.refused:
            say(self._console, f"{row.name}: {row.refused}")

    def end(self, table: BenchTable) -> None:
        """Print what stands below the rows of a table."""
        from gradwire.cli.lines import say

        is_last = self._begun is not None and self._begun[0].variables == table.variables
        if not is_last and (table.wrong or table.links_text):  # of a sweep, whose tables have all been printed
            say(self._console, f"\n{_title(table)}")
        if table.wrong:
            say(self._console, f"{table.wrong} elements are not what they should be")
        if table.links_text:
            say(self._console, f"\n{table.links_text}")

    def _line(self, name: str, *cells: str) -> str:
        padded = (cell.rjust(width) for cell, width in zip(cells, _WIDTHS, strict=False))
        return "  ".join((name.ljust(self._width), *padded))


_NAME_WIDTH = len("reduce_scatter")
_WIDTHS = (11, 11, 8, 5, 4, 5, 9, 9, 9, 12, 12, 11, 8)
"""Of the columns after the name: the widest number of bytes that fits is 10 GB."""


def _title(table: BenchTable) -> str:
    set_ = "".join(f", {name}={value}" for name, value in (table.variables or {}).items())
    return f"{table.ranks} ranks, {table.backend} on {table.device}{set_}"


def _headings(kind: str) -> list[str]:
    """Those of the columns after the name."""
    shared = ["size (B)", "count", "type", "redop", "root", "calls", "time (us)", "max (us)", "p99 (us)"]
    return [*shared, "algbw (GB/s)", "busbw (GB/s)", *(["wire (B)", "error"] if kind == "method" else ["#wrong"])]


def _figures(row: BenchRow) -> list[str]:
    times = row.times
    assert times is not None
    found = [str(times.calls), *(_microseconds(s) for s in (times.mean_s, times.slowest_s, times.p99_s))]
    found += [f"{row.algbw:.4g}", f"{row.busbw:.4g}"]
    if row.kind == "method":
        return [*found, str(row.wire_bytes), f"{row.error:.2g}"]
    return [*found, str(row.wrong)]


def _microseconds(seconds: float) -> str:
    """As nccl-tests writes them: four digits or whole ones."""
    return f"{1e6 * seconds:.0f}" if seconds >= 1e-3 else f"{1e6 * seconds:.4g}"
