"""Samples and partitions: keyed, exact, and as uneven as they say."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradwire.core.errors import CompositionError
from gradwire.core.key import Key
from gradwire.federated import (
    ByWeight,
    Uniform,
)
from gradwire.federated.partition import DataPartition, Dirichlet, Even, LabelShards, Quantity


@given(st.integers(1, 60), st.integers(0, 10**6), st.data())
def test_a_sample_is_keyed_and_without_replacement(clients: int, seed: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(1, clients))
    for sampling in (Uniform(count), ByWeight(count, tuple(float(1 + i % 5) for i in range(clients)))):
        drawn = sampling.draw(clients, Key(seed))
        assert drawn == sampling.draw(clients, Key(seed))
        assert drawn == sorted(set(drawn))
        assert len(drawn) == count
        assert 0 <= drawn[0] <= drawn[-1] < clients


def test_every_client_is_drawn_as_often_as_its_weight_says() -> None:
    counts = torch.zeros(4)
    for step in range(4000):
        counts[ByWeight(1, (1.0, 0.0, 2.0, 5.0)).draw(4, Key(step=step))] += 1
    assert torch.allclose(counts / 4000, torch.tensor([0.125, 0.0, 0.25, 0.625]), atol=0.03)
    assert ByWeight(2, (1.0, 0.0, 2.0)).draw(3, Key()) == [0, 2]


PARTITIONS = (Even(), Dirichlet(0.01), Dirichlet(0.3), Dirichlet(100.0), LabelShards(2), Quantity(0.1), Quantity(10.0))


@pytest.mark.parametrize("partition", PARTITIONS, ids=repr)
@given(clients=st.integers(1, 40), examples=st.integers(80, 300), seed=st.integers(0, 10**6))
def test_a_partition_deals_out_every_example_once(
    partition: DataPartition, clients: int, examples: int, seed: int
) -> None:
    labels = torch.arange(examples) * 7919 % 10
    parts = partition.split(labels, clients, Key(seed))
    assert len(parts) == clients
    assert torch.equal(torch.cat(parts).sort().values, torch.arange(examples))
    assert min(part.numel() for part in parts) >= 1
    again = partition.split(labels, clients, Key(seed))
    assert all(torch.equal(one, other) for one, other in zip(parts, again, strict=True))


def labels_of(partition: DataPartition, clients: int = 20) -> tuple[float, float]:
    """The mean number of labels of a client, and the ratio of the largest client to the mean one."""
    labels = torch.arange(2000) % 10
    parts = partition.split(labels, clients, Key(3))
    sizes = [part.numel() for part in parts]
    return sum(labels[part].unique().numel() for part in parts) / clients, max(sizes) * clients / 2000


def test_partitions_are_as_uneven_as_they_say() -> None:
    assert labels_of(Even())[0] == 10
    assert labels_of(LabelShards(2))[0] <= 3
    assert labels_of(Dirichlet(0.05))[0] < labels_of(Dirichlet(0.5))[0] < labels_of(Dirichlet(100.0))[0] == 10
    assert labels_of(Quantity(0.3))[1] > 2 > labels_of(Quantity(100.0))[1]
    assert labels_of(Even())[1] == labels_of(LabelShards(2))[1] == 1


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Even().split(5, 6, Key()), "5 examples for 6 clients"),
        (lambda: Dirichlet().split(50, 6, Key()), "by their labels"),
        (lambda: LabelShards(9).split(torch.zeros(50), 6, Key()), "deal out fewer"),
        (lambda: LabelShards(0), "one at least"),
        (lambda: Dirichlet(0.0), "above 0"),
        (lambda: Quantity(float("nan")), "above 0"),
    ],
)
def test_partitions_that_cannot_be_made_are_refused(make: Callable[[], object], says: str) -> None:
    with pytest.raises(CompositionError, match=says):
        make()
