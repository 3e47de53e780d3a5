"""`gradwire.save` and `gradwire.load`: exact, complete or not there, and never a hang. Real ranks over Gloo."""

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gradwire
from gradwire.core import save_folder, tensor_file
from gradwire.core.errors import StateError
from gradwire.core.grain import flat_grain
from gradwire.hooks import PeriodicModelAverager, PostLocalSGDOptimizer
from gradwire.ranks.supervised import RankFailure, run_function
from gradwire.session.meeting import group_store
from gradwire.session.offers import Offer, Shelf, choose
from laws.damage import difference

CASES = str(Path(__file__).with_name("checkpoint_cases.py"))
SPECS = ["int4", "powersgd:2", "topk:0.05"]


def run(case: str, ranks: int, **arguments: Any) -> list[Any]:
    return run_function(f"{CASES}:{case}", ranks, arguments, 120)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    """A folder of what two ranks have saved, and what they saw who went on."""
    folder = tmp_path_factory.mktemp("saved")
    return folder, run("save_and_go_on", 2, folder=str(folder), specs=SPECS)


def test_as_many_ranks_go_on_as_if_nothing_had_been(saved: tuple[Path, list[Any]]) -> None:
    folder, whole = saved
    jobs = [(spec, shared) for spec in SPECS for shared in (True, False)]
    for rank, again in enumerate(run("load_and_go_on", 2, folder=str(folder), jobs=jobs)):
        for (spec, _), seen in zip(jobs, again, strict=True):
            assert seen == {"step": 6, **whole[rank][spec]}


def mean_owed(ranks: list[dict[str, Any]]) -> float:
    """What all ranks owe, as the mean over ranks that the optimizer would see."""
    return sum(rank["owed"][0] for rank in ranks) / len(ranks) + sum(rank["owed"][1] for rank in ranks)


@pytest.mark.parametrize("ranks", [1, 3])
def test_another_number_of_ranks_owes_the_same_mean(saved: tuple[Path, list[Any]], ranks: int) -> None:
    folder, whole = saved
    seen = run("load_and_refusals", ranks, folder=str(folder), jobs=[(spec, True) for spec in SPECS])
    for i, spec in enumerate(SPECS):
        before, after = [rank[spec] for rank in whole], [rank["loaded"][i] for rank in seen]
        assert abs(mean_owed(before)) > 1e-3, "nothing was owed"
        assert mean_owed(after) == pytest.approx(mean_owed(before), rel=1e-3)
        assert len({tuple(rank["digests"]) for rank in after}) == 1
    for rank in seen:
        assert "rank 0 finds no rank1.safetensors" in rank["refused"]["int4"]
        assert f"gradwire reshard FOLDER --ranks {ranks}" in rank["refused"]["int4"]


def test_a_run_that_cuts_grains_otherwise_owes_the_same(saved: tuple[Path, list[Any]]) -> None:
    """On every rank as its residual, and all together as owners; of a shard that moved, all files are needed."""
    folder, whole = saved
    seen = run("load_with_other_grains", 2, folder=str(folder), specs=SPECS)
    for i, spec in enumerate(SPECS):
        for before, after in zip(whole, seen, strict=True):
            assert after[i]["owed"][0] == pytest.approx(before[spec]["owed"][0], rel=1e-6)
        owned = [sum(rank["owed"][1] for rank in ranks) for ranks in ([r[spec] for r in whole], [r[i] for r in seen])]
        assert owned[1] == pytest.approx(owned[0], rel=1e-6)
        assert seen[0][i]["digests"] == seen[1][i]["digests"]
    assert any(spec["owed"][1] for spec in seen[0][: len(SPECS)])
    for rank in seen:
        assert "is not of the shard that this rank owns: shards were cut otherwise" in rank[-1]["refused"]


def test_the_folder_holds_one_save_and_nothing_else(saved: tuple[Path, list[Any]]) -> None:
    here = saved[0] / "shared" / "int4"
    assert [path.name for path in here.iterdir()] == ["gradwire-2"]
    names = sorted(path.name for path in (here / "gradwire-2").iterdir())
    assert names == ["manifest.json", "rank0.safetensors", "rank1.safetensors"]


def test_a_resharded_folder_is_what_reshard_makes_of_its_states(saved: tuple[Path, list[Any]], tmp_path: Path) -> None:
    here = Path(shutil.copytree(saved[0] / "shared" / "int4", tmp_path / "copy"))
    old = save_folder.newest(here)
    states = gradwire.reshard([old.read(here, rank) for rank in range(2)], 3)
    new = save_folder.reshard_folder(here, 3)
    assert (new.number, new.step, new.world_size) == (3, 6, 3)
    for rank, state in enumerate(states):
        assert difference(in_order(save_folder.newest(here).read(here, rank)), in_order(state)) is None
    (here / "gradwire-3" / "rank2.safetensors").unlink()
    with pytest.raises(StateError, match=r"lacks rank2\.safetensors"):
        save_folder.reshard_folder(here, 2)


@pytest.mark.one_draw_in(2)
def test_a_save_that_was_killed_leaves_the_one_before(tmp_path: Path) -> None:
    folders = {at: tmp_path / at for at in ("write_rank", "finish")}
    for at, folder in folders.items():
        with pytest.raises(RankFailure, match="SIGKILL"):
            run("save_twice_and_die", 2, folder=str(folder), at=at)
        assert (folder / "gradwire-2" / "rank0.safetensors").exists()
        assert not (folder / "gradwire-2" / "manifest.json").exists()
    first, _ = run("what_is_there", 2, folders=[str(folder) for folder in folders.values()])
    assert [one["step"] for one in first] == [2, 2]
    assert all("not finished on every rank" in one["said"][0] for one in first)


@pytest.mark.one_draw_in(3)
def test_every_fault_is_told_to_every_rank_and_changes_nothing(tmp_path: Path) -> None:
    one, other = run("faults", 2, folder=str(tmp_path))
    for told in (one, other):
        assert "no finished save" in told["empty"]
        assert "rank 1 called gradwire.load while rank 0 called gradwire.save" in told["crossed"]
        for name in ("write_rank", "finish"):
            assert "gradwire.save failed on rank 1, and changed nothing" in told[name]
            assert "No space left on device" in told[name]
        assert "rank1.safetensors is damaged" in told["damaged"]
        assert "rank 1 finds no rank1.safetensors" in told["missing"]
        assert "copy it from the host" in told["missing"]
        assert "rank 1 finds no gradwire-1/manifest.json" in told["no manifest"]
        assert "host1 holds what a run of another model has saved (gradwire-1, step 2)" in told["another's"]
        assert told["step"] == 2
    assert "rank 1 has not come to gradwire.save within 2 s" in one["lead alone"]
    assert "rank 0 has not come to gradwire.save within 7 s" in other["without lead"]


def in_order(state: dict[str, Any]) -> dict[str, Any]:
    """A state with its keys in one order."""
    return dict(sorted(state.items()))


# Choosing, without ranks --------------------------------------------------------------------------------------------

OLD, NEW = Offer(1, "x", 10, 2, []), Offer(2, "y", 20, 2, [])


def plain(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def session_of(model: nn.Module, spec: str = "topk:0.5") -> gradwire.Session:
    return gradwire.Session(model, spec, deadline_s=10)


def stepped(session: gradwire.Session, model: nn.Module) -> gradwire.Session:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    session.reduce_(model)
    return session


@pytest.mark.usefixtures("one_rank")
def test_a_second_handle_does_not_delete_what_the_first_has_saved(tmp_path: Path) -> None:
    """A generator and a discriminator, also of the same shapes, that take turns in one folder."""
    for others in (nn.Linear(4, 3), nn.Linear(5, 3)):
        folder, model = tmp_path / str(others.in_features), nn.Linear(4, 3)
        with session_of(model) as first, session_of(others) as second:
            for _ in range(2):
                gradwire.save(folder, stepped(first, model))
                with pytest.raises(
                    StateError, match=r"holds what another session of this process has saved .*a folder of"
                ):
                    gradwire.save(folder, stepped(second, others))
            assert [found.step for found in save_folder.manifests(folder)] == [2]
            gradwire.save(folder, second, overwrite=True)
            with pytest.raises(StateError, match="another session"):
                gradwire.save(folder, first)


def forgotten(folder: Path) -> None:
    """As if another process had saved what is there."""
    for found in save_folder.manifests(folder):
        assert found.run is not None
        save_folder.finish(folder, dataclasses.replace(found, run=found.run._replace(id="another run's")))


REPLACED: dict[str, tuple[nn.Module, str, bool, str | None]] = {
    "the same again, from scratch": (nn.Linear(4, 3), "topk:0.5", False, None),
    "resumed after a change": (nn.Linear(4, 3), "int8", True, None),
    "another model": (nn.Linear(5, 3), "topk:0.5", False, "what a run of another model has saved"),
    "more layers": (nn.Sequential(nn.Linear(4, 3)), "topk:0.5", False, "what a run of another model has saved"),
    "another method": (nn.Linear(4, 3), "int4", False, "what a run with another method has saved .*began with .*TopK"),
}


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("kind", REPLACED)
def test_which_saves_a_later_run_replaces(kind: str, tmp_path: Path) -> None:
    model, (other, spec, loads, said) = nn.Linear(4, 3), REPLACED[kind]
    with session_of(model) as session:
        gradwire.save(tmp_path, stepped(session, model))
        session.change("int8")  # the run is the same one, and goes on from its save with that method
        gradwire.save(tmp_path, stepped(session, model))
    forgotten(tmp_path)
    with session_of(other, spec) as session:
        if loads:
            assert gradwire.load(tmp_path, session) == 2
        stepped(session, other)
        if said is None:
            gradwire.save(tmp_path, session)
        else:
            with pytest.raises(StateError, match=f"holds {said}"):
                gradwire.save(tmp_path, session)
            assert save_folder.newest(tmp_path).step == 2
            gradwire.save(tmp_path, session, overwrite=True)
        (left,) = save_folder.manifests(tmp_path)
        assert left.step == session.engine.index
        assert left.run is not None
        assert (left.run.id == "another run's") == loads
        assert ("TopK" in left.run.method) == (kind != "another method")


@pytest.mark.usefixtures("one_rank")
def test_a_save_of_an_older_version_is_replaced(tmp_path: Path) -> None:
    """It does not say of which run it is."""
    model = nn.Linear(4, 3)
    with session_of(model) as session:
        gradwire.save(tmp_path, stepped(session, model))
        old = dataclasses.replace(save_folder.newest(tmp_path), run=None)
        save_folder.finish(tmp_path, old)
        assert "run" not in json.loads((tmp_path / "gradwire-1" / "manifest.json").read_text())
        with session_of(model, "int4") as other:
            gradwire.save(tmp_path, other)
    assert save_folder.newest(tmp_path).number == 2


@pytest.mark.usefixtures("one_rank")
def test_a_closed_handle_leaves_its_folder_to_the_next_one(tmp_path: Path) -> None:
    model = nn.Linear(4, 3)
    for number in (1, 2, 3):
        with session_of(model) as session:
            gradwire.save(tmp_path, session)
        assert save_folder.newest(tmp_path).number == number


def kept_otherwise() -> dict[str, tuple[Callable[[nn.Module], Any], str]]:
    """What `save` and `load` refuse, and what they say to do."""
    return {
        "elastic": (lambda model: gradwire.sync.Elastic(model, store=group_store()), "begin again with resume="),
        "post-local": (
            lambda model: PostLocalSGDOptimizer(plain(model), PeriodicModelAverager(2)),
            r"state_dict\(\) is all there is",
        ),
        "model": (lambda model: model, "give it what gradwire.attach returned"),
    }


@pytest.mark.parametrize("kind", kept_otherwise())
def test_what_has_no_state_of_each_rank_is_refused_with_how_it_is_kept(
    kind: str, tmp_path: Path, one_rank: None
) -> None:
    make, said = kept_otherwise()[kind]
    handle = make(nn.Linear(4, 3))
    for call in (gradwire.save, gradwire.load):
        with pytest.raises(StateError, match=rf"gradwire\.{call.__name__} takes no .*{said}"):
            call(tmp_path / "here", handle)
    assert not (tmp_path / "here").exists()
    getattr(handle, "close", lambda: None)()


def test_the_newest_save_that_all_ranks_have_is_chosen() -> None:
    assert choose([Shelf("a", [NEW, OLD]), Shelf("b", [NEW, OLD])]) == NEW
    assert choose([Shelf("a", [NEW, OLD]), Shelf("b", [OLD])]) == OLD
    assert choose([Shelf("a", [NEW, OLD]), Shelf("b", [NEW._replace(missing=[1]), OLD])]) == OLD


def test_saves_of_two_runs_under_one_number_are_not_mixed() -> None:
    with pytest.raises(StateError, match=r"rank 0 finds no gradwire-1/manifest\.json of it in a"):
        choose([Shelf("a", [OLD]), Shelf("b", [OLD._replace(token="z")])])


# Files --------------------------------------------------------------------------------------------------------------


def a_state() -> dict[str, Any]:
    lockstep = gradwire.Lockstep(gradwire.parse("int4,residual=bf16"), flat_grain(300), world_size=2)
    lockstep.step([torch.randn(300), torch.randn(300)])
    return lockstep.state_dicts()[0]


def test_a_file_holds_the_state_bit_for_bit(tmp_path: Path) -> None:
    state = a_state()
    written = tensor_file.write(tmp_path / "f", state)
    assert difference(in_order(tensor_file.read(tmp_path / "f", written)), in_order(state)) is None


def test_a_file_is_safetensors_as_its_text_says(tmp_path: Path) -> None:
    state, path = a_state(), tmp_path / "f"
    tensor_file.write(path, state)
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    table = json.loads(data[8 : 8 + length])
    assert json.loads(table.pop("__metadata__")["gradwire"])["step"] == 1
    for key, entry in table.items():
        leaf, start, name = key.split("@")
        (piece,) = [p for p in state["parameters"][name][leaf] if p["start"] == int(start)]
        begin, end = (8 + length + offset for offset in entry["data_offsets"])
        assert data[begin:end] == bytes(piece["values"].view(torch.uint8).tolist())
        assert entry["dtype"] == {torch.float32: "F32", torch.bfloat16: "BF16"}[piece["values"].dtype]


def test_every_cut_and_every_changed_byte_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "f"
    written = tensor_file.write(path, a_state())
    data = path.read_bytes()
    damaged = [data[:n] for n in range(0, len(data), 97)]
    damaged += [data[:i] + bytes([data[i] ^ 0x55]) + data[i + 1 :] for i in range(0, len(data), 13)]
    for content in damaged:
        path.write_bytes(content)
        for expected in (written, written._replace(size=len(content))):
            with pytest.raises(StateError, match=str(path)):
                tensor_file.read(path, expected)


def test_a_header_that_readers_refuse_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, state = tmp_path / "f", a_state()
    written = tensor_file.write(path, state)
    length = int.from_bytes(path.read_bytes()[:8], "little")
    monkeypatch.setattr(tensor_file, "_LONGEST_HEADER", length)
    assert tensor_file.write(path, state) == written
    path.unlink()
    monkeypatch.setattr(tensor_file, "_LONGEST_HEADER", length - 1)
    with pytest.raises(StateError, match=f"take {length} bytes, and readers of safetensors take at most {length - 1}"):
        tensor_file.write(path, state)
    assert not path.exists()


def test_a_damaged_manifest_is_no_save(tmp_path: Path) -> None:
    manifest = save_folder.Manifest(1, "t", {}, ())
    state = a_state()
    files = (save_folder.write_rank(tmp_path, 1, state),) * 2
    run = save_folder.SavedRun("id", "tensors", "int4")
    manifest = save_folder.Manifest(1, "t", {key: state[key] for key in save_folder.SHARED}, files, run)
    save_folder.finish(tmp_path, manifest)
    path = tmp_path / "gradwire-1" / "manifest.json"
    good = path.read_text()
    assert save_folder.newest(tmp_path) == manifest
    tree = json.loads(good)
    bad = [good[:n] for n in range(0, len(good) - 1, 7)]
    bad += ["[]", "null", "[" * 100_000, good.replace('"step"', '"stop"')]
    bad += [json.dumps({**tree, key: value}) for key in tree for value in (None, [], {}, "x", -1)]
    bad.remove(json.dumps({**tree, "token": "x"}))
    for text in bad:
        path.write_text(text)
        with pytest.raises(StateError, match="no finished save"):
            save_folder.newest(tmp_path)
