"""The flight recorder's ring, its files, and what the records of all ranks say, without ranks."""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import threading
from pathlib import Path

import pytest

from gradwire.cli.main import main
from gradwire.core.errors import FlightError
from gradwire.core.rank_files import rank_file, rank_files
from gradwire.flight import FlightRecord, Recorder, judge, stacks_of
from gradwire.flight.doing import doing_in_trouble
from gradwire.flight.earlier import MOST_EARLIER, earlier_runs
from gradwire.flight.keeping import Keeper
from gradwire.flight.record import Event, LaneState, NotFinite, ThreadStack, read_record
from gradwire.flight.recorder import LaneLog

NOW_S = 1000.0
FRAMES = ["/home/me/train.py:37 in load: next(rows)"]


def lane(issued: int = 5, *, waits: bool = False, name: str = "a", meets: str = "", step: int = 3) -> LaneState:
    return LaneState(
        name=name,
        what="gradwire.attach",
        ranks=[0, 1, 2],
        step=step,
        in_step=waits,
        issued=issued,
        taken=issued - waits,
        waits=waits,
        sequence=issued,
        collective="AllReduce",
        nbytes=400,
        meets=meets,
        since_s=NOW_S - 31.0,
        ended=False,
    )


def record(rank: int, *lanes: LaneState, state: str = "died", **fields: object) -> FlightRecord:
    made = FlightRecord(
        run="0123456789",
        rank=rank,
        world_size=3,
        host=socket.gethostname(),
        pid=os.getpid(),
        state=state,
        why="CommunicationError: it hangs",
        own=False,
        written_s=NOW_S,
        lanes=list(lanes),
        threads=[ThreadStack("MainThread", FRAMES), ThreadStack("gradwire-communication", ["x.py:1 in wait"])],
        events=[Event(0, NOW_S, "a", "issued", "AllReduce", 1, 400, 0)],
    )
    return dataclasses.replace(made, **fields)  # type: ignore[arg-type]


def by_rank(*records: FlightRecord) -> dict[int, FlightRecord]:
    return {each.rank: each for each in records}


# Who differs ---------------------------------------------------------------------------------------------------------

WAITING = [record(0, lane(6, waits=True)), record(1, lane(6, waits=True))]


def test_a_rank_that_waits_nowhere_is_behind() -> None:
    found = judge(by_rank(*WAITING, record(2, lane(5))))
    assert (found.kind, found.ranks) == ("behind", (2,))
    counts = "it has started 5 collectives of gradwire.attach, and ranks 0 and 1 6"
    where = "it is after step 3 of gradwire.attach for 31 s; its main thread is in load (train.py:37)"
    assert found.sentence == f"rank 2 is behind: {counts}; {where}"
    assert found.lines[0].doing.startswith("waits for AllReduce 6 of 400 bytes in step 3 of gradwire.attach for 31 s")
    assert str(found).endswith("rank 2, MainThread:\n  /home/me/train.py:37 in load: next(rows)")


def test_of_two_that_are_behind_the_one_that_is_further_behind_is_told_first() -> None:
    found = judge(by_rank(WAITING[0], record(1, lane(5)), record(2, lane(4, step=2))))
    assert found.ranks == (2, 1)
    assert found.sentence.startswith("rank 2 is behind: it has started 4 collectives")


def test_a_rank_that_has_ended_while_others_wait_is_behind() -> None:
    found = judge(by_rank(*WAITING, record(2, lane(5), state="ended")))
    assert (found.kind, found.ranks) == ("behind", (2,))
    assert "its process has ended, and before that it is after step 3" in found.sentence


def test_a_rank_that_is_ahead_because_its_result_came_is_not_at_fault() -> None:
    found = judge(by_rank(*WAITING, record(2, lane(6))))
    assert (found.kind, found.ranks) == ("alike", ())


def test_ranks_that_all_wait_for_the_same_do_not_differ() -> None:
    found = judge(by_rank(*WAITING, record(2, lane(6, waits=True), written_s=NOW_S + 9.0)))
    assert (found.kind, found.ranks) == ("alike", ())
    assert "all wait for AllReduce 6 of gradwire.attach, rank 2 for 40 s" in found.sentence


def test_other_collectives_under_one_number_are_named() -> None:
    events = [Event(n, NOW_S, "a", "issued", "AllReduce", n, 400, 0) for n in (1, 2)]
    other = [events[0], Event(2, NOW_S, "a", "issued", "AllGather", 2, 96, 0)]
    records = [record(r, lane(2, waits=True), events=other if r == 1 else events) for r in range(3)]
    found = judge(by_rank(*records))
    assert (found.kind, found.ranks) == ("different collectives", (1,))
    assert "collective 2 of gradwire.attach is not the same on all ranks" in found.sentence
    assert "rank 0 has AllReduce of 400 bytes; rank 1 has AllGather" in found.sentence


@pytest.mark.parametrize(("what", "differs"), [("AllReduce", True), ("AllToAllV", False)])
def test_sums_have_the_same_size_on_all_ranks_and_messages_need_not(what: str, differs: bool) -> None:
    records = [
        record(r, lane(1, waits=True), events=[Event(1, NOW_S, "a", "issued", what, 1, 400 + r, 0)]) for r in range(3)
    ]
    assert (judge(by_rank(*records)).kind == "different collectives") == differs


def test_ranks_that_wait_for_each_other_in_two_lanes_are_named() -> None:
    here = [record(r, lane(6, waits=True), lane(3, name="b")) for r in (0, 1)]
    found = judge(by_rank(*here, record(2, lane(5), lane(4, waits=True, name="b"))))
    assert (found.kind, found.ranks) == ("different collectives", (2,))
    assert "ranks 0 and 1: waits for AllReduce 6" in found.sentence
    assert "rank 2: waits for AllReduce 4" in found.sentence


def test_a_call_to_which_one_rank_does_not_come_is_named() -> None:
    saving = [record(r, lane(6, meets="gradwire.save")) for r in (0, 1)]
    found = judge(by_rank(*saving, record(2, lane(6))))
    assert (found.kind, found.ranks) == ("behind", (2,))
    assert found.sentence.startswith("rank 2 has not come to gradwire.save, where ranks 0 and 1 wait for it; it is aft")
    found = judge(by_rank(*saving, record(2, lane(7, waits=True))))
    assert (found.kind, found.ranks) == ("different collectives", (2,))
    assert "ranks 0 and 1: waits for the other ranks in gradwire.save" in found.sentence


def test_an_exception_of_its_own_comes_before_what_follows_from_it() -> None:
    failed = record(2, lane(5), own=True, why="ValueError: bad", written_s=NOW_S - 2.0)
    also = record(1, lane(5), own=True, why="OSError: later")
    found = judge(by_rank(WAITING[0], also, failed))
    assert (found.kind, found.ranks, found.sentence) == ("failed", (2,), "rank 2 failed in step 3: ValueError: bad")


def test_a_rank_without_a_record_was_killed() -> None:
    found = judge(by_rank(*WAITING))
    assert (found.kind, found.ranks) == ("no record", (2,))
    assert "rank 2 left no record: it never made a session, or it was killed (SIGKILL" in found.sentence
    assert found.lines[2].doing == "has left no record"


GONE = 2**22 + 7
"""The number of no process: the kernel's end at 2^22."""


@pytest.mark.parametrize(
    ("fields", "kind", "said"),
    [
        ({"pid": GONE}, "killed", "the process is gone: it was killed (SIGKILL"),
        ({"host": "elsewhere"}, "unanswered", "look at host elsewhere"),
        ({}, "unanswered", "inside of C code that keeps Python's lock"),
    ],
)
def test_a_rank_that_wrote_nothing_when_the_others_died(fields: dict[str, object], kind: str, said: str) -> None:
    found = judge(by_rank(*WAITING, record(2, lane(5), state="running", **fields)))
    assert (found.kind, found.ranks) == (kind, (2,))
    assert said in found.sentence


def test_a_rank_that_answered_when_the_others_died_is_judged_by_what_it_did() -> None:
    found = judge(by_rank(*WAITING, record(2, lane(5), state="running", answers="0123456789/1")))
    assert (found.kind, found.ranks) == ("behind", (2,))


def test_ranks_of_a_run_that_goes_on_are_not_called_silent() -> None:
    running = [record(r, lane(6), state="running") for r in range(3)]
    assert judge(by_rank(*running)).kind == "alike"
    assert judge(by_rank(*running), token="x").kind == "unanswered"


def test_ranks_that_were_all_killed_are_named() -> None:
    found = judge(by_rank(*(record(r, lane(6), state="running", pid=GONE) for r in range(3))))
    assert (found.kind, found.ranks) == ("killed", (0, 1, 2))


def worker(number: int, *lanes: LaneState, state: str = "running", **fields: object) -> FlightRecord:
    return record(number, *lanes, state=state, world_size=number + 1, comes_and_goes=True, **fields)


def of(workers: list[int], state: LaneState, *, ended: bool = False) -> LaneState:
    return dataclasses.replace(state, ranks=workers, ended=ended)


def test_workers_that_the_others_have_gone_on_without_are_no_cause() -> None:
    """Worker 1 was killed and 2 has failed, in a list of workers that is no more; of those at hand 3 is late."""
    old, new = of([0, 1, 2], lane(4, waits=True), ended=True), of([0, 3], lane(name="b", waits=True))
    gone = [worker(1, pid=GONE), worker(2, old, state="died", own=True, why="ValueError: bad")]
    late = worker(3, of([0, 3], lane(4, name="b")))
    found = judge(by_rank(worker(0, old, new), *gone, late))
    assert (found.kind, found.ranks) == ("behind", (3,))
    assert found.notes == ["the others have gone on without ranks 1 and 2"]
    assert [line.rank for line in found.lines] == [0, 1, 2, 3]


def test_a_worker_that_the_others_still_count_on_is_named() -> None:
    at_hand = worker(0, of([0, 3], lane(name="b", waits=True)))
    killed = judge(by_rank(at_hand, worker(3, pid=GONE)))
    assert (killed.kind, killed.ranks, killed.notes) == ("killed", (3,), [])
    assert judge(by_rank(at_hand)).ranks == (3,)  # which has left no record at all


def test_workers_that_have_all_failed_are_judged_as_ranks_are() -> None:
    failed = worker(0, of([0, 3], lane()), state="died", own=True, why="ValueError: bad")
    assert judge(by_rank(failed, worker(3, pid=GONE))).kind == "failed"


def test_numbers_of_workers_need_not_agree_on_how_many_there_are(tmp_path: Path) -> None:
    for each in (worker(0, lane()), worker(5, lane())):
        each.write(tmp_path)
    assert read_record(rank_file(tmp_path, 5)).comes_and_goes
    assert [line.rank for line in stacks_of(tmp_path).lines if line.state == "running"] == [0, 5]


def test_a_rank_that_alone_was_told_to_end_is_named() -> None:
    found = judge(by_rank(*WAITING, record(2, lane(6, waits=True), why="was ended by SIGTERM")))
    assert (found.kind, found.ranks) == ("terminated", (2,))
    assert found.sentence.startswith("rank 2 was ended by SIGTERM")


def test_the_first_tensor_that_was_not_finite_is_passed_on() -> None:
    late, early = NotFinite(9, None, "w", "after the exchange"), NotFinite(7, 1, "v", "before the exchange")
    records = [record(0, not_finite=late), record(1, not_finite=early), record(2)]
    notes = judge(by_rank(*records)).notes
    assert notes == ["rank 1's gradient of 'v' was not finite in step 7, before the exchange"]


# Files ---------------------------------------------------------------------------------------------------------------


def refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["stacks", str(folder)]) == 2
    said = capsys.readouterr().err
    assert said.startswith("gradwire: ")
    assert said.count("\n") == 1
    return said


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    written = record(1, lane(), not_finite=NotFinite(9, None, "w", "after the exchange"))
    written.write(tmp_path)
    assert read_record(rank_file(tmp_path, 1)) == written


def test_the_command_names_the_rank_and_shows_its_stack(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for each in (*WAITING, record(2, lane(5))):
        each.write(tmp_path)
    assert main(["stacks", str(tmp_path)]) == 1
    said = capsys.readouterr().out
    assert said.startswith("rank 2 is behind: ")
    assert "train.py:37 in load: next(rows)" in said
    assert "gradwire-communication" not in said
    assert main(["stacks", str(tmp_path), "--threads"]) == 1
    assert capsys.readouterr().out.count("gradwire-communication") == 3
    assert main(["stacks", str(tmp_path), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["ranks"] == [2]


def test_no_records_are_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for folder in (tmp_path, tmp_path / "none"):
        assert f"there are no records in {folder}: set GRADWIRE_RECORDS=" in refused(folder, capsys)


def test_ranks_that_do_not_belong_together_are_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record(0).write(tmp_path)
    record(1, world_size=2).write(tmp_path)
    said = "rank0.json is of run 01234567 with 3 ranks, and rank1.json is of run 01234567 with 2 ranks: remove the file"
    assert said in refused(tmp_path, capsys)


def test_a_rank_that_has_not_come_back_is_none_of_the_newest_run(tmp_path: Path) -> None:
    for rank in (0, 2):
        record(rank, lane(6, waits=True), run="newest", written_s=NOW_S + 9).write(tmp_path)
    record(1, run="before").write(tmp_path)
    found = stacks_of(tmp_path)
    assert (found.kind, found.ranks) == ("no record", (1,))
    assert found.notes == ["rank1.json is of an earlier run, and is left out"]


def test_a_run_in_the_same_folder_keeps_the_records_of_the_runs_before(tmp_path: Path) -> None:
    """Three ranks, and then fewer and fewer runs of two: each rank moves its own record, rank 0 that of rank 2."""
    for rank in range(3):
        record(rank, run="aaaa/../0123456789").write(tmp_path)
    rank_file(tmp_path, 2).write_text("cut off")
    for number in range(MOST_EARLIER + 3):
        for rank in (1, 0):
            keeper = Keeper(Recorder(), tmp_path, f"{number:08x}", rank, 2)
            keeper.belongs(tmp_path, f"{number + 1:08x}", rank, 2)
            assert keeper.problem == ""
            path = rank_file(tmp_path, rank)
            assert read_record(path).run == f"{number + 1:08x}"
            os.utime(path, (number, number))
        if number == 0:
            assert {each.name: set(rank_files(each)) for each in earlier_runs(tmp_path)} == {
                "aaaa0123": {0, 1},
                "unknown": {2},
            }
            found = stacks_of(tmp_path / "earlier" / "aaaa0123")
            assert found.lines[1].why == "CommunicationError: it hangs"
    kept = earlier_runs(tmp_path)
    assert len(kept) == MOST_EARLIER
    assert all(set(rank_files(each)) == {0, 1} for each in kept if each.name != "unknown")
    (note,) = stacks_of(tmp_path).notes
    assert note.startswith("there are records of 8 earlier runs too: gradwire stacks ")


def test_an_answer_that_comes_after_the_end_does_not_say_that_the_rank_goes_on(tmp_path: Path) -> None:
    """A thread answers who asks, and may be slower than the end of the process."""
    keeper = Keeper(Recorder(), tmp_path, "a", 0, 1)
    answer = keeper.seen("asked by gradwire stacks")
    keeper.ended()
    keeper.write(answer)
    assert read_record(rank_file(tmp_path, 0)).state == "ended"
    keeper.belongs(tmp_path, "b", 0, 1)  # another run may begin
    assert read_record(rank_file(tmp_path, 0)).state == "running"


DAMAGED = {
    "cut off": ('{"format": "gradwire flight record 1", "run": "a", "ra', "is cut off, or no JSON"),
    "binary": (b"\x80\x04\x95\xff\x00", "is cut off, or no JSON"),
    "empty": ("", "is cut off, or no JSON"),
    "deep": ("[" * 100_000, "is cut off, or no JSON"),
    "a list": ("[1, 2]", "is not a record of this version of gradwire"),
    "another version": ('{"format": "gradwire flight record 2"}', "is not a record of this version of gradwire"),
    "without fields": ('{"format": "gradwire flight record 1"}', "rank1.json has no 'run'"),
}


@pytest.mark.parametrize("kind", DAMAGED)
def test_a_damaged_record_is_a_sentence_and_the_others_are_read(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    body, said = DAMAGED[kind]
    rank_file(tmp_path, 1).write_bytes(body if isinstance(body, bytes) else body.encode())
    assert said in refused(tmp_path, capsys)
    for rank in (0, 2):
        record(rank, lane(6, waits=True)).write(tmp_path)
    found = stacks_of(tmp_path)
    assert len(found.notes) == 1
    assert said in found.notes[0]
    assert found.ranks == (1,)


def test_texts_of_a_record_move_no_cursor_and_types_are_checked(tmp_path: Path) -> None:
    record(1, why="bad\x1b[2J\rgood").write(tmp_path)
    assert read_record(rank_file(tmp_path, 1)).why == "bad?[2J?good"
    path = rank_file(tmp_path, 1)
    path.write_text(json.dumps({**json.loads(path.read_text()), "pid": "1234"}))
    with pytest.raises(FlightError, match=r"rank1.json.pid should be a whole number, not '1234'; remove it"):
        read_record(path)


def test_a_record_under_another_ranks_name_is_refused(tmp_path: Path) -> None:
    record(1).write(tmp_path)
    rank_file(tmp_path, 1).rename(rank_file(tmp_path, 2))
    with pytest.raises(FlightError, match="says that it is of rank 1 of 3: give it its own name"):
        read_record(rank_file(tmp_path, 2))


# The ring ------------------------------------------------------------------------------------------------------------


def test_the_ring_keeps_the_last_thousand_events_and_no_more() -> None:
    recorder = Recorder()
    log = recorder.lane("a", "gradwire.attach", [0])
    for step in range(700):
        log.step_began(step)
        number = log.issue("AllReduce", 4)
        log.wait(number, "AllReduce", 4)
        log.take(number, "AllReduce", 4)
        log.step_ended()
    events = recorder.events()
    assert [event.number for event in events] == list(range(2500, 3500))
    assert events[-1] == dataclasses.replace(events[-1], event="step ended", step=699, sequence=700)
    assert (log.issued, log.taken, log.state().in_step) == (700, 700, False)


def test_many_threads_lose_no_event() -> None:
    recorder = Recorder(4000)
    logs = [recorder.lane(str(number), "gradwire.attach", [0]) for number in range(4)]

    def thousand(log: LaneLog) -> None:
        for _ in range(1000):
            log.issue("AllReduce", 4)

    threads = [threading.Thread(target=thousand, args=(log,)) for log in logs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    events = recorder.events()
    assert [event.number for event in events] == list(range(4000))
    assert all(sum(event.lane == log.name for event in events) == 1000 for log in logs)


def test_lanes_that_ended_long_ago_are_forgotten() -> None:
    recorder = Recorder()
    kept = recorder.lane("kept", "gradwire.attach", [0])
    for number in range(100):
        recorder.lane(str(number), "gradwire.Session", [0]).end()
    assert recorder.lanes[0] is kept
    assert len(recorder.lanes) == 17
    assert recorder.lanes[-1].name == "99"


def test_what_a_lane_waits_for_stays_when_it_fails() -> None:
    log = Recorder().lane("a", "gradwire.attach", [0, 1])
    log.step_began(4)
    number = log.issue("AllGather", 1234)
    log.wait(number, "AllGather", 1234)
    log.lose(number, "AllGather", 1234)
    assert log.waits
    assert log.state().called == "waits for AllGather 1 of 1,234 bytes in step 4 of gradwire.attach"
    log.take(number, "AllGather", 1234)
    assert (
        log.state().called
        == "is in step 4 of gradwire.attach, waits for no collective, and has started AllGather 1 last"
    )


def test_the_first_of_several_failures_tells_where_the_rank_was(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Recorder()
    monkeypatch.setattr("gradwire.flight.doing.recorder", lambda: found)
    log = found.lane("a", "gradwire.attach", [0, 1])
    log.wait(log.issue("AllReduce", 4), "AllReduce", 4)
    first, stack = doing_in_trouble(60.0)
    assert first.startswith("waits for AllReduce 1 of 4 bytes before the first step of gradwire.attach for 0.0 s")
    assert "test_the_first_of_several_failures" in stack
    log.take(1, "AllReduce", 4)
    assert doing_in_trouble(60.0) == (first, stack)
    assert doing_in_trouble(0.0)[0].startswith("is before the first step of gradwire.attach")
