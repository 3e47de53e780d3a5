"""What the README and docs/attach.md show runs as it stands there."""

from __future__ import annotations

import pkgutil
import re
import shlex
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.cli.main import parser

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def blocks(kind: str, page: str = "README.md") -> list[str]:
    return re.findall(rf"```{kind}\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


def after(diff: str) -> str:
    """What a script has once the lines of a diff are added, with a backward pass where the loop stands."""
    lines = [line[1:] for line in diff.splitlines()]
    return "\n".join(lines).replace("...", "ddp(batch).square().mean().backward()")


@pytest.mark.parametrize("page", ["README.md", "docs/attach.md"])
def test_five_lines_train_and_three_resume(
    page: str, one_rank: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    model, data = nn.Linear(64, 64), [torch.randn(4, 64) for _ in range(12)]
    names: dict[str, object] = {
        "model": model,
        "data": data,
        "DistributedDataParallel": DistributedDataParallel,
        "torch": torch,
    }
    (diff,), (resume,) = blocks("diff", page), blocks("python", page)
    exec(after(diff), names)
    torch.save(model.state_dict(), "checkpoint/model.pt")
    handle = names["session"]
    assert isinstance(handle, gradwire.Session)
    assert ("gradwire report: int4" in capsys.readouterr().out) == ("print(session.report())" in diff)
    handle.close()
    names["gradwire"] = gradwire
    exec(resume, names)
    resumed = names["session"]
    assert isinstance(resumed, gradwire.Session)
    assert names["step"] == len(data)
    assert resumed is not handle
    resumed.close()


CALLS = re.findall(r"^\|[^|]*\| `(gradwire\.[^`]*\))` \|", README, re.MULTILINE)


@pytest.mark.parametrize("call", CALLS)
def test_calls_of_the_table_are_taken(call: str, one_rank: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    model = nn.Linear(8, 8)
    ddp, optimizer = DistributedDataParallel(nn.Linear(8, 8)), torch.optim.AdamW(model.parameters())
    names = {"gradwire": gradwire, "model": model, "ddp": ddp, "optimizer": optimizer}
    if "parameters=" in call:  # of a model of FSDP2, which DDP's is not
        with pytest.raises(gradwire.AttachError, match="fully_shard"):
            eval(call, {**names, "model": ddp})
        return
    eval(call, names).close()


def test_there_are_calls() -> None:
    assert len(CALLS) >= 5
    for name in re.findall(r"\| `gradwire\.([\w.]+)` \|", README):
        assert pkgutil.resolve_name(f"gradwire.{name}")


def test_commands_are_taken() -> None:
    commands = [line for block in blocks("sh") for line in block.splitlines() if line.startswith("gradwire")]
    commands += re.findall(r"\| `(gradwire [^`]*)` \|", README)
    assert len(commands) >= 3
    for command in commands:
        given = parser().parse_args(shlex.split(command, comments=True)[1:])
        if given.command == "compare":
            for spec in given.methods:
                gradwire.parse(spec)


def test_it_is_short() -> None:
    """Without addresses and tables: what is read from the top to the bottom."""
    prose = "\n".join(line for line in README.splitlines() if not line.startswith("|"))
    assert len(re.sub(r"https?://\S+", "", prose).split()) < 700
