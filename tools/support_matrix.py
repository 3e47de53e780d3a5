#!/usr/bin/env python3
"""What was run where: PyTorch x framework x backend, from what the tests said and nothing else.

Each subject has its tests. They are run in the Python environment at hand, and what passed, failed and was skipped goes
into a dated file below `benchmarks/results`. The table of `docs/frameworks.md` is made of all these files.

    tools/support_matrix.py                 run the tests, and show what came out
    tools/support_matrix.py --save          write the file and the table too
    tools/support_matrix.py --only FSDP2    this subject alone
    tools/support_matrix.py --table         write the table from the files that are there
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
RESULTS, PAGE = ROOT / "benchmarks" / "results", ROOT / "docs" / "frameworks.md"
BEGIN, END = "<!-- support matrix: tools/support_matrix.py -->\n", "<!-- end of support matrix -->"
BACKEND, UNTRIED_BACKEND = "Gloo", "NCCL"
LIMIT_S = 1800.0
"""For the tests of one subject."""


class Subject(NamedTuple):
    """What people train by.

    Attributes:
        name: of it.
        package: the framework's, whose version counts; none where that is PyTorch itself.
        tests: arguments of as many runs of pytest.
    """

    name: str
    package: str | None
    tests: tuple[tuple[str, ...], ...]


PARTS = "tests/test_framework_parts.py"
SUBJECTS = (
    Subject("DistributedDataParallel", None, (("tests/test_ddp.py",),)),
    Subject("FSDP2", None, (("tests/test_fsdp2.py",),)),
    Subject(
        "`gradwire run`, DDP",
        None,
        (("tests/test_run.py", "tests/test_script_saves.py", "tests/test_script_follow.py"),),
    ),
    Subject("`gradwire run`, FSDP2", None, (("tests/test_run_fsdp2.py",),)),
    Subject("Accelerate", "accelerate", (("tests/test_frameworks.py", PARTS, "-k", "accelerat"),)),
    Subject("Transformers", "transformers", (("tests/test_frameworks.py", PARTS, "-k", "transformers or trainer"),)),
    Subject("Lightning", "lightning", (("tests/test_frameworks.py", PARTS, "-k", "lightning or callback"),)),
)


class Counts(NamedTuple):
    """What came of some tests."""

    passed: int
    failed: int
    skipped: int


def counts_of(junit: str) -> tuple[Counts, list[str]]:
    """What a file of JUnit's form says, and which tests failed.

    Args:
        junit: the file's text.

    >>> counts_of('<testsuite><testcase name="a"/><testcase name="b"><skipped/></testcase></testsuite>')
    (Counts(passed=1, failed=0, skipped=1), [])
    """
    cases = list(ET.fromstring(junit).iter("testcase"))
    skipped = [case for case in cases if case.find("skipped") is not None]
    failed = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    names = [f"{case.get('classname', '')}::{case.get('name', '')}" for case in failed]
    return Counts(len(cases) - len(skipped) - len(failed), len(failed), len(skipped)), names


def run(subject: Subject) -> dict[str, Any]:
    """A row of a record: what came of a subject's tests here."""
    version = _version(subject.package) if subject.package else None
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    row: dict[str, Any] = {"name": subject.name, "framework": version, "backend": BACKEND, "date": today}
    if subject.package and version is None:
        return {**row, **Counts(0, 0, 0)._asdict(), "failures": []}
    counted, failures = [_run(tests) for tests in subject.tests], list[str]()
    for _, names in counted:
        failures += names
    whole = Counts(*(sum(column) for column in zip(*(counts for counts, _ in counted), strict=True)))
    return {**row, **whole._asdict(), "failures": failures}


def _run(tests: Sequence[str]) -> tuple[Counts, list[str]]:
    with tempfile.TemporaryDirectory() as folder:
        junit = Path(folder) / "junit.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-n", "0", f"--junitxml={junit}", *tests]
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
        ended = subprocess.run(command, cwd=ROOT, env=environment, timeout=LIMIT_S, check=False, stdout=sys.stderr)
        if not junit.exists():
            raise SystemExit(f"pytest ended with {ended.returncode} and without a word on: {' '.join(tests)}")
        return counts_of(junit.read_text())


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def record(rows: Iterable[Mapping[str, Any]], before: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
    """A record of rows with the versions that they are of, and what earlier records of this PyTorch have besides."""
    packages = {name: found for name in ("torch", "numpy", "numba") if (found := _version(name))}
    whole: dict[str, Any] = {"versions": {"python": platform.python_version(), **packages}}
    held = [row for one in before if _torch(one) == _torch(whole) for row in one["rows"]]
    named = {row["name"]: row for row in [*held, *rows]}
    ordered = [named[subject.name] for subject in SUBJECTS if subject.name in named]
    return {"date": max(row["date"] for row in ordered), **whole, "rows": ordered}


def records() -> list[dict[str, Any]]:
    """All records, of the newest PyTorch first; of one version the newest record alone."""
    found = [json.loads(path.read_text()) for path in sorted(RESULTS.glob("support_*.json"))]
    newest = {_torch(one): one for one in sorted(found, key=lambda one: one["date"])}
    return sorted(newest.values(), key=lambda one: [int(part) for part in _torch(one).split(".")], reverse=True)


def _torch(one: Mapping[str, Any]) -> str:
    return str(one["versions"]["torch"]).split("+")[0]


def oldest() -> str:
    """The oldest PyTorch that `pip` keeps.

    >>> re.fullmatch(r"[0-9]+[.][0-9]+", oldest()) is not None
    True
    """
    (found,) = re.findall(r'"torch>=([\d.]+)"', (ROOT / "pyproject.toml").read_text())
    return found


def table(found: Sequence[Mapping[str, Any]]) -> str:
    """What all records say, as Markdown."""
    head = ["", "its version", "PyTorch", "backend", "passed", "failed", "skipped", "date"]
    lines = [_line(head), "|---|---|---|---|--:|--:|--:|---|"]
    for one in found:
        for row in one["rows"]:
            tried = row["passed"] + row["failed"] + row["skipped"]
            figures = [str(row[key]) if tried else "not tried" for key in Counts._fields]
            where = [row["framework"] or "", _torch(one), row["backend"]]
            lines.append(_line([row["name"], *where, *figures, row["date"]]))
        there = {row["name"] for row in one["rows"]}
        lines += [_untried(subject.name, _torch(one)) for subject in SUBJECTS if subject.name not in there]
    if not any(_torch(one).startswith(f"{oldest()}.") for one in found):
        lines.append(_untried("all of them", f"{oldest()}, the oldest"))
    lines.append(_untried("all of them", "any", UNTRIED_BACKEND))
    return "\n".join(lines)


def _untried(name: str, torch: str, backend: str = BACKEND) -> str:
    return _line([name, "", torch, backend, *["not tried"] * len(Counts._fields), ""])


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def written(page: str, text: str) -> str:
    """The page with another table."""
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n{text}\n\n{END}{after}"


def main() -> None:
    """Run, show, and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", action="store_true", help="write a dated file and the table")
    names = [subject.name for subject in SUBJECTS]
    parser.add_argument("--only", nargs="+", choices=names, metavar="NAME", help="these; the others stay as recorded")
    parser.add_argument("--table", action="store_true", help="run nothing, write the table")
    arguments = parser.parse_args()
    if not arguments.table:
        chosen = [subject for subject in SUBJECTS if not arguments.only or subject.name in arguments.only]
        one = record([run(subject) for subject in chosen], records() if arguments.only else ())
        print(table([one]))
        if arguments.save:
            path = RESULTS / f"support_{_torch(one)}_{one['date']}.json"
            path.write_text(json.dumps(one, indent=1) + "\n")
    if arguments.save or arguments.table:
        PAGE.write_text(written(PAGE.read_text(), table(records())))


if __name__ == "__main__":
    main()
