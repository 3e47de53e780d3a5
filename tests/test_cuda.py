"""The CUDA path on a real GPU: kernels, the side stream, `attach` over NCCL with one rank."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import gradwire
from gradwire import kernels
from gradwire.choosing import coding
from gradwire.core import buffers
from gradwire.core.state import walk
from gradwire.drivers.any_flag import AnyFlag
from gradwire.drivers.host_memory import PinnedMemory
from gradwire.kernels import low_rank
from gradwire.kernels.dispatch import KERNELS
from gradwire.session.lane import SideStream

if not torch.cuda.is_available():
    pytest.skip("there is no CUDA device", allow_module_level=True)

import cuda_checks as check  # it imports triton, which needs the device to be of use
from cuda_checks import KINDS, sample

GPU = torch.device("cuda", 0)
HUGE = 3_000_001
SPECS = ["none", "fp16", "bf16", "int8", "int4", "topk:0.05", "sign", "qsgd:15", "randomk:0.2", "powersgd:2"]


@pytest.fixture
def unwaiting() -> Iterator[None]:
    """Any wait for the device inside is an error."""
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that this is a prototype
        torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


# Kernels


def test_tensors_on_the_gpu_take_the_triton_kernels() -> None:
    for kernel in KERNELS:
        if "cuda" in kernel.devices:
            assert kernel.on(GPU, 1) is getattr(check.cuda, kernel.name)


@pytest.mark.parametrize("numel", [1, 5, 4099, HUGE, 46_340**2 + 1, 2**31 - 1])
def test_permuted_indices(numel: int) -> None:
    check.check_permutation(GPU, 11, numel, min(numel, 100_001))
    check.check_strata(GPU, 11, numel, min(numel, 100_001))


@pytest.mark.parametrize("bits", range(1, 17))
def test_packing(bits: int) -> None:
    for numel in (0, 1, 9, 4096, 100_001):
        check.check_packing(GPU, bits, numel)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("key", [None, 5])
def test_block_int(kind: str, key: int | None) -> None:
    check.check_block_int(GPU, sample(kind, 100_001), 4, 256, key)


@pytest.mark.parametrize("bits", range(2, 9))
def test_block_int_of_any_width(bits: int) -> None:
    for block in (8, 24, 1024, 4096, 8192, 6000):
        check.check_block_int(GPU, sample("heavy", 50_003), bits, block, 1)


@pytest.mark.parametrize("key", [None, 5])
def test_block_int_of_many(key: int | None) -> None:
    check.check_block_int(GPU, sample("normal", HUGE), 4, 256, key)


@pytest.mark.parametrize("kind", KINDS)
def test_sign(kind: str) -> None:
    for block in (8, 256, 4096, 8192):
        check.check_sign(GPU, sample(kind, 100_001), block)


@pytest.mark.parametrize("levels", [1, 2, 7, 15, 127, 128, 255, 1000, 32767])
def test_qsgd(levels: int) -> None:
    for block in (8, 512, 8192):
        check.check_qsgd(GPU, sample("normal", 100_001), levels, block, 3)


@pytest.mark.parametrize("kind", KINDS)
def test_selection(kind: str) -> None:
    x = sample(kind, 100_001)
    check.check_finite(GPU, x)
    for k in (0, 1, 1000, 50_000, 100_001):
        check.check_topk(GPU, x, k)


@pytest.mark.parametrize("kind", ["normal", "constant", "zeros"])
def test_selection_of_many(kind: str) -> None:
    check.check_topk(GPU, sample(kind, HUGE), HUGE // 100)


def test_sparse_sums() -> None:
    for k in (0, 1, 3000):
        check.check_sparse(GPU, sample("normal", 210_001), k)
    check.check_damaged_indices(GPU)


@pytest.mark.parametrize(
    ("batch", "rows", "columns", "rank"), [(1, 1, 1, 1), (8, 3000, 70, 4), (2, 50_000, 3, 2), (3, 4096, 500, 32)]
)
def test_matrices(batch: int, rows: int, columns: int, rank: int) -> None:
    check.check_matrices(GPU, batch, rows, columns, rank)


def test_orthonormalise_degenerate_matrices() -> None:
    check.check_degenerate(GPU)


@pytest.mark.usefixtures("unwaiting")
def test_no_kernel_waits_for_the_device() -> None:
    x, k = torch.zeros(100_001, device=GPU), 1000
    indices = kernels.topk_indices(x, k)
    kernels.scatter_add_(x, indices, kernels.gather(x, indices))
    kernels.topk_encode_keeping(x, torch.empty(k, device=GPU), indices)
    kernels.permuted_indices(1, x.numel(), k, GPU)
    kernels.all_finite(x)
    for block in (256, 8192):
        packed = torch.empty(kernels.packed_nbytes(x.numel(), 5), dtype=torch.uint8, device=GPU)
        scales = torch.empty(-(-x.numel() // block), device=GPU)
        kernels.block_int_encode(x, 5, block, 1, packed, scales)
        kernels.block_int_decode(packed, scales, 5, block, x, 1.0)
        kernels.qsgd_encode(x, 15, block, 1, packed, scales)
        kernels.qsgd_decode(packed, scales, 15, block, x)
        bits = packed[: kernels.packed_nbytes(x.numel(), 1)]
        kernels.sign_encode(x, block, bits, scales)
        kernels.sign_decode(bits, scales, block, x)
    low_rank.orthonormalise(torch.ones(2, 4, 1000, device=GPU))


def test_coding_is_timed_where_it_happens() -> None:
    assert isinstance(coding.clock_of(GPU), coding.StreamClock)
    small, large = (coding.coding_s("int4", nn.Linear(width, width, device=GPU), 2) for width in (512, 8192))
    assert 0.0 < small < large < 0.1
    on_the_cpu = coding.coding_s("int4", nn.Linear(8192, 8192), 2)
    assert on_the_cpu > large


# The side stream


def test_jobs_on_the_side_stream_see_what_came_before_and_are_seen_by_what_waits() -> None:
    executor, main = SideStream(GPU), torch.cuda.current_stream(GPU)
    x, streams = torch.zeros(1 << 24, device=GPU), list[torch.cuda.Stream]()
    future = executor.future()

    def job() -> None:
        streams.append(torch.cuda.current_stream(GPU))
        assert not torch.is_grad_enabled()
        future.set_result(x * 2)

    torch.cuda._sleep(20_000_000)  # pyright: ignore[reportPrivateUsage]  # about 10 ms, so that order shows
    x.fill_(3.0)
    executor.run(job)
    assert streams[0] != main
    assert bool((future.wait() == 6.0).all())
    executor.order()
    assert bool((x * 2 == 6.0).all())
    executor.close(timeout_s=5.0)


# DDP over NCCL


@pytest.fixture
def nccl(tmp_path: Path) -> Iterator[None]:
    """A world of one."""
    torch.cuda.set_device(GPU)
    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def model(device: torch.device) -> nn.Sequential:
    torch.manual_seed(0)
    layers = (nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 4))
    return nn.Sequential(*layers).to(device)


def batch(step: int, device: torch.device) -> tuple[Tensor, Tensor]:
    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(step))
    return x.to(device), x[:, :4].argmax(1).to(device)


def train(ddp: nn.Module, device: torch.device, steps: int) -> list[float]:
    """Losses of each step."""
    optimizer, losses = torch.optim.SGD(ddp.parameters(), lr=0.2), list[float]()
    for step in range(steps):
        x, y = batch(step, device)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(ddp(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def attached(device: torch.device, spec: str, steps: int) -> tuple[list[float], float, int]:
    """Losses, the residual's norm and the number of steps of a short training."""
    ddp = DDP(model(device), bucket_cap_mb=0.1)
    with gradwire.attach(ddp, spec, grain_numel=20_000, deadline_s=60) as handle:
        losses = train(ddp, device, steps)
        return losses, handle.residual_norm(), handle.stats().steps


@pytest.mark.usefixtures("nccl")
@pytest.mark.parametrize("spec", SPECS)
def test_attach_trains_over_nccl(spec: str) -> None:
    losses, residual, steps = attached(GPU, spec, 60)
    assert steps == 60
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])
    assert torch.tensor(residual).isfinite()


@pytest.mark.usefixtures("nccl")
def test_uncompressed_training_is_ddp_s_own() -> None:
    losses, residual, _ = attached(GPU, "none", 10)
    plain = train(DDP(model(GPU)), GPU, 10)
    torch.testing.assert_close(losses, plain, rtol=1e-4, atol=1e-5)
    assert residual == 0.0


@pytest.mark.usefixtures("nccl")
@pytest.mark.filterwarnings("ignore::gradwire.NonFiniteWarning")
@pytest.mark.parametrize("spec", ["int4", "topk:0.05", "sign", "powersgd:2"])
def test_infinity_reaches_the_gradient_and_no_residual(spec: str) -> None:
    ddp = DDP(model(GPU))
    with gradwire.attach(ddp, spec, deadline_s=60) as handle:
        train(ddp, GPU, 3)
        x, y = batch(3, GPU)
        for scale in (float("inf"), 1.0):
            ddp.zero_grad()
            (nn.functional.cross_entropy(ddp(x), y) * scale).backward()
            finite = all(bool(p.grad.isfinite().all()) for p in ddp.parameters() if p.grad is not None)
            assert finite == (scale == 1.0)
        assert torch.tensor(handle.residual_norm()).isfinite()


@pytest.mark.usefixtures("nccl")
def test_equal_runs_give_equal_bits() -> None:
    runs = [attached(GPU, spec, 5)[0] for spec in ("int4", "int4", "topk:0.05", "topk:0.05")]
    assert runs[0] == runs[1]
    assert runs[2] == runs[3]


# Residuals on the host


@pytest.mark.usefixtures("nccl")
@pytest.mark.parametrize("spec", ["topk:0.05", "int4", "powersgd:2"])
def test_residuals_on_the_host_change_no_bit_and_lie_there(spec: str) -> None:
    found: list[tuple[list[float], list[Tensor]]] = []
    for residuals in ("device", "host"):
        ddp = DDP(model(GPU), bucket_cap_mb=0.1)
        with gradwire.attach(ddp, spec, grain_numel=20_000, deadline_s=60, residuals=residuals) as session:
            losses = train(ddp, GPU, 20)
            leaves = [leaf.tensor for _, state in session.engine.states() for _, leaf in walk(state) if leaf.owed]
            assert all(tensor.is_pinned() == (residuals == "host") for tensor in leaves)
            memory = session.report().memory
            assert (memory.host_residual_bytes, memory.residual_bytes).index(0) == (residuals == "host")
            found.append((losses, [tensor.cpu() for tensor in leaves]))
    assert found[0][0] == found[1][0]
    assert all(torch.equal(one, other) for one, other in zip(found[0][1], found[1][1], strict=True))


def test_copies_to_the_host_and_back_wait_for_what_they_copy() -> None:
    """While the device is busy: a copy begins behind the work that makes what it copies, and ends before it is used."""
    host = PinnedMemory(GPU)
    x = torch.zeros(1 << 22, device=GPU)
    for turn in range(5):
        torch.cuda._sleep(20_000_000)  # pyright: ignore[reportPrivateUsage]  # about 10 ms, so that order shows
        x.fill_(float(turn))
        kept = host.keep(x)
        brought = host.bring(kept)
        host.order()
        x.fill_(-1.0)
        assert bool((brought.wait() == turn).all())
        host.wait()
        assert bool((kept == turn).all())
    assert buffers.PINNED.use().hits > 0


@pytest.mark.parametrize("is_set", [False, True])
def test_a_flag_is_read_without_waiting_for_later_work(is_set: bool) -> None:
    """A step asks for the flags of the one before it, when its own forward pass is handed over and not yet done."""
    flags = AnyFlag([torch.tensor(False, device=GPU), torch.tensor(is_set, device=GPU)])
    torch.cuda._sleep(1 << 31)  # about a second  # pyright: ignore[reportPrivateUsage]
    assert flags.is_set() == is_set
    assert not torch.cuda.current_stream(GPU).query()
