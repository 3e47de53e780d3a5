"""The Triton kernels on CPU tensors: run by `test_triton.py` in a process with `TRITON_INTERPRET=1`."""

from __future__ import annotations

import importlib
import os

import pytest
import torch

import cuda_checks as check
import test_fused as laws
from cuda_checks import KINDS, sample
from gradwire.kernels import dispatch

CPU = torch.device("cpu")
pytestmark = [
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="only under TRITON_INTERPRET=1"),
    # numpy speaks of what a GPU does silently: divisions by zero, NaN that is selected away.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]


@pytest.mark.parametrize("numel", [1, 2, 5, 101, 4099, 46_340**2 + 1, 2**31 - 1])
@pytest.mark.draw(4)
def test_permuted_indices(numel: int) -> None:
    check.check_permutation(CPU, 11, numel, min(numel, 1500))
    check.check_permutation(CPU, 12, numel, 0)


@pytest.mark.parametrize("numel", [1, 2, 5, 101, 4099, 2**31 - 1])
@pytest.mark.draw(3)
def test_stratified_indices(numel: int) -> None:
    for k in (0, 1, min(numel, 1500)):
        check.check_strata(CPU, 11, numel, k)


@pytest.mark.parametrize("bits", range(1, 17))
@pytest.mark.draw(6)
def test_packing(bits: int) -> None:
    for numel in (0, 9, 5001):
        check.check_packing(CPU, bits, numel)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("key", [None, 5])
@pytest.mark.draw(5)
def test_block_int_on_any_input(kind: str, key: int | None) -> None:
    check.check_block_int(CPU, sample(kind, 1031), 4, 256, key)


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("key", [None, 2**64 - 1])
@pytest.mark.draw(4)
def test_block_int_of_any_width(bits: int, key: int | None) -> None:
    check.check_block_int(CPU, sample("heavy", 700), bits, 24, key)


@pytest.mark.parametrize(("numel", "block"), [(0, 8), (1, 8), (4096, 256), (5000, 4096), (9001, 8192), (8192, 6000)])
def test_block_int_in_any_block(numel: int, block: int) -> None:
    check.check_block_int(CPU, sample("normal", numel), 3, block, None)
    check.check_block_int(CPU, sample("normal", numel), 8, block, 1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.draw(4)
def test_sign(kind: str) -> None:
    check.check_sign(CPU, sample(kind, 1031), 256)


@pytest.mark.parametrize(("numel", "block"), [(0, 8), (1, 8), (1000, 24), (9001, 8192)])
def test_sign_in_any_block(numel: int, block: int) -> None:
    check.check_sign(CPU, sample("normal", numel), block)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "huge values"])
@pytest.mark.draw(4)
def test_qsgd(kind: str) -> None:
    check.check_qsgd(CPU, sample(kind, 1031), 15, 256, 3)


@pytest.mark.parametrize("levels", [1, 127, 128, 32767])
def test_qsgd_of_any_width(levels: int) -> None:
    check.check_qsgd(CPU, sample("normal", 700), levels, 24, 3)


@pytest.mark.parametrize(("numel", "block"), [(0, 8), (1, 8), (9001, 8192)])
def test_qsgd_in_any_block(numel: int, block: int) -> None:
    check.check_qsgd(CPU, sample("normal", numel), 15, block, 3)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.draw(5)
def test_selection(kind: str) -> None:
    x = sample(kind, 5001)
    check.check_finite(CPU, x)
    for k in (50, 2500):
        check.check_topk(CPU, x, k)


@pytest.mark.parametrize("numel", [0, 1, 7, 4096])
def test_selection_of_any_size(numel: int) -> None:
    x = sample("normal", numel)
    check.check_finite(CPU, x)
    for k in {0, numel // 2, numel}:
        check.check_topk(CPU, x, k)


def test_sparse_sums() -> None:
    for k in (0, 1, 300):
        check.check_sparse(CPU, sample("normal", 2100), k)
    check.check_damaged_indices(CPU)


@pytest.mark.parametrize(("batch", "rows", "columns", "rank"), [(1, 1, 1, 1), (1, 1500, 9, 3), (2, 40, 130, 32)])
def test_matrices(batch: int, rows: int, columns: int, rank: int) -> None:
    check.check_matrices(CPU, batch, rows, columns, rank)


def test_orthonormalise_degenerate_matrices() -> None:
    check.check_degenerate(CPU)


@pytest.fixture
def fused_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU tensors take the way of those on a GPU."""
    monkeypatch.setattr(dispatch, "implementations", lambda package, _: importlib.import_module(f"{package}.cuda"))  # pyright: ignore[reportUnknownLambdaType]


@pytest.mark.usefixtures("fused_on_cpu")
def test_fused_kernels_obey_the_laws_of_their_parts() -> None:
    laws.test_block_int_leaves_what_it_does_not_say(3)
    laws.test_sign_and_qsgd_leave_what_they_do_not_say()
    laws.test_topk_leaves_what_it_does_not_send(torch.float32, 10)
    laws.test_misuse_is_told()
