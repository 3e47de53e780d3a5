"""What the planner refuses, each in one sentence, and what it reads from files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gradwire.cli.main import main
from gradwire.core.errors import SpecError
from gradwire.planning import Efficiencies, ParallelLayout, hardware, model, plan, step_time

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
        (CLUSTER + "sustained = 1.5", "at most 1"),
    ],
)
def test_a_broken_description_of_hardware(text: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(SpecError, match=says):
        hardware(str(path))
