"""Fragments of a model have about equally many bytes, whatever its layers are."""

from collections.abc import Callable, Mapping
from itertools import pairwise

import pytest
from torch import nn

from gradwire.session.names import named
from gradwire.sync import fragment
from gradwire.sync.fragment import layers_of, split
from gradwire.tasks.builtin import ByteGPT


def normalised() -> nn.Sequential:
    """Every second layer has nearly nothing."""
    return nn.Sequential(*(layer for _ in range(8) for layer in (nn.LayerNorm(64), nn.Linear(64, 64))))


def perceptron(*widths: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(before, after) for before, after in pairwise(widths)))


def convolutions() -> nn.Sequential:
    """Each stage has four times the bytes of the one before."""
    stages = [[nn.Conv2d(8 << i, 16 << i, 3), nn.BatchNorm2d(16 << i)] for i in range(4)]
    return nn.Sequential(*(layer for stage in stages for layer in stage), nn.Linear(128, 10))


def recurrent() -> nn.ModuleDict:
    return nn.ModuleDict({"embedding": nn.Embedding(500, 32), "lstm": nn.LSTM(32, 64, 2), "head": nn.Linear(64, 500)})


def transformer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
    return nn.TransformerEncoder(layer, 6, nn.LayerNorm(64), enable_nested_tensor=False)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "normalised": normalised,
    "byte-gpt": ByteGPT,
    "perceptron": lambda: perceptron(784, 256, 256, 64, 10),
    "convolutions": convolutions,
    "recurrent": recurrent,
    "transformer": transformer,
}


def sizes_of(model: nn.Module) -> dict[str, int]:
    return {name: parameter.numel() * parameter.element_size() for name, parameter in named(model).items()}


def check_balance(sizes: Mapping[str, int], fragments: int) -> None:
    """The largest fragment has at most 4/3 of what the largest one has at least, however layers are dealt out."""
    dealt = split(sizes, fragments)
    assert sorted(name for part in dealt for name in part) == sorted(sizes)
    filled = [sum(sizes[name] for name in part) for part in dealt]
    layers = [sum(sizes[name] for name in layer) for layer in layers_of(list(sizes))]
    assert max(filled) <= sum(layers) / fragments + max(layers) * (1 - 1 / fragments)
    assert max(filled) <= (4 / 3) * max(sum(layers) / fragments, *_at_least(layers, fragments))


def _at_least(layers: list[int], fragments: int) -> list[int]:
    """Some fragment has the largest layer, and some fragment has two of the n + 1 largest ones."""
    ordered = sorted(layers, reverse=True)
    return [ordered[0], sum(ordered[fragments - 1 : fragments + 1])]


@pytest.mark.parametrize("fragments", [2, 3, 4])
@pytest.mark.parametrize("name", MODELS)
def test_fragments_are_balanced(name: str, fragments: int) -> None:
    sizes = sizes_of(MODELS[name]())
    if fragments <= len(layers_of(list(sizes))):
        check_balance(sizes, fragments)


def in_turn(sizes: Mapping[str, int], fragments: int) -> list[list[str]]:
    layers = layers_of(list(sizes))
    return [[name for layer in layers[i::fragments] for name in layer] for i in range(fragments)]


@pytest.mark.parametrize(("name", "fragments"), [("normalised", 2), ("byte-gpt", 3)])
def test_layers_in_turn_are_noticed(name: str, fragments: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "split", in_turn)
    with pytest.raises(AssertionError):
        check_balance(sizes_of(MODELS[name]()), fragments)


def test_blocks_that_are_alike_are_dealt_out_in_turn() -> None:
    assert fragment.split({f"{i}.weight": 4 for i in range(6)}, 3) == [
        ["0.weight", "3.weight"],
        ["1.weight", "4.weight"],
        ["2.weight", "5.weight"],
    ]
