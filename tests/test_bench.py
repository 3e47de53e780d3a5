"""`gradwire bench`: rows whose results are right, figures that follow from their times, and what is refused."""

from __future__ import annotations

import dataclasses
import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from gradwire import bench
from gradwire.bench import BenchError, BenchOptions, BenchRow, BenchTable, CallTimes
from gradwire.bench.collectives import CALLS
from gradwire.bench.options import COLLECTIVES
from gradwire.bench.sizes import parse_size, sizes_between
from gradwire.cli.bench import RowPrinter
from gradwire.cli.main import main
from gradwire.network.loopback import loopback_environments
from gradwire.ranks.news import write_news
from gradwire.ranks.supervised import RankFailure, run_function, run_ranks
from gradwire.topology.link_profile import LinkProfile

CASES = str(Path(__file__).with_name("bench_cases.py"))
QUICK: dict[str, Any] = {"max_bytes": "2K", "factor": 16, "calls": 3, "no_links": True}

pytestmark = pytest.mark.timeout(200)


def run(case: str, ranks: int, **arguments: Any) -> list[Any]:
    return run_function(f"{CASES}:{case}", ranks, arguments, 150)


def quick(**options: Any) -> dict[str, Any]:
    """Options of quick rows, as ranks are given them."""
    return BenchOptions(**{**QUICK, **options}).as_words()


def measured(ranks: int, **options: Any) -> BenchTable:
    """The table of quick rows, which must be the same on all ranks."""
    found = run("table", ranks, options=quick(**options))
    assert all(each == found[0] for each in found)
    return BenchTable.of(found[0])


# Sizes ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", ["", "0", "-8", "8Q", "many", "1e3", "9T", "0.5"])
def test_sizes_that_make_no_sense_are_refused(size: str) -> None:
    with pytest.raises(BenchError, match=r"size '.*' cannot be used: write whole bytes or a number and a unit"):
        parse_size(size)


def test_sizes_grow_by_the_factor_up_to_the_most() -> None:
    assert sizes_between("1K", "1M", 16) == (1 << 10, 1 << 14, 1 << 18)
    assert sizes_between("100", "100", 2) == (100,)
    with pytest.raises(BenchError, match="sizes from 1M to 1K are none: give the smaller one first"):
        sizes_between("1M", "1K", 2)


# Options --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"collectives": ("all_redcue",)}, "unknown collective 'all_redcue': did you mean 'all_reduce'?"),
        ({"dtype": "float23"}, "unknown type 'float23': did you mean 'float32'?"),
        ({"min_bytes": "1M", "max_bytes": "1K"}, "sizes from 1M to 1K are none"),
        ({"factor": 1}, "--factor must be at least 2, and at most 1,048,576, not 1"),
        ({"hosts": 1}, "--hosts must be at least 2, and at most 1,000, not 1"),
        ({"hosts": 2, "ranks": 2}, "give --hosts or --ranks, not both"),
        ({"rate": "1gbit"}, "--rate, --delay and --loss are of emulated links: give --hosts 2 as well"),
        ({"no_links": True, "cache": Path("a.json")}, "--cache and --description are about links"),
    ],
)
def test_options_that_make_no_table_are_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(BenchError) as caught:
        BenchOptions(**given)
    assert said in str(caught.value)


def test_every_collective_has_a_call() -> None:
    assert tuple(CALLS) == COLLECTIVES == BenchOptions().collectives_in_order
    assert BenchOptions(methods=("int4",)).collectives_in_order == ("all_reduce",)


# Figures --------------------------------------------------------------------------------------------------------------


def test_bandwidths_are_those_of_nccl_tests() -> None:
    times = CallTimes(10, 0.9, 1.0, 1.2)
    factors = {name: kind.bus_factor(4) for name, kind in CALLS.items()}
    assert factors == {
        "all_reduce": 1.5,
        **dict.fromkeys(("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter"), 0.75),
        **dict.fromkeys(("broadcast", "reduce", "send_recv"), 1.0),
    }
    row = BenchRow("all_gather", "collective", 8 * 10**9, 10**9, "float32", bus_factor=0.75, times=times)
    assert (row.algbw, row.busbw) == (8.0, 6.0)
    assert CALLS["all_gather"].nbytes_of(3, 4, 5) == 60  # n times the count where ranks gather
    assert CALLS["all_reduce"].nbytes_of(3, 4, 5) == 12
    assert CALLS["scatter"].count_of(8, 4, 5) == 1  # at least one element for each rank


def test_times_are_of_the_mean_and_of_the_slowest_rank() -> None:
    seconds = torch.tensor([[1.0] * 200, [2.0] * 198 + [5.0, 9.0]], dtype=torch.float64)
    assert CallTimes.of(seconds) == CallTimes(200, pytest.approx(1.525), pytest.approx(2.05), 2.0)  # pyright: ignore[reportArgumentType]
    for found in run("slow_rank", 2):
        calls, mean_s, slowest_s, p99_s = found
        assert calls == 4
        assert 0.02 <= slowest_s <= p99_s < 1
        assert 0.01 <= mean_s < slowest_s


def test_a_table_is_kept_in_a_file_and_what_is_none_is_refused(tmp_path: Path) -> None:
    row = BenchRow(
        "int4", "method", 8, 2, "float32", "mean", times=CallTimes(3, 1.0, 2.0, 3.0), wire_bytes=9, error=0.1
    )
    table = BenchTable(2, "gloo", "cpu", (row,), (bench.BenchLink("node", 0.1, 8e-8),), "text", "net", {"A": "1"})
    file = tmp_path / "bench.json"
    bench.write_tables((table,), file)
    assert bench.read_tables(file) == (table,)
    assert json.loads(file.read_text())[0]["rows"][0]["algbw_gb_per_s"] == 4e-9
    for wrong in ("{", "{}", "[1]", "[{}]", '[{"format": 7}]'):
        file.write_text(wrong)
        with pytest.raises(BenchError, match="table"):
            bench.read_tables(file)


# Collectives, on ranks ------------------------------------------------------------------------------------------------


@pytest.mark.draw(1)
@pytest.mark.parametrize("ranks", [2, 3])
def test_all_collectives_have_rows_and_their_results_are_right(ranks: int) -> None:
    table = measured(ranks)
    assert [row.name for row in table.rows] == [name for name in COLLECTIVES for _ in range(3)]
    assert [row.refused for row in table.rows] == [""] * len(table.rows)
    assert table.wrong == 0
    for row in table.rows:
        parts = ranks if CALLS[row.name].has_parts else 1
        assert row.size_bytes == row.count * 4 * parts
        assert row.times is not None
        assert row.times.calls == 3
        assert 0 < row.times.mean_s <= row.times.slowest_s <= row.times.p99_s
        assert row.root == (0 if CALLS[row.name].has_root else -1)
    assert (table.ranks, table.backend, table.device) == (ranks, "gloo", "cpu")


def test_a_collective_that_did_nothing_is_wrong() -> None:
    found = run("wrong", 3, root=1)
    for name in COLLECTIVES:
        assert [of_rank[name][0] for of_rank in found] == [0, 0, 0]
        assert sum(of_rank[name][1] for of_rank in found) >= 5, name


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "int8", "uint8", "int64", "float64"])
def test_sums_are_exact_in_every_type(dtype: str) -> None:
    table = measured(3, dtype=dtype, collectives=("all_reduce", "all_to_all", "broadcast"))
    assert table.wrong == 0
    assert {row.refused for row in table.rows} == {""}


def test_a_collective_that_a_backend_lacks_has_a_sentence_and_the_others_have_figures() -> None:
    options = quick(collectives=("all_reduce", "broadcast", "all_gather"))
    found = BenchTable.of(run("partial_backend", 2, options=options)[1])
    lacking, *there, last = found.rows
    assert lacking.refused.startswith("partial has no all_reduce of float32 here: ")
    assert last.refused.startswith("partial has no all_gather of float32 here: ")
    assert [(row.name, row.refused, row.wrong) for row in there] == [("broadcast", "", 0)] * 3


def test_a_rank_that_fails_alone_is_named_on_all() -> None:
    said = "CommunicationError: rank 1 failed where others did not: OSError: the cable is gone"
    assert run("one_fails", 3) == [said] * 3


def test_what_ranks_cannot_do_together_is_told_on_all() -> None:
    plain = quick()
    other = {**plain, "max_bytes": "4K"}
    assert (
        run("refusal", 3, options=[plain, other, plain])
        == ["rank 1 got other options than rank 0: give all ranks the same"] * 3
    )
    assert run("refusal", 2, options=[{**plain, "root": 2}] * 2) == ["there is no rank 2: --root is from 0 to 1"] * 2
    assert "one rank sends nothing" in run("refusal", 1, options=[plain])[0]
    (huge, _) = run("refusal", 2, options=[{**plain, "max_bytes": "8T", "factor": 1 << 20}] * 2)
    assert "give a smaller --max-bytes" in huge


# Methods, on ranks ----------------------------------------------------------------------------------------------------


def test_methods_have_bytes_and_errors_beside_their_times() -> None:
    specs = ("none", "int4", "topk:0.1", "powersgd:2", "none,exchange=ring")
    table = measured(2, methods=specs, min_bytes="16K", max_bytes="16K")
    assert [row.name for row in table.rows] == ["all_reduce", *specs]
    none, int4, topk, powersgd, ring = table.rows[1:]
    for row in table.rows[1:]:
        assert (row.kind, row.redop, row.count, row.size_bytes, row.wrong) == ("method", "mean", 4096, 16384, None)
        assert row.busbw == row.algbw
    assert none.error is not None
    assert none.error < 1e-6
    assert none.wire_bytes == ring.wire_bytes == 16384
    assert int4.wire_bytes is not None
    assert 2048 <= int4.wire_bytes <= 3000
    assert int4.error == pytest.approx(0.17, rel=0.25)  # each of two shots loses 0.115
    assert topk.error == pytest.approx(0.749, rel=0.05)  # what a normal distribution has below its top tenth
    assert powersgd.wire_bytes is not None
    assert powersgd.wire_bytes < 3000


def test_a_method_that_cannot_serve_has_a_sentence_and_the_others_have_figures() -> None:
    table = measured(2, methods=("krum:1", "fp16", "median"), min_bytes="1K", max_bytes="1K")
    _, krum, fp16, median = table.rows
    assert krum.refused.startswith("it cannot serve here: ")
    assert krum.times is None
    assert (fp16.refused, fp16.redop) == ("", "mean")
    assert (median.refused, median.redop) == ("", "rule")
    with pytest.raises(RankFailure, match="methods reduce gradients, and int32 is no type of those"):
        measured(2, methods=("fp16",), dtype="int32")


# The command ----------------------------------------------------------------------------------------------------------


@pytest.mark.one_draw_in(3)
def test_the_command_starts_ranks_and_writes_what_programs_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, cache = tmp_path / "bench.json", tmp_path / "links.json"
    words = ["--max-bytes", "1K", "--factor", "32", "--calls", "2", "--methods", "int4", "--cache", str(cache)]
    assert main(["bench", "--ranks", "2", *words, "--json", str(file)]) == 0
    said = capsys.readouterr().out
    for heading in ("size (B)", "redop", "time (us)", "p99 (us)", "algbw (GB/s)", "busbw (GB/s)", "#wrong", "wire (B)"):
        assert heading in said
    assert "between ranks of a node: " in said
    (table,) = bench.read_tables(file)
    assert [row.name for row in table.rows] == ["all_reduce"] * 2 + ["int4"] * 2
    assert [link.level for link in table.links] == ["rank"]
    assert LinkProfile.read(cache).links[0].level == "rank"


def test_the_command_serves_ranks_that_a_launcher_has_started(tmp_path: Path) -> None:
    printed = list[tuple[int, str]]()
    words = ["bench", "--collectives", "broadcast", "--max-bytes", "8", "--calls", "2", "--no-links"]
    run_ranks(
        [[sys.executable, "-m", "gradwire", *words]] * 2,
        loopback_environments(2),
        log_dir=tmp_path,
        deadline_s=100,
        on_line=lambda rank, line: printed.append((rank, line)),
    )
    assert {rank for rank, _ in printed} == {0}
    assert any(line.split()[:3] == ["broadcast", "8", "2"] for _, line in printed)


def test_rows_are_printed_as_they_come_in_columns_that_stay() -> None:
    console = Console(file=io.StringIO(), width=40)
    printer = RowPrinter(console, ["all_reduce", "topk:0.01,exchange=allgather"])
    times, printed = CallTimes(1000, 1.5e-6, 12.0, 100.0), list[list[str]]()
    rows = [
        BenchRow("all_reduce", "collective", 10**10, 10**10, "bfloat16", "sum", times=times, wrong=0),
        BenchRow("all_reduce", "collective", 8, 2, "uint8", "sum", refused="gloo has none"),
        BenchRow("topk:0.01,exchange=allgather", "method", 8, 2, "float32", "mean", times=times, wire_bytes=9, error=2),
    ]
    for table in (BenchTable(2, "gloo", "cpu", ()), BenchTable(2, "nccl", "cuda", (), variables={"NCCL_ALGO": "Ring"})):
        for row in rows:
            printer.row(table, row)
            printed.append(console.file.getvalue().splitlines())  # pyright: ignore[reportAttributeAccessIssue]
    assert [len(lines) for lines in printed] == [4, 6, 8, 12, 14, 16]
    lines = printed[-1]
    assert (lines[1], lines[5], lines[9]) == (
        "2 ranks, gloo on cpu", "all_reduce: gloo has none", "2 ranks, nccl on cuda, NCCL_ALGO=Ring"
    )  # fmt: skip
    assert len({len(lines[place]) for place in (2, 3, 4)}) == len({len(lines[place]) for place in (6, 7)}) == 1
    figures = "1000 1.5 12000000 100000000 0.8333 0.8333 0"
    assert " ".join(lines[3].split()) == f"all_reduce 10000000000 10000000000 bfloat16 sum -1 {figures}"
    assert lines[4].split()[6:] == ["-"] * 7
    printer.end(BenchTable(2, "gloo", "cpu", (dataclasses.replace(rows[0], wrong=3),), links_text="links"))
    assert console.file.getvalue().splitlines()[16:] == [  # pyright: ignore[reportAttributeAccessIssue]
        "", "2 ranks, gloo on cpu", "3 elements are not what they should be", "", "links"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "one rank sends nothing: give --hosts 2 for emulated hosts or --ranks 2"),
        (["--ranks", "2", "--methods", "int5x"], "unknown method 'int5x'"),
        (["--ranks", "2", "--collectives", "boardcast"], "did you mean 'broadcast'?"),
        (["--ranks", "2", "--backend", "glo"], "unknown backend 'glo': did you mean 'gloo'?"),
        (["--ranks", "2", "--backend", "gloo", "--sweep"], "--sweep sets variables of NCCL, and gloo reads none"),
        (["--hosts", "2", "--rate", "7parsec"], "rate '7parsec' cannot be used"),
        (["--ranks", "2", "--max-bytes", "0"], "size '0' cannot be used"),
    ],
)
def test_what_cannot_be_measured_is_told_before_anything_starts(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert main(["bench", *words]) == 2
    assert said in capsys.readouterr().err


def test_nccl_wants_a_gpu_for_each_rank(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert main(["bench", "--ranks", "2", "--backend", "nccl"]) == 2
    assert "NCCL wants a GPU for each of 2 ranks, and there are 1 here" in capsys.readouterr().err


# The sweep ------------------------------------------------------------------------------------------------------------


def test_a_sweep_has_the_default_and_every_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = bench.sweep_plan()
    assert len(plan) == len(set(plan)) == 7
    assert plan[0].variables == {}
    assert {tuple(setting.variables) for setting in plan[1:]} == {("NCCL_ALGO", "NCCL_PROTO")}
    with pytest.raises(BenchError, match="NCCL has no algorithm 'AUTO': known are Ring, Tree"):
        bench.sweep_plan(["AUTO"])
    with pytest.raises(BenchError, match=r"NCCL has no protocol 'LL182': did you mean 'LL128'\?"):
        bench.sweep_plan(protocols=["LL182"])


def test_each_setting_of_a_sweep_has_processes_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL reads its variables once. Without GPUs what is seen is the environment that ranks are given."""
    from gradwire.bench import launch

    row = BenchRow("all_reduce", "collective", 8, 2, "float32", times=CallTimes(3, 1.0, 2.0, 3.0), wrong=0)
    table, seen = BenchTable(2, "nccl", "cuda", (row,)), list[list[dict[str, str]]]()
    told = list[tuple[BenchTable, BenchRow]]()

    def started(
        target: str, ranks: int, args: Any, deadline: float, network: Any, variables: Any, on_line: Any
    ) -> list[Any]:
        seen.append(variables)
        on_line(0, write_news(row, args["token"]))
        on_line(0, write_news(row, "of another"))
        return [table.as_dict()] * ranks

    monkeypatch.setattr(sys.modules[launch.__module__], "run_function", started)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.distributed.Backend, "backend_list", ["gloo", "nccl"])
    found = launch(BenchOptions(ranks=2, backend="nccl", sweep=True), on_row=lambda *each: told.append(each))  # pyright: ignore[reportUnknownLambdaType]
    assert told == [(dataclasses.replace(each, rows=()), row) for each in found]
    assert [each.variables for each in found[1:]] == [setting.variables for setting in bench.sweep_plan()[1:]]
    assert seen[1] == [{"LOCAL_RANK": str(rank), "NCCL_ALGO": "Ring", "NCCL_PROTO": "LL"} for rank in range(2)]
    assert found[0] == dataclasses.replace(table, variables=None)
