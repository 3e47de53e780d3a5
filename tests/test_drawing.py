"""What the short test command runs of a product of parameters."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path

import pytest

import drawing

ROOT = Path(__file__).parents[1]
PRODUCT = [{"method": m, "dtype": d, "kind": k} for m, d, k in itertools.product(range(20), range(4), range(9))]


def test_every_value_of_every_parameter_is_drawn_in_few_cases() -> None:
    found = drawing.covering(PRODUCT, "1")
    assert len(found) == 20
    for name in ("method", "dtype", "kind"):
        assert {PRODUCT[place][name] for place in found} == {case[name] for case in PRODUCT}


def test_a_seed_repeats_its_draw_and_others_draw_others() -> None:
    draws = [drawing.covering(PRODUCT, str(seed)) for seed in (1, 1, 2, 3)]
    assert draws[0] == draws[1]
    assert len({tuple(draw) for draw in draws}) == 3
    assert drawing.some(PRODUCT, 5, "1") == drawing.some(PRODUCT, 5, "1") != drawing.some(PRODUCT, 5, "2")


def test_without_git_the_seed_is_nought(tmp_path: Path) -> None:
    assert drawing.seed_of_commit(tmp_path) == 0


TESTS = """
import pytest

@pytest.mark.parametrize("kind", ["a", "b", "c"])
@pytest.mark.parametrize("number", range(5))
def test_product(kind, number): ...

@pytest.mark.parametrize("number", range(5))
def test_one_parameter(number): ...

@pytest.mark.draw(2)
@pytest.mark.parametrize("number", range(5))
def test_some(number): ...

@pytest.mark.parametrize("number", [1, pytest.param(2, marks=pytest.mark.long)])
def test_partly_long(number): ...

@pytest.mark.long
def test_long(): ...

@pytest.mark.turns("saves", 1)
@pytest.mark.parametrize("number", range(2))
def test_one_save(number): ...

@pytest.mark.turns("saves", 1)
def test_another_save(): ...

@pytest.mark.turns("saves", 1)
def test_third_save(): ...

@pytest.mark.long
@pytest.mark.turns("saves", 1)
def test_long_save(): ...

@pytest.mark.one_draw_in(2)
@pytest.mark.parametrize("number", range(2))
def test_now_and_then(number): ...
"""
MARKERS = "[pytest]\nmarkers =\n    long: x\n    draw(count): x\n    turns(name, count): x\n    one_draw_in(count): x\n"


def ids(folder: Path, *arguments: str) -> tuple[list[str], str]:
    """The cases that are collected, and the whole output."""
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-p", "no:cacheprovider", *arguments]
    out = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=True).stdout
    return [line for line in out.splitlines() if "::" in line], out


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("project")
    for name in ("conftest.py", "tools/drawing.py"):
        (folder / Path(name).name).write_bytes((ROOT / name).read_bytes())
    (folder / "test_it.py").write_text(TESTS)
    (folder / "pytest.ini").write_text(MARKERS)
    return folder


def of(found: list[str], test: str) -> list[str]:
    return [line for line in found if line.partition("[")[0].endswith(f"::{test}")]


def test_the_short_command_draws_and_the_whole_one_leaves_nothing_out(project: Path) -> None:
    every, out = ids(project)
    assert len(every) == 15 + 5 + 5 + 2 + 1 + 5 + 2
    assert "drawn" not in out
    drawn, _ = ids(project, "--cases", "drawn", "--seed", "7")
    assert drawn == ids(project, "--cases", "drawn", "--seed", "7")[0]
    counts = [len(of(drawn, test)) for test in ("test_product", "test_one_parameter", "test_some", "test_partly_long")]
    assert counts == [5, 5, 2, 1]
    assert not of(drawn, "test_long")
    others = [ids(project, "--cases", "drawn", "--seed", str(seed))[0] for seed in (1, 2)]
    assert len({tuple(of(other, "test_product")) for other in others}) == 2
    saves = [{line.partition("[")[0] for line in found if "_save" in line} for found in (drawn, *others)]
    assert [len(tests) for tests in saves] == [1, 1, 1]
    assert len(set[str]().union(*saves)) > 1, "other seeds have other turns"
    assert {len(of(found, "test_now_and_then")) for found in (drawn, *others)} == {0, 2}
    assert not any("test_long_save" in test for tests in saves for test in tests)


def test_a_case_that_failed_once_is_always_drawn(project: Path, tmp_path: Path) -> None:
    known = "test_it.py::test_product[0-a]", "test_it.py::test_long"
    (tmp_path / "tools").mkdir()
    (tmp_path / "tests").mkdir()
    for name in ("test_it.py", "conftest.py"):
        (tmp_path / name).write_bytes((project / name).read_bytes())
    (tmp_path / "tools" / "drawing.py").write_bytes((project / "drawing.py").read_bytes())
    (tmp_path / "pytest.ini").write_text(f"{MARKERS}pythonpath = tools\n")
    (tmp_path / "tests" / "always.txt").write_text("# why\n" + "\n".join(known) + "\n")
    for seed in range(3):
        assert set(known) <= set(ids(tmp_path, "--cases", "drawn", "--seed", str(seed))[0])
