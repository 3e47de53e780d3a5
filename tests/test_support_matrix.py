"""`tools/support_matrix.py`: what the page says is what its records say, and these are what the tests said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import support_matrix
from support_matrix import SUBJECTS, Counts, Subject, counts_of, record, records, run, table, written

JUNIT = """<testsuites><testsuite name="pytest">
  <testcase classname="tests.test_a" name="test_one"/>
  <testcase classname="tests.test_a" name="test_two"><failure message="no">...</failure></testcase>
  <testcase classname="tests.test_a" name="test_three"><error message="no">...</error></testcase>
  <testcase classname="tests.test_a" name="test_four"><skipped message="not here"/></testcase>
  <testcase classname="tests.test_a" name="test_five"/>
</testsuite></testsuites>"""


def row(name: str, passed: int, failed: int = 0, **words: Any) -> dict[str, Any]:
    counts = Counts(passed, failed, 0)._asdict()
    return {"name": name, "framework": None, "backend": "Gloo", "date": "2026-01-02", "failures": [], **counts, **words}


def test_the_page_has_the_table_of_all_records() -> None:
    found = records()
    assert found
    page = support_matrix.PAGE.read_text()
    assert written(page, table(found)) == page, "run tools/support_matrix.py --table"


def test_records_are_of_what_there_is() -> None:
    for one in records():
        assert set(one["versions"]) >= {"python", "torch"}
        names = [each["name"] for each in one["rows"]]
        assert names == [subject.name for subject in SUBJECTS if subject.name in names]
        for each in one["rows"]:
            assert len(each["failures"]) == each["failed"]


def test_every_subject_s_tests_are_there() -> None:
    for subject in SUBJECTS:
        for tests in subject.tests:
            files = [part for part in tests if part.endswith(".py")]
            assert files
            assert all((support_matrix.ROOT / part).is_file() for part in files)


def test_what_pytest_says_is_counted() -> None:
    counts, failures = counts_of(JUNIT)
    assert counts == Counts(passed=2, failed=2, skipped=1)
    assert failures == ["tests.test_a::test_two", "tests.test_a::test_three"]


def test_tests_are_run_here(tmp_path: Path) -> None:
    tests = tmp_path / "test_given.py"
    tests.write_text("def test_good():\n    pass\n\ndef test_bad():\n    assert 1 == 2\n")
    found = run(Subject("given", "pytest", ((str(tests),),)))
    assert (found["passed"], found["failed"], found["skipped"]) == (1, 1, 0)
    assert found["framework"] == pytest.__version__
    assert [name.split("::")[-1] for name in found["failures"]] == ["test_bad"]


def test_a_framework_that_is_not_here_is_not_tried() -> None:
    found = run(Subject("given", "no-such-framework", (("nowhere.py",),)))
    assert (found["framework"], found["passed"], found["failed"]) == (None, 0, 0)
    one = {"versions": {"torch": "2.13.0+cpu"}, "rows": [found], "date": "2026-01-02"}
    assert f"| given |  | 2.13.0 | Gloo | not tried | not tried | not tried | {found['date']} |" in table([one])


def test_what_nobody_ran_is_said() -> None:
    one = {"versions": {"torch": "2.13.0+cpu"}, "rows": [row("FSDP2", 3, 2)], "date": "2026-01-02"}
    tried_line, *others = table([one]).splitlines()[2:]
    assert tried_line == "| FSDP2 |  | 2.13.0 | Gloo | 3 | 2 | 0 | 2026-01-02 |"
    *left_out, old, nccl = others
    expected = [subject.name for subject in SUBJECTS if subject.name != "FSDP2"]
    assert left_out == [f"| {name} |  | 2.13.0 | Gloo | not tried | not tried | not tried |  |" for name in expected]
    assert old.startswith(f"| all of them |  | {support_matrix.oldest()}, the oldest | Gloo | not tried |")
    assert nccl.startswith("| all of them |  | any | NCCL | not tried |")
    tried = {**one, "versions": {"torch": f"{support_matrix.oldest()}.1"}}
    assert not any("the oldest" in line for line in table([one, tried]).splitlines())


def test_records_of_one_pytorch_are_joined_and_the_newest_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = record([row("FSDP2", 3)])
    second = record([row("Lightning", 1, date="2026-02-03")], [first])
    assert [each["name"] for each in second["rows"]] == ["FSDP2", "Lightning"]
    assert second["date"] == "2026-02-03"
    other = {**first, "versions": {"torch": "2.10.1"}}
    for number, one in enumerate([first, second, other]):
        (tmp_path / f"support_{number}.json").write_text(json.dumps(one))
    monkeypatch.setattr(support_matrix, "RESULTS", tmp_path)
    assert records() == [second, other]
    assert record([row("FSDP2", 4)], records())["rows"][0]["passed"] == 4
