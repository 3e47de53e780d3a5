"""What older versions saved is taken up: classes that had other names then are known by them.

`tests/golden/saves` holds a save of each of these, made by one rank before exchanges and warm-ups had their names of
today, before a gossip was saved with its counts, before a clip said what it was of, or before fragments were dealt out
by their bytes. None is ever written again: what is saved today is in the other tests.
"""

import hashlib
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import gradwire
from gradwire import reducers
from gradwire.adapters.fsdp2.stateful import Stateful
from gradwire.core import save_folder
from gradwire.core.errors import StateError
from gradwire.core.renamed import FORMER_NAMES, with_former_names, with_names_of_today
from gradwire.core.tree import taken_apart
from gradwire.session import Session
from gradwire.session.checkpoint import Savable
from gradwire.sync.averaging_options import Options
from laws.damage import difference

SAVES = Path(__file__).with_name("golden") / "saves"
STEPS = 4

pytestmark = pytest.mark.usefixtures("one_rank")

METHODS = {
    "int4": "int4",
    "powersgd": "powersgd:2",
    "topk": "topk:0.01",
    "topk-warmup": "topk:0.1,warmup=2",
    "threshold": "threshold:0.01,exchange=allgatherv",
    "int4-matrices": "int4,vectors=off",
    "dgc": "dgc:0.05",
    "dgc-clip": "dgc:0.05,clip=0.5",
}


def tensors(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {"a": torch.randn(24, generator=generator), "b": torch.randn(4, 6, generator=generator)}


def diloco(model: nn.Module) -> gradwire.sync.LocalSGD:
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    outer = gradwire.sync.DiLoCo()
    return gradwire.sync.LocalSGD(inner, model, every=2, method="topk:0.1,warmup=1", outer=outer, deadline_s=10)


def one_bit_adam(model: nn.Module) -> gradwire.sync.optimizers.OneBitAdam:
    return gradwire.sync.optimizers.OneBitAdam(model, freeze_step=2, deadline_s=10)


OPTIMIZERS = {"diloco": diloco, "onebit_adam": one_bit_adam}


def trained(optimizer: torch.optim.Optimizer, model: nn.Module, steps: int) -> None:
    for number in range(steps):
        optimizer.zero_grad()
        model(torch.ones(2, 4) * (number + 1)).square().sum().backward()
        optimizer.step()


def file_of(name: str) -> save_folder.Manifest:
    (manifest,) = save_folder.manifests(SAVES / name)
    return manifest


@pytest.mark.parametrize(("name", "spec"), METHODS.items(), ids=METHODS)
def test_a_session_takes_up_what_an_older_version_saved(name: str, spec: str) -> None:
    saved = file_of(name).read(SAVES / name, 0)
    with Session(tensors(0), spec, deadline_s=10) as session:
        assert gradwire.load(SAVES / name, session) == STEPS
        here = session.state_dict()
        assert here.pop("reducer") == with_names_of_today(saved.pop("reducer")) == repr(session.reducer)
        assert difference(here, saved) is None
        session.reduce_(tensors(STEPS))
        assert session.state_dict()["step"] == STEPS + 1


@pytest.mark.parametrize(("name", "make"), OPTIMIZERS.items(), ids=OPTIMIZERS)
def test_an_optimizer_takes_up_what_an_older_version_saved(
    name: str, make: Callable[[nn.Module], gradwire.sync.LocalSGD]
) -> None:
    model, saved = nn.Linear(4, 3), file_of(name).read(SAVES / name, 0)
    optimizer = make(model)
    assert isinstance(optimizer, Savable)
    assert gradwire.load(SAVES / name, optimizer) == 5
    assert optimizer.kind == with_names_of_today(saved["reducer"])
    _, found = taken_apart(optimizer.state_dict())
    for key, leaves in saved["parameters"].items():
        assert torch.equal(found.pop(key), leaves["matrix:value"][0]["values"])
    assert not found
    trained(optimizer, model, 2)
    optimizer.close()


def norms() -> nn.Sequential:
    return nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 3))


def streaming(model: nn.Module, fragments: int = 2) -> gradwire.sync.LocalSGD:
    inner, outer = torch.optim.SGD(model.parameters(), lr=0.01), gradwire.sync.DiLoCo()
    options: Options = {"outer": outer, "fragments": fragments, "delay": 1, "deadline_s": 10}
    return gradwire.sync.LocalSGD(inner, model, every=4, method="topk:0.2", **options)


def parts(optimizer: gradwire.sync.LocalSGD) -> list[set[str]]:
    return [{name.rpartition(".")[0] for name in fragment.parameters} for fragment in optimizer.averaging.fragments]


def test_fragments_go_on_as_they_were_dealt_out() -> None:
    """They were every second layer, which is all of one kind here."""
    model, saved = norms(), file_of("streaming").read(SAVES / "streaming", 0)
    optimizer = streaming(model)
    assert parts(optimizer) == [{"1", "2"}, {"0", "3"}]
    assert gradwire.load(SAVES / "streaming", optimizer) == 6
    assert parts(optimizer) == [{"0", "2"}, {"1", "3"}]
    _, found = taken_apart(optimizer.state_dict())
    for key, leaves in saved["parameters"].items():
        assert torch.equal(found.pop(key), leaves["matrix:value"][0]["values"])
    assert not found
    trained(optimizer, model, 8)
    again = streaming(norms())
    again.load_state_dict(optimizer.state_dict())
    assert parts(again) == [{"0", "2"}, {"1", "3"}]
    optimizer.close()
    again.close()


def test_fragments_of_another_model_are_refused() -> None:
    optimizer = streaming(nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 5)))
    with pytest.raises(StateError, match=r"global copy of '3\.weight'"):
        gradwire.load(SAVES / "streaming", optimizer)
    assert parts(optimizer) == [{"2", "3"}, {"0", "1"}]
    optimizer.close()


def gossip(model: nn.Module, every: int) -> gradwire.sync.Gossip:
    method = gradwire.sync.CHOCO("topk:0.25", 0.5)
    return gradwire.sync.Gossip(model, "ring", method, every=every, deadline_s=10)


@pytest.mark.parametrize(("name", "every", "rounds", "steps"), [("gossip", 1, 5, 5), ("gossip-windows", 3, 2, 6)])
def test_a_gossip_takes_up_the_session_that_older_versions_saved(
    name: str, every: int, rounds: int, steps: int
) -> None:
    """Of windows of three steps, a warning says that those since the last round are not known."""
    model, saved = nn.Linear(4, 3), file_of(name).read(SAVES / name, 0)
    assert saved["step"] == rounds
    with gossip(model, every) as here, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert gradwire.load(SAVES / name, here) == here.steps == steps
        assert ["without the steps since its last round" in str(said.message) for said in caught] == [True] * (
            every > 1
        )
        assert difference(here.session.state_dict(), saved) is None
        assert [here.step() for _ in range(every)] == [False] * (every - 1) + [True]

    with gossip(nn.Linear(4, 2), every) as other, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(StateError):
            gradwire.load(SAVES / name, other)


def test_a_run_that_begins_anew_takes_the_place_of_one_whose_clip_was_of_something_else(tmp_path: Path) -> None:
    shutil.copytree(SAVES / "dgc-clip", tmp_path, dirs_exist_ok=True)
    with Session(tensors(0), "dgc:0.05,clip=0.5", deadline_s=10) as session:
        gradwire.save(tmp_path, session)
        assert "clip_of='mean'" in session.state_dict()["reducer"]
    other = Session(tensors(0), "dgc:0.05,clip=0.7", deadline_s=10)
    with other, pytest.raises(StateError, match="another method"):
        gradwire.save(tmp_path, other)


def test_an_average_goes_on_with_what_its_clip_was_of(tmp_path: Path) -> None:
    def made(method: str) -> gradwire.sync.LocalSGD:
        model = nn.Linear(4, 3)
        return gradwire.sync.LocalSGD(torch.optim.SGD(model.parameters(), 0.1), model, 2, method=method, deadline_s=10)

    with made("dgc:0.5,clip=0.5,clip_of=sum") as old:
        gradwire.save(tmp_path, old)
    with made("dgc:0.5,clip=0.5") as new:
        gradwire.load(tmp_path, new)
        assert new.kind == old.kind
        assert "clip_of='sum'" in new.kind


def test_a_checkpoint_of_torch_says_its_method_by_a_number_and_clips_as_it_did() -> None:
    """In `torch.distributed.checkpoint` a text is known by its hash: that of a text without `clip_of=` is taken up."""
    mesh = init_device_mesh("cpu", (1,))
    with Session(tensors(0), "dgc:0.05,clip=0.5,clip_of=sum", deadline_s=10) as old:
        old.reduce_(tensors(1))
        saved, text = Stateful(old, mesh).state_dict(), with_former_names(repr(old.reducer))
        wanted = repr(old.reducer)
    assert "clip=0.5, ramp=0" in text
    saved["head"][4] = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "little")
    with Session(tensors(0), "dgc:0.05,clip=0.5", deadline_s=10) as session:
        Stateful(session, mesh).load_state_dict(saved)
        assert repr(session.reducer) == wanted
        assert session.state_dict()["step"] == 1
    with Session(tensors(0), "dgc:0.05,clip=0.7", deadline_s=10) as other:
        with_another = Stateful(other, mesh)
        with pytest.raises(StateError, match="another method"):
            with_another.load_state_dict(saved)


def test_a_save_of_another_method_is_refused_still() -> None:
    with Session(tensors(0), "topk:0.02", deadline_s=10) as session:
        with pytest.raises(StateError, match="attach with the spec it was saved with"):
            gradwire.load(SAVES / "topk", session)
        assert session.engine.index == 0


def test_every_former_name_is_read_and_no_class_has_it() -> None:
    folders = [path for path in SAVES.iterdir() if path.name != "streaming"]  # made with the names of today
    saved = " ".join(str(file_of(path.name).head["reducer"]) for path in folders)
    for former, today in FORMER_NAMES.items():
        assert f"{former}(" in saved
        assert not hasattr(reducers, former)
        assert hasattr(reducers, today)
    assert with_former_names(with_names_of_today(saved)) == saved != with_names_of_today(saved)
