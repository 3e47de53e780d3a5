"""Those who talk in pairs: requests and replies, the carriers that move them, and the supervisor of their processes.

There is no mathematics here. A *protocol object* (`Served`) replies to requests, at once or later, and does no I/O. A
*carrier* moves requests and replies: in one process (`local`), over TCP or Unix sockets (`sockets`), by Ray, or with
faults that a seed draws (`faulty`). A *supervisor* starts processes, knows which are dead, and starts them anew.
"""
