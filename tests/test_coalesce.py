"""What travels as one, and how many bytes that is: nothing is copied that may be overwritten."""

from __future__ import annotations

import pytest
import torch

from gradwire.core.axis import Axis
from gradwire.core.collective import AllGather, AllReduce
from gradwire.drivers.interpreter import coalesced, sent_bytes


@pytest.mark.parametrize("consumable", [True, False])
def test_only_a_tensor_that_must_be_kept_is_copied(consumable: bool) -> None:
    x = torch.ones(4)
    (batch,) = coalesced([(0, AllReduce(x, consumable=consumable))])
    assert isinstance(batch.joined, AllReduce)
    assert (batch.joined.tensor.data_ptr() == x.data_ptr()) == consumable


def test_on_an_axis_only_its_own_ranks_count() -> None:
    x, pair = torch.zeros(100), Axis(2, 4)
    (batch,) = coalesced([(0, AllReduce(x, axis=pair))])
    assert sent_bytes(batch.joined, 0, 8) == sent_bytes(AllReduce(x, axis=pair), 0, 8) == 400
    assert sent_bytes(AllGather(x.view(torch.uint8), axis=pair), 0, 8) == 400
    assert sent_bytes(AllReduce(x), 0, 8) == 700
