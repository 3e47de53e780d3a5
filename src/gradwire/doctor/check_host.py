"""Checks of one host: versions, GPUs, limits, and what a launcher says of its ranks."""

from __future__ import annotations

from collections.abc import Iterator

from gradwire.core.figures import listed
from gradwire.doctor.facts import UNLIMITED, Facts
from gradwire.doctor.finding import Finding, Outcome, Unchecked
from gradwire.doctor.variable import version_of
from gradwire.topology.gpus import nvlink_groups, nvlinks_between

VERSIONS, DEVICES, LIMITS, LAUNCHER = "versions", "devices", "limits", "launcher"
RUNTIME_PAGE = "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting/runtime_and_mpi_issues.html"
GPU_PAGE = "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting/gpu_troubleshooting.html"
INSTALL_PAGE = "https://pytorch.org/get-started/locally/"
README = "https://github.com/gradwire/gradwire/blob/main/README.md"

OLDEST = {"python": "3.11", "torch": "2.9", "numpy": "1.26", "numba": "0.62", "triton": "3.5"}
"""What gradwire needs, as `pyproject.toml` says."""

FEWEST_FILES, FILES_A_RANK, OTHER_FILES = 256, 4, 128
"""Gloo and NCCL hold connections to all ranks, several each, beside the files of data loaders and libraries."""
LEAST_SHARED = 1 << 29
"""Bytes of `/dev/shm`: Docker gives 64 MiB where nobody asks for more, and NVIDIA advises 1 GiB."""
LEAST_FREE_SHARED = 1 << 26
LEAST_LOCKED = 1 << 30


def versions(facts: Facts) -> Iterator[Outcome]:
    """Versions that gradwire does not serve, and packages that do not fit each other."""
    for name, oldest in OLDEST.items():
        here, needed = version_of(facts.versions.get(name)), version_of(oldest)
        if here is not None and needed is not None and here < needed:
            yield Finding(
                "error" if name in ("python", "torch") else "warning",
                VERSIONS,
                f"{name} {facts.versions[name]} is older than what gradwire is made for",
                f"{name} {facts.versions[name]}, and {oldest} is the oldest that is tested",
                f"Install {name} {oldest} or later.",
                README,
            )
    if "numba" not in facts.versions:
        yield Finding(
            "note",
            VERSIONS,
            "numba is not installed, so kernels for CPUs run in plain PyTorch, several times slower",
            "no package numba",
            'pip install "gradwire[fast]"',
            README,
        )
    numpy, numba = version_of(facts.versions.get("numpy")), version_of(facts.versions.get("numba"))
    if numpy and numba and numpy >= (2, 3) and numba < (0, 62):
        yield Finding(
            "error",
            VERSIONS,
            f"numba {facts.versions['numba']} cannot be imported with numpy {facts.versions['numpy']}",
            "numba supports numpy 2.3 from 0.62 on",
            "Install numba 0.62 or later.",
            "https://numba.readthedocs.io/en/stable/user/installing.html#version-support-information",
        )
    if facts.devices.cuda_build and facts.devices.usable and "triton" not in facts.versions:
        yield Finding(
            "warning",
            VERSIONS,
            "triton is not installed, so kernels for GPUs run in plain PyTorch",
            f"PyTorch for CUDA {facts.devices.cuda_build}, {facts.devices.usable} GPUs, no package triton",
            "pip install triton",
            README,
        )


def devices(facts: Facts) -> Iterator[Outcome]:
    """GPUs that PyTorch cannot use, and ranks without one."""
    gpus, build, usable = facts.host.gpus, facts.devices.cuda_build, facts.devices.usable
    if gpus is None:
        yield Unchecked(DEVICES, "NVML is not installed (pip install nvidia-ml-py), or has no driver")
    if "devices" in facts.why_unread:
        yield Unchecked("GPUs of PyTorch", facts.why_unread["devices"])
    if gpus and build is None:
        yield Finding(
            "error",
            DEVICES,
            f"PyTorch is built without CUDA, and this host has {len(gpus)} GPUs",
            f"torch {facts.versions.get('torch')}; {gpus[0].summary}",
            "Install a build of PyTorch for CUDA.",
            INSTALL_PAGE,
        )
    elif gpus and usable == 0:
        visible = facts.environment.get("CUDA_VISIBLE_DEVICES")
        said = f"CUDA_VISIBLE_DEVICES={visible}" if visible is not None else "CUDA_VISIBLE_DEVICES is not set"
        yield Finding(
            "error",
            DEVICES,
            f"PyTorch can use none of this host's {len(gpus)} GPUs",
            f"{said}; PyTorch is built for CUDA {build}",
            "Correct CUDA_VISIBLE_DEVICES; if it is right, the driver is older than this build of PyTorch wants.",
            INSTALL_PAGE,
        )
    local = facts.local_ranks
    if usable and local and local > usable:
        yield Finding(
            "error",
            DEVICES,
            f"{local} ranks run on this host, and it has {usable} GPUs for them",
            f"LOCAL_WORLD_SIZE={local}",
            f"Start {usable} ranks a host: torchrun --nproc-per-node {usable}. NCCL refuses two ranks on one GPU.",
            "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html#nccl-multi-rank-gpu-enable",
        )


def nvlinks(facts: Facts) -> Iterator[Outcome]:
    """GPUs with fewer links than the others, and pairs that cannot read each other's memory."""
    gpus = [gpu for gpu in facts.host.gpus or () if gpu.nvlinks is not None]
    counts = {gpu.index: len(gpu.nvlinks or ()) for gpu in gpus}
    most = max(counts.values(), default=0)
    for index, count in counts.items():
        if count < most:
            yield Finding(
                "warning",
                DEVICES,
                f"GPU {index} has {count} active NVLinks, and others of this host have {most}",
                ", ".join(f"GPU {each}: {links}" for each, links in counts.items()),
                "Look at nvidia-smi nvlink --status; a link that is down wants a restart of the fabric, or repair.",
                GPU_PAGE,
            )
    if most and len(nvlink_groups(gpus)) > 1:
        groups = "; ".join(f"GPUs {listed(group)}" for group in nvlink_groups(gpus))
        yield Finding(
            "note",
            DEVICES,
            "NVLinks do not join all GPUs of this host",
            groups,
            "Keep tensor-parallel groups within those that are joined.",
            GPU_PAGE,
        )
    reach = facts.devices.peer_access or ()
    parted = [(one, other) for one, row in enumerate(reach) for other, yes in enumerate(row) if one < other and not yes]
    if parted:
        joined = [pair for pair in parted if _are_joined(facts, *pair)]
        yield Finding(
            "warning" if joined else "note",
            DEVICES,
            f"{len(parted)} pair{'s' * (len(parted) > 1)} of GPUs cannot read each other's memory",
            ", ".join(f"GPUs {one} and {other}" for one, other in parted[:8]),
            "Turn PCI access control (ACS) and the IOMMU off, or in a virtual machine pass the switch through.",
            GPU_PAGE,
        )


def _are_joined(facts: Facts, one: int, other: int) -> bool:
    """Whether NVLinks join two GPUs, where CUDA counts them as NVML does, which CUDA_VISIBLE_DEVICES may change."""
    gpus = {gpu.index: gpu for gpu in facts.host.gpus or ()}
    return one in gpus and other in gpus and nvlinks_between(gpus[one], gpus[other]) > 0


def peer_to_peer_off(facts: Facts) -> Iterator[Outcome]:
    """Direct access between GPUs that is turned off although NVLinks join them."""
    joined = [group for group in nvlink_groups(facts.host.gpus or ()) if len(group) > 1]
    for name in ("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE"):
        if joined and facts.environment.get(name) == "1":
            yield Finding(
                "warning",
                DEVICES,
                f"{name}=1 keeps NCCL from the fastest way between the GPUs of this host",
                f"NVLinks join GPUs {listed(joined[0])}",
                f"Leave {name} out.",
                "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html",
            )


def limits(facts: Facts) -> Iterator[Outcome]:
    """Open files, shared memory, locked memory."""
    if "limits" in facts.why_unread:
        yield Unchecked(LIMITS, facts.why_unread["limits"])
    yield from _open_files(facts)
    yield from _shared_memory(facts)
    locked = facts.limits.locked_bytes
    if facts.host.rdma_ports and locked is not None and locked != UNLIMITED and locked < LEAST_LOCKED:
        yield Finding(
            "error",
            LIMITS,
            "too little memory may be locked for RDMA, so NCCL fails to register its buffers",
            f"ulimit -l is {locked / 2**10:,.0f} KiB, and {len(facts.host.rdma_ports)} RDMA ports are here",
            "Add '* soft memlock unlimited' and '* hard memlock unlimited' to /etc/security/limits.conf, or start the "
            "container with --ulimit memlock=-1.",
            "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting/networking_troubleshooting.html",
        )


def _open_files(facts: Facts) -> Iterator[Outcome]:
    files, most = facts.limits.open_files, facts.limits.most_open_files
    needed = max(FEWEST_FILES, OTHER_FILES + FILES_A_RANK * facts.world_size)
    if files is None or files == UNLIMITED or files >= needed:
        return
    can_raise = most is not None and (most == UNLIMITED or most >= needed)
    how = "ulimit -n" if can_raise else "a line such as '* - nofile 131072' in /etc/security/limits.d"
    yield Finding(
        "error" if files < OTHER_FILES + facts.world_size else "warning",
        LIMITS,
        f"a process may open {files} files, which is too few for {facts.world_size} ranks",
        f"ulimit -n is {files}; about {needed} are needed",
        f"Raise it to {max(needed, 4096)} or more by {how}.",
        RUNTIME_PAGE,
    )


def _shared_memory(facts: Facts) -> Iterator[Outcome]:
    size, free = facts.limits.shared_bytes, facts.limits.free_shared_bytes
    if size is not None and size < LEAST_SHARED:
        yield Finding(
            "warning",
            LIMITS,
            f"/dev/shm has {size / 2**20:,.0f} MiB, which data loaders and NCCL may fill",
            f"{size:,} bytes, of which {free or 0:,} are free",
            "Start the container with --shm-size=1g or more, or remount /dev/shm larger.",
            RUNTIME_PAGE,
        )
    elif free is not None and free < LEAST_FREE_SHARED:
        yield Finding(
            "warning",
            LIMITS,
            f"/dev/shm has {free / 2**20:,.0f} MiB left",
            f"{size or 0:,} bytes, of which {free:,} are free",
            "Remove what programs that crashed have left in /dev/shm.",
            RUNTIME_PAGE,
        )


def launcher(facts: Facts) -> Iterator[Outcome]:
    """What variables of the launcher say of ranks, which must fit together."""
    environment = facts.environment
    rank, world = facts.rank, facts.world_size
    if rank is not None and rank >= world:
        yield Finding(
            "error",
            LAUNCHER,
            f"RANK={rank} does not exist among {world} ranks",
            f"RANK={rank}, WORLD_SIZE={environment.get('WORLD_SIZE', 'not set')}",
            f"Ranks count from 0 to {world - 1}: correct RANK or WORLD_SIZE, or leave both to torchrun.",
            "https://docs.pytorch.org/docs/stable/elastic/run.html",
        )
    local, local_rank = facts.local_ranks, environment.get("LOCAL_RANK", "")
    if local is not None and local_rank.isdigit() and int(local_rank) >= local:
        yield Finding(
            "error",
            LAUNCHER,
            f"LOCAL_RANK={local_rank} does not exist among {local} ranks of a host",
            f"LOCAL_RANK={local_rank}, LOCAL_WORLD_SIZE={local}",
            "Leave both to torchrun.",
            "https://docs.pytorch.org/docs/stable/elastic/run.html",
        )
    threads = environment.get("OMP_NUM_THREADS", "")
    if threads.isdigit() and facts.processors and int(threads) * (local or 1) > 2 * facts.processors:
        yield Finding(
            "warning",
            LAUNCHER,
            f"{local or 1} ranks of {threads} threads share {facts.processors} processors",
            f"OMP_NUM_THREADS={threads}, LOCAL_WORLD_SIZE={local or 'not set'}",
            f"Set OMP_NUM_THREADS to {max(1, facts.processors // (local or 1))}.",
            "https://docs.pytorch.org/docs/stable/elastic/run.html",
        )
