"""`gradwire run`: a script that knows nothing of gradwire, with its gradients compressed and its statuses its own."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from framework_runs import DEADLINE_S, EXAMPLES, SETTINGS, run_two
from gradwire import AttachError, hooks
from gradwire.adapters.unchanged import Unchanged
from gradwire.cli.main import main

EXAMPLE = str(EXAMPLES / "train_ddp.py")
RUN = ["-m", "gradwire", "run", "--method", "int4"]


@pytest.mark.one_draw_in(4)
def test_an_unchanged_script_sends_little_and_resumes_exactly(tmp_path: Path) -> None:
    whole = run_two([*RUN, EXAMPLE, "--folder", str(tmp_path)], tmp_path / "whole")
    assert len(whole.parameters) == 2
    assert len(set(whole.parameters)) == 1
    assert "gradwire: int4 is attached to Sequential: 11,018 parameters, 2 ranks" in whole.logs[0]
    (factor,) = re.findall(r"int4 sent 116 kB in 20 steps where fp32 sends 881 kB \((\S+) times less\)", whole.logs[0])
    assert float(factor) >= 5
    assert "gradwire" not in whole.logs[1]
    states = tmp_path / "step-10.pt.gradwire" / "gradwire-1"
    assert sorted(path.name for path in states.iterdir()) == ["manifest.json", "rank0.safetensors", "rank1.safetensors"]
    resumed = run_two([*RUN, EXAMPLE, "--resume", str(tmp_path / "step-10.pt")], tmp_path / "resumed")
    assert resumed.parameters == whole.parameters
    assert "gradwire: goes on at step 10 with what was owed when" in resumed.logs[0]


ENDS = """
import os, sys, torch.distributed as dist
dist.init_process_group("gloo")
assert sys.argv[1:] == ["--mine", "-m"], sys.argv
assert __name__ == "__main__"
if os.environ["RANK"] == "1":
    sys.exit(7)
"""


@pytest.mark.turns("processes", 1)
def test_ranks_that_it_starts_end_with_the_status_of_the_first_to_fail(tmp_path: Path) -> None:
    script = tmp_path / "ends.py"
    script.write_text(ENDS)
    command = [sys.executable, *RUN, "--nproc", "2", str(script), "--mine", "-m"]
    environment = os.environ | SETTINGS
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert ended.returncode == 7, ended.stdout + ended.stderr
    assert "gradwire: rank 1 was the first to fail, with status 7" in ended.stderr


def run_here(script: Path, text: str, monkeypatch: pytest.MonkeyPatch, *own: str) -> int:
    """Run a script of this text in this process."""
    script.write_text(text)
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delenv("RANK", raising=False)
    return main(["run", "--method", "int4", str(script), *own])


@pytest.mark.parametrize(
    ("text", "status"),
    [("pass", 0), ("import sys; sys.exit(5)", 5), ("import sys; sys.exit()", 0), ("import sys; sys.exit('no')", 1)],
)
def test_a_script_without_a_model_keeps_its_status(
    text: str, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_here(tmp_path / "script.py", text, monkeypatch) == status
    said = capsys.readouterr().err
    if text == "pass":
        why = "the script made no model of DistributedDataParallel or fully_shard"
        assert said == f"gradwire: {why}, so nothing was compressed\n"
    assert ("no\n" in said) == ("'no'" in text)


def test_an_exception_is_shown_from_the_script_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown: list[Any] = []

    def show(*given: Any) -> None:
        shown.append(given)

    monkeypatch.setattr(sys, "excepthook", show)
    script = tmp_path / "script.py"
    assert run_here(script, "import sys\nassert sys.argv[1] == '-x'\nopen('/does/not/exist')", monkeypatch, "-x") == 1
    ((kind, error, trace),) = shown
    assert kind is FileNotFoundError
    assert error.__traceback__ is trace
    assert trace.tb_frame.f_code.co_filename == str(script)
    assert capsys.readouterr().err == ""


WORDS = [
    ["--n", "3"],
    ["--n=3", "--no", "-n", "3", "-1"],
    ["--method", "x", "--help", "-h", "-m"],
    ["--", "--nproc", "9", "--"],
    ["--rdzv", "x", "--node", "--standalone"],
    ["--s", "a b", ""],
]


@pytest.mark.parametrize("words", WORDS)
def test_what_follows_the_script_is_the_script_s_own(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "script.py"
    assert run_here(script, f"import sys\nassert sys.argv[1:] == {words}", monkeypatch, *words) == 0
    started: list[Any] = []
    monkeypatch.setattr(importlib.import_module("torch.distributed.run"), "run", started.append)
    assert main(["run", "--method", "int4", "--nproc", "2", "--", str(script), *words]) == 0
    (given,) = started
    assert given.training_script_args == ["run", "--method", "int4", "--seed", "0", str(script), *words]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--npro", "2", "--method", "int4", EXAMPLE], "unrecognized arguments: --npro"),
        (["--npro=2", "--method", "int4", EXAMPLE], "unrecognized arguments: --npro=2"),
        (["--meth", "int4", EXAMPLE], "unrecognized arguments: --meth"),
        (["--method", "int4"], "required: SCRIPT"),
    ],
)
def test_abbreviations_of_options_are_refused(
    words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        main(["run", *words])
    assert left.value.code == 2
    assert sentence in capsys.readouterr().err


STARTS = """
import os, sys, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn, save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

def work(rank, folder, kind):
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    layer = nn.Linear(8, 300)
    sharded = kind == "fsdp2"
    model = fully_shard(layer, mesh=init_device_mesh("cpu", (2,))) if sharded else DistributedDataParallel(layer)
    for step in range(3):
        model(torch.randn(4, 8)).square().sum().backward()
    if rank == 0:
        save({}, f"{folder}/tmp")
        os.replace(f"{folder}/tmp", f"{folder}/last.pt")
    dist.destroy_process_group()

class Own(mp.get_context("spawn").Process):
    def run(self):
        pass

if __name__ == "__main__":
    folder, kind = sys.argv[1:]
    if kind == "fsdp2":
        mp.spawn(work, args=(folder, kind), nprocs=2)
    elif kind == "own":
        process = Own()
        process.start()
        process.join()
    elif kind == "fork":
        mp.start_processes(work, args=(folder, kind), nprocs=2, start_method=kind)
    else:
        data = torch.utils.data.DataLoader(range(4), num_workers=1)
        context = mp.get_context(kind.removeprefix("Process "))
        processes = [context.Process(target=work, args=(rank, folder, kind)) for rank in range(2)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        assert [process.exitcode for process in processes] == [0, 0]
        assert len(list(data)) == 4
"""


def started(kind: str, tmp_path: Path) -> list[str]:
    """What is said of a script that starts processes."""
    (tmp_path / "starts.py").write_text(STARTS)
    environment = {name: value for name, value in os.environ.items() if name != "RANK"} | SETTINGS
    command = [sys.executable, *RUN, str(tmp_path / "starts.py"), str(tmp_path), kind]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return [line for line in ended.stderr.splitlines() if line.startswith("gradwire: ")]


@pytest.mark.parametrize("kind", ["fsdp2", "fork", "Process spawn"])
@pytest.mark.draw(1)
@pytest.mark.turns("processes", 1)
def test_processes_that_a_script_starts_are_served(kind: str, tmp_path: Path) -> None:
    attached, sent, first = started(kind, tmp_path)
    assert re.fullmatch(r"gradwire: int4 is attached to Linear: 2,700 parameters, 2 ranks", attached)
    assert re.match(r"gradwire: Linear: int4 sent .* in 3 steps where fp32 sends", sent)
    assert first == (
        "gradwire: the script made no model of DistributedDataParallel or fully_shard in its first process; of the 2 "
        "processes that it started, each that made one says what it sent"
    )
    states = tmp_path / "last.pt.gradwire" / "gradwire-1"
    assert sorted(path.name for path in states.iterdir()) == ["manifest.json", "rank0.safetensors", "rank1.safetensors"]


@pytest.mark.turns("processes", 1)
def test_processes_that_cannot_be_served_are_told_of(tmp_path: Path) -> None:
    assert started("own", tmp_path) == [
        "gradwire: the script made no model of DistributedDataParallel or fully_shard in its first process, and "
        "processes that have a run() of their own are not served: let their class have no run() of its own but a "
        "target=, or call gradwire.attach in them"
    ]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--method", "int5000", EXAMPLE], "int5000"),
        (["--method", "int4", "nowhere.py"], "there is no script nowhere.py: give its path, or -m"),
        (["--method", "int4", "--nproc", "0", EXAMPLE], "--nproc 0: there must be at least 1 rank"),
    ],
)
def test_what_cannot_run_is_refused(words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", *words]) == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.usefixtures("one_rank")
class TestModels:
    """In one process, with one rank."""

    def test_a_model_is_attached_to_at_its_first_pass_with_gradients(self) -> None:
        said: list[str] = []
        plain = DistributedDataParallel.__init__
        with Unchanged("int4", said.append).watching() as unchanged:
            scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
            ddp = DistributedDataParallel(nn.Linear(3, 2))
            with torch.no_grad():
                ddp(torch.ones(1, 3))
            assert not said
            assert unchanged.summary() == [
                "the script made a model of DistributedDataParallel and did not train it: nothing was compressed"
            ]
            scaler.scale(ddp(torch.ones(1, 3)).sum()).backward()
        assert DistributedDataParallel.__init__ is plain
        assert said == ["int4 is attached to Linear: 8 parameters, 1 rank, so nothing is sent"]
        ((name, handle),) = unchanged.sessions
        assert (name, handle.method) == ("Linear", "int4")
        assert handle.feed.scale == 8.0
        assert unchanged.summary() == [
            "Linear: int4 sent nothing in 1 steps; there is one rank: nothing is sent, and nothing can be saved"
        ]
        handle.close()

    def test_a_class_of_the_script_s_own_is_attached_to_and_a_hook_of_its_own_is_refused(self) -> None:
        class Own(DistributedDataParallel):
            def __init__(self, module: nn.Module) -> None:
                super().__init__(module)
                self.register_comm_hook(None, hooks.fp16_compress_hook)

        with Unchanged("int4", lambda _: None).watching() as unchanged:
            ddp = Own(nn.Linear(3, 2))
            with pytest.raises(AttachError, match="has a communication hook already"):
                ddp(torch.ones(1, 3))
        assert not unchanged.sessions

    def test_two_scalers_are_not_followed(self) -> None:
        said: list[str] = []
        with Unchanged("int4", said.append).watching() as unchanged:
            kept = [
                torch.amp.GradScaler("cpu"),
                torch.amp.GradScaler("cpu"),
                torch.amp.GradScaler("cpu", enabled=False),
            ]
            DistributedDataParallel(nn.Linear(3, 2))(torch.ones(1, 3)).sum().backward()
        assert len(kept) == 3
        assert said[0] == "2 GradScalers: none is followed, so what is owed is wrong when a scale changes"
        unchanged.sessions[0][1].close()

    @pytest.mark.filterwarnings("default")  # PyTorch's own, of what it imports to compile
    def test_a_compiled_model_is_attached_to(self) -> None:
        with Unchanged("int4", lambda _: None).watching() as unchanged:
            compiled = torch.compile(DistributedDataParallel(nn.Linear(3, 2)), backend="eager")
            for _ in range(3):
                compiled(torch.ones(1, 3)).sum().backward()
        ((_, handle),) = unchanged.sessions
        assert handle.stats().steps == 3
        handle.close()
