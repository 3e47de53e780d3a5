"""Attaching and letting go: names, refusals, freed threads and files, interrupts, and errors that name the rank."""

import ast
import gc
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import PrefixStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.swa_utils import AveragedModel

import gradwire
from gradwire.codecs import Identity
from gradwire.core.errors import AttachError, CommunicationError, ConnectionLost
from gradwire.network.loopback import loopback_environments
from gradwire.ranks.supervised import RankFailure, run_function
from gradwire.reducers import AllReduceExchange, Hierarchical
from gradwire.session.failures import FailureBoard, RankAnswer
from kernel_sets import everything_in

FILE = Path(__file__).with_name("attach_cases.py")
SOURCES = sorted(Path(gradwire.__file__).parent.rglob("*.py"))


def run(case: str, ranks: int, **arguments: Any) -> list[Any]:
    return run_function(f"{FILE}:{case}", ranks, arguments, 120)


# Names ------------------------------------------------------------------------------------------------------


class Gated(nn.Module):
    """Names that contain those of wrappers."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_module = nn.Linear(4, 4, bias=False)
        self.module = nn.Linear(4, 4, bias=False)
        self.wrapped = checkpoint_wrapper(nn.Linear(4, 4, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        """All of them."""
        return self.wrapped(self.module(self.gate_module(x)))


class Compiled(nn.Module):
    """Names its module as `torch.compile` does, without the seconds that importing the compiler takes."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._orig_mod = module


def names_of(module: nn.Module) -> set[str]:
    with gradwire.attach(DDP(module), "topk:0.5") as handle:
        return set(handle.state_dict()["parameters"])


@pytest.mark.usefixtures("one_rank")
def test_only_what_wrappers_put_into_names_is_left_out() -> None:
    own = {"gate_module.weight", "module.weight", "wrapped.weight"}
    assert names_of(Gated()) == own
    assert names_of(AveragedModel(Gated())) == own
    assert names_of(nn.DataParallel(Gated())) == own
    assert names_of(nn.Sequential(Compiled(Gated()))) == {f"0.{name}" for name in own}


@pytest.mark.usefixtures("one_rank")
def test_two_parameters_that_would_share_a_name_are_refused_with_both() -> None:
    model = nn.ModuleDict({"_orig_mod": nn.Linear(2, 2, bias=False), "weight": nn.Linear(2, 2)})
    model["weight"] = nn.Linear(2, 2, bias=False)
    model.register_parameter("top", nn.Parameter(torch.zeros(2)))
    model["_orig_mod"].register_parameter("top", nn.Parameter(torch.zeros(2)))
    with pytest.raises(AttachError, match=r"'top' and '_orig_mod\.top' are both 'top'.*rename one"):
        gradwire.attach(DDP(model), "none")


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("now", [True, False])
def test_a_parameter_that_ddp_does_not_know_as_it_is_now_is_named(now: bool) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].bias.requires_grad_(not now)
    ddp = DDP(model)
    model[1].bias.requires_grad_(now)
    with pytest.raises(AttachError, match=r"'1\.bias' requires .*set requires_grad first, then make the Distributed"):
        gradwire.attach(ddp, "none")


def other_parallelism(kind: str) -> nn.Module:
    from torch.distributed._composable.replicate import replicate
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    if kind == "replicate":
        return replicate(nn.Linear(2, 2))
    if kind == "FSDP1":
        return FullyShardedDataParallel(nn.Linear(2, 2), device_id=torch.device("cpu"))
    model = nn.Sequential(nn.Linear(2, 2))
    fully_shard(model[0], mesh=init_device_mesh("cpu", (1,)))
    return model


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("kind", ["FSDP1", "FSDP2", "replicate"])
def test_other_ways_to_train_in_parallel_are_told_what_to_do_meanwhile(kind: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch's own, about shards of one rank
        model = other_parallelism(kind)
    instead = {"FSDP1": "fully_shard", "FSDP2": "give it to fully_shard too", "replicate": "DistributedDataParallel"}
    with pytest.raises(AttachError, match=f"{kind}.*{instead[kind]}"):
        gradwire.attach(model, "none")  # type: ignore[arg-type]


# Letting go -------------------------------------------------------------------------------------------------


def in_use() -> tuple[int, int, int]:
    """Threads of Python, threads of the process, and open files."""
    return threading.active_count(), len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


def attach_and_drop(close: bool) -> None:
    ddp = DDP(nn.Linear(4, 4))
    handle = gradwire.attach(ddp, Hierarchical(AllReduceExchange(Identity()), 1))
    ddp(torch.ones(2, 4)).sum().backward()
    if close:
        handle.close()
        files = in_use()[2]
        del handle, ddp
        assert files == in_use()[2], "a closed handle holds no file that its end frees"


@pytest.mark.usefixtures("one_rank")
@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts in /proc")
@pytest.mark.parametrize("close", [True, False])
def test_a_handle_frees_threads_groups_and_files_closed_or_dropped(close: bool) -> None:
    attach_and_drop(close=True)  # makes what stays: thread pools, autograd's threads
    gc.collect()
    before = in_use()
    for _ in range(3):
        attach_and_drop(close)
        gc.collect()
    for _ in range(50):
        if in_use() == before:
            break
        time.sleep(0.1)  # a dropped handle's thread lets go by itself
    assert in_use() == before


def test_attaching_again_after_close_works_every_time() -> None:
    for times in run("attach_again", 4, rounds=4):
        assert len(times) == 4
        assert max(times) < 15


@pytest.fixture
def stuck_pair() -> Iterator[list["subprocess.Popen[str]"]]:
    """Two ranks, the second of which is stuck."""
    ranks = [
        subprocess.Popen(
            [sys.executable, str(FILE), "interrupted"],
            env={**os.environ, **environment, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for environment in loopback_environments(2)
    ]
    yield ranks
    for rank in ranks:
        rank.kill()
        rank.communicate()


@pytest.mark.one_draw_in(3)
def test_an_interrupt_ends_a_rank_within_two_seconds_although_its_peer_is_stuck(
    stuck_pair: list["subprocess.Popen[str]"],
) -> None:
    first = stuck_pair[0]
    assert first.stdout is not None
    assert first.stdout.readline() == "ready\n"
    time.sleep(1.5)  # it waits in its third step
    began = time.monotonic()
    first.send_signal(signal.SIGINT)
    left, errors = first.communicate(timeout=30)  # on a busy machine Python takes seconds to end; the peer sleeps 60
    assert float(left) - began < 2.0
    assert errors.rstrip().endswith("KeyboardInterrupt")
    assert first.returncode == -signal.SIGINT


# Errors -----------------------------------------------------------------------------------------------------


@pytest.mark.one_draw_in(2)
def test_a_rank_that_does_not_attach_or_sleeps_past_the_deadline_is_named() -> None:
    first, second, last = run("absent_then_asleep", 3)
    for found in (first, second):
        assert found["absent"]["ranks"] == [2], found
        assert "rank 2 did not call gradwire.attach within" in found["absent"]["text"]
        assert "deadline_s=1)" in found["absent"]["text"]
        assert found["asleep"]["ranks"] == [2], found
        assert "rank 2 answers, but has handed over no gradients for" in found["asleep"]["text"]
        assert "in step 2, deadline_s=3: AllReduce of 144 bytes failed after 3." in found["asleep"]["text"]
        assert found["asleep"]["s"] < 8
    assert last["asleep"]["ranks"] == [2], last
    assert "gave up on this rank (2)" in last["asleep"]["text"]
    assert {found["steps"] for found in (first, second, last)} == {2}


def test_a_rank_that_was_killed_is_named(tmp_path: Path) -> None:
    with pytest.raises(RankFailure, match="rank 2 was killed by SIGKILL"):
        run("killed", 3, folder=str(tmp_path))
    for rank in (0, 1):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert found["ranks"] == [2], found
        assert "rank 2 did not answer: it has ended, or its host cannot be reached" in found["text"]
        assert found["s"] < 10


# Nothing from outside is executed ---------------------------------------------------------------------------


class Malicious:
    """Executes something when it is unpickled."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.target,)


GOOD = json.loads(RankAnswer(1, "failed", 0.0, 7, False, "ValueError", "bad", "...").to_json())
DAMAGED: dict[str, Any] = {
    "cut": json.dumps(GOOD)[:-5],
    "binary": b"\x80\x04\x95\xff\x00",
    "empty": b"",
    "a list": "[1, 2]",
    "a number": "7",
    "no rank": json.dumps({**GOOD, "rank": None}),
    "another rank": json.dumps({**GOOD, "rank": 5}),
    "another deed": json.dumps({**GOOD, "doing": "eval"}),
    "a tree for a text": json.dumps({**GOOD, "message": [[["deep"]]]}),
    "no message": json.dumps({key: value for key, value in GOOD.items() if key != "message"}),
    "deep": "[" * 100_000,
}


def error_after(body: Any) -> BaseException:
    """What a rank raises that finds `body` as the answer of rank 1."""
    group = dist.group.WORLD
    assert group is not None
    board = FailureBoard(group, deadline_s=1)
    board.ranks = [0, 1]
    default = dist.distributed_c10d._get_default_store()  # pyright: ignore[reportPrivateUsage]
    store = PrefixStore(f"gradwire/failure/{group.group_name}", default)
    for key in ("alarm", "error", "1"):
        store.set(key, body)
    error = board.explain(ConnectionLost("AllReduce", 1.0, RuntimeError("lost")))
    board.close(5)
    return error


@pytest.mark.usefixtures("one_rank")
def test_a_pickle_in_the_store_is_not_executed(tmp_path: Path) -> None:
    error = error_after(pickle.dumps((1, Malicious(tmp_path / "executed"))))
    assert list(tmp_path.iterdir()) == []
    assert isinstance(error, CommunicationError)
    assert "no message of gradwire's" in str(error)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("kind", DAMAGED)
def test_a_damaged_answer_is_a_sentence(kind: str) -> None:
    error = error_after(DAMAGED[kind])
    assert isinstance(error, CommunicationError)
    assert "as the answer of rank 1 is no message of gradwire's" in str(error)


@pytest.mark.usefixtures("one_rank")
def test_an_answer_is_passed_on_as_text_without_control_characters() -> None:
    error = error_after(json.dumps({**GOOD, "message": "bad\x1b[2J\rgood"}))
    assert isinstance(error, CommunicationError)
    assert str(error) == "rank 1 failed with ValueError: bad?[2J?good"
    assert error.ranks == (1,)


UNPICKLERS = {
    "pickle",
    "cPickle",
    "_pickle",
    "dill",
    "cloudpickle",
    "joblib",
    "marshal",
    "shelve",
    "copyreg",
    "jsonpickle",
}
EXECUTES = {"eval", "exec", "compile", "__import__"}


def executes(node: ast.AST) -> bool:
    """Whether a piece of source may execute what it reads."""
    if isinstance(node, ast.Import):
        return any(alias.name.split(".")[0] in UNPICKLERS for alias in node.names)
    if isinstance(node, ast.ImportFrom):
        return (node.module or "").split(".")[0] in UNPICKLERS
    if isinstance(node, ast.Attribute) and (node.attr.endswith("_object") or node.attr.endswith("_object_list")):
        return True  # torch.distributed's object collectives
    if not isinstance(node, ast.Call):
        return False
    given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
    name = ast.unparse(node.func)
    return (
        name in EXECUTES
        or (name.endswith("torch.load") and given.get("weights_only") != "True")
        or (name.endswith(("yaml.load", "np.load", "numpy.load")) and given.get("allow_pickle") != "False")
        or given.get("shell") == "True"
    )


@pytest.mark.parametrize(
    "line",
    ["import pickle", "from pickle import loads", "eval(text)", "torch.load(file)", "dist.all_gather_object(a, b)"],
)
def test_the_search_finds_what_it_is_for(line: str) -> None:
    assert any(executes(node) for node in ast.walk(ast.parse(line)))


@pytest.mark.one_draw_in(2)
def test_no_source_executes_what_it_reads() -> None:
    found = [
        f"{file.name}:{getattr(node, 'lineno', 0)}: {ast.unparse(node)}"
        for file in SOURCES
        for node in ast.walk(ast.parse(file.read_text()))
        if executes(node)
    ]
    assert len(SOURCES) > 100
    assert found == []


# Warming up -------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("spec", ["int4", "topk:0.01", "powersgd:2", "qsgd:15", "sign"])
def test_after_attach_a_step_compiles_nothing(spec: str) -> None:
    compiling = pytest.importorskip("gradwire.kernels.runtime.compiling")
    everything_in("cpu")  # imports them all
    kernels = compiling.COMPILED
    for kernel in kernels:
        kernel._ready = False
    ddp = DDP(nn.Sequential(nn.Linear(600, 600), nn.Linear(600, 30)))
    with gradwire.attach(ddp, spec):
        ready = [kernel.__name__ for kernel in kernels if kernel._ready]
        for _ in range(3):
            ddp(torch.ones(2, 600)).sum().backward()
        assert [kernel.__name__ for kernel in kernels if kernel._ready] == ready
    assert ready
