"""Kernels on torch's own threads: the same results, whoever asks, and clear errors."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any, cast

import numpy as np
import pytest
import torch

from gradwire import kernels
from gradwire.codecs import TernGrad
from gradwire.kernels.runtime import pool
from kernel_sets import everything_in

compiling = cast(ModuleType, pytest.importorskip("gradwire.kernels.runtime.compiling", exc_type=ImportError))
reference = everything_in("reference")
team = cast(ModuleType, pytest.importorskip("gradwire.kernels.runtime.team", exc_type=ImportError))
if not team.available():
    pytest.skip("this platform's OpenMP has no GOMP_parallel", allow_module_level=True)

HUGE = 300_001
DEADLINE_S = 120


@pytest.fixture(autouse=True)
def three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def add(x: Any, first: int, weight: float, odd: bool, out: Any) -> int:
    if first < 0:
        raise ValueError("negative")
    for row in range(x.shape[0]):
        for column in range(x.shape[1]):
            out[row] += np.float64(x[row, column]) * weight
    return first + int(odd)


KERNEL = compiling.compiled("int64(float32[:, ::1], int64, float32, boolean, float64[::1])")(add)


def calls(firsts: list[int]) -> tuple[list[Any], list[Any]]:
    x = np.arange(12, dtype=np.float32).reshape(4, 3)
    outs = [np.zeros(4) for _ in firsts]
    tasks = [functools.partial(KERNEL, x, first, 0.5, i % 2 == 1, outs[i]) for i, first in enumerate(firsts)]
    return tasks, outs


def test_all_kinds_of_arguments_arrive_and_results_come_back_in_order() -> None:
    tasks, outs = calls([1, 20, 300, 2**40, 5])
    assert pool.run(tasks) == [1, 21, 300, 2**40 + 1, 5]
    for out in outs:
        assert out.tolist() == [1.5, 6.0, 10.5, 15.0]


def test_a_kernel_that_fails_says_so() -> None:
    tasks, _ = calls([1, -1, 2])
    with pytest.raises(RuntimeError, match="kernel could not go on"):
        pool.run(tasks)


@pytest.mark.parametrize("wrong", [np.zeros((4, 3)), np.zeros(12, np.float32), np.zeros((3, 4), np.float32).T])
def test_other_arrays_than_it_was_compiled_for_are_refused(wrong: Any) -> None:
    tasks, outs = calls([1, 2])
    with pytest.raises(TypeError, match="argument 0"):
        pool.run([tasks[0], functools.partial(KERNEL, wrong, 2, 0.5, False, outs[1])])


def test_empty_arrays_are_arrays() -> None:
    out = np.zeros(1)
    empty = functools.partial(KERNEL, np.zeros((0, 3), np.float32), 7, 1.0, False, out)
    assert pool.run([empty, empty]) == [7, 7]


def test_many_threads_may_ask_at_once() -> None:
    xs = [torch.randn(HUGE, generator=torch.Generator().manual_seed(seed)) for seed in range(4)]

    def top(x: torch.Tensor) -> torch.Tensor:
        for _ in range(20):
            kernels.topk_indices(x, 1000)
        return kernels.topk_indices(x, 1000)

    with ThreadPoolExecutor(4) as executor:
        for x, found in zip(xs, executor.map(top, xs), strict=True):
            assert torch.equal(found, reference.topk_indices(x, 1000))


@pytest.mark.parametrize("offset", range(17))
def test_what_is_decoded_lands_wherever_it_begins(offset: int) -> None:
    x = torch.randn(4 * HUGE, generator=torch.Generator().manual_seed(offset))
    packed, scales = torch.empty(4 * HUGE, dtype=torch.uint8), torch.empty(-(-4 * HUGE // 256))
    kernels.block_int_encode(x, 8, 256, None, packed, scales)
    whole, expected = torch.full((4 * HUGE + 40,), 7.0), torch.empty(4 * HUGE)
    out = whole[offset : offset + 4 * HUGE]
    kernels.block_int_decode(packed, scales, 8, 256, out)
    reference.block_int_decode(packed, scales, 8, 256, expected)
    assert torch.equal(out, expected)
    assert whole[:offset].eq(7).all()
    assert whole[offset + 4 * HUGE :].eq(7).all()


def test_an_output_that_begins_between_floats_is_written_all_the_same() -> None:
    numel = 4 * HUGE
    out = torch.frombuffer(bytearray(4 * numel + 1), dtype=torch.float32, offset=1, count=numel)
    kernels.scatter_(out, torch.tensor([7], dtype=torch.int32), torch.ones(1))
    assert out[7] == 1
    assert int(out.count_nonzero()) == 1


def test_a_kernel_called_with_another_type_of_number_still_goes_to_the_team() -> None:
    for clip in (2, 2.0):
        codec = TernGrad(clip=clip)
        for numel in (100, HUGE):
            codec.encode(torch.ones(numel))


ENCODES = """
import torch
from gradwire import kernels
torch.set_num_threads(2)
x = torch.arange(300_001, dtype=torch.float32)
def check():  # and nothing else of torch's that its threads would do: those hang in a child
    found = kernels.topk_indices(x, 3)
    assert found.tolist() == [299_998, 299_999, 300_000], found
check()
"""
FORKS = (
    ENCODES
    + """
import os
child = os.fork()
if child == 0:
    try:
        check()
    except BaseException:
        os._exit(1)
    os._exit(0)
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == 0
check()
"""
)


def in_child(code: str, **environment: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=DEADLINE_S,
    )
    assert not ended.returncode, ended.stdout + ended.stderr


@pytest.mark.one_draw_in(2)
def test_fewer_threads_than_asked_for_do_it_all() -> None:
    in_child(ENCODES, OMP_THREAD_LIMIT="1")


@pytest.mark.one_draw_in(2)
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform cannot fork")
def test_a_forked_child_does_not_wait_for_threads_it_has_not() -> None:
    in_child(FORKS)
