"""The Triton kernels without a GPU: what they compute, in Triton's interpreter, and that they compile for Hopper."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from gradwire import kernels
from gradwire.kernels import dispatch
from gradwire.kernels.dispatch import Kernel
from gradwire.kernels.runtime.pool import SERIAL_NUMEL

pytest.importorskip("triton", reason="triton cannot be imported, so there are no kernels for GPUs to test")

HERE = Path(__file__).parent
BLOCKWISE = {"_block_int_encode", "_sign_encode", "_qsgd_encode", "_decode"}


def in_child(arguments: Sequence[str], **environment: str) -> str:
    """Triton is set for life when it is imported, so each use has a process of its own."""
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    result = subprocess.run(
        [sys.executable, "-W", "error", *arguments],
        env={**inherited, "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path]), **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert not result.returncode, result.stdout[-10_000:] + result.stderr[-3_000:]
    return result.stdout


@pytest.mark.one_draw_in(3)
def test_kernels_compute_what_the_reference_does(pytestconfig: pytest.Config) -> None:
    options = pytestconfig.option
    draw = ["--cases", options.cases, *(["--seed", str(options.seed)] if options.cases == "drawn" else [])]
    cases = str(HERE / "triton_cases.py")
    told = in_child(["-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *draw, cases], TRITON_INTERPRET="1")
    passed = re.search(r"(\d+) passed", told)
    assert passed, told
    assert int(passed[1]) > (100 if options.cases == "all" else 40)
    assert "skipped" not in told


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    cache = str(tmp_path_factory.mktemp("triton"))
    return json.loads(in_child([str(HERE / "triton_compile.py")], TRITON_CACHE_DIR=cache))


@pytest.mark.long
def test_every_kernel_compiles_for_hopper_and_keeps_to_registers(compiled: list[dict[str, Any]]) -> None:
    folder = HERE.parent / "src/gradwire/kernels"
    sources = [*folder.glob("*/cuda.py"), *folder.glob("triton/*.py")]
    started = {name for path in sources for name in re.findall(r"launch\(\s*(_\w+),", path.read_text())}
    assert {facts["kernel"] for facts in compiled} == started
    assert [facts["kernel"] for facts in compiled if facts["stack_bytes"]] == []


@pytest.mark.long
def test_no_kernel_rounds_otherwise_than_ieee(compiled: list[dict[str, Any]]) -> None:
    """No fused multiplication, no approximate division, no subnormal flushed."""
    assert {facts["kernel"]: facts["unfaithful"] for facts in compiled if facts["unfaithful"]} == {}


@pytest.mark.long
def test_block_kernels_read_16_bytes_at_a_time_though_the_size_is_odd(compiled: list[dict[str, Any]]) -> None:
    for facts in compiled:
        if facts["kernel"] in BLOCKWISE:
            assert facts["wide_loads"] >= 4, facts


# Dispatch


@pytest.fixture
def any_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whatever the environment of the tests asks for."""
    dispatch.implementations.cache_clear()
    monkeypatch.setenv("GRADWIRE_KERNELS", "auto")
    yield
    getattr(dispatch.implementations, "cache_clear", lambda: None)()


def kernel_named(name: str) -> Kernel[..., object]:
    [found] = [kernel for kernel in dispatch.KERNELS if kernel.name == name]
    return found


@pytest.mark.usefixtures("any_kernels")
def test_gpus_get_the_kernels_that_are_declared_and_no_others() -> None:
    gpu, found = torch.device("cuda"), set[str]()
    for kernel in dispatch.KERNELS:
        module = dispatch.implementations(kernel.package, "cuda")
        assert hasattr(module, kernel.name) == ("cuda" in kernel.devices), kernel.name
        found |= {kernel.name} if kernel.on(gpu, 1) is not kernel.reference else set()
    assert {"topk", "pack_bits", "block_int_encode", "sign_decode", "qsgd_encode", "orthonormalise"} <= found


@pytest.mark.usefixtures("any_kernels")
def test_missing_triton_is_told_once_and_only_for_large_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, huge, kernel = torch.device("cuda"), SERIAL_NUMEL + 1, kernel_named("topk")
    monkeypatch.setattr(dispatch, "implementations", lambda _package, _kind: None)  # pyright: ignore[reportUnknownLambdaType]
    dispatch.warn_slow.cache_clear()
    assert kernel.on(gpu, 10) is kernel.reference
    assert kernel_named("float8_encode").on(gpu, huge) is kernel_named("float8_encode").reference  # Triton has none
    with pytest.warns(kernels.SlowKernelsWarning, match="triton"):
        assert kernel.on(gpu, huge) is kernel.reference
    assert kernel.on(gpu, huge) is kernel.reference


@pytest.mark.one_draw_in(3)
def test_triton_is_imported_at_first_use_and_not_if_unwanted() -> None:
    code = (
        "import sys, torch; from gradwire.kernels.dispatch import KERNELS; print('triton' in sys.modules); "
        "[kernel.on(torch.device('cuda'), 1) for kernel in KERNELS]; print('triton' in sys.modules)"
    )
    assert in_child(["-c", code], GRADWIRE_KERNELS="auto").split() == ["False", "True"]
    assert in_child(["-c", code], GRADWIRE_KERNELS="reference").split() == ["False", "False"]
