"""All-to-alls of rows of any size: on virtual ranks, on processes, without data, and under wrapped transports."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from gradwire.core.axis import Axis
from gradwire.core.collective import AllToAll, AllToAllV
from gradwire.core.errors import PayloadError
from gradwire.core.link import Link
from gradwire.core.program import along, once
from gradwire.drivers.checked import Checked
from gradwire.drivers.cost import MetaTransport
from gradwire.drivers.faulty import Fault, Faulty
from gradwire.drivers.interpreter import Interpreter, Script, Traffic, Transport, coalesced, run, script_of
from gradwire.drivers.lockstep import Meeting, VirtualTransport, outcomes, run_lockstep, together
from gradwire.drivers.timing import SimulatedMeeting
from gradwire.drivers.traced import Traced
from gradwire.ranks.supervised import run_function
from row_cases import SIZES, Sizes, asked, content, expected, sent

CASES = str(Path(__file__).with_name("row_cases.py"))


def scripts(several: list[Sizes], transports: list[Transport], traffic: list[Traffic]) -> list[Script[list[Tensor]]]:
    """Every rank's requests, in one wave."""

    def script(rank: int) -> Script[list[Tensor]]:
        programs = [asked(number, sizes, rank) for number, sizes in enumerate(several)]
        return Interpreter[Tensor](transports[rank], traffic[rank]).script(1, lambda _: programs)

    return [script(rank) for rank in range(len(transports))]


@pytest.mark.parametrize("checked", [False, True])
@pytest.mark.parametrize("several", SIZES.values(), ids=SIZES.keys())
def test_every_row_arrives_whole_at_its_rank(several: list[Sizes], checked: bool) -> None:
    meeting, traffic = Meeting(3), [Traffic() for _ in range(3)]
    plain: list[Transport] = [VirtualTransport(meeting, rank) for rank in range(3)]
    results = together(scripts(several, [Checked(way) for way in plain] if checked else plain, traffic))
    for rank, received in enumerate(results):
        for number, (part, sizes) in enumerate(zip(received, several, strict=True)):
            assert torch.equal(part, expected(number, sizes, rank))
    assert [each.wire_bytes for each in traffic] == [sent(several, rank) for rank in range(3)]
    assert [each.payload_bytes for each in traffic] == [sum(sum(s[rank]) for s in several) for rank in range(3)]


@pytest.mark.one_draw_in(3)
def test_processes_exchange_what_virtual_ranks_do() -> None:
    for rank, found in enumerate(run_function(f"{CASES}:exchanged", 3, {}, 90)):
        assert found == {name: [True, sent(several, rank)] * 2 for name, several in SIZES.items()}


@pytest.mark.one_draw_in(3)
def test_processes_exchange_within_their_sub_groups() -> None:
    sizes = [[1, 2], [0, 3]]
    for rank, found in enumerate(run_function(f"{CASES}:on_an_axis", 4, {}, 90)):
        place, first = rank % 2, rank - rank % 2
        rows = [content(0, first + source, place, sizes[source][place]) for source in range(2)]
        assert found == torch.cat(rows).tolist()


def test_virtual_ranks_exchange_within_their_sub_groups() -> None:
    axis = Axis(2, 2)  # 0 with 2, 1 with 3
    programs = [along(asked(0, [[1, 2], [0, 3]], axis.index(rank), name=rank), axis) for rank in range(4)]
    found = run_lockstep(programs)
    for rank in range(4):
        place, first = rank // 2, rank % 2
        rows = [content(0, first + 2 * source, place, nbytes) for source, nbytes in enumerate([[1, 0], [2, 3]][place])]
        assert torch.equal(found[rank], torch.cat(rows))


def test_requests_of_one_round_travel_as_one() -> None:
    first = AllToAllV(torch.arange(3, dtype=torch.uint8), (1, 2), (1, 4), place=0)
    second = AllToAllV(torch.arange(10, 15, dtype=torch.uint8), (0, 5), (0, 1), place=0)
    (batch,) = coalesced([(0, first), (1, second)])
    assert isinstance(batch.joined, AllToAllV)
    assert batch.joined.tensor.tolist() == [0, 1, 2, 10, 11, 12, 13, 14]
    assert (batch.joined.sends, batch.joined.receives) == ((1, 7), (1, 5))
    parts = batch.split(torch.arange(6, dtype=torch.uint8))
    assert [part.tolist() for part in parts] == [[0, 1, 2, 3, 4], [5]]


def test_one_request_is_not_copied() -> None:
    request = AllToAllV(torch.arange(3, dtype=torch.uint8), (1, 2), (1, 4), place=0)
    (batch,) = coalesced([(0, request)])
    assert batch.joined is request


# Without data -----------------------------------------------------------------------------------------------------


def meta(sizes: Sizes, place: int) -> AllToAllV:
    """A rank's request without data."""
    tensor = torch.empty(sum(sizes[place]), dtype=torch.uint8, device="meta")
    return AllToAllV(tensor, tuple(sizes[place]), tuple(row[place] for row in sizes), place)


def test_without_data_it_has_its_size_and_its_bytes() -> None:
    nowhere, traffic, sizes = MetaTransport(3, 1), Traffic(), SIZES["uneven"][0]
    programs = [once(meta(sizes, 1)), once(meta(sizes, 1))]
    results = run(Interpreter[Tensor](nowhere, traffic).script(1, lambda _: programs))
    assert [tuple(result.shape) for result in results] == [(8,), (8,)]
    assert traffic.wire_bytes == 2 * 8


def seconds(requests: list[AllToAllV] | list[AllToAll]) -> list[float]:
    """When each rank has what it asks for, on links of a byte a second with a latency of 10."""
    clocks = SimulatedMeeting(len(requests), Link(10.0, 1.0), {})
    together([script_of(once(request), VirtualTransport(clocks, rank)) for rank, request in enumerate(requests)])
    return clocks.now


def test_rows_of_one_size_take_the_time_of_an_all_to_all() -> None:
    even = torch.empty(3, 4, dtype=torch.uint8, device="meta")
    assert seconds([meta(SIZES["even"][0], rank) for rank in range(3)]) == seconds([AllToAll(even)] * 3) == [18.0] * 3


def test_a_rank_waits_for_its_own_rows_only() -> None:
    """Rank 0 sends 5 bytes, which arrive 10 seconds later; rank 1 sends 3; rank 2 has nothing to do."""
    assert seconds([meta(SIZES["one rank idle"][0], rank) for rank in range(3)]) == [13.0, 15.0, 0.0]


# Wrapped transports -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", [Fault("flip", 0.1), Fault("flip", 0.99), Fault("truncate")])
def test_a_checksum_names_the_sender_of_a_damaged_row(fault: Fault) -> None:
    """Rank 1 sends 8 bytes to rank 0 and 8 to rank 2: the first bits are rank 0's, and the last half is rank 2's."""
    sizes, meeting = [[0, 3, 0], [8, 0, 8], [1, 1, 1]], Meeting(3)
    ways = [Checked(Faulty(VirtualTransport(meeting, rank), {0: fault} if rank == 1 else {})) for rank in range(3)]
    found = outcomes([script_of(asked(0, sizes, rank), way) for rank, way in enumerate(ways)])
    damaged = 0 if fault == Fault("flip", 0.1) else 2
    error = found.pop(damaged)
    assert isinstance(error, PayloadError)
    assert "the AllToAllV payload of rank 1 was damaged on its way" in str(error)
    assert all(isinstance(other, Tensor) for other in found)


def test_a_trace_tells_what_was_waited_for() -> None:
    traced = Traced(VirtualTransport(Meeting(1), 0))
    assert run(script_of(asked(0, [[5]], 0), traced)).numel() == 5
    assert [(span.kind, span.what, span.nbytes) for span in traced.spans][-1] == ("wire", "AllToAllV", 5)


# Refusals ---------------------------------------------------------------------------------------------------------


def test_sizes_that_cannot_be_are_refused() -> None:
    three = torch.zeros(3, dtype=torch.uint8)
    for tensor, sends in ((three, (1, 1)), (three.view(1, 3), (1, 2)), (three.float(), (1, 2))):
        with pytest.raises(PayloadError, match="lay them end to end"):
            AllToAllV(tensor, sends, (1, 1), place=0)
    for receives in ((1, 1, 1), (2, 1)):
        with pytest.raises(PayloadError, match="name a size for each rank, and one size for the row that stays"):
            AllToAllV(three, (1, 2), receives, place=0)


def test_ranks_that_expect_other_sizes_are_found() -> None:
    first = AllToAllV(torch.zeros(3, dtype=torch.uint8), (1, 2), (1, 4), place=0)
    second = AllToAllV(torch.zeros(9, dtype=torch.uint8), (4, 5), (3, 5), place=1)
    with pytest.raises(AssertionError, match=r"rank 1 expects rows of \(3, 5\) bytes, and gets \(2, 5\)"):
        run_lockstep([once(first), once(second)])
