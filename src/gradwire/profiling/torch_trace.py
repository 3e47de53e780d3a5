"""Traces that `torch.profiler` has exported: what a rank computed, copied and communicated, over Gloo or NCCL.

Gloo's collectives are annotations `gloo:...` on threads of its own, from when a thread takes the collective up until it
is done. NCCL's are kernels `nccl...` of a GPU's streams, which PyTorch tells the collective's name and its elements;
older versions have these only in the operator `record_param_comms` that launched the kernel.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import msgspec

from gradwire.core.checked import checked, printable
from gradwire.core.json_file import read_json
from gradwire.core.rank_files import rank_files
from gradwire.drivers.traced import Span
from gradwire.profiling.records import ProfileError

_MOST_BYTES = 1 << 32
"""Of a trace that is read, after unpacking."""

_APART_S = 60.0
"""Between traces of ranks that share a host, and so a clock, before they are taken for traces of other steps."""

_UNITS = {"cpu_op", "kernel", "gpu_memcpy", "gpu_memset", "user_annotation"}

_CALLS = ("autograd::", "torch::autograd::", "c10d", "_c10d", "record_param_comms")
"""What operators are called that compute nothing themselves: a call of a collective may wait for it."""

_ELEMENT_BYTES = {
    **dict.fromkeys(("double", "long", "long int", "complexfloat"), 8),
    **dict.fromkeys(("float", "int"), 4),
    **dict.fromkeys(("half", "bfloat16", "short", "short int"), 2),
    **dict.fromkeys(("byte", "unsigned char", "char", "signed char", "bool"), 1),
}

_STEMS = {
    "reducescatter": "reduce_scatter",
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "alltoall": "all_to_all",
    "broadcast": "broadcast",
    "gather": "gather",
    "scatter": "scatter",
    "reduce": "reduce",
    "sendrecv": "send and receive",
    "send": "send",
    "recv": "receive",
    "barrier": "barrier",
}
"""Longer ones before those that they hold."""


@dataclass(frozen=True)
class TorchTrace:
    """What the trace of one rank holds.

    Attributes:
        path: of the file.
        rank, world_size: 0 and 1 of a process that trained alone.
        backend: of the default process group; "" without one.
        host: its name, "" of a trace that does not tell.
        on_gpu: whether kernels of a GPU are in it. They are its computation then, else operators on the CPU are.
        collectives: what each was, from its start to its end, with the bytes that this rank gave; -1 for unknown.
        computation: kernels, or operators, which may lie within each other.
        copies: of memory: `Memcpy` and `Memset` on a GPU, `aten::copy_` on a CPU.
        own_s: seconds by name of a kernel or an operator, less those of operators within it.
        steps: how many steps `profiler.step()` has marked.
        began_s, ended_s: of all these, in seconds since 1970 by the clock of the host.
    """

    path: Path
    rank: int
    world_size: int
    backend: str
    host: str
    on_gpu: bool
    collectives: Sequence[Span]
    computation: Sequence[Span]
    copies: Sequence[Span]
    own_s: Mapping[str, float]
    steps: int
    began_s: float
    ended_s: float


class _Info(msgspec.Struct):
    backend: str = ""
    rank: int = 0
    world_size: int = 1


class _Head(
    msgspec.Struct,
    rename={
        "schema_version": "schemaVersion",
        "distributed_info": "distributedInfo",
        "base_time_ns": "baseTimeNanoseconds",
    },
):
    schema_version: int
    distributed_info: _Info | None = None
    host_name: str = ""
    base_time_ns: int = 0


class _Event(msgspec.Struct):
    name: str
    cat: str
    ts: float
    dur: float = 0.0
    pid: int | str = 0
    tid: int | str = 0
    args: dict[str, Any] = msgspec.field(default_factory=dict[str, Any])

    def span(self, kind: Any = "train", what: str = "", nbytes: int = 0) -> Span:
        return Span(kind, what or self.name, 1e-6 * self.ts, 1e-6 * (self.ts + self.dur), nbytes)


def holds_torch_traces(path: Path) -> bool:
    """Whether a path is read as traces of `torch.profiler`: a file, or a folder of files that are no records."""
    if not path.is_dir():
        return True
    files = rank_files(path)
    if not files:
        return bool(_files(path))
    with next(iter(files.values())).open("rb") as file:  # `rank0.json` is a good name for a trace, too
        return b'"schemaVersion"' in file.read(4096)


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.name.endswith((".json", ".json.gz")))


def read_torch_traces(*paths: Path | str) -> list[TorchTrace]:
    """Read traces that `torch.profiler` has exported, one a rank.

    Args:
        paths: files `.json` or `.json.gz`, or folders of them.

    Returns:
        The traces in the order of ranks.

    Raises:
        ProfileError: no traces, one that cannot be read or was made by another tool, or traces of ranks that do not
            belong together.

    Example:
        with torch.profiler.profile(record_shapes=True) as profiler:
            ...  # some steps
        profiler.export_chrome_trace(f"traces/rank{dist.get_rank()}.json.gz")
        ...
        print(torch_summary(torch_account(read_torch_traces("traces"))))
    """
    files = [file for path in map(Path, paths) for file in (_files(path) if path.is_dir() else [path])]
    if not files:
        raise ProfileError(f"{' and '.join(map(str, paths))} has no file that ends with .json or .json.gz")
    return _together([_read(path, alone=len(files) == 1) for path in files])


def _together(traces: Sequence[TorchTrace]) -> list[TorchTrace]:
    """Traces in the order of ranks, if they belong together."""
    traces = sorted(traces, key=lambda trace: trace.rank)
    for one, other in itertools.pairwise(traces):
        if one.rank == other.rank:
            raise ProfileError(
                f"{one.path} and {other.path} are both of rank {one.rank}: give one trace a rank, of the same steps"
            )
    first = traces[0]
    for trace in traces[1:]:
        if (first.world_size, first.backend) != (trace.world_size, trace.backend):
            raise ProfileError(
                f"{first.path} and {trace.path} do not belong together: one is of {first.world_size} ranks with "
                f"{first.backend or 'no backend'}, the other of {trace.world_size} with {trace.backend or 'none'}"
            )
        apart_s = max(first.began_s, trace.began_s) - min(first.ended_s, trace.ended_s)
        if first.host and first.host == trace.host and apart_s > _APART_S:
            raise ProfileError(
                f"{first.path} and {trace.path} do not belong together: they are {apart_s:.0f} s apart on one host"
            )
    return traces


def _read(path: Path, alone: bool) -> TorchTrace:
    remedy = "; export it anew with profiler.export_chrome_trace"
    data = read_json(path, ProfileError, _MOST_BYTES, remedy)
    if not isinstance(data, dict):
        raise ProfileError(f"{path} is no trace of torch.profiler, which is a mapping with traceEvents{remedy}")
    data = cast(dict[str, Any], data)
    if "traceEvents" not in data or "schemaVersion" not in data:
        hint = ": it is a record of gradwire.profile, so give its folder" if "world_size" in data else remedy
        raise ProfileError(f"{path} is no trace of torch.profiler{hint}")
    head = checked(data, _Head, str(path), ProfileError)
    if head.distributed_info is None and not alone:
        raise ProfileError(
            f"{path} does not tell its rank: make the profiler after torch.distributed.init_process_group, or give "
            "this trace alone"
        )
    info = head.distributed_info or _Info()
    if not 0 <= info.rank < info.world_size:
        raise ProfileError(f"{path} says that it is of rank {info.rank} of {info.world_size}: {remedy[2:]}")
    events = checked(_complete(data["traceEvents"]), list[_Event], f"{path}: traceEvents", ProfileError, joint="")
    return _trace(path, head, info, events)


def _complete(events: Any) -> Any:
    """The complete events of the categories that count; anything else than a list is left for the check."""
    if not isinstance(events, list):
        return events
    return [
        event
        for event in cast(list[Any], events)
        if isinstance(event, dict) and event.get("ph") == "X" and event.get("cat") in _UNITS
    ]


def _trace(path: Path, head: _Head, info: _Info, events: Sequence[_Event]) -> TorchTrace:
    kernels = [event for event in events if event.cat == "kernel"]
    calls = {event.args.get("External id"): event for event in events if event.name == "record_param_comms"}
    gloo = [event for event in events if event.name.startswith("gloo:")]
    collectives = [event.span("wire", named(event.name), _given_to_gloo(event)) for event in gloo]
    for kernel in kernels:
        if kernel.name.startswith("nccl"):
            call = kernel if "In msg nelems" in kernel.args else calls.get(kernel.args.get("External id"), kernel)
            collectives.append(kernel.span("wire", named(_called(kernel, call)), _given_to_nccl(call)))
    if kernels:
        working = [kernel for kernel in kernels if not kernel.name.startswith("nccl")]
        copying = [event for event in events if event.cat in ("gpu_memcpy", "gpu_memset")]
        own_s = _summed((kernel.name, 1e-6 * kernel.dur) for kernel in working)
    else:
        threads = {event.tid for event in gloo}  # what Gloo copies there is a part of its collectives
        working = [event for event in events if event.cat == "cpu_op" and _computes(event) and event.tid not in threads]
        copying = [event for event in working if event.name in ("aten::copy_", "aten::_foreach_copy_")]
        own_s = _summed(_own(working))
    spans = [*collectives, *(event.span() for event in (*working, *copying))]
    origin_s = 1e-9 * head.base_time_ns
    return TorchTrace(
        path,
        info.rank,
        info.world_size,
        info.backend,
        printable(head.host_name),
        bool(kernels),
        collectives,
        [event.span() for event in working],
        [event.span() for event in copying],
        own_s,
        len({event.name for event in events if event.name.startswith("ProfilerStep#")}),
        origin_s + min((span.began_s for span in spans), default=0.0),
        origin_s + max((span.ended_s for span in spans), default=0.0),
    )


def _computes(event: _Event) -> bool:
    """Whether an operator computes: those of autograd and of collectives only hold others, or wait for them.

    Operators of libraries have a namespace, and so have not the nodes of autograd; loops of `torch.compile` are named
    otherwise.
    """
    return ("::" in event.name and not event.name.startswith(_CALLS)) or "cpp_fused" in event.name


def _own(events: Iterable[_Event]) -> Iterator[tuple[str, float]]:
    """The name of each operator, and its seconds less those of the operators within it."""
    threads: defaultdict[object, list[_Event]] = defaultdict(list)
    for event in events:
        threads[event.pid, event.tid].append(event)
    for of_thread in threads.values():
        outer: list[_Event] = []
        for event in sorted(of_thread, key=lambda event: (event.ts, -event.dur)):
            while outer and outer[-1].ts + outer[-1].dur <= event.ts:
                outer.pop()
            if outer:
                yield outer[-1].name, -1e-6 * event.dur
            yield event.name, 1e-6 * event.dur
            outer.append(event)


def _summed(pairs: Iterable[tuple[str, float]]) -> dict[str, float]:
    sums: defaultdict[str, float] = defaultdict(float)
    for name, seconds in pairs:
        sums[printable(name)] += seconds
    return dict(sums)


def named(raw: str) -> str:
    """Return the name of a collective as torch.distributed has it, whatever Gloo, NCCL or PyTorch call it.

    >>> [named(raw) for raw in ("gloo:all_reduce", "_allgather_base", "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL")]
    ['all_reduce', 'all_gather', 'reduce_scatter']
    """
    plain = re.sub(r"^gloo:|^nccl(Dev)?Kernel_?|_", "", raw).lower()
    return next((name for stem, name in _STEMS.items() if stem in plain), printable(raw))


def _called(kernel: _Event, call: _Event) -> str:
    return str(call.args.get("Collective name") or kernel.name)


def _given_to_nccl(call: _Event) -> int:
    """Bytes that a rank gave; -1 where the trace does not tell."""
    elements, size = call.args.get("In msg nelems"), _element_bytes(call.args.get("dtype"))
    return elements * size if isinstance(elements, int) and size else -1


def _given_to_gloo(event: _Event) -> int:
    """Bytes that a rank gave; -1 where the trace does not tell: shapes are only in it with `record_shapes=True`."""
    kinds, shapes = event.args.get("Input type"), event.args.get("Input Dims")
    if event.name == "gloo:barrier":
        return 0
    if not isinstance(kinds, list) or not isinstance(shapes, list):
        return -1
    total = 0
    for kind, shape in zip(cast(list[Any], kinds), cast(list[Any], shapes), strict=False):
        size = _element_bytes(kind)
        if (
            not size
            or not isinstance(shape, list)
            or not all(isinstance(length, int) for length in cast(list[Any], shape))
        ):
            return -1
        total += size * math.prod(shape)
    return total


def _element_bytes(dtype: object) -> int:
    """Bytes of an element, by the name that Gloo or NCCL's caller give its type; 0 for an unknown one."""
    name = str(dtype).lower().removeprefix("c10::")
    return 1 if name.startswith("float8") else _ELEMENT_BYTES.get(name, 0)
