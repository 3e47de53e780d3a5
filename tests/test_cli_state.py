"""`gradwire state` and `gradwire reshard` on a folder, without ranks."""

from pathlib import Path

import pytest
import torch

import gradwire
from gradwire.cli.main import main
from gradwire.core import save_folder
from gradwire.core.grain import flat_grain
from gradwire.core.saved_schema import SHARED


def saved(folder: Path) -> None:
    ranks = gradwire.Lockstep(gradwire.parse("topk:0.1"), flat_grain(300), world_size=2)
    ranks.step([torch.randn(300), torch.randn(300)])
    states = ranks.state_dicts()
    files = tuple(save_folder.write_rank(folder, 1, state) for state in states)
    head = {key: states[0][key] for key in SHARED}
    save_folder.finish(folder, save_folder.Manifest(1, save_folder.new_token(), head, files))


def test_a_folder_is_shown_and_resharded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved(tmp_path)
    assert main(["reshard", str(tmp_path), "--ranks", "3"]) == 0
    assert "step 1 for 3 ranks" in capsys.readouterr().out
    (tmp_path / "gradwire-1" / "rank1.safetensors").unlink()
    assert main(["state", str(tmp_path)]) == 0
    _, new, old = capsys.readouterr().out.splitlines()
    assert new.split()[:3] == ["gradwire-2", "1", "3"]
    assert old.split()[:3] == ["gradwire-1", "1", "2"]
    assert [line.split()[4] for line in (new, old)] == ["none", "1"]
    assert "TopK" in new


def test_what_is_not_there_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["state", str(tmp_path)], ["reshard", str(tmp_path), "--ranks", "2"]):
        assert main(arguments) == 2
        assert "no finished save" in capsys.readouterr().err
    saved(tmp_path)
    assert main(["reshard", str(tmp_path), "--ranks", "0"]) == 2
    assert "give 1 or more" in capsys.readouterr().err
