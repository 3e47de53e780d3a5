"""Nothing compiles inside a training step, and compiled kernels are thrown away when what they are made of changes."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import pytest

import gradwire

compiling = cast(ModuleType, pytest.importorskip("gradwire.kernels.runtime.compiling", exc_type=ImportError))
HERE, KERNELS = Path(__file__).parent, Path(gradwire.__file__).parent / "kernels"


@pytest.fixture(scope="module")
def told() -> dict[str, Any]:
    """Which signatures were made by warming up, and which by the steps of each method."""
    result = subprocess.run(
        [sys.executable, str(HERE / "kernel_compile_main.py")],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "GRADWIRE_KERNELS": "auto"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert not result.returncode, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.timeout(1200)  # where nothing is compiled yet: a minute of compiling, on a core that others leave alone
@pytest.mark.long
def test_after_warm_up_no_method_compiles_anything(told: dict[str, Any]) -> None:
    assert len(told["kernels"]) > 60
    assert {spec: compiled for spec, compiled in told["steps"].items() if compiled} == {}
    assert set(told["steps"]) == {spec for method in gradwire.methods().values() for spec in method.examples}


@pytest.mark.timeout(1200)
@pytest.mark.long
def test_warm_up_compiles_every_kernel_for_its_signature_alone(told: dict[str, Any]) -> None:
    assert {name: count for name, count in told["kernels"].items() if count != 1} == {}


def test_a_kernel_converts_numbers_of_other_types_and_compiles_nothing() -> None:
    def doubled(x: float) -> float:
        return x * 2

    kernel = compiling.compiled("float32(float32)")(doubled)
    assert [kernel(3), kernel(3.0), kernel(True)] == [6, 6, 2]
    assert len(kernel._dispatcher.overloads) == 1


def folder_with(path: Path, content: str) -> str:
    for name in ("__init__.py", "low_rank/reference.py"):
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(content if name.startswith("low_rank") else "")
    return compiling.digest_of(path)


def test_the_digest_changes_with_any_file(tmp_path: Path) -> None:
    one = folder_with(tmp_path / "one", "LANES = 32\n")
    assert one == folder_with(tmp_path / "two", "LANES = 32\n")
    assert one != folder_with(tmp_path / "three", "LANES = 16\n")
    (tmp_path / "two/low_rank/reference.py").rename(tmp_path / "two/low_rank/cpu.py")
    assert one != compiling.digest_of(tmp_path / "two")


def imported(path: Path) -> set[str]:
    """The names of gradwire that a file imports, such as gradwire.kernels.packing.cpu.pack."""
    nodes = (node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.ImportFrom))
    names = {f"{node.module}.{each.name}" for node in nodes for each in node.names}
    return {name for name in names if name.startswith("gradwire")}


PYTHON_ALONE = {"gradwire.core.buffers"}
"""Functions of tensors, which compiled code cannot take in."""


def is_compiled(path: Path) -> bool:
    return any(name.startswith("gradwire.kernels.runtime.compiling.") for name in imported(path))


def test_what_kernels_take_in_lies_where_the_digest_looks() -> None:
    compiled = [path for path in KERNELS.rglob("*.py") if is_compiled(path)]
    assert len(compiled) > 15
    for path in compiled:
        assert all(name.startswith("gradwire.kernels.") for name in imported(path) - PYTHON_ALONE), path
    assert compiling.digest_of_sources() == compiling.digest_of(KERNELS)
