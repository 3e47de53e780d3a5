"""How a connection begins: both ends say who they are, and prove that they know the run's secret.

    server to peer      b"gradwire", format (4 bytes), version of gradwire (20), nonce (32)
    peer to server      the same, number of the peer (8), HMAC-SHA256 of both greetings and the number (32)
    server to peer      HMAC-SHA256 of both greetings (32); zeros where the peer is refused

Both nonces are drawn for each connection, so what was recorded on one opens no other. The secret itself is never sent.
All lengths are fixed: a stranger cannot have memory allocated. What follows is neither encrypted nor signed.
"""

from __future__ import annotations

import hmac
import secrets
import struct
from typing import NamedTuple

from gradwire.core.errors import CommunicationError
from gradwire.core.version import VERSION

MAGIC = b"gradwire"
FORMAT = 3
"""Of greetings and frames; 1 and 2 had the secret itself in place of a greeting."""
NONCE = 32
SECRET_BYTES = 16
_FORM = struct.Struct(f"<8sI20s{NONCE}s")
_NUMBER = struct.Struct("<q")
_MAC = 32

GREETING = _FORM.size
"""Bytes of a greeting."""
ANSWER = _FORM.size + _NUMBER.size + _MAC
"""Bytes of a peer's answer."""
VERDICT = _MAC
"""Bytes of the server's last word."""
REFUSED = bytes(_MAC)


class Refusal(CommunicationError):  # noqa: N818 - what is refused is the peer
    """A peer that is not of this run: a stranger, one of another version, or one with another secret.

    Attributes:
        kind: "stranger", "version" or "secret".
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class Greeted(NamedTuple):
    """Who a peer is, and the server's last word to it."""

    peer: int
    verdict: bytes


def greeting() -> bytes:
    """Return a greeting with a new nonce.

    >>> len(greeting()) == GREETING
    True
    """
    return _FORM.pack(MAGIC, FORMAT, VERSION.encode()[:20], secrets.token_bytes(NONCE))


def answer(theirs: bytes, ours: bytes, peer: int, secret: bytes) -> bytes:
    """Return a peer's answer to a server's greeting; one of another version is answered too, so that it can say so.

    Raises:
        Refusal: a server that is none of gradwire's.
    """
    _require_ours(theirs, "server")
    said = ours + _NUMBER.pack(peer)
    return said + _mac(secret, b"peer", theirs, said)


def verdict_of(theirs: bytes, ours: bytes, secret: bytes) -> bytes:
    """Return the server's last word, as the peer expects it."""
    return _mac(secret, b"server", theirs, ours)


def heard(answered: bytes, ours: bytes, secret: bytes) -> Greeted:
    """Return what a peer's answer to our greeting says.

    Raises:
        Refusal: a stranger, another version, or another secret.
    """
    theirs, said, mac = answered[:GREETING], answered[:-_MAC], answered[-_MAC:]
    require_alike(theirs, ours, "peer")
    if not hmac.compare_digest(mac, _mac(secret, b"peer", ours, said)):
        raise Refusal("secret", "a peer does not know this run's secret: it is of another run")
    return Greeted(_NUMBER.unpack(said[GREETING:])[0], _mac(secret, b"server", ours, theirs))


def require_alike(theirs: bytes, ours: bytes, who: str) -> None:
    """Refuse a greeting that is none of gradwire's, or of another version.

    Raises:
        Refusal: one of these; both versions are named.
    """
    _require_ours(theirs, who)
    _, form, said, _ = _FORM.unpack(theirs)
    _, _, own, _ = _FORM.unpack(ours)
    if (form, said) != (FORMAT, own):
        there, here = (text.rstrip(b"\0").decode("ascii", "replace") for text in (said, own))
        raise Refusal("version", f"a {who} has gradwire {there}, and here it is {here}: install one version everywhere")


def _require_ours(theirs: bytes, who: str) -> None:
    if not theirs.startswith(MAGIC):
        raise Refusal(
            "stranger", f"a {who} that is not of this version of gradwire: it does not begin as this one does"
        )


def _mac(secret: bytes, *parts: bytes) -> bytes:
    return hmac.digest(secret, b"".join(parts), "sha256")
