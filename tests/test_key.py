"""Keys: every field tells streams apart, and the keys of older runs are what they were."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from gradwire import CompositionError
from gradwire.codecs import BlockInt
from gradwire.core.key import Key

OLDER = [
    (Key(), 1353911710959558508),
    (Key(1, 5, "w"), 18190423927265872816),
    (Key(7, 123456, "layer4.1.conv.weight[1000]..fc.bias", "first", 3), 2007797198476784468),
    (Key(2**40, 0, "x|y", "second/2", 0), 10327203765496350671),
    (Key(name="ä", rank=15), 8939282815255009458),
]
"""Keys, and the bits they had when a key was (seed, step, name, stage, rank)."""

FIELDS: dict[str, list[Any]] = {
    "seed": [0, 1],
    "step": [0, 1],
    "name": ["", "w"],
    "stage": ["", "first"],
    "rank": [-1, 0],
    "layer": ["", "blocks.1", "0"],
    "micro_batch": [None, 0, 1],
    "direction": [None, "forward", "backward"],
}


@pytest.mark.parametrize(("key", "bits"), OLDER)
def test_keys_of_older_runs_have_the_bits_they_had(key: Key, bits: int) -> None:
    assert key.stream_seed == bits


def test_keys_that_differ_anywhere_have_other_bits() -> None:
    keys = [Key(**dict(zip(FIELDS, values, strict=True))) for values in itertools.product(*FIELDS.values())]
    assert len({key.stream_seed for key in keys}) == len(keys) == 2**5 * 27


def test_what_stands_in_one_field_is_not_taken_for_another() -> None:
    passages: list[dict[str, Any]] = [{"layer": "None|1"}, {"layer": "1", "micro_batch": 1}, {"layer": "forward|1|"}]
    keys = [Key(**passage) for passage in passages]
    keys += [Key(name="forward|1|x"), Key(layer="x", micro_batch=1, direction="forward")]
    assert len({key.stream_seed for key in keys}) == len(keys)


@pytest.mark.parametrize("change", [{"layer": "b"}, {"micro_batch": 1}, {"direction": "backward"}], ids=str)
def test_a_codec_draws_another_stream(change: dict[str, Any]) -> None:
    """Of rounding up or down by chance half of the elements differ: streams are not shifted or reused."""
    codec, x = BlockInt(2, block=1000, stochastic=True), torch.full((10_000,), 0.5)
    x[::1000] = 1.0
    key = Key(seed=3, layer="a", micro_batch=0, direction="forward")
    first, again, other = (codec.decode(codec.encode(x, k), like=x, key=k) for k in (key, key, key.with_(**change)))
    assert torch.equal(first, again)
    differing = int((first != other).sum())
    assert abs(differing - 4995) <= 5.5 * 0.5 * 9990**0.5  # as often as coins differ, within 5.5 standard deviations


def test_fields_out_of_range_are_refused() -> None:
    with pytest.raises(CompositionError, match="must be 'forward', 'backward' or None"):
        Key(direction="sideways")  # pyright: ignore[reportArgumentType]
    with pytest.raises(CompositionError, match="counted from 0"):
        Key(micro_batch=-1)


def test_the_shared_key_keeps_all_but_the_rank() -> None:
    key = Key(1, 2, "n", "s", 3, "l", 4, "backward")
    assert key.shared == Key(1, 2, "n", "s", -1, "l", 4, "backward")
