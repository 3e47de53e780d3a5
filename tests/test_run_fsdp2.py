"""`gradwire run` on scripts of FSDP2 that know nothing of gradwire."""

from __future__ import annotations

import importlib
import re
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import gradwire
from framework_runs import EXAMPLES, run_two
from gradwire import AttachError
from gradwire.adapters.fsdp2.roots import PLACES, Roots
from gradwire.adapters.script_saves import ScriptSaves
from gradwire.adapters.unchanged import Unchanged
from gradwire.cli.main import main
from gradwire.ranks.supervised import run_function
from run_fsdp2_cases import WAYS

CASES = str(Path(__file__).with_name("run_fsdp2_cases.py"))
EXAMPLE = str(EXAMPLES / "train_fsdp2.py")
RUN = ["-m", "gradwire", "run", "--method", "int4"]


def run(case: str, ranks: int, folder: Path) -> list[Any]:
    return run_function(f"{CASES}:{case}", ranks, {"folder": str(folder)}, 200)


# The example ------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_an_unchanged_script_sends_little_and_resumes_exactly(tmp_path: Path) -> None:
    whole = run_two([*RUN, EXAMPLE, "--folder", str(tmp_path)], tmp_path / "whole")
    assert len(whole.parameters) == 2
    assert len(set(whole.parameters)) == 1
    assert "gradwire: int4 is attached to Sequential: 76,810 parameters, 2 ranks" in whole.logs[0]
    said = re.findall(r"Sequential: int4 sent 397 kB in 20 steps where fp32 sends 3.07 MB \((\S+) times", whole.logs[0])
    assert float(said[0]) >= 5
    assert "gradwire" not in whole.logs[1]
    states = tmp_path / "step-10" / "gradwire" / "gradwire-1"
    assert sorted(path.name for path in states.iterdir()) == ["manifest.json", "rank0.safetensors", "rank1.safetensors"]
    resumed = run_two([*RUN, EXAMPLE, "--resume", str(tmp_path / "step-10")], tmp_path / "resumed")
    assert resumed.parameters == whole.parameters
    assert f"gradwire: goes on at step 10 with what was owed when {tmp_path / 'step-10'} was saved" in resumed.logs[0]


# Checkpoints ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run("ways", 2, tmp_path_factory.mktemp("ways"))


@pytest.mark.one_draw_in(3)
@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_save_is_one_to_resume_exactly(way: str, resumed: list[dict[str, Any]]) -> None:
    for outcome in resumed:
        whole, again, without = outcome[way]["digests"]
        assert again == whole
        assert without != whole, "what is owed makes no difference here, so nothing is tested"
        assert outcome[way]["digests"] == resumed[0][way]["digests"]
    said = resumed[0][way]["said"][0]
    assert re.fullmatch(rf"goes on at step 4 with what was owed when \S+/{way} was saved", said)
    assert resumed[0]["alone"]["there"] == ["again.gradwire", "file.gradwire"], (
        "other states belong inside of their checkpoints"
    )


@pytest.mark.one_draw_in(3)
def test_another_number_of_ranks_owes_the_same_mean(tmp_path: Path) -> None:
    saved = run("owed_when_saved", 2, tmp_path)[0]
    found = run("owed_by_others", 3, tmp_path)
    for outcome in found:
        assert outcome["digest"] == found[0]["digest"]
        for name, owed in saved.items():
            torch.testing.assert_close(torch.tensor(outcome["owed"][name]), torch.tensor(owed), atol=1e-6, rtol=1e-5)
    assert max(abs(value) for owed in saved.values() for value in owed) > 0.01


def test_a_file_gets_no_states_of_later_steps(tmp_path: Path) -> None:
    first, second = run("unseen_steps", 2, tmp_path)
    assert first["there"] == ["step.pt"]
    for outcome in (first, second):
        assert outcome["said"][-1].endswith(
            "step.pt has nothing beside it: steps went by before ranks could ask each other"
        )


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("kind", ["elsewhere", "thread"])
def test_a_checkpoint_that_states_cannot_go_with_is_told_of_once(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    dcp = importlib.import_module("torch.distributed.checkpoint")
    monkeypatch.setattr(dcp, "save", lambda *_, **__: None)  # type: ignore[misc]
    saves, unchanged = ScriptSaves(said.append), Unchanged("int4", lambda _: None)
    unchanged.on_attach(saves.follow)
    place = "memory://here" if kind == "elsewhere" else str(tmp_path / "here")
    with unchanged.watching(), saves.watching():
        save: Callable[[], None] = lambda: dcp.save({}, checkpoint_id=place)  # noqa: E731
        save()
        assert said == [], "nothing is owed before the first step"
        sharded()(torch.ones(1, 4)).sum().backward()
        for _ in range(2):
            worker = threading.Thread(target=save) if kind == "thread" else None
            worker.start() if worker else save()
            worker.join() if worker else None
    why = "is not in a folder" if kind == "elsewhere" else "is saved by another thread"
    assert said == [f"a checkpoint {why}, so what is owed is not saved with it"]
    assert not list(tmp_path.iterdir())
    unchanged.sessions[0][1].close()


# Which models, and when -------------------------------------------------------------------------------------------


@pytest.mark.one_draw_in(2)
def test_models_are_attached_to_by_their_roots_and_gather_in_a_codec(tmp_path: Path) -> None:
    first, _ = run("named", 2, tmp_path)
    assert first["quiet"], "a pass without gradients attaches nothing"
    attached = "topk:0.05 is attached to Net: 4,302 parameters, gathered in int8, 2 ranks"
    assert first["said"] == [attached] * 2
    assert [(name, steps) for name, steps, _ in first["models"]] == [("Net", 4), ("Net", 3)]
    assert [line.split(" sent ")[0] for line in first["summary"]] == ["Net: topk:0.05"] * 2
    assert first["there"] == ["gradwire", "gradwire-1"]


def sharded(layer: Callable[[], nn.Module] = lambda: nn.Linear(4, 4), place: str = PLACES[0], **options: Any) -> Any:
    """A model of one rank, sharded as a script does."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch's own, about shards of one rank
        options.setdefault("mesh", init_device_mesh("cpu", (1,)))
        return vars(importlib.import_module(place))["fully_shard"](layer(), **options)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("place", PLACES)
def test_every_place_to_import_it_from_is_watched(place: str) -> None:
    plain, found = vars(importlib.import_module(place))["fully_shard"], list[nn.Module]()
    with Roots(found.append).watching():
        assert vars(importlib.import_module(place))["fully_shard"] is not plain
        model = sharded(place=place)
        model(torch.ones(1, 4))
        model(torch.ones(1, 4))
    assert found == [model]
    assert vars(importlib.import_module(place))["fully_shard"] is plain


@pytest.mark.usefixtures("one_rank")
def test_a_root_comes_up_before_anything_is_gathered() -> None:
    state: list[Any] = []
    roots = Roots(lambda root: state.append(next(root.parameters())))
    with roots.watching():
        inner = sharded()
        model = sharded(lambda: nn.Sequential(inner, nn.Linear(4, 4)))
        model(torch.ones(1, 4))
    assert roots.sharded == 2
    (parameter,) = state
    assert type(parameter.data).__name__ == "DTensor"


@pytest.mark.usefixtures("one_rank")
def test_a_model_that_is_not_trained_is_told_of() -> None:
    with Unchanged("int4", lambda _: None).watching() as unchanged:
        model = sharded()
        with torch.no_grad():
            model(torch.ones(1, 4))
    assert unchanged.summary() == [
        "the script made a model of fully_shard and did not train it: nothing was compressed"
    ]


# What is refused --------------------------------------------------------------------------------------------------


def over_two_dimensions() -> Any:
    return sharded(mesh=init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicate", "shard")))


def in_several_groups() -> Any:
    common = importlib.import_module("torch.distributed.fsdp._fully_shard._fsdp_common")
    groups: list[Any] = [dist.new_group([0]) for _ in range(2)]
    meshes = [common.FSDPMeshInfo(DeviceMesh.from_group(group, "cpu"), 0) for group in groups]

    def placed(parameter: nn.Parameter) -> Any:
        return common.ShardPlacementResult(None, meshes[parameter.dim() - 1])

    return sharded(shard_placement_fn=placed)


REFUSED: dict[str, tuple[Callable[[], Any], str, str]] = {
    "two dimensions": (over_two_dimensions, "int4", "this module is sharded over a mesh of two dimensions"),
    "several groups": (in_several_groups, "int4", "this module has 2 parameter groups"),
    "a method": (sharded, "powersgd:2", "FSDP2 needs a method that ends with shards of the mean"),
}


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_attached_to_is_left_as_it_is(kind: str) -> None:
    make, method, sentence = REFUSED[kind]
    with Unchanged(method, lambda _: None).watching() as unchanged:
        model = make()
        with pytest.raises(gradwire.GradwireError, match=sentence):
            model(torch.ones(1, 4))
        assert isinstance(unchanged.refused, gradwire.GradwireError)
        groups = model._get_fsdp_state()._fsdp_param_groups
        assert all(type(group._reduce_scatter_comm).__name__.startswith("Default") for group in groups)
        model(torch.ones(1, 4)).sum().backward()
        assert next(model.parameters()).grad is not None
    assert unchanged.sessions == []
    assert unchanged.summary()[0].startswith(f"nothing was compressed: {sentence}")


SCRIPT = """
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
try:
    {body}
finally:
    dist.destroy_process_group()
"""


def run_script(
    body: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *options: str
) -> tuple[int, list[str]]:
    """The status and the words of a script that is run in this process."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(body=body))
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr("sys.argv", [])
    monkeypatch.setattr("sys.path", [])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch's own, about shards of one rank
        status = main(["run", "--method", "int4", *options, str(script)])
    return status, [line for line in capsys.readouterr().err.splitlines() if line.startswith("gradwire:")]


def test_a_refused_script_ends_with_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    mesh = "init_device_mesh('cpu', (1, 1), mesh_dim_names=('replicate', 'shard'))"
    body = f"fully_shard(torch.nn.Linear(4, 4), mesh={mesh})(torch.ones(1, 4))"
    status, (sentence,) = run_script(body, tmp_path, monkeypatch, capsys)
    assert status == 1
    assert sentence.startswith("gradwire: this module is sharded over a mesh of two dimensions, between whose replicas")


def test_fsdp1_is_told_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    body = "FullyShardedDataParallel(torch.nn.Linear(4, 4), device_id=torch.device('cpu'))"
    assert run_script(body, tmp_path, monkeypatch, capsys) == (
        0,
        [
            "gradwire: FullyShardedDataParallel (FSDP1) is not served, so nothing was compressed: give the module to "
            "fully_shard instead"
        ],
    )


def test_parameters_of_ddp_are_told_of_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # Models are held: a pass of DDP hangs where its model is freed in the course of it.
    body = (
        "models = [torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4)) for _ in range(2)]; "
        "[model(torch.ones(1, 4)).sum().backward() for model in models]"
    )
    status, said = run_script(body, tmp_path, monkeypatch, capsys, "--parameters", "int8")
    assert status == 0
    assert [line for line in said if "--parameters" in line] == [
        "gradwire: --parameters int8 is for models of fully_shard: Linear is in DistributedDataParallel, where every "
        "rank has all parameters and nothing is gathered"
    ]
    assert len(said) == 5


def test_ranks_are_started_with_the_same_options(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []
    monkeypatch.setattr(importlib.import_module("torch.distributed.run"), "run", started.append)
    words = ["--method", "int4", "--seed", "7", "--parameters", "int8", "--deadline", "9.0"]
    words += ["--residuals", "host", "--no-states"]
    assert main(["run", *words, "--nproc", "3", EXAMPLE, "--steps", "2"]) == 0
    (given,) = started
    assert given.nproc_per_node == "3"
    assert [given.training_script, *given.training_script_args] == ["gradwire", "run", *words, EXAMPLE, "--steps", "2"]


@pytest.mark.parametrize(("codec", "sentence"), [("sign", "would change parameters by"), ("int4000", "int4000")])
def test_a_codec_that_will_not_do_is_refused_before_anything_is_started(
    codec: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "--method", "int4", "--parameters", codec, EXAMPLE]) in (1, 2)
    assert sentence in capsys.readouterr().err


@pytest.mark.usefixtures("one_rank")
def test_an_old_pytorch_is_told_which_one_is_needed() -> None:
    with Unchanged("int4", lambda _: None).watching():
        model = sharded()
        del model._get_fsdp_state()._fsdp_param_groups  # older ones had a single group
        with pytest.raises(AttachError, match=r"FSDP2 of PyTorch \S+ is not known here: PyTorch 2.13 is needed"):
            model(torch.ones(1, 4))
