"""Several hosts on one Linux machine, joined by links of given rates, delay and loss.

Each host is a network namespace with one interface, `eth0`; a further namespace is the switch. The machine's
own firewall, addresses and interfaces are never touched::

    host 0 [eth0 | tbf] === [tbf | port0]                       tbf: the queue that lets `rate` through,
    host 1 [eth0 | tbf] === [tbf | port1]  switch                    one for each direction of each link,
    host 2 [eth0 | tbf] === [tbf | port2]                            so every link is full duplex

The switch is a bridge of the kernel. Where delay or loss is asked for it is a process, the *delay line*, that takes
frames from one port, holds them, and puts them out by another (`delay_line.py`).

Groups of hosts may reach each other over links that their hosts share (`Uplinks`): the switch then has a bridge for
each group, from which a link of the same kind goes to the bridge above.

No name is written anywhere: a namespace lives as long as its *holder*, a shell that waits for the end of its
standard input, which comes when the creator ends, however it ends; so does the delay line. What can outlive a killed
creator are the commands it started on the hosts; they carry its name in `GRADWIRE_NET`, and `clean` removes them.
"""

from gradwire.core.rates import parse_rate
from gradwire.network.links import Links, Uplinks
from gradwire.network.network import Network
from gradwire.network.processes import clean
from gradwire.network.units import parse_delay, parse_loss

__all__ = ["Links", "Network", "Uplinks", "clean", "parse_delay", "parse_loss", "parse_rate"]
