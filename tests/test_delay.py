"""Laws of links with delay and loss, and of links that differ, measured where an application would feel them."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import pytest

from gradwire import bench
from gradwire.bench import BenchOptions
from gradwire.core.errors import NetworkError
from gradwire.network import Network, parse_delay, parse_loss
from gradwire.network.delay_line import Large, Losses
from gradwire.network.delay_process import LineUse
from gradwire.ranks.supervised import run_ranks
from namespaces import needs_namespaces
from trials import unspoiled

SECONDS = pytest.mark.timeout(120)


def measured(script: str, network: Network, folder: Path, *words: object) -> list[Any]:
    """What the ranks of a network print, when each runs a script on its host."""
    argv = [sys.executable, "-I", "-S", "-c", script, *map(str, words)]
    ranks = range(network.hosts)
    run_ranks(
        [network.command(rank, argv) for rank in ranks],
        [network.environment(rank) for rank in ranks],
        log_dir=folder,
        deadline_s=40,
    )
    return [json.loads((folder / f"rank{rank}.log").read_text()) for rank in ranks]


# What hosts run ----------------------------------------------------------------------------------------------

ECHO = """
import json, os, socket, sys, time
rank, count = int(os.environ["RANK"]), int(sys.argv[1])
udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
udp.settimeout(20)
seconds = []
if rank == 0:
    udp.bind(("10.77.0.1", 5001))
    for _ in range(count):
        data, peer = udp.recvfrom(100)
        udp.sendto(data, peer)
else:
    udp.connect(("10.77.0.1", 5001))
    time.sleep(0.5)
    for _ in range(count):
        start = time.perf_counter()
        udp.send(b"ping")
        udp.recv(100)
        seconds.append(time.perf_counter() - start)
print(json.dumps(seconds))
"""

BULK = """
import hashlib, json, os, random, socket, sys, time
rank, size, address = int(os.environ["RANK"]), int(sys.argv[1]), ("10.77.0.1", 5000)
if rank == 0:
    data = random.Random(0).randbytes(size)
    peer, _ = socket.create_server(address).accept()
    peer.sendall(data)
    peer.recv(1)
    lines = [line.split() for line in open("/proc/net/snmp") if line.startswith("Tcp:")]
    print(json.dumps({name: int(value) for name, value in zip(*lines) if name in ("OutSegs", "RetransSegs")}))
elif rank == 1:
    while True:
        try:
            peer = socket.create_connection(address, timeout=30)
            break
        except ConnectionRefusedError:
            time.sleep(0.02)
    data, half = bytearray(), None
    while len(data) < size:
        data += peer.recv(1 << 20)
        if half is None and len(data) > size // 2:
            half = time.perf_counter(), len(data)
    rate = (size - half[1]) / (time.perf_counter() - half[0])
    peer.sendall(b"!")
    print(json.dumps({"bytes_per_s": rate, "digest": hashlib.sha256(data).hexdigest()}))
"""

SHOWER = """
import json, os, socket, sys, time
rank, count = int(os.environ["RANK"]), int(sys.argv[1])
udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
if rank == 0:
    udp.bind(("10.77.0.1", 5001))
    udp.settimeout(4)
    came = 0
    try:
        while True:
            udp.recv(100)
            came += 1
    except TimeoutError:
        print(json.dumps(came))
else:
    udp.connect(("10.77.0.1", 5001))
    time.sleep(1)
    for i in range(count):
        udp.send(b"x")
        time.sleep(0.002 if i % 20 == 0 else 0)
    print(json.dumps(count))
"""


# What is asked for is what there is --------------------------------------------------------------------------


@pytest.mark.one_draw_in(2)
@SECONDS
@pytest.mark.net
@pytest.mark.parametrize(("mode", "delay"), [("root", "50ms"), ("user", "50ms"), ("user", "10ms")])
def test_a_round_trip_takes_the_delay_within_5_percent(mode: Literal["root", "user"], delay: str, tmp_path: Path):
    needs_namespaces(mode)
    asked_s = parse_delay(delay)

    def median_s() -> float:
        with Network(2, "100mbit", mode=mode, delay=delay) as network:
            assert delay.removesuffix("ms") + " ms" in network.description
            return sorted(measured(ECHO, network, tmp_path, 31)[1])[15]

    assert 0.95 * asked_s < unspoiled(median_s, lambda found_s: found_s < 1.05 * asked_s) < 1.05 * asked_s


@pytest.mark.one_draw_in(3)
@SECONDS
@pytest.mark.net
def test_a_bulk_transfer_over_a_delay_has_the_rate_and_the_line_tells_what_it_costs(tmp_path: Path):
    """200 Mbit/s over 50 ms: TCP can reach 1448 of the 1514 bytes of each frame."""
    needs_namespaces()
    asked = 200e6 / 8 * 1448 / 1514

    def transferred() -> tuple[float, LineUse | None]:
        with Network(2, "200mbit", mode="user", delay="50ms") as network:
            received = measured(BULK, network, tmp_path, 75_000_000)[1]
            use = network.line_use()
        assert received["digest"] == hashlib.sha256(random.Random(0).randbytes(75_000_000)).hexdigest()
        return received["bytes_per_s"], use

    rate, use = unspoiled(transferred, lambda found: found[0] > 0.95 * asked)
    assert 0.95 * asked < rate < 1.05 * asked
    assert use is not None
    assert 0.02 < use.cpu_s < 3  # it takes 3.5 seconds; most of a processor is left to the ranks


@pytest.mark.one_draw_in(3)
@SECONDS
@pytest.mark.net
def test_single_frames_get_lost_at_the_rate_asked_for(tmp_path: Path):
    """Of 20000 frames 5% are 1000; five standard deviations are 154."""
    needs_namespaces()
    with Network(2, None, mode="user", loss="5%") as network:
        came, sent = measured(SHOWER, network, tmp_path, 20_000)
        assert "5 % of frames lost" in network.description
    assert sent - came == pytest.approx(1000, abs=154)


@SECONDS
@pytest.mark.net
def test_what_tcp_sends_again_is_what_got_lost_and_the_data_arrive_whole(tmp_path: Path):
    """Large packets lose single frames, not all of theirs: 1% of the segments is sent again, with some to spare."""
    needs_namespaces()
    with Network(2, "100mbit", mode="user", loss="1%") as network:
        sent, received = measured(BULK, network, tmp_path, 20_000_000)
    assert received["digest"] == hashlib.sha256(random.Random(0).randbytes(20_000_000)).hexdigest()
    frames = 20_000_000 / 1448
    assert 0.005 * frames < sent["RetransSegs"] < 0.02 * frames


@SECONDS
@pytest.mark.net
@pytest.mark.parametrize("delay", ["0", "5ms"])
def test_each_host_has_the_rate_of_its_own(delay: str, tmp_path: Path):
    """The slower end of a way decides: 20 Mbit/s from a host with 100 to one with 20.

    A machine whose neighbours take its processors lets less through. So a rate that is too low is compared with that
    of two hosts with 20 Mbit/s each, at the same time; `test_net.py` holds such links to what is asked.
    """
    needs_namespaces()
    asked = 20e6 / 8 * 1448 / 1514

    def rate_and_usual() -> tuple[float, float]:
        rate = bulk_rate("100mbit, 20mbit", delay, tmp_path)
        return rate, asked if rate > 0.93 * asked else min(bulk_rate("20mbit, 20mbit", delay, tmp_path), asked)

    rate, usual = unspoiled(rate_and_usual, lambda found: found[0] > 0.93 * found[1])
    assert 0.93 * usual < rate < 1.05 * asked


def bulk_rate(rates: str, delay: str, folder: Path) -> float:
    """Bytes a second from one host to another."""
    with Network(2, rates.split(", "), mode="user", delay=delay) as network:
        assert len(set(rates.split(", "))) == 1 or rates in network.description
        return measured(BULK, network, folder, 5_000_000)[1]["bytes_per_s"]


@pytest.mark.net
@pytest.mark.long
@pytest.mark.timeout(300)
def test_rates_of_emulated_links_are_found() -> None:
    """Three hosts: what two send each other shares a connection of Gloo's, which carries one way at a time."""
    needs_namespaces()
    options = BenchOptions(
        collectives=("all_reduce", "send_recv"), min_bytes="1M", max_bytes="1M", calls=4, hosts=3, rate="100mbit"
    )

    def rate() -> float:
        said = list[str]()
        (table,) = bench.launch(options, said.append)
        assert said == [table.network]
        (link,) = table.links
        assert link.level == "node"
        for row in table.rows:
            assert row.busbw is not None
            assert 0.008 < row.busbw < 0.0125  # GB/s; 100 Mbit/s are 0.0125
        return link.bits_per_s or 0.0

    assert unspoiled(rate, lambda found: found > 90e6) == pytest.approx(100e6, rel=0.1)


# Nothing is left behind --------------------------------------------------------------------------------------


def lines_of(tag: str) -> list[int]:
    """Process numbers of a network's delay lines."""
    found: list[int] = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            environment, words = (folder / "environ").read_bytes(), (folder / "cmdline").read_bytes()
        except OSError:
            continue
        if f"GRADWIRE_NET={tag}".encode() in environment.split(b"\0") and b"delay_line.py" in words:
            found.append(int(folder.name))
    return found


def soon(done: Any) -> bool:
    end = time.monotonic() + 20
    while not done() and time.monotonic() < end:
        time.sleep(0.02)
    return done()


CREATOR = """
import time
from gradwire.network import Network
with Network(2, mode="user", delay="5ms") as network:
    print(network.environment(0)["GRADWIRE_NET"], flush=True)
    time.sleep(100)
"""


@SECONDS
@pytest.mark.net
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_line_ends_with_its_creator_however_that_ends(number: signal.Signals):
    needs_namespaces()
    path = {"PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
    command = [sys.executable, "-c", CREATOR]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | path) as process:
        try:
            assert process.stdout is not None
            tag = process.stdout.readline().strip()
            assert len(lines_of(tag)) == 1
            process.send_signal(number)
            process.wait(20)
            assert soon(lambda: not lines_of(tag))
        finally:
            process.kill()


@SECONDS
@pytest.mark.net
def test_the_line_ends_with_the_block_and_one_that_was_killed_is_noticed():
    needs_namespaces()
    with Network(2, mode="user", delay="5ms") as network:
        tag = network.environment(0)["GRADWIRE_NET"]
        (line,) = lines_of(tag)
        assert network.line_use() is not None
        os.kill(line, signal.SIGKILL)
        with pytest.raises(NetworkError, match=f"delay line, process {line}, has failed"):
            network.line_use()
    with Network(2, mode="user", delay="5ms") as network:
        tag = network.environment(0)["GRADWIRE_NET"]
        assert len(lines_of(tag)) == 1
    assert not lines_of(tag)


@SECONDS
@pytest.mark.net
def test_a_network_without_delay_has_no_line():
    needs_namespaces()
    with Network(2, mode="user") as network:
        assert network.line_use() is None
        assert not lines_of(network.environment(0)["GRADWIRE_NET"])
        assert "bridge" in network.description


# Arguments ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"delay": "50"}, r"delay '50' cannot be emulated: write a number and a unit of us, ms, s, from 1ms to 10s"),
        ({"delay": "100us"}, "from 1ms to 10s"),
        ({"delay": "11s"}, "from 1ms to 10s"),
        ({"delay": "-5ms"}, "from 1ms to 10s"),
        ({"delay": "10s", "rate": "10gbit"}, "11.6 GiB would be on their way at a time, and 1 GiB is"),
        ({"loss": "0.1"}, "loss '0.1' cannot be used: write per cent from 0% to 50%"),
        ({"loss": "51%"}, "from 0% to 50%"),
        ({"loss": "-1%"}, "from 0% to 50%"),
        ({"mode": "paced", "delay": "5ms"}, "paced sockets have neither delay nor loss"),
        ({"mode": "paced", "loss": "1%"}, "paced sockets have neither delay nor loss"),
        ({"rate": ["100mbit"]}, "there are 1 rates for 2 hosts"),
        ({"rate": ["100mbit", "fast"]}, "rate 'fast'"),
    ],
)
def test_what_cannot_be_emulated_is_refused_before_anything_is_made(arguments: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        Network(2, **arguments)


def test_without_tools_a_delay_is_not_dropped_for_paced_sockets(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NetworkError, match="iproute2"):
        Network(2, delay="5ms").__enter__()


@pytest.mark.parametrize(
    ("text", "seconds"), [("50ms", 0.05), ("1.5 s", 1.5), ("2000us", 0.002), ("0", 0.0), ("0ms", 0.0)]
)
def test_a_delay_is_read_as_tc_reads_it(text: str, seconds: float):
    assert parse_delay(text) == pytest.approx(seconds)


@pytest.mark.parametrize(("text", "share"), [("0.1%", 0.001), ("50 %", 0.5), ("0", 0.0)])
def test_a_loss_is_read_as_per_cent(text: str, share: float):
    assert parse_loss(text) == pytest.approx(share)


# Losses ------------------------------------------------------------------------------------------------------


def test_losses_do_not_depend_on_how_frames_are_packed():
    """5% of 20000 are 1000; five standard deviations are 154."""
    single, packed = Losses(0.05), Losses(0.05)
    alone = [i for i in range(20_000) if single.among(1)]
    together = [8 * i + lost for i in range(2_500) for lost in packed.among(8)]
    assert alone == together
    assert len(alone) == pytest.approx(1000, abs=154)


def large_packet(payload: bytes, frame_bytes: int, flags: int) -> bytes:
    """A TCP packet as the kernel hands it to a packet socket, its checksum not yet complete."""
    options = b"\x01\x01\x08\x0a" + bytes(8)
    tcp = struct.pack("!HHIIBBHHH", 5000, 6000, 2**32 - 1000, 7, 8 << 4, flags, 100, 0, 0) + options
    ip = struct.pack(
        "!BBHHHBBH4s4s", 0x45, 0, 52 + len(payload), 65535, 0x4000, 64, 6, 0, b"\x0a\x4d\0\1", b"\x0a\x4d\0\2"
    )
    return struct.pack("=BBHHHH", 1, 1, 66, frame_bytes, 34, 16) + bytes(12) + b"\x08\0" + ip + tcp + payload


def summed(*parts: bytes) -> int:
    total = sum(int.from_bytes(part[i : i + 2]) for part in parts for i in range(0, len(part), 2))
    return total % 0xFFFF


@pytest.mark.parametrize("lost", [[0], [4], [2], [1, 3], [0, 1, 2, 3], [0, 1, 2, 3, 4]])
def test_the_parts_of_a_cut_packet_are_packets_of_their_own(lost: Sequence[int]):
    fin, psh, ack, cwr = 0x01, 0x08, 0x10, 0x80
    payload = bytes(range(250)) * 2
    packet = large_packet(payload[:450], 100, fin | psh | ack | cwr)
    large = Large.read(packet)
    assert large is not None
    assert large.frames == 5
    kept: dict[int, bytes] = {}
    for part in large.without(lost):
        kind, size = part[1], int.from_bytes(part[4:6], sys.byteorder)
        ip, tcp, data = part[24:44], part[44:76], part[76:]
        first = (int.from_bytes(tcp[4:8]) - (2**32 - 1000)) % 2**32 // 100
        frames = -(-len(data) // 100)
        assert (kind, size) == ((1, 100) if frames > 1 else (0, 0))
        assert int.from_bytes(ip[2:4]) == 52 + len(data)
        assert int.from_bytes(ip[4:6]) == (65535 + first) % 65536
        assert summed(ip) == 0  # a header whose sum is right adds up to nothing
        assert int.from_bytes(tcp[16:18]) == summed(ip[12:20], b"\0\6", (32 + len(data)).to_bytes(2))
        assert bool(tcp[13] & fin) == bool(tcp[13] & psh) == (first + frames == 5)
        assert bool(tcp[13] & cwr) == (first == 0)
        kept |= {first + i: data[100 * i : 100 * i + 100] for i in range(frames)}
    assert sorted(kept) == [i for i in range(5) if i not in lost]
    assert all(data == payload[:450][100 * i : 100 * i + 100] for i, data in kept.items())
