"""Traces of `torch.profiler`: overlap and idle time against sums made by hand, and traces that cannot be used."""

from __future__ import annotations

import gzip
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity

from gradwire.cli.main import main
from gradwire.profiling import ProfileError, read_torch_traces, torch_account, torch_summary

Interval = tuple[float, float]


def by_hand(*kinds: list[Interval]) -> float:
    """Seconds in which an interval of each kind is open: every piece between two edges is looked at by itself."""
    edges = sorted({edge for spans in kinds for span in spans for edge in span})
    pieces = itertools.pairwise(edges)
    return 1e-6 * sum(
        end - begin for begin, end in pieces if all(any(b <= begin and end <= e for b, e in spans) for spans in kinds)
    )


@pytest.mark.usefixtures("one_rank")
def test_overlap_of_a_trace_over_gloo_agrees_with_one_made_by_hand(tmp_path: Path, capsys: Any) -> None:
    given, factor = torch.ones(1 << 20), torch.ones(128, 128)
    taken = torch.empty(1 << 20)
    with torch.profiler.profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        for step in range(3):
            with torch.profiler.record_function(f"ProfilerStep#{step}"):  # as `schedule=` has it
                work = dist.all_gather([taken], given, async_op=True)
                for _ in range(8):
                    factor = factor @ factor
                    factor = factor / factor.norm()
                assert work is not None
                work.wait()
                dist.barrier()
    path = tmp_path / "trace.json"
    profiler.export_chrome_trace(str(path))

    events = [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == "X"]

    def spans(chosen: Callable[[dict[str, Any]], bool]) -> list[Interval]:
        return [(event["ts"], event["ts"] + event["dur"]) for event in events if chosen(event)]

    gloo = {event["tid"] for event in events if event["name"].startswith("gloo:")}
    wires = spans(lambda event: event["name"].startswith("gloo:"))
    work_spans = spans(lambda event: event["name"].startswith("aten::") and event["tid"] not in gloo)
    found = torch_account(read_torch_traces(path))
    (rank,) = found.ranks
    assert rank.communication_s == pytest.approx(by_hand(wires), abs=1e-7)
    assert rank.compute_s == pytest.approx(by_hand(work_spans), abs=1e-7)
    assert rank.at_once_s == pytest.approx(by_hand(wires, work_spans), abs=1e-7)
    assert rank.overlap == pytest.approx(by_hand(wires, work_spans) / by_hand(wires), abs=1e-3)
    both = wires + work_spans
    assert rank.idle_s == pytest.approx(rank.whole_s - by_hand(both), abs=1e-7)
    assert rank.compute_s > 0.001
    assert sum(rank.own_s.values()) == pytest.approx(rank.compute_s, abs=1e-6)  # one thread computes
    assert {name: (of.calls, of.nbytes) for name, of in rank.collectives.items()} == {
        "all_gather": (3, 3 << 22),
        "barrier": (3, 0),
    }
    assert (found.steps, found.backend, found.missing) == (3, "gloo", [])

    packed = tmp_path / "packed.json.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert torch_account(read_torch_traces(packed)) == found
    assert main(["profile", str(packed)]) == 0
    printed = capsys.readouterr().out
    assert "torch.profiler, gloo, 1 of 1 ranks, 3 steps" in printed
    assert "all_gather" in printed


# Written by hand ----------------------------------------------------------------------------------------------------


def event(cat: str, name: str, ts: float, dur: float, tid: int = 7, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "pid": 0, "tid": tid, "ts": ts, "dur": dur, "args": args}


def nccl_trace(rank: int = 0, size: int = 2, **changes: Any) -> dict[str, Any]:
    """A trace of a GPU, in milliseconds: computes 0 to 4 and 6 to 8, all-reduces 3 to 5, gathers 7 to 10, copies 12."""
    told = {"Collective name": "allreduce", "In msg nelems": 1000, "Out msg nelems": 1000, "dtype": "BFloat16"}
    older = {"Collective name": "_allgather_base", "In msg nelems": 250, "dtype": "Float"}
    events = [
        {"ph": "M", "name": "process_name", "pid": 0, "tid": 0, "args": {"name": "python"}},
        event("cpu_op", "aten::mm", 0, 9000, tid=1),  # it launches the kernel, and is no computation beside it
        event("user_annotation", "ProfilerStep#2", 0, 12000, tid=1),
        event("kernel", "ampere_sgemm_128x64_tn", 0, 4000, stream=7),
        event("kernel", "ampere_sgemm_128x64_tn", 6000, 2000, stream=7),
        event(
            "kernel", "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevComm*)", 3000, 2000, tid=20, stream=20, **told
        ),
        event("cpu_op", "record_param_comms", 2000, 10, tid=1, **{"External id": 5}, **older),
        event("kernel", "ncclKernel_AllGather_RING_LL_Sum_int8_t", 7000, 3000, tid=20, **{"External id": 5}),
        event("gpu_user_annotation", "nccl:all_reduce", 3000, 2000, tid=20),
        event("gpu_memcpy", "Memcpy HtoD (Pageable -> Device)", 11000, 1000, bytes=4000),
    ]
    trace = {
        "schemaVersion": 1,
        "distributedInfo": {"backend": "nccl", "rank": rank, "world_size": size, "nccl_version": "2.27.5"},
        "host_name": "host",
        "baseTimeNanoseconds": 1_790_857_026_000_000_000,
        "traceEvents": events,
    }
    return trace | changes


def written(path: Path, trace: Any) -> Path:
    path.write_text(json.dumps(trace))
    return path


def test_kernels_of_nccl_are_communication_and_other_kernels_are_computation(tmp_path: Path) -> None:
    for rank in range(2):
        written(tmp_path / f"rank{rank}.json", nccl_trace(rank, 3))
    found = torch_account(read_torch_traces(tmp_path))
    rank = found.ranks[1]
    milliseconds = [rank.whole_s, rank.compute_s, rank.communication_s, rank.at_once_s, rank.copies_s, rank.idle_s]
    assert [1e3 * seconds for seconds in milliseconds] == pytest.approx([12, 6, 5, 2, 1, 2], abs=1e-3)
    assert rank.overlap == pytest.approx(0.4)
    assert {name: (of.calls, of.nbytes) for name, of in rank.collectives.items()} == {
        "all_reduce": (1, 2000),
        "all_gather": (1, 1000),
    }
    assert rank.own_s == {"ampere_sgemm_128x64_tn": pytest.approx(0.006)}
    assert found.missing == [2]
    text = torch_summary(found)
    assert "2 of 3 ranks, 1 step" in text
    assert "The traces of ranks 2 are missing" in text


def test_a_folder_of_traces_called_rank0_json_is_not_taken_for_records(tmp_path: Path, capsys: Any) -> None:
    written(tmp_path / "rank0.json", nccl_trace(size=1))
    figures = tmp_path / "figures" / "overlap.json"
    assert main(["profile", str(tmp_path), "--json", str(figures)]) == 0
    assert "torch.profiler, nccl, 1 of 1 ranks" in capsys.readouterr().out
    assert json.loads(figures.read_text())["ranks"][0]["overlap"] == pytest.approx(0.4)


def test_what_a_trace_does_not_tell_is_said(tmp_path: Path) -> None:
    gloo = [event("user_annotation", "gloo:all_reduce", 0, 10, tid=9), event("cpu_op", "aten::copy_", 2, 3, tid=9)]
    quiet = nccl_trace(traceEvents=gloo)
    (rank,) = torch_account(read_torch_traces(written(tmp_path / "t.json", quiet))).ranks
    assert rank.compute_s == 0  # what Gloo copies is a part of its collective
    assert rank.collectives["all_reduce"].nbytes is None
    text = torch_summary(torch_account(read_torch_traces(tmp_path)))
    assert "record_shapes=True" in text
    assert "ProfilerActivity.CUDA" in text
    assert "The traces of ranks 1 are missing" in text
    other = nccl_trace(traceEvents=[event("cpu_op", "aten::mm", 0, 10)])
    other["distributedInfo"]["backend"] = "gloo"
    text = torch_summary(torch_account(read_torch_traces(written(tmp_path / "t.json", other))))
    assert "No collective of Gloo or NCCL is in the trace of rank 0" in text


ONE = nccl_trace()
REFUSED = {
    "other tool": ([{"traceEvents": []}], "is no trace of torch.profiler; export it anew"),
    "list": ([[]], "which is a mapping with traceEvents"),
    "record": ([{"run": "a", "rank": 0, "world_size": 2}], "it is a record of gradwire.profile, so give its folder"),
    "no list": ([nccl_trace(traceEvents=3)], "should be a list"),
    "no time": ([nccl_trace(traceEvents=[{**event("kernel", "k", 0, 1), "ts": "soon"}])], "ts should be a number"),
    "no rank": ([ONE, nccl_trace(1, distributedInfo=None)], "t1.json does not tell its rank"),
    "such a rank": ([nccl_trace(2, 2)], "says that it is of rank 2 of 2"),
    "twice": ([ONE, ONE], "are both of rank 0: give one trace a rank"),
    "sizes": ([ONE, nccl_trace(1, 4)], "one is of 2 ranks with nccl, the other of 4 with nccl"),
    "hour": ([ONE, nccl_trace(1, baseTimeNanoseconds=1_790_860_626_000_000_000)], "3600 s apart on one host"),
}


@pytest.mark.parametrize(("traces", "said"), REFUSED.values(), ids=REFUSED.keys())
def test_traces_that_cannot_be_used_are_refused_in_a_sentence(tmp_path: Path, traces: list[Any], said: str) -> None:
    paths = [written(tmp_path / f"t{number}.json", trace) for number, trace in enumerate(traces)]
    with pytest.raises(ProfileError) as refusal:
        read_torch_traces(*paths)
    assert said in str(refusal.value)


def test_a_trace_that_was_cut_off_is_refused_in_a_sentence(tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(nccl_trace())[:-30])
    assert main(["profile", str(path)]) == 2
    assert "is cut off, or no JSON: it cannot be read; export it anew" in capsys.readouterr().err
    assert main(["profile", str(tmp_path / "none.json")]) == 2
    assert "cannot be read: No such file" in capsys.readouterr().err
