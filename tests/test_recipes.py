"""Recipes of precision: what they say is what they set, and a precision that a device lacks is refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import gradwire
from gradwire.cli.main import main
from gradwire.core.errors import SpecError
from gradwire.recipes import FINE_TUNING, LOW_MEMORY, PRE_TRAINING, RECIPES, TrainingRecipe, recipe, require_compute

EVERY = list(RECIPES.values())


@pytest.mark.parametrize("given", EVERY, ids=lambda given: given.name)
def test_a_recipe_names_what_it_sets_with_a_reason_and_a_figure(given: TrainingRecipe) -> None:
    gradwire.parse(given.spec)
    values = ",".join(line.value for line in given.lines)
    assert all(part in given.spec for line in given.lines if line.setting == "method" for part in line.value.split(","))
    assert given.compute == "bf16"
    assert "bfloat16" in values
    assert all(line.reason.endswith(".") and line.measured for line in given.lines)
    assert hasattr(gradwire.parse(given.spec), "parameters") == given.sharded


@pytest.mark.parametrize("given", EVERY, ids=lambda given: given.name)
def test_products_are_in_16_bits_and_weights_and_gradients_are_not(given: TrainingRecipe) -> None:
    model = nn.Linear(8, 8)
    with given.autocast("cpu"):
        out = model(torch.ones(2, 8))
    out.float().sum().backward()
    assert out.dtype == torch.bfloat16
    assert model.weight.grad is not None
    assert model.weight.grad.dtype == model.weight.dtype == torch.float32
    with given.autocast("cpu", "fp16"):
        assert model(torch.ones(2, 8)).dtype == torch.float16


def test_the_policy_of_a_sharded_model_sums_in_float32() -> None:
    policy = LOW_MEMORY.policy()
    assert (policy.param_dtype, policy.reduce_dtype) == (torch.bfloat16, torch.float32)


@pytest.mark.parametrize(
    ("capability", "said"), [((8, 0), "this GPU has 8.0: take bf16"), ((9, 0), "torch.autocast has no 8-bit floats")]
)
def test_fp8_is_refused_where_a_gpu_lacks_it(
    capability: tuple[int, int], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    with pytest.raises(SpecError, match=said):
        PRE_TRAINING.autocast("cuda", "fp8")


def test_what_no_device_has_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: False)
    for call, said in {
        lambda: FINE_TUNING.autocast("cpu", "fp8"): "gradients travel in fp8 on every device",
        lambda: FINE_TUNING.autocast("cpu", "fp17"): "unknown precision 'fp17'",
        lambda: require_compute("bf16", "cuda"): "take fp16, with a torch.amp.GradScaler",
        lambda: recipe("fine tuning"): "did you mean 'fine-tuning'",
    }.items():
        with pytest.raises(SpecError, match=said):
            call()


def test_the_command_prints_recipes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes"]) == 0
    said = capsys.readouterr().out
    for given in EVERY:
        assert all(line.reason in said and line.measured in said for line in given.lines)
    assert main(["recipes", "low memory"]) == 0
    assert capsys.readouterr().out.startswith("low memory: a model that does not fit")
    assert main(["recipes", "none"]) == 2
