"""Frames that no honest peer sends, and whoever sends them; `hostile_frames.py` says what they are for."""

from __future__ import annotations

import contextlib
import hmac
import os
import pickle
import random
import socket
import struct
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from gradwire.asynchronous.several.messages import (
    Finish,
    Gone,
    Granted,
    Hello,
    Join,
    Leave,
    PushRequest,
    Refused,
    ServerReply,
    Watch,
)
from gradwire.core.record import Count, Record, pack, unpack
from gradwire.peers import greeting
from gradwire.peers.sockets import Address

HEAD = struct.Struct("<QQ")
IN_ROW = 1 << 63
ATTACKER = 1
"""The number under which hostile peers greet."""
BATCH = 100
"""Frames sent in a row where none ends its connection."""
MOST = 1 << 20
"""The longest reply that is read."""


class Marker:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.open, (str(self.path), os.O_CREAT | os.O_WRONLY)


class Odd(Record, frozen=True, tag="PushRequest"):
    """Says that it is a push, and has other fields."""

    server: str
    worker: float
    number: Count


class Frames:
    """Draws frames.

    Args:
        draw: where random numbers come from.
        push: one that the server has applied.
        marker: the file that a pickle would make.
    """

    def __init__(self, draw: random.Random, push: PushRequest, marker: Path) -> None:
        self.draw, self.push = draw, push
        self.packed = pack(push)
        self.pickles = [pickle.dumps(Marker(marker), protocol) for protocol in range(pickle.HIGHEST_PROTOCOL + 1)]

    # Records, without a head -----------------------------------------------------------------------------------------

    def noise(self) -> bytes:
        """Random bytes."""
        return self.draw.randbytes(self.draw.randint(1, 400))

    def flipped(self) -> bytes:
        """A real push in which some bits are flipped."""
        found = bytearray(self.packed)
        for _ in range(self.draw.randint(1, 8)):
            found[self.draw.randrange(len(found))] ^= 1 << self.draw.randrange(8)
        return bytes(found)

    def cut(self) -> bytes:
        """The beginning of a real push, or its end."""
        at = self.draw.randrange(1, len(self.packed))
        return self.draw.choice((self.packed[:at], self.packed[at:]))

    def odd(self) -> bytes:
        """A record whose fields are missing, too many, of other kinds or out of range."""
        fields = msgspec.msgpack.decode(msgspec.msgpack.encode(self.push, enc_hook=lambda _: 0))
        name = self.draw.choice([name for name in fields if name != "type"])
        value = self.draw.choice((None, -1, "7", 1e300, [1], {"a": 1}, 1 << 63, True, b"x"))
        changes: dict[str, Any] = self.draw.choice(({name: value}, {"more": value}, {"type": value}))
        kept = {key: one for key, one in fields.items() if key != name or self.draw.random() < 0.5}
        return self._rewritten(msgspec.msgpack.encode({**kept, **changes}))

    def pickled(self) -> bytes:
        """A pickle, alone or as the fields of a record."""
        found = self.draw.choice(self.pickles)
        return self.draw.choice((found, self._rewritten(found)))

    def table(self) -> bytes:
        """A header of huge, negative, nested, overlapping or missing tensors."""
        size = self.draw.choice((1 << 62, 1 << 40, -1, 1e30, "9" * 50))
        entry = {"dtype": "F32", "shape": [size] * self.draw.randint(1, 40), "data_offsets": [0, size]}
        nested = "[" * 50_000 if self.draw.random() < 0.1 else "[" * 50
        header = self.draw.choice(
            (
                msgspec.json.encode({"0": entry, "fields": entry}),
                msgspec.json.encode({"fields": {**entry, "dtype": "U8", "shape": [0, size]}}),
                f'{{"0": {nested}'.encode(),
                msgspec.json.encode({str(number): entry for number in range(200)}),
                b"{}",
            )
        )
        length = self.draw.choice((len(header), 1 << 63, (1 << 64) - 1, 0))
        return length.to_bytes(8, "little") + header + bytes(self.draw.randrange(64))

    def _rewritten(self, fields: bytes) -> bytes:
        """The record of the push with other bytes as its fields."""
        header = {"0": {"dtype": "U8", "shape": [len(self.push.wire)], "data_offsets": [0, len(self.push.wire)]}}
        end = len(self.push.wire) + len(fields)
        header["fields"] = {"dtype": "U8", "shape": [len(fields)], "data_offsets": [len(self.push.wire), end]}
        text = msgspec.json.encode(header)
        return len(text).to_bytes(8, "little") + text + bytes(self.push.wire.numpy()) + fields

    def undue(self) -> bytes:
        """A push that is well formed, and not due: replayed, or of a life, model or process that is another."""
        changes: dict[str, Any] = self.draw.choice(
            (
                {"worker": ATTACKER},
                {"worker": ATTACKER, "process": self.draw.getrandbits(60), "number": self.draw.getrandbits(60)},
                {"worker": ATTACKER, "wire": torch.full_like(self.push.wire, 255)},
                {"worker": ATTACKER, "wire": torch.zeros(self.draw.randrange(100), dtype=torch.uint8)},
                {"worker": ATTACKER, "life": 9, "fingerprint": 0, "loss": float("nan"), "seconds": -1.0},
            )
        )
        return pack(msgspec.structs.replace(self.push, **changes))

    def posing(self) -> bytes:
        """What is well formed, and not the attacker's to ask: another worker's request, or one of whoever watches."""
        serial = self.draw.randrange(1 << 60)
        head = (0, self.draw.choice((0, self.draw.randrange(2, 1 << 60))), self.push.process, serial)
        push = msgspec.structs.replace(self.push, worker=head[1], serial=serial)
        return pack(self.draw.choice((push, Hello(*head), Join(*head, 0), Leave(*head), Watch([0]), Finish())))

    RECORDS = ("noise", "flipped", "cut", "odd", "pickled", "table", "undue")
    """Kinds of records."""

    # Frames with a head ----------------------------------------------------------------------------------------------

    def framed(self, kind: str, number: int) -> bytes:
        """A frame of that kind, as the connection's request of that number."""
        if kind == "length":
            length = self.draw.choice((MOST, 1 << 40, (1 << 62) + 5, (1 << 63) - 1, IN_ROW | 1 << 40, IN_ROW | 1 << 20))
            return HEAD.pack(length, number) + self.noise()
        if kind == "row":
            return HEAD.pack(IN_ROW | self.draw.randint(1, 1 << 17), number)
        if kind == "short":
            return HEAD.pack(len(self.packed), number) + self.packed[: self.draw.randrange(len(self.packed))]
        if kind == "replayed":
            return HEAD.pack(len(self.packed), self.draw.choice((0, number - 1))) + self.packed
        record = getattr(self, kind)()
        return HEAD.pack(len(record), number) + record

    # Greetings -------------------------------------------------------------------------------------------------------

    def answered(self, kind: str, theirs: bytes, recorded: bytes) -> bytes:
        """What a stranger says to a server's greeting, in place of an answer."""
        ours = greeting.greeting()
        if kind == "silence":
            return b""
        if kind == "frame":
            return HEAD.pack(len(self.packed), 1) + self.packed + bytes(greeting.ANSWER)
        if kind == "pickle":
            return (self.draw.choice(self.pickles) + bytes(greeting.ANSWER))[: greeting.ANSWER]
        if kind == "again":
            return recorded
        if kind == "version":
            ours = ours[:12] + b"99.9".ljust(20, b"\0") + ours[32:]
            said = ours + ATTACKER.to_bytes(8, "little")
            return said + hmac.digest(b"", said, "sha256")
        return greeting.answer(theirs, ours, ATTACKER, self.draw.randbytes(greeting.SECRET_BYTES))

    GREETINGS = ("silence", "frame", "pickle", "again", "version", "secret")
    """Kinds of answers to a server's greeting."""


class Attack:
    """Sends frames to a server.

    Args:
        address: of the server.
        secret: of its run.
        frames: what to send.

    Attributes:
        sent: frames, by kind.
        outcomes: what came of them.
        connections: how many were made.
    """

    def __init__(self, address: Address, secret: bytes, frames: Frames) -> None:
        self.address, self.secret, self.frames = address, secret, frames
        self.sent: Counter[str] = Counter()
        self.outcomes: Counter[str] = Counter()
        self.connections = 0
        self._line: socket.socket | None = None
        self._number = 0
        self._recorded = self._record()

    def _record(self) -> bytes:
        """An honest answer, as somebody may have seen it on its way."""
        line, theirs = self._connected()
        said = greeting.answer(theirs, greeting.greeting(), ATTACKER, self.secret)
        line.sendall(said)
        line.close()
        return said

    def _connected(self) -> tuple[socket.socket, bytes]:
        line = socket.socket(socket.AF_UNIX if isinstance(self.address, str) else socket.AF_INET, socket.SOCK_STREAM)
        line.settimeout(30.0)
        line.connect(self.address)
        self.connections += 1
        return line, exactly(line, greeting.GREETING)

    def stranger(self, kind: str) -> None:
        """Say something other than an answer, and hear that the connection ends."""
        self.sent[f"greeting: {kind}"] += 1
        line, theirs = self._connected()
        with line:
            with contextlib.suppress(OSError):  # it has ended already
                line.sendall(self.frames.answered(kind, theirs, self._recorded))
                line.shutdown(socket.SHUT_WR)
            heard = until_end(line)
        good = not heard or heard.endswith(greeting.REFUSED)
        self.outcomes["refused at the greeting" if good else "ACCEPTED"] += 1

    def peer(self, kind: str, count: int = 1) -> None:
        """Send some frames over a connection that knows the secret; each has a refusal as its reply, or cuts it."""
        line = self._line = self._line or self._greeted()
        self.sent[kind] += count
        frames: list[bytes] = []
        for _ in range(count):
            self._number += 1
            frames.append(self.frames.framed(kind, self._number))
        try:
            line.sendall(b"".join(frames))
            if kind in ("length", "row", "short"):
                line.shutdown(socket.SHUT_WR)
            for _ in range(count):
                self._hear(line)
        except TimeoutError:
            raise  # a server that neither replies nor ends the connection
        except (OSError, EOFError):
            self.outcomes["cut off"] += 1
            line.close()
            self._line = None

    def _greeted(self) -> socket.socket:
        line, theirs = self._connected()
        line.sendall(greeting.answer(theirs, greeting.greeting(), ATTACKER, self.secret))
        exactly(line, greeting.VERDICT)
        self._number = 1
        return line

    def _hear(self, line: socket.socket) -> None:
        length = 0
        while not length:  # a heartbeat
            length, _ = HEAD.unpack(exactly(line, HEAD.size))
        reply = unpack(exactly(line, min(length, MOST)), ServerReply)
        good = isinstance(reply, Refused | Gone) and not isinstance(reply, Granted)
        self.outcomes["refused by the protocol object" if good else "ACCEPTED"] += 1

    def close(self) -> None:
        """End the connection."""
        if self._line is not None:
            self._line.close()


def exactly(line: socket.socket, nbytes: int) -> bytes:
    """Read so many bytes.

    Raises:
        EOFError: there are no more.
    """
    found = b""
    while len(found) < nbytes:
        more = line.recv(nbytes - len(found))
        if not more:
            raise EOFError
        found += more
    return found


def until_end(line: socket.socket) -> bytes:
    """Read until the other end has closed."""
    found = b""
    try:
        while more := line.recv(1 << 16):
            found += more
    except ConnectionResetError:
        pass
    return found


PEERS = ("noise", "flipped", "cut", "odd", "pickled", "table", "length", "short", "replayed", "posing")
"""Kinds of frames most of which end their connection."""
UNDUE = 0.7
"""Share of the frames that are well formed and not due."""
STRANGERS = 0.08
"""Share of the frames that are no right greeting."""


def attack(target: Attack, count: int, peers: Sequence[str] = PEERS) -> None:
    """Send so many frames of all kinds.

    Args:
        target: the server.
        count: of the frames.
        peers: kinds of frames behind a right greeting.
    """
    draw, left = target.frames.draw, count
    while left:
        if draw.random() < UNDUE * BATCH**-1 / (1 - UNDUE + UNDUE / BATCH):
            size = min(left, BATCH)
            target.peer("undue", size)
            left -= size
        else:
            if draw.random() < STRANGERS / (1 - UNDUE):
                target.stranger(draw.choice(Frames.GREETINGS))
            else:
                target.peer(draw.choice(peers))
            left -= 1
    target.close()
