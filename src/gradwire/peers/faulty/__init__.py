"""The carrier with faults, in simulated time: messages are lost, late, repeated and out of order, connections are cut,
and processes are killed, started anew, stopped and continued.

    network = FaultyNetwork(CarrierFaults(), seed=7)
    network.serve(lambda: PartServer(...))              # server 0; called again for each of its lives
    network.join(0, main, replies=ServerReply)          # peer 0
    network.plan_faults()
    network.run(end_s=60.0)

A peer's main function is a generator that yields where a real process would wait, and says for how long at most:

    def main(connections: FaultyConnections) -> Iterator[float]:
        connections.ask(0, request)
        while (arrived := connections.wait(0.0)) is None:
            yield 0.5

One seed draws everything, so a run that goes wrong can be repeated.
"""

from gradwire.peers.faulty.faults import CarrierFaults
from gradwire.peers.faulty.network import FaultyConnections, FaultyNetwork
from gradwire.peers.faulty.process import Process

__all__ = ["CarrierFaults", "FaultyConnections", "FaultyNetwork", "Process"]
