"""`gradwire net exec`: scripts that know nothing of gradwire, on emulated hosts."""

from __future__ import annotations

import itertools
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gradwire.cli.main import main
from gradwire.core.errors import NetworkError
from gradwire.network import Network
from gradwire.ranks import net_exec

pytestmark = pytest.mark.timeout(120)

# Gloo's threads end with the last reference to their group, and one that Python's end overtakes may abort the process
# (gradwire.ranks.group_end says how). So nothing keeps the group beyond `destroy_process_group`: not the model, and not
# default arguments in torch.distributed.nn, which the first model would import after there is a group.
SCRIPT = """
import sys
import torch
import torch.distributed as dist
import torch.distributed.nn
from torch.nn.parallel import DistributedDataParallel

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
ddp = DistributedDataParallel(torch.nn.Linear(200, 200))
ddp(torch.full((1, 200), float(rank))).sum().backward()
print(f"rank {rank} of {dist.get_world_size()} has {float(ddp.module.weight.grad.mean()):g}")
del ddp
dist.destroy_process_group()
sys.exit(int(sys.argv[1]) if len(sys.argv) > 1 and rank == 1 else 0)
"""


@pytest.fixture(scope="module", autouse=True)
def hosts_can_be_made() -> None:
    try:
        with Network(1, "100mbit") as network:
            if network.mode == "paced":
                pytest.skip(f"no network namespaces here: {network.description}")
    except NetworkError as error:
        pytest.skip(f"no network here: {error}")


@pytest.fixture
def script(tmp_path: Path) -> str:
    (tmp_path / "train.py").write_text(SCRIPT)
    return str(tmp_path / "train.py")


@pytest.mark.draw(1)
@pytest.mark.parametrize("launcher", [["-m", "torch.distributed.run"], []], ids=["torchrun", "python"])
@pytest.mark.turns("scripts", 1)
def test_a_script_of_ddp_runs_as_it_is_on_two_hosts(
    launcher: list[str], script: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["net", "exec", "--rate", "100mbit", "--", sys.executable, *launcher, script]) == 0
    said = capfd.readouterr().out
    assert said.startswith("2 hosts as network namespaces")
    for rank in range(2):
        assert f"host {rank} | rank {rank} of 2 has 0.5" in said
    sent = re.findall(r"host \d sent ([\d.]+) kB and received ([\d.]+) kB", said)
    assert len(sent) == 2
    assert all(160 < float(bytes_) < 1000 for of_host in sent for bytes_ in of_host)  # a weight has 160 kB


@pytest.mark.turns("scripts", 1)
def test_the_status_is_that_of_the_host_that_failed(script: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["net", "exec", "--", sys.executable, script, "7"]) == 7
    assert "gradwire: host 1 ended with status 7, and the others were ended" in capfd.readouterr().err


def test_what_hosts_write_is_kept_where_that_is_wanted(tmp_path: Path) -> None:
    executed = net_exec.execute(["sh", "-c", "echo I am $RANK at $PET_NODE_RANK"], hosts=3, logs=tmp_path / "logs")
    assert [(tmp_path / f"logs/rank{rank}.log").read_text() for rank in range(3)] == [
        f"I am {rank} at {rank}\n" for rank in range(3)
    ]
    assert len(executed.sent_bytes) == len(executed.received_bytes) == 3
    assert executed.seconds < 60


def test_a_deadline_ends_all(capfd: pytest.CaptureFixture[str]) -> None:
    began = time.monotonic()
    assert main(["net", "exec", "--deadline", "0.5", "--", "sleep", "100"]) == 1
    assert time.monotonic() - began < 60
    assert "host 0 was still running at the deadline" in capfd.readouterr().err


def test_an_interrupt_ends_the_program_and_its_hosts() -> None:
    heeding = ["env", "--default-signal=INT"]  # whoever runs the tests in the background ignores interrupts
    words = [*heeding, sys.executable, "-m", "gradwire", "net", "exec", "--", "sh", "-c", "echo pid $$; sleep 100"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"}) as run:
        assert run.stdout is not None
        lines = (line for line in run.stdout if "| pid" in line)
        pids = [int(line.rpartition(" ")[2]) for line in itertools.islice(lines, 2)]
        run.send_signal(signal.SIGINT)
        assert run.wait(60) == 130
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        ([], 2, "there is no program to run: write it behind --"),
        (["--", "no-such-program"], 1, "there is no program 'no-such-program' to run here"),
        (["--rate", "7parsec", "--", "true"], 2, "rate '7parsec' cannot be used: write a number and a unit"),
        (["--hosts", "0", "--", "true"], 2, "hosts must lie between 1 and 1000, not 0"),
    ],
)
def test_what_cannot_run_is_told_before_anything_starts(
    words: list[str], status: int, said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["net", "exec", *words]) == status
    assert said in capfd.readouterr().err


def test_without_namespaces_it_is_refused_and_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "true").symlink_to("/bin/true")
    with pytest.raises(
        NetworkError, match=r"needs hosts of its own, and here is only an approximation.*not root: ip, tc"
    ):
        net_exec.execute(["true"])
