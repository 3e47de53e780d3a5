"""The carrier over TCP and Unix sockets: a server in an event loop, and peers that send and wait in their own thread.

Behind the greeting (`gradwire.peers.greeting`) both ends send frames (`frames`). Who has sent nothing for `silent_s` is
taken for lost, as is who closes the connection. On one machine, long records lie in shared memory (`SharedRows`), so
that they are not copied by the kernel.
"""

from gradwire.peers.sockets.connections import SocketConnections
from gradwire.peers.sockets.frames import SILENT_S, Address, Inbox, SharedRows, framed, shown
from gradwire.peers.sockets.server import SocketServer, listening

__all__ = [
    "SILENT_S",
    "Address",
    "Inbox",
    "SharedRows",
    "SocketConnections",
    "SocketServer",
    "framed",
    "listening",
    "shown",
]
