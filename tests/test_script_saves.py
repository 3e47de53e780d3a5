"""States beside the files that a script saves, whichever ranks save them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from gradwire.ranks.supervised import run_function

CASES = str(Path(__file__).with_name("framework_cases.py"))
RANKS = range(2)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("saved")
    return folder, run_function(f"{CASES}:save_on_one_rank", 2, {"folder": str(folder)}, 120)


def loaded(folder: Path, *names: str) -> list[dict[str, Any]]:
    return run_function(f"{CASES}:load_again", 2, {"folder": str(folder), "names": names}, 120)


def test_every_file_has_states_of_all_ranks_beside_it(saved: tuple[Path, list[dict[str, Any]]]) -> None:
    folder, seen = saved
    files = ["again.pt", "both.pt", "own-0.pt", "own-1.pt"]
    folders = [f"{file}.gradwire{model}" for file in files for model in ("", "-1")]
    assert sorted(path.name for path in folder.iterdir()) == sorted(files + folders)
    for rank in seen:
        assert not any("gradwire" in name for name in rank["before"]), "a pass without gradients is no place to look"
        assert rank["said"] == []
    together = sorted(path.name for path in (folder / "both.pt.gradwire" / "gradwire-1").iterdir())
    assert together == ["manifest.json", "rank0.safetensors", "rank1.safetensors"]
    alone = sorted(path.name for path in (folder / "own-1.pt.gradwire" / "gradwire-1").iterdir())
    assert alone == ["manifest.json", "rank1.safetensors"]


@pytest.mark.parametrize(
    ("names", "when"), [(["both.pt"], "norms"), (["own-{rank}.pt"], "last"), (["own-{rank}.pt", "again.pt"], "norms")]
)
def test_states_are_those_of_the_file_that_was_loaded_last(
    names: list[str], when: str, saved: tuple[Path, list[dict[str, Any]]]
) -> None:
    folder, seen = saved
    for rank, again in enumerate(loaded(folder, *names)):
        assert again["norms"] == pytest.approx(seen[rank][when], rel=1e-6)
        assert min(again["norms"]) > 0
        assert again["said"][0].startswith(f"goes on at step {1 if when == 'norms' else 2} with what was owed when")
    assert seen[0]["norms"][0] != pytest.approx(seen[0]["last"][0], rel=1e-3)


def test_a_script_that_loads_nothing_begins_with_nothing_owed(saved: tuple[Path, list[dict[str, Any]]]) -> None:
    assert loaded(saved[0]) == [{"norms": [0.0, 0.0], "said": []}] * 2


@pytest.fixture(scope="module")
def unevenly(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[float]]]:
    folder = tmp_path_factory.mktemp("unevenly")
    return folder, run_function(f"{CASES}:save_unevenly", 2, {"folder": str(folder)}, 120)


@pytest.mark.parametrize("names", [["best.pt"], ["best.pt", "random-{rank}.pt"], ["random-{rank}.pt", "best.pt"]])
@pytest.mark.draw(2)
def test_a_rank_that_saves_more_than_others_saves_for_all(
    names: list[str], unevenly: tuple[Path, list[list[float]]]
) -> None:
    folder, norms = unevenly
    assert not (folder / "model.tmp.gradwire").exists()
    assert not (folder / "model.pt.gradwire").exists()
    for rank, again in enumerate(loaded(folder, *names)):
        assert again["norms"][0] == pytest.approx(norms[rank][2], rel=1e-6)
        assert again["said"][0].startswith("goes on at step 3 with what was owed when")


def test_a_checkpoint_of_another_save_on_one_rank_is_taken_up_by_none(
    unevenly: tuple[Path, list[list[float]]], tmp_path: Path
) -> None:
    shutil.copytree(unevenly[0], tmp_path / "run")
    torch.save({"at": 7}, tmp_path / "run" / "other.pt")
    shutil.copytree(tmp_path / "run" / "best.pt.gradwire", tmp_path / "run" / "other.pt.gradwire")
    (tmp_path / "run" / "own-0.pt").symlink_to("best.pt")
    (tmp_path / "run" / "own-1.pt").symlink_to("other.pt")
    for again in loaded(tmp_path / "run", "own-{rank}.pt"):
        assert again["norms"] == [0.0, 0.0]
        other = tmp_path / "run" / "other.pt"
        assert again["said"] == [
            f"{other} is another file than the one that the states in {other}.gradwire were saved with: "
            "training goes on with nothing owed"
        ]
