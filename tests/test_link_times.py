"""Links as gradwire measures them, beside what plain sockets see: to a few percent, so alone on the machine."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from gradwire.network import Network
from gradwire.ranks.supervised import run_function, run_ranks
from namespaces import needs_namespaces
from trials import unspoiled

CASES = Path(__file__).with_name("topology_cases.py")

PING_PONG = """
import json, os, socket, statistics, sys, time
rank, bulk, peer = int(os.environ["RANK"]), int(sys.argv[1]), None
address = ("10.77.0.1", 5000)

def receive(size):
    while size:
        size -= len(peer.recv(min(size, 1 << 20)))

def message(size):
    if rank:
        began = time.perf_counter()
        peer.sendall(bytes(size))
        receive(8)
        return time.perf_counter() - began
    receive(size)
    peer.sendall(bytes(8))
    return 0.0

if rank < 2:
    if rank == 0:
        peer, _ = socket.create_server(address).accept()
    while peer is None:
        try:
            peer = socket.create_connection(address, timeout=30)
        except ConnectionRefusedError:
            time.sleep(0.02)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    trips = [message(8) for _ in range(60)][10:]
    times = [(message(bulk), message(3 * bulk)) for _ in range(6)][1:]
    one, three = map(statistics.median, zip(*times))
    print(json.dumps([statistics.median(trips) / 2, (three - one) / (2 * bulk)]))
"""


def ping_pong(network: Network, nbytes: int, folder: Path) -> list[float]:
    """Latency one way and seconds a byte between hosts 0 and 1, by plain sockets."""
    argv = [sys.executable, "-I", "-S", "-c", PING_PONG, str(nbytes)]
    commands = [network.command(rank, argv) for rank in range(2)]
    run_ranks(commands, [network.environment(rank) for rank in range(2)], log_dir=folder, deadline_s=60)
    return json.loads((folder / "rank1.log").read_text())


@pytest.mark.long
@pytest.mark.net
@pytest.mark.timeout(400)
@pytest.mark.parametrize(("rate", "delay"), [("50mbit", "10ms"), ("20mbit", "40ms"), ("100mbit", "4ms")])
def test_links_are_those_that_plain_sockets_see(rate: str, delay: str, tmp_path: Path) -> None:
    """Rates within 5%, latencies within 20%, and within seconds."""
    needs_namespaces()

    def ours_and_theirs() -> tuple[list[float], list[float], float]:
        with Network(4, rate, delay=delay) as network:
            found = run_function(f"{CASES}:links", 4, {}, 100, network)
            theirs = ping_pong(network, int(float(rate.removesuffix("mbit")) * 20_000), tmp_path)
        assert found[0]["groups"] == [[0], [1], [2], [3]]
        assert all(each["links"] == found[0]["links"] for each in found)
        assert found[0]["pairs"] == {"node": [[0, 1], [2, 3]]}
        return found[0]["links"]["node"], theirs, found[0]["seconds"]

    def are_near(found: tuple[list[float], list[float], float]) -> bool:
        ours, (alpha_s, beta_s), _ = found
        return abs(ours[0] - alpha_s) < 0.2 * alpha_s and abs(ours[1] - beta_s) < 0.05 * beta_s

    assert unspoiled(ours_and_theirs, are_near)[2] < 20
