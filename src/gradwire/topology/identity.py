"""By what a rank knows the host that it runs on, so that ranks can tell whether they share one."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import msgspec

from gradwire.core.checked import thread_safe
from gradwire.core.errors import TopologyError
from gradwire.topology.sysfs import text_of

NODE_VARIABLE = "GRADWIRE_NODE"
"""Names the node of a rank, in place of all that is found."""


@dataclass(frozen=True)
class HostIdentity:
    """What tells a host from others.

    A machine has one boot id until it starts anew, but its containers, and hosts that are emulated on it, have the
    same one. Each of these has a network of its own, so the inode of the network namespace belongs to the identity:
    what lies between two of them is a link. The host name tells copies of a virtual machine apart, which go on from one
    saved state and so have its boot id. Where all of this is equal and the machines are not, or where containers are
    to count as one node, `GRADWIRE_NODE` says so.

    Attributes:
        hostname: as the kernel has it.
        boot_id: random, new at each start; None where it cannot be read.
        network_namespace: inode; None where it cannot be read.
        node: what `GRADWIRE_NODE` says.

    >>> HostIdentity("a", "7f", 4026531840) == HostIdentity("a", "7f", 4026532201)
    False
    >>> HostIdentity("a", node="left").key == HostIdentity("b", node="left").key
    True
    """

    hostname: str | None
    boot_id: str | None = None
    network_namespace: int | None = None
    node: str | None = None

    @classmethod
    def here(cls, proc: Path = Path("/proc"), environment: Mapping[str, str] = os.environ) -> Self:
        """The host of this process.

        Args:
            proc: where procfs is mounted.
            environment: variables of this process.
        """
        try:
            inode = os.stat(proc / "self" / "ns" / "net").st_ino
        except OSError:
            inode = None
        boot_id = text_of(proc / "sys" / "kernel" / "random" / "boot_id")
        node = environment.get(NODE_VARIABLE, "").strip() or None
        return cls(socket.gethostname() or None, boot_id, inode, node)

    @property
    def key(self) -> str:
        """A text that is equal on ranks which share a node, and on no others.

        Raises:
            TopologyError: nothing is known.
        """
        if self.node is not None:
            return f"node {self.node}"
        if self.hostname is None and self.boot_id is None:
            raise TopologyError(
                f"a rank knows neither its host name nor its boot id: set {NODE_VARIABLE} on every rank"
            )
        return f"host {self.hostname} boot {self.boot_id} net {self.network_namespace}"

    @property
    def machine(self) -> str:
        """A text that is equal on ranks whose processes share processors: hosts that are emulated on one machine do.

        >>> HostIdentity("a", "7f", 1, "left").machine == HostIdentity("a", "7f", 2, "right").machine
        True
        """
        return f"host {self.hostname} boot {self.boot_id}"

    @property
    def name(self) -> str:
        """What people call it."""
        return self.node or self.hostname or "a host without a name"

    @property
    def full_name(self) -> str:
        """The name with the network namespace, which tells emulated hosts and containers of one name apart."""
        return (
            self.name if self.node or self.network_namespace is None else f"{self.name} (net {self.network_namespace})"
        )

    def to_words(self) -> dict[str, Any]:
        """The same as plain data, for JSON."""
        return asdict(self)

    @classmethod
    def of_words(cls, words: Mapping[str, Any]) -> Self:
        """What `to_words` made.

        Raises:
            TopologyError: another program's data.
        """
        try:
            return msgspec.convert(dict(words), thread_safe(cls))
        except msgspec.ValidationError as error:
            raise TopologyError("what a rank says of its host has other fields: versions of gradwire differ") from error
