"""What is stored can be read back, and what is damaged is refused in a sentence: results, runs, tables."""

from __future__ import annotations

import copy
import csv
import json
import math
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from comparisons import comparison, failed, run
from gradwire.cli import main as cli
from gradwire.cli.console import show_table
from gradwire.compare import compare, storage
from gradwire.compare.results import Comparison, ResultsError
from gradwire.compare.run_folder import stored_runs
from gradwire.compare.verdict import judge
from gradwire.report.page import render


def test_comparisons_round_trip_with_losses_that_are_not_numbers(tmp_path: Path):
    before = comparison(run("torch.fp32"), run("int4", losses=(4, math.nan, math.inf, 1)), failed("sign"))
    storage.save(before, tmp_path / "results.json")
    json.loads((tmp_path / "results.json").read_text(), parse_constant=lambda name: pytest.fail(name))
    after = storage.load(tmp_path / "results.json")
    assert after.runs[0] == before.runs[0]
    assert after.runs[2] == before.runs[2]
    assert math.isnan(after.runs[1].losses[1])
    assert (after.task, after.options, after.smoothing) == (before.task, before.options, before.smoothing)


def test_what_was_stored_with_the_old_spelling_of_pytorchs_methods_is_read(tmp_path: Path):
    data = stored()
    data["runs"][0]["method"], data["target"] = "torch:fp32", "method:torch:fp32"
    after = use(data, tmp_path)
    assert after.methods == ["torch.fp32", "int4", "sign"]
    assert after.target == "method:torch.fp32"
    folder = tmp_path / "runs"
    folder.mkdir()
    (folder / "torch_fp32-seed0.json").write_text(json.dumps(data["runs"][0]))
    assert [run.method for run in stored_runs(tmp_path, [("torch.fp32", 0)], lambda method: {})] == ["torch.fp32"]


def test_losses_beyond_all_reason_count_as_infinite(tmp_path: Path):
    storage.save(comparison(run("int4", losses=(4, 1e300, -1e300))), tmp_path / "results.json")
    assert storage.load(tmp_path / "results.json").runs[0].losses == [4.0, math.inf, -math.inf]


# ---------------------------------------------------------------------------------------------- damage


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "cut short"),
        (b'{"schema": 1, "runs": [{"method"', "cut short"),
        (bytes(range(256)) * 9, "no JSON"),
        (b"\x00" * 100, "no JSON"),
        (b"\xff\xfe\xfd", "no JSON"),
        (b"[]", "mapping"),
        (b"{}", "schema"),
        (b'"results"', "mapping"),
        (b'{"schema": 99, "runs": []}', "update gradwire"),
        (b'{"schema": true}', "schema"),
        (b"[" * 100_000, "nested"),
        (b'{"schema": ' + b"9" * 5000 + b"}", "no JSON"),
    ],
    ids=range(12),
)
def test_what_is_no_results_file_is_refused_in_one_sentence(
    tmp_path: Path, data: bytes, said: str, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "results.json").write_bytes(data)
    assert cli.main(["report", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert str(tmp_path / "results.json") in error
    assert error.count("\n") == 1
    assert len(error) < 600


def test_what_is_not_there_is_to_be_made_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert cli.main(["report", str(tmp_path)]) == 2
    assert "run gradwire compare" in capsys.readouterr().err
    (tmp_path / "results.json").mkdir()
    assert cli.main(["report", str(tmp_path)]) == 1


def stored() -> dict[str, Any]:
    """The plain data of a small comparison that lacks nothing."""
    made = comparison(run("torch.fp32", losses=(3, 2)), run("int4", losses=(3, 2)), failed("sign"))
    data = {name: storage.plain(value) for name, value in vars(made).items() if name != "runs"}
    return data | {"runs": [storage.run_to_json(one) for one in made.runs]}


def paths(data: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in plain data."""
    if path:
        yield path
    for key, value in data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ():
        yield from paths(value, (*path, key))


def parent(data: Any, path: tuple[Any, ...]) -> Any:
    for key in path[:-1]:
        data = data[key]
    return data


def use(data: Any, folder: Path) -> Comparison:
    """Do with a file all that `gradwire report` does."""
    (folder / "results.json").write_text(json.dumps(data))
    loaded = storage.load(folder / "results.json")
    compare.write_derived(loaded, folder)
    render(loaded).encode()
    show_table(Console(file=StringIO(), width=200), loaded, judge(loaded))
    return loaded


JUNK: tuple[Any, ...] = (
    *(None, True, -1, 0, 3, 10**400, 1e300, -2.5, math.nan, math.inf),
    *("", "[/x]", "<b>", "\ud800", "nan", [], [None], {}, {"x": 1}),
)


def test_the_data_that_is_damaged_below_was_fine(tmp_path: Path):
    assert use(stored(), tmp_path).methods == ["torch.fp32", "int4", "sign"]


@pytest.mark.parametrize("path", list(paths(stored())), ids=lambda path: ".".join(map(str, path)))
@pytest.mark.draw(30)
def test_whatever_stands_in_a_field_is_used_or_refused_in_a_sentence(tmp_path: Path, path: tuple[Any, ...]):
    for junk in (*JUNK, "gone"):
        data = copy.deepcopy(stored())
        if junk == "gone":
            del parent(data, path)[path[-1]]
        else:
            parent(data, path)[path[-1]] = junk
        said = refusal(data, tmp_path)
        assert len(said) < 600
        assert "\n" not in said


def refusal(data: Any, folder: Path) -> str:
    """What is said against a file; empty where it can be used. No other exception may come."""
    try:
        use(data, folder)
    except ResultsError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (("runs", 1, "losses", 0), "low", r"runs\[1\].losses\[0\] should be a number, not 'low'"),
        (("runs", 0, "times_s"), [1.0], "2 losses, 1 times and 2 byte counts"),
        (("runs", 0, "tx_bytes"), [1.0, 2.0, 3.0], "one of each"),
        (("runs", 0, "status"), "maybe", "'finished' or 'failed'"),
        (("runs", 0, "seed"), 1.5, "whole number"),
        (("runs", 0, "wire", "total"), True, "a number"),
        (("runs", 0, "split", "wait_s"), -1.0, "not negative"),
        (("runs", 0, "evaluations", 0), [1, 2], r"evaluations\[0\] should be a list of 3, not \[1, 2\]"),
        (("task", "higher_is_better"), 1, "true or false"),
        (("options", "hosts"), "four", "options.hosts"),
        (("smoothing",), 0, "from 1"),
        (("target",), "soon", "--target"),
    ],
)
def test_a_refusal_names_the_field_and_what_it_should_be(tmp_path: Path, path: tuple[Any, ...], value: Any, said: str):
    data = stored()
    parent(data, path)[path[-1]] = value
    with pytest.raises(ResultsError, match=said):
        use(data, tmp_path)


@pytest.mark.parametrize("path", [("runs", 0, "method"), ("task", "metric_name"), ("environment", "torch"), ("runs",)])
def test_a_missing_field_is_named(tmp_path: Path, path: tuple[Any, ...]):
    data = stored()
    del parent(data, path)[path[-1]]
    with pytest.raises(ResultsError, match=f"has no '{path[-1]}'"):
        use(data, tmp_path)


def test_a_run_that_cannot_be_read_is_none():
    with pytest.raises(ResultsError):
        storage.run_from_json([])
    with pytest.raises(ResultsError, match="method"):
        storage.run_from_json({"seed": 0, "status": "finished"})
    assert storage.run_from_json({"method": "int4", "seed": 0, "status": "failed"}).losses == []


# ---------------------------------------------------------------------------------------------- tables


def test_tables_have_a_row_a_method_and_a_row_a_step(tmp_path: Path):
    storage.write_tables(comparison(run("torch.fp32"), run("int4", losses=(4, 3, 2, 0.5))), tmp_path)
    with (tmp_path / "results.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["method"] for row in rows] == ["torch.fp32", "int4"]
    assert (float(rows[1]["loss"]), float(rows[1]["wire_payload_bytes"])) == (0.5, 88.0)
    with (tmp_path / "curves.csv").open() as file:
        curves = list(csv.DictReader(file))
    assert len(curves) == 8
    assert list(curves[7].values()) == ["int4", "0", "4", "4.0", "400.0", "0.5"]


def test_a_write_that_fails_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "file"
    path.write_text("before")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(OSError, match="space"):
        storage.write_atomically(path, "after")
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]
