"""What the planner refuses, each in one sentence, and what it reads from files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gradwire.cli.main import main
from gradwire.core.errors import SpecError
from gradwire.planning import (
    Efficiencies,
    ParallelLayout,
    hardware,
    hardware_here,
    here,
    model,
    plan,
    step_time,
    with_links,
)
from gradwire.topology import AxisLink, Gpu, Host, HostIdentity, MeasuredPair, NvLink
from gradwire.topology import NetworkInterface as Interface
from gradwire.topology.link_profile import LinkProfile

GPT3, A100 = model("gpt3-175b"), hardware("a100-80g")

# What is refused ---------------------------------------------------------------------------------------------

ASKED = {"--model": "gpt3-175b", "--hardware": "a100-80g", "--gpus": "1024", "--batch": "1536"}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"--model": "gpt3-175"}, "did you mean 'gpt3-175b'"),
        ({"--hardware": "a100"}, "did you mean 'a100"),
        ({"--gpus": "0"}, "gpus=0 is below 1"),
        ({"--gpus": "1021"}, "no whole nodes of 8: take 1016 or 1024"),
        ({"--batch": "-4"}, "batch=-4 is below 1"),
        ({"--sequence": "0"}, "sequence=0 is below 1"),
        ({"--gpus": "8", "--batch": "8"}, "it fits on 64 GPUs"),
        ({"--batch": "1"}, "take a larger batch"),
        ({"--tokens": "many"}, "--tokens many is no number of tokens"),
        ({"--price": "2"}, "--price wants --tokens"),
        ({"--tokens": "1T", "--price": "-2"}, "0 or more"),
        ({"--model": ""}, "no model is called ''"),
        ({"--model": "none/config.json"}, "none/config.json cannot be read: No such file"),
        ({"--hardware": "none.toml"}, "none.toml cannot be read: No such file"),
    ],
)
def test_bad_input_is_one_sentence(changes: dict[str, str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *(word for pair in {**ASKED, **changes}.items() for word in pair)]) == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"tp": 0}, "tp=0 is below 1"),
        ({"dp": 3, "batch": 4}, "take a multiple of 3"),
        ({"interleave": 2}, "take interleave=1"),
        ({"sharding": "optimiser"}, "did you mean 'optimizer'"),
        ({"recompute": "some"}, "known are none, selective, full"),
        ({"ep": 3}, "ep=3 does not divide"),
        ({"gradient_bytes": 3}, "2 or 4 bytes"),
        ({"host_s": -1.0}, "write seconds"),
    ],
)
def test_impossible_layouts(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(SpecError, match=says):
        ParallelLayout(**changes)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"tp": 16}, "more than the 8 GPUs of a node"),
        ({"tp": 5}, "does not divide 96 heads"),
        ({"pp": 7}, "do not divide 96 layers"),
        ({"ep": 2, "dp": 2, "batch": 2}, "does not divide 0 experts"),
        ({"pp": 2, "sharding": "parameters"}, "would send in every micro-batch"),
        ({"cp": 3}, "two parts for each rank"),
    ],
)
def test_layouts_that_a_model_cannot_have(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(SpecError, match=says):
        step_time(GPT3, ParallelLayout(**changes), A100)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"layers": 0}, "layers=0 is below 1"),
        ({"heads": 7}, "7 heads do not divide"),
        ({"key_heads": 5}, "5 key heads do not divide"),
        ({"experts": 8}, "0 of 8 experts"),
        ({"experts": 2, "chosen": 3}, "3 of 2 experts"),
        ({"shared_inner": -1}, "shared_inner=-1 is below 0"),
        ({"dense_layers": 97}, "97 of 96 layers"),
    ],
)
def test_impossible_models(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(SpecError, match=says):
        replace(GPT3, **changes)


def test_efficiencies_are_fractions() -> None:
    with pytest.raises(SpecError, match=r"efficiency links=1\.5 is no fraction"):
        Efficiencies(links=1.5)


# Files -------------------------------------------------------------------------------------------------------

MIXTRAL = {
    "model_type": "mixtral",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14_336,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 32_000,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
GPT2 = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50_257, "n_positions": 1024}


@pytest.mark.parametrize(("config", "name"), [(MIXTRAL, "mixtral-8x7b"), (GPT2, "gpt2")])
def test_a_config_of_hugging_face_is_the_model(config: dict[str, Any], name: str, tmp_path: Path) -> None:
    folder = tmp_path / name
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    assert model(str(folder)) == replace(
        model(name), key_heads=model(str(folder)).key_heads, inner=model(str(folder)).inner
    )
    assert model(str(folder)).parameters == model(name).parameters
    assert model(str(folder / "config.json")) == model(str(folder))


@pytest.mark.parametrize(
    ("kind", "tied"),
    [("gemma", True), ("gemma2", True), ("llama", False), ("gpt2", True), ("gpt_neox", False), ("phi", False)],
)
def test_embeddings_are_tied_as_transformers_has_it(kind: str, tied: bool, tmp_path: Path) -> None:
    left = {key: value for key, value in MIXTRAL.items() if "experts" not in key and key != "tie_word_embeddings"}
    (tmp_path / "config.json").write_text(json.dumps(left | {"model_type": kind}))
    assert model(str(tmp_path)).tied == tied
    (tmp_path / "config.json").write_text(json.dumps(left | {"model_type": kind, "tie_word_embeddings": not tied}))
    assert model(str(tmp_path)).tied != tied


def test_experts_with_a_width_of_their_own(tmp_path: Path) -> None:
    qwen = MIXTRAL | {"model_type": "qwen3_moe", "num_experts": 128, "moe_intermediate_size": 768}
    del qwen["num_local_experts"]
    (tmp_path / "config.json").write_text(json.dumps(qwen))
    found = model(str(tmp_path))
    assert (found.experts, found.width, found.dense_width, found.gated) == (128, 768, 14_336, True)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "is no JSON"),
        ("[]", "holds no object"),
        (json.dumps(MIXTRAL | {"model_type": "mixtrall"}), "did you mean 'mixtral'"),
        (json.dumps(MIXTRAL | {"kv_lora_rank": 512}), "latent attention"),
        (json.dumps(MIXTRAL | {"hidden_size": "4096"}), "hidden_size='4096' is no whole number"),
        (json.dumps(MIXTRAL | {"hidden_size": -1}), "hidden_size=-1 is no whole number"),
        (json.dumps({k: v for k, v in MIXTRAL.items() if k != "vocab_size"}), "vocab_size is there"),
        (json.dumps(MIXTRAL | {"num_experts_per_tok": 9}), "9 of 8 experts"),
    ],
)
def test_a_broken_config_names_file_and_key(text: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(SpecError, match=says) as caught:
        model(str(path))
    assert str(path) in str(caught.value)


CLUSTER = """
peak_tflops = 312
memory_gb = 85
memory_gb_per_s = 2039
processors = 108
node = 4
node_gb_per_s = 300
network_gbit_per_s = 100
"""


def test_hardware_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(CLUSTER)
    found = hardware(str(path))
    assert (found.name, found.node, found.network_gbit_per_s) == ("mine", 4, 100)
    assert plan(model("llama2-7b"), found, 4, 64).best[0].layout.gpus == 4


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("node =", "is no TOML"),
        ("nodes = 4\n" + CLUSTER, "no key 'nodes': did you mean 'node'"),
        (CLUSTER.replace("node = 4\n", ""), "'node' is missing"),
        (CLUSTER.replace("= 312", "= '312'"), "peak_tflops='312' is no number"),
        (CLUSTER.replace("= 312", "= 0"), "must be a finite number above 0"),
        (CLUSTER.replace("node = 4", "node = 4.5"), "must be a whole number"),
        (CLUSTER.replace("node = 4", "node = 4.0"), r"node=4\.0 must be a whole number, such as 4"),
        (CLUSTER.replace("= 108", "= 108.0"), r"processors=108\.0 must be a whole number"),
        (CLUSTER + "sustained = 1.5", "at most 1"),
    ],
)
def test_a_broken_description_of_hardware(text: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(SpecError, match=says):
        hardware(str(path))


# Links and this machine --------------------------------------------------------------------------------------


def profile(
    folder: Path, nodes: tuple[tuple[int, ...], ...], links: tuple[AxisLink, ...], backend: str = "gloo"
) -> Path:
    ranks = tuple((rank,) for group in nodes for rank in group)
    names = tuple("a" for _ in ranks)
    levels = {"rank": ranks, "node": nodes}
    found = LinkProfile(hosts=names, names=names, levels=levels, settings={"backend": backend}, links=links)
    (folder / "links.json").write_text(found.to_text())
    return folder / "links.json"


INSIDE = AxisLink("rank", (MeasuredPair((0, 1), 2e-6, 1e-10),))
BETWEEN = AxisLink("node", (MeasuredPair((0, 2), 1e-4, 8e-9),))


def test_links_of_a_profile(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = profile(tmp_path, ((0, 1), (2, 3)), (INSIDE, BETWEEN))
    found = with_links(A100, file)
    assert (found.node, found.node_latency_s, found.network_latency_s) == (2, 2e-6, 1e-4)
    assert found.node_gb_per_s == pytest.approx(10)
    assert found.network_gbit_per_s == pytest.approx(0.5), "the two ranks of a node share what one of them measured"
    assert found.peak_tflops == A100.peak_tflops
    asked = ["plan", "--model", "llama2-7b", "--hardware", "a100-80g", "--gpus", "16", "--batch", "64", "--json"]
    assert main([*asked, "--links", str(file)]) == 0
    slow = json.loads(capsys.readouterr().out)["best"][0]["step_s"]
    assert main(asked) == 0
    assert json.loads(capsys.readouterr().out)["best"][0]["step_s"] < slow
    alone = with_links(A100, profile(tmp_path, ((0,), (2,)), (BETWEEN,)))
    assert (alone.node, alone.node_gb_per_s, alone.network_gbit_per_s) == (1, A100.node_gb_per_s, pytest.approx(1))
    over_nccl = with_links(A100, profile(tmp_path, ((0, 1), (2, 3)), (INSIDE, BETWEEN), "nccl"))
    assert over_nccl.network_gbit_per_s == pytest.approx(1), "a rank has a network card of its own"


@pytest.mark.parametrize(
    ("nodes", "links", "says"),
    [
        (((0, 1), (2, 3)), (), "has no measured links: write one by torchrun"),
        (((0, 1), (2,)), (INSIDE, BETWEEN), "nodes of 1 and 2 ranks"),
    ],
)
def test_links_that_make_no_cluster(nodes: Any, links: Any, says: str, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=says):
        with_links(A100, profile(tmp_path, nodes, links))


def test_a_file_that_is_no_link_profile(tmp_path: Path) -> None:
    for path, says in ((tmp_path / "none.json", "cannot be read"), (Path(__file__), "no link profile")):
        with pytest.raises(SpecError, match=says):
            with_links(A100, path)


def test_devices_of_a_node_share_its_network() -> None:
    def rate(devices: int, *interfaces: Interface) -> float:
        return here._network_gbit_per_s(interfaces, devices)  # pyright: ignore[reportPrivateUsage]

    slow, down = Interface("eth0", "ethernet", 25e9, "up"), Interface("eth1", "ethernet", 100e9, "down")
    loop = Interface("lo")
    assert rate(1, slow, down, loop) == 25
    assert (rate(1, loop), rate(8, loop)) == (10, 1.25)
    cards = [Interface(f"ib{i}", "infiniband", 200e9, "up") for i in range(4)]
    assert rate(8, slow, *cards) == 100
    bond = Interface("bond0", "bond", 400e9, "up")
    assert rate(8, bond, *cards) == 100, "the bond has no cards of its own"


def test_links_in_a_node_are_nvlinks_or_assumed() -> None:
    def rate(*gpus: Gpu) -> float:
        return here._node_gb_per_s(gpus)  # pyright: ignore[reportPrivateUsage]

    def gpu(index: int, links: int | None, bits_per_s: float | None = 200e9) -> Gpu:
        found = None if links is None else (NvLink(0, "switch", None),) * links
        return Gpu(index, f"0000:{index:02}:00.0", nvlinks=found, nvlink_bits_per_s=bits_per_s)

    assert rate(gpu(0, 18), gpu(1, 18)) == 450
    assert rate(gpu(0, 18), gpu(1, 17)) == 425
    for unknown in ((), (gpu(0, 18),), (gpu(0, 18), gpu(1, 0)), (gpu(0, None), gpu(1, None))):
        assert rate(*unknown) == here.PCIE_GB_PER_S
    assert rate(gpu(0, 18, None), gpu(1, 18, None)) == here.PCIE_GB_PER_S


def test_this_machine_is_measured(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    cards = tuple(Interface(f"eth{i}", "ethernet", 25e9, "up") for i in range(2))
    monkeypatch.setattr(here, "read_host", lambda: Host(HostIdentity("a"), cards))
    found = hardware_here(0.01)
    assert found.peak_tflops > 1e-4
    assert found.memory_gb > 0.5
    assert found.sustained == 1
    is_gpu = torch.cuda.is_available()
    assert found.node_gb_per_s == (here.PCIE_GB_PER_S if is_gpu else found.memory_gb_per_s / 2)
    assert found.network_gbit_per_s * found.node == pytest.approx(50)
    asked = ["plan", "--model", "gpt2", "--hardware", "here", "--gpus", "2", "--batch", "8", "--json"]
    monkeypatch.setattr("gradwire.planning.hardware_here", lambda: replace(A100, name="here"))
    assert main(asked) == 0
    assert json.loads(capsys.readouterr().out)["hardware"] == "here"
