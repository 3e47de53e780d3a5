"""States that stay beside their checkpoints, by whatever way a script saves, renames, copies and loads these."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import shutil
import subprocess
import tempfile
import threading
import warnings
from collections.abc import Callable, Generator
from os import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradwire.adapters.script_loads import shapes_in
from gradwire.adapters.script_moves import Move, Moves
from gradwire.adapters.script_places import fingerprint
from gradwire.adapters.script_saves import ScriptSaves
from gradwire.adapters.unchanged import Unchanged
from gradwire.core import save_folder
from gradwire.session import Session

pytestmark = pytest.mark.usefixtures("one_rank")
dcp: Any = importlib.import_module("torch.distributed.checkpoint")


class Script:
    """What a script has: a model, and what it is told while it is followed.

    Attributes:
        norms: of what is owed: when training began, and after each step.
    """

    def __init__(self, unchanged: Unchanged, said: list[str]) -> None:
        torch.manual_seed(0)
        self.model = DistributedDataParallel(nn.Linear(8, 300))
        self.said, self.norms, self._unchanged = said, list[float](), unchanged
        unchanged.on_attach(lambda _, handle: self.norms.append(handle.residual_norm()))

    @property
    def handle(self) -> Session:
        """Of the model."""
        ((_, handle),) = self._unchanged.sessions
        return handle

    def step(self) -> None:
        """One pass forwards and backwards: what is owed changes, the parameters do not."""
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(len(self.norms)))
        self.model(x).square().sum().backward()
        self.norms.append(self.handle.residual_norm())

    def state(self) -> dict[str, Any]:
        """What it saves, another thing at each step."""
        return {"model": self.model.state_dict(), "step": len(self.norms)}


@contextlib.contextmanager
def watched(method: str = "topk:0.05") -> Generator[Script]:
    """What `gradwire run` does around a script."""
    said: list[str] = []
    saves, unchanged = ScriptSaves(said.append), Unchanged(method, lambda _: None)
    unchanged.on_attach(saves.follow)
    with unchanged.watching(), saves.watching():
        yield Script(unchanged, said)
    for _, handle in unchanged.sessions:
        handle.close()


def begun(load: Callable[[], object], method: str = "topk:0.05") -> tuple[float, list[str]]:
    """What is owed when a script begins that loads something, and what it is told."""
    with watched(method) as script:
        load()
        script.step()
    return script.norms[0], script.said


def states_in(folder: Path) -> list[str]:
    """Where states are."""
    return sorted(str(found.parent.parent.relative_to(folder)) for found in folder.rglob("manifest.json"))


# Ways to save -----------------------------------------------------------------------------------------------------

Between = Callable[[], None]


def renamed(rename: Callable[[str, str], object]) -> Callable[[Script, Path, Between], Path]:
    def way(script: Script, folder: Path, between: Between) -> Path:
        torch.save(script.state(), folder / "last.tmp")
        between()
        rename(str(folder / "last.tmp"), str(folder / "last.pt"))
        return folder / "last.pt"

    return way


def by_relative_names(script: Script, folder: Path, between: Between) -> Path:
    os.chdir(folder)
    torch.save(script.state(), "last.tmp")
    between()
    os.chdir(folder.parent)
    os.replace(f"{folder.name}/last.tmp", folder / "last.pt")
    return folder / "last.pt"


def through_a_link(script: Script, folder: Path, between: Between) -> Path:
    (folder / "real").mkdir()
    (folder / "link").symlink_to("real")
    torch.save(script.state(), folder / "link" / "last.tmp")
    between()
    (folder / "real" / "last.tmp").replace(folder / "link" / "last.pt")
    return folder / "link" / "last.pt"


def in_a_folder(script: Script, folder: Path, between: Between) -> Path:
    (folder / "step.tmp").mkdir()
    torch.save(script.state(), folder / "step.tmp" / "model.pt")
    between()
    (folder / "step.tmp").rename(folder / "step")
    return folder / "step" / "model.pt"


def into_a_folder(script: Script, folder: Path, between: Between) -> Path:
    (folder / "done").mkdir()
    torch.save(script.state(), folder / "last.pt")
    between()
    return Path(shutil.move(folder / "last.pt", folder / "done"))


def from_another_disk(script: Script, folder: Path, between: Between) -> Path:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as other:
        torch.save(script.state(), f"{other}/last.pt")
        between()
        shutil.move(f"{other}/last.pt", folder / "last.pt")
    return folder / "last.pt"


def by_a_temporary_file(script: Script, folder: Path, between: Between) -> Path:
    with tempfile.NamedTemporaryFile(dir=folder, delete=False) as file:
        torch.save(script.state(), file)
        file.flush()
        os.fsync(file.fileno())
    between()
    os.replace(file.name, folder / "last.pt")
    return folder / "last.pt"


def by_an_open_file(script: Script, folder: Path, between: Between) -> Path:
    with (folder / "last.pt").open("wb") as file:
        torch.save(script.state(), f=file)
    return folder / "last.pt"


def over_an_older_one(script: Script, folder: Path, between: Between) -> Path:
    torch.save({}, folder / "last.pt")
    script.step()
    return WAYS["os.replace"](script, folder, between)


def twice_renamed(script: Script, folder: Path, between: Between) -> Path:
    os.replace(WAYS["os.rename"](script, folder, between), folder / "again.pt")
    return folder / "again.pt"


WAYS: dict[str, Callable[[Script, Path, Between], Path]] = {
    "os.replace": renamed(lambda old, new: os.replace(old, new)),
    "imported": renamed(lambda old, new: replace(old, new)),
    "os.rename": renamed(lambda old, new: os.rename(old, new)),
    "shutil.move": renamed(lambda old, new: shutil.move(old, new)),
    "Path.replace": renamed(lambda old, new: Path(old).replace(new)),
    "os.renames": renamed(lambda old, new: os.renames(old, new)),
    "relative": by_relative_names,
    "link": through_a_link,
    "folder": in_a_folder,
    "into a folder": into_a_folder,
    "another disk": from_another_disk,
    "temporary": by_a_temporary_file,
    "open file": by_an_open_file,
    "over": over_an_older_one,
    "twice": twice_renamed,
}


@pytest.mark.parametrize("when", ["at once", "a step later"])
@pytest.mark.parametrize("name", WAYS)
@pytest.mark.draw(10)
def test_states_go_where_the_checkpoint_goes(
    name: str, when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    with watched() as script:
        script.step()
        script.step()
        at = 3 if name == "over" else 2
        file = WAYS[name](script, tmp_path / "here", script.step if when == "a step later" else lambda: None)
        script.step()
    assert script.said == []
    assert [Path(found).name for found in states_in(tmp_path)] == [f"{file.name}.gradwire"]
    norm, said = begun(lambda: torch.load(file))
    assert norm == script.norms[at] != script.norms[at - 1]
    assert said == [f"goes on at step {at} with what was owed when {file.resolve()} was saved"]


COPIES: dict[str, Callable[[Path, Path], object]] = {
    "copy": lambda old, new: shutil.copy(old, new),
    "copy2": lambda old, new: shutil.copy2(old, new),
    "copyfile": lambda old, new: shutil.copyfile(src=old, dst=new),
    "link": lambda old, new: os.link(old, new),
}


@pytest.mark.parametrize("when", ["at once", "a step later"])
@pytest.mark.parametrize("name", COPIES)
def test_a_copy_has_the_states_of_its_own_time(name: str, when: str, tmp_path: Path) -> None:
    last, best = tmp_path / "last.pt", tmp_path / "best.pt"
    with watched() as script:
        script.step()
        torch.save(script.state(), last)
        script.step() if when == "a step later" else None
        COPIES[name](last, best)
        script.step()
        assert states_in(tmp_path) == ["best.pt.gradwire", "last.pt.gradwire"]
        torch.save(script.state(), tmp_path / "last.tmp")
        os.replace(tmp_path / "last.tmp", last)
        script.step()
    assert states_in(tmp_path) == ["best.pt.gradwire", "last.pt.gradwire"]
    assert begun(lambda: torch.load(best))[0] == script.norms[1]
    assert begun(lambda: torch.load(last))[0] == script.norms[-2]
    assert script.said == []


@pytest.mark.parametrize("when", ["at once", "a step later"])
def test_a_tree_of_checkpoints_is_copied_with_its_states(when: str, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    with watched() as script:
        script.step()
        torch.save(script.state(), tmp_path / "run" / "last.pt")
        script.step() if when == "a step later" else None
        shutil.copytree(tmp_path / "run", tmp_path / "kept")
        script.step()
    assert states_in(tmp_path) == ["kept/last.pt.gradwire", "run/last.pt.gradwire"]
    assert begun(lambda: torch.load(tmp_path / "kept" / "last.pt"))[0] == script.norms[1]


def test_safetensors_are_followed(tmp_path: Path) -> None:
    with watched() as script:
        script.step()
        safetensors.torch.save_file(script.model.state_dict(), tmp_path / "a.safetensors")
        safetensors.torch.save_model(script.model, str(tmp_path / "b.safetensors"))
        safetensors.torch.save_file(tensors=script.model.state_dict(), filename=tmp_path / "c.safetensors")
        script.step()
    assert states_in(tmp_path) == [f"{name}.safetensors.gradwire" for name in "abc"]
    assert begun(lambda: safetensors.torch.load_file(tmp_path / "a.safetensors"))[0] == script.norms[1]
    into = DistributedDataParallel(nn.Linear(8, 300))
    assert begun(lambda: safetensors.torch.load_model(into, tmp_path / "b.safetensors"))[0] == script.norms[1]


def test_a_checkpoint_is_loaded_from_an_open_file(tmp_path: Path) -> None:
    with watched() as script:
        script.step()
        torch.save(script.state(), tmp_path / "last.pt")
        script.step()
    with (tmp_path / "last.pt").open("rb") as file:
        assert begun(lambda: torch.load(file))[0] == script.norms[1]


def test_a_folder_of_all_ranks_is_renamed_with_its_states(tmp_path: Path) -> None:
    with watched() as script:
        script.step()
        dcp.save({"model": script.model.state_dict()}, checkpoint_id=tmp_path / "tmp")
        os.replace(tmp_path / "tmp", tmp_path / "step-1")
        script.step()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PyTorch's own, of a rank that saves alone
            dcp.save({"model": script.model.state_dict()}, checkpoint_id=tmp_path / "alone", no_dist=True)
        os.replace(tmp_path / "alone", tmp_path / "step-2")
        script.step()
    assert script.said == []
    assert states_in(tmp_path) == ["step-1/gradwire", "step-2/gradwire"]
    for at in (1, 2):
        state = {"model": nn.Linear(8, 300).state_dict(prefix="module.")}
        assert begun(lambda: dcp.load(state, checkpoint_id=tmp_path / f"step-{at}"))[0] == script.norms[at]  # noqa: B023


def test_what_is_loaded_and_then_renamed_is_found(tmp_path: Path) -> None:
    with watched() as script:
        script.step()
        torch.save(script.state(), tmp_path / "last.pt")
        script.step()

    def load() -> None:
        torch.load(tmp_path / "last.pt")
        os.rename(tmp_path / "last.pt", tmp_path / "resumed.pt")

    assert begun(load)[0] == script.norms[1]


# What is not there, or belongs to something else ------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A checkpoint with its states."""
    with watched() as script:
        script.step()
        torch.save(script.state(), tmp_path / "last.pt")
        script.step()
    return tmp_path / "last.pt"


def test_a_checkpoint_without_states_is_told_of(saved: Path) -> None:
    shutil.rmtree(f"{saved}.gradwire")
    lost = "training goes on with nothing owed"
    assert begun(lambda: torch.load(saved)) == (
        0.0,
        [f"{saved} has no states of gradwire's in {saved}.gradwire: {lost}"],
    )
    assert begun(lambda: torch.load(io.BytesIO(saved.read_bytes()))) == (
        0.0,
        [f"a checkpoint in a BytesIO has no states of gradwire's: {lost}"],
    )
    dcp.save(torch.load(saved)["model"], checkpoint_id=saved.parent / "folder")
    names = nn.Linear(8, 300).state_dict(prefix="module.")
    assert begun(lambda: dcp.load(names, checkpoint_id=saved.parent / "folder")) == (
        0.0,
        [f"{saved.parent / 'folder'} has no states of gradwire's in {saved.parent / 'folder' / 'gradwire'}: {lost}"],
    )


def test_a_later_checkpoint_without_states_is_named_beside_the_one_that_has_some(saved: Path) -> None:
    torch.save(torch.load(saved), saved.with_name("other.pt"))
    norm, (sentence,) = begun(lambda: [torch.load(saved), torch.load(saved.with_name("other.pt"))])
    assert norm > 0
    assert sentence.startswith(
        f"goes on at step 1 with what was owed when {saved} was saved; {saved.with_name('other.pt')}"
    )
    assert sentence.endswith("other.pt.gradwire, though it was loaded later")


@pytest.mark.parametrize(
    "content", [{"image": torch.ones(8, 300)}, {"model": nn.Linear(8, 10).state_dict()}, torch.ones(3), [1], None]
)
def test_what_holds_no_parameters_of_the_model_is_no_checkpoint(content: object, tmp_path: Path) -> None:
    torch.save(content, tmp_path / "data.pt")
    assert begun(lambda: torch.load(tmp_path / "data.pt")) == (0.0, [])


def test_a_method_without_memory_loses_nothing(saved: Path) -> None:
    shutil.rmtree(f"{saved}.gradwire")
    assert begun(lambda: torch.load(saved), "fp16") == (0.0, [])


def test_many_files_of_data_do_not_hide_a_checkpoint(saved: Path) -> None:
    torch.save({}, data := saved.with_name("data.pt"))
    assert begun(lambda: [torch.load(saved), *(torch.load(data) for _ in range(1100))])[0] > 0


@pytest.mark.parametrize("how", ["overwritten", "renamed"])
def test_states_of_another_save_are_not_taken_for_those_of_this_one(how: str, saved: Path) -> None:
    """As after a crash between the second save and the next step."""
    other = torch.load(saved) | {"step": 99}
    torch.save(other, saved if how == "overwritten" else saved.with_name("tmp"))
    if how == "renamed":
        os.replace(saved.with_name("tmp"), saved)
    assert begun(lambda: torch.load(saved)) == (
        0.0,
        [
            f"{saved} is another file than the one that the states in {saved}.gradwire were saved with: "
            "training goes on with nothing owed"
        ],
    )


def test_the_file_counts_that_was_loaded(saved: Path) -> None:
    def load() -> None:
        torch.load(saved)
        saved.write_bytes(b"")

    assert begun(load)[0] > 0


def test_states_of_an_older_version_are_loaded(saved: Path) -> None:
    manifest = next(saved.parent.rglob("manifest.json"))
    text = manifest.read_text()
    assert '"checkpoint"' in text
    manifest.write_text(text.replace('"checkpoint"', '"ignored"'))
    torch.save({}, saved)
    assert begun(lambda: torch.load(saved))[0] > 0


def test_a_new_number_of_ranks_keeps_the_bond(saved: Path) -> None:
    folder = saved.with_name("last.pt.gradwire")
    assert save_folder.reshard_folder(folder, 2).checkpoint == fingerprint(saved)
    assert save_folder.newest(folder).checkpoint == fingerprint(saved)


def test_a_folder_that_is_overwritten_has_no_states_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []
    plain = dcp.save

    def looking(*given: Any, **named: Any) -> None:
        seen.append(states_in(tmp_path))
        plain(*given, **named)

    monkeypatch.setattr(dcp, "save", looking)
    with watched() as script:
        script.step()
        for _ in range(2):
            writer = dcp.FileSystemWriter(tmp_path / "last", overwrite=True)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # PyTorch's own, of what it overwrites
                dcp.save({"model": script.model.state_dict()}, storage_writer=writer)
    assert seen == [[], []]
    assert states_in(tmp_path) == ["last/gradwire"]


def test_pieces_of_a_large_file_tell_it_from_another(tmp_path: Path) -> None:
    file = tmp_path / "large.pt"
    weights = torch.zeros(24 << 20)
    torch.save({"a": weights, "b": torch.zeros(1 << 20)}, file)
    first = fingerprint(file)
    weights[12345678] = 1
    torch.save({"a": weights, "b": torch.zeros(1 << 20)}, file)
    second = fingerprint(file)
    assert first is not None
    assert second is not None
    assert first.size == second.size
    assert first.sha256 != second.sha256
    assert fingerprint(tmp_path) is None


# What cannot be followed ------------------------------------------------------------------------------------------


def in_a_buffer(script: Script, file: Path) -> None:
    torch.save(script.state(), buffer := io.BytesIO())
    file.write_bytes(buffer.getvalue())


def in_a_thread(script: Script, file: Path) -> None:
    worker = threading.Thread(target=torch.save, args=(script.state(), file))
    worker.start()
    worker.join()


def moved_by_another_process(script: Script, file: Path) -> None:
    torch.save(script.state(), file.with_name("tmp"))
    subprocess.run(["mv", file.with_name("tmp"), file], check=True)


CANNOT: dict[str, tuple[Callable[[Script, Path], None], str]] = {
    "buffer": (in_a_buffer, "a checkpoint is saved to a BytesIO, so what is owed is not saved with it"),
    "thread": (in_a_thread, "a checkpoint is saved by another thread, so what is owed is not saved with it"),
    "process": (
        moved_by_another_process,
        "{folder}/tmp is gone since it was saved, so what is owed is not saved with it: rename it with os.replace, "
        "os.rename, shutil.move or Path.rename, in the process that saved it",
    ),
}


@pytest.mark.parametrize("name", CANNOT)
def test_what_cannot_be_followed_is_told_of_once(name: str, tmp_path: Path) -> None:
    save, sentence = CANNOT[name]
    with watched() as script:
        save(script, tmp_path / "before.pt")
        for number in range(3):
            script.step()
            save(script, tmp_path / f"{number}.pt")
        torch.save([1], io.BytesIO())
    assert script.said == [sentence.format(folder=tmp_path)]
    assert states_in(tmp_path) == (["before.pt.gradwire"] if name == "thread" else [])  # of the first step, or none


def test_a_rename_does_not_fail_where_states_cannot_follow(saved: Path) -> None:
    best = saved.with_name("best.pt")
    (saved.parent / "best.pt.gradwire").mkdir()
    (saved.parent / "best.pt.gradwire" / "mine.txt").write_text("mine")
    with watched() as script:
        os.replace(saved, best)
    assert best.exists()
    assert script.said == [
        f"{saved}.gradwire could not follow its checkpoint to {best}.gradwire: there is a folder of that name with "
        "other files"
    ]
    assert (saved.parent / "best.pt.gradwire" / "mine.txt").exists()
    assert states_in(saved.parent) == ["last.pt.gradwire"]


def test_a_link_is_renamed_without_what_it_points_to(saved: Path) -> None:
    (saved.with_name("link.pt")).symlink_to("last.pt")
    with watched() as script:
        os.rename(saved.with_name("link.pt"), saved.with_name("other.pt"))
    assert script.said == []
    assert states_in(saved.parent) == ["last.pt.gradwire"]
    assert begun(lambda: torch.load(saved.with_name("other.pt")))[0] > 0


# Other hosts ------------------------------------------------------------------------------------------------------


def nothing(*_: object) -> None:
    pass


def test_one_rank_of_each_host_repeats_what_others_have_moved(saved: Path) -> None:
    """Of each host's own disk, which is this folder here."""
    folder = saved.with_name("last.pt.gradwire")
    (token,) = (manifest.token for manifest in save_folder.manifests(folder))
    first, second = str(folder), str(saved.with_name("best.pt.gradwire"))
    moves = Moves(nothing, nothing, lambda: ())

    def words(*hosts: str, tokens: tuple[str, ...] = (token,)) -> list[dict[str, Any]]:
        move = list(Move(first, second, list(tokens), False))
        return [{"host": host, "moves": [move] if at == 0 else []} for at, host in enumerate(hosts)]

    moves.repeat(words("a", "a", "a"), 1)  # on this host it is done
    moves.repeat(words("a", "b", "b"), 2)  # rank 1 does it here
    moves.repeat(words("a", "b", tokens=("another",)), 1)  # a disk that all hosts share, with newer states by now
    assert states_in(saved.parent) == ["last.pt.gradwire"]
    moves.repeat(words("a", "b", "b"), 1)
    assert states_in(saved.parent) == ["best.pt.gradwire"]
    moves.repeat(words("a", "b", "b"), 1)
    assert states_in(saved.parent) == ["best.pt.gradwire"]


def test_other_hosts_are_told_once_of_what_has_moved(saved: Path) -> None:
    moves = Moves(nothing, nothing, lambda: ())
    with moves.watching():
        os.replace(saved, saved.with_name("best.pt"))
        Path(saved.parent / "x").write_text("x")
        os.replace(saved.parent / "x", saved.parent / "y")
    assert moves
    ((source, target, tokens, copied),) = moves.words()["moves"]
    assert [Path(source).name, Path(target).name, copied] == ["last.pt.gradwire", "best.pt.gradwire", False]
    assert len(tokens) == 1
    assert not moves
    assert moves.words()["moves"] == []


def test_names_of_parameters_are_those_of_the_plain_model() -> None:
    model = torch.compile(DistributedDataParallel(nn.Sequential(nn.Linear(2, 1))), backend="eager")
    shapes = {"0.weight": (1, 2), "0.bias": (1,)}
    assert shapes_in(model) == shapes
    assert shapes_in({"epoch": 3, "ema": {"net": model}}) == shapes
    assert shapes_in({"a": {"b": {"c": {"weight": torch.ones(1)}}}}) == {}
