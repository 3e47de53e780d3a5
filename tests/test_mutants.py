"""`tools/mutants.py`: every mutant is another program, every file has its share, and its tables are up to date."""

from __future__ import annotations

import ast

import pytest

import mutants
from mutant_tests import EQUIVALENT, FILES, LEFT_OUT


@pytest.mark.one_draw_in(2)
@pytest.mark.parametrize("file", FILES)
def test_every_mutant_is_another_program(file: str) -> None:
    source = (mutants.ROOT / mutants.SOURCE / file).read_bytes()
    same, found = ast.dump(ast.parse(source)), mutants.mutants_of(file)
    assert found
    for mutant in found[::10]:
        assert ast.dump(ast.parse(mutant.applied(source))) != same, mutant


def test_a_draw_has_its_number_and_something_of_every_file() -> None:
    drawn = mutants.draw(mutants.COUNT, mutants.SEED)
    assert drawn == mutants.draw(mutants.COUNT, mutants.SEED)
    assert len(set(drawn)) == len(drawn) == mutants.COUNT
    assert {mutant.file for mutant in drawn} == set(FILES)
    assert drawn != mutants.draw(mutants.COUNT, mutants.SEED + 1)


def test_every_file_with_code_in_it_has_its_tests() -> None:
    root = mutants.ROOT / mutants.SOURCE
    floors = [
        file.relative_to(root).as_posix()
        for floor in ("drivers", "session", "adapters", "sync")
        for file in root.glob(f"{floor}/**/*.py")
    ]
    assert set(FILES) == {file for file in floors if mutants.mutants_of(file)} | {
        "core/saved.py",
        "compare/figures.py",
    }
    for stage in (stage for stages in FILES.values() for stage in stages):
        assert all((mutants.ROOT / part).exists() for part in stage if part.endswith(".py")), stage


def test_what_is_called_equivalent_or_left_out_is_there() -> None:
    there = {(mutant.file, mutant.change) for file in FILES for mutant in mutants.mutants_of(file)}
    assert set(EQUIVALENT) <= there
    for file, name in LEFT_OUT:
        tree = ast.parse((mutants.ROOT / mutants.SOURCE / file).read_bytes())
        assert name in {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef | ast.FunctionDef)}
