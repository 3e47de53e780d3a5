"""Tasks: what a comparison trains. A model, its data, a loss, and a metric on data that was held out.

Every task is deterministic in its seed: two methods with the same seed start from the same weights and see
the same batches in the same order, so what differs between their curves is the communication.

A task of your own is a function that takes a seed and returns a `Task`, or the four things nobody can guess:

    def mine(seed: int):
        torch.manual_seed(seed)
        return model, batch, loss, metric

where `batch(step, rank, world_size)` gives `(inputs, targets)`, `loss(outputs, targets)` a scalar, and
`metric(model)` a float on held-out data, or a tensor with a value for each held-out example: the metric is their mean,
and `compare` knows then what chance does to it. Run it with `gradwire compare --task package.module:mine`.
"""

from __future__ import annotations

import functools
import hashlib
import math
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from gradwire.tasks.task import Examples, Task, TaskError, count, stream, warm_cosine
from gradwire.tasks.user_tasks import as_task, call_user_task

# --------------------------------------------------------------------------------------------- digits


class Digits(NamedTuple):
    """Images (count, 1, 8, 8) in [0, 1] and labels, split once and for all."""

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor


@functools.cache
def load_digits() -> Digits:
    """scikit-learn's 1797 handwritten digits of 8x8 pixels, one in five held out by a fixed shuffle."""
    try:
        from sklearn import datasets  # pyright: ignore[reportMissingTypeStubs]
    except ImportError as error:
        raise TaskError(
            "the digits task needs scikit-learn: pip install 'gradwire[compare]', or use --task bytes"
        ) from error
    raw = cast(Any, datasets.load_digits())
    images = torch.tensor(raw.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(raw.target, dtype=torch.int64)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    held_out = len(labels) // 5
    test, train = order[:held_out], order[held_out:]
    return Digits(images[train], labels[train], images[test], labels[test])


def digits_model() -> nn.Module:
    """A convolutional net for 8x8 images: three 3x3 convolutions and two linear layers."""
    model = nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(64, 64, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64 * 4 * 4, 36),
        nn.ReLU(),
        nn.Linear(36, 10),
    )
    for layer in model:
        if isinstance(layer, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
            nn.init.zeros_(cast(Tensor, layer.bias))
    return model


def shift(images: Tensor, generator: torch.Generator) -> Tensor:
    """Move each image (count, 1, 8, 8) by up to one pixel, so that 1438 images last for more epochs."""
    count, _, height, width = images.shape
    padded = functional.pad(images, (1, 1, 1, 1))
    top, left = torch.randint(0, 3, (2, count, 1, 1), generator=generator)
    rows = top + torch.arange(height).view(1, -1, 1)
    columns = left + torch.arange(width).view(1, 1, -1)
    return padded[torch.arange(count).view(-1, 1, 1), 0, rows, columns].unsqueeze(1)


def digits(seed: int, *, batch_per_rank: int = 32) -> Task:
    """Handwritten digits: a small convolutional net, SGD with momentum, accuracy on 359 held-out images."""
    data = load_digits()
    torch.manual_seed(seed)
    model = digits_model()

    def batch(step: int, rank: int, world_size: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(stream(seed, step))
        chosen = torch.randperm(len(data.train_labels), generator=generator)
        mine = chosen[rank * batch_per_rank : (rank + 1) * batch_per_rank]
        moved = shift(data.train_images[mine], torch.Generator().manual_seed(stream(seed, step, rank)))
        return moved, data.train_labels[mine]

    def chosen_digits(indices: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        return shift(data.train_images[indices], generator), data.train_labels[indices]

    def accuracy(model: nn.Module) -> Tensor:
        hits = model(data.test_images).argmax(dim=1) == data.test_labels
        return 100.0 * hits

    return Task(
        model=model,
        batch=batch,
        loss=functional.cross_entropy,
        metric=accuracy,
        metric_name="accuracy %",
        higher_is_better=True,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=5e-4),
        schedule=functools.partial(warm_cosine, warm_up=10, floor=0.02),
        steps=200,
        evaluate_every=20,
        target=0.25,  # where nine in ten images are right; what is left after that is noise
        description=f"scikit-learn's 8x8 digits, convolutional net of {count(model):,} parameters, "
        f"{batch_per_rank} images a rank and step, shifted by up to a pixel, SGD with momentum",
        fingerprint=f"digits, {len(data.train_labels)} + {len(data.test_labels)} images",
        examples=Examples(len(data.train_labels), data.train_labels, chosen_digits),
    )


# ---------------------------------------------------------------------------------------------- bytes


class Block(nn.Module):
    """A pre-norm transformer block: causal self-attention, then a feed-forward layer four times as wide."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.norm_feed = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x_BTC: Tensor) -> Tensor:
        """Add attention, then the feed-forward layer, to `x` (batch, time, channels)."""
        x_BTC = x_BTC + self.attend(self.norm_attention(x_BTC))
        return x_BTC + self.down(functional.gelu(self.up(self.norm_feed(x_BTC))))

    def attend(self, x_BTC: Tensor) -> Tensor:
        """Mix over time, each position seeing itself and what came before."""
        B, T, C = x_BTC.shape
        qkv = self.qkv(x_BTC).view(B, T, 3, self.heads, C // self.heads).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(B, T, C))


class ByteGPT(nn.Module):
    """A GPT over bytes: learned positions, pre-norm blocks, the output tied to the embedding."""

    def __init__(self, *, layers: int = 4, width: int = 192, heads: int = 6, context: int = 128) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.position = nn.Parameter(torch.zeros(context, width))
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.apply(self._initialise)
        for block in self.blocks:  # GPT-2: the residual stream's variance must not grow with depth
            for name in ("out", "down"):
                nn.init.normal_(getattr(block, name).weight, std=0.02 / math.sqrt(2 * layers))

    @staticmethod
    def _initialise(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Logits (batch, time, 256) of the byte that follows each position."""
        x_BTC = self.embed(tokens_BT) + self.position[: tokens_BT.shape[1]]
        for block in self.blocks:
            x_BTC = block(x_BTC)
        return functional.linear(self.norm(x_BTC), self.embed.weight)


CORPUS_LIMIT_BYTES = 10_000_000
HELD_OUT_SHARE = 0.05


class Corpus(NamedTuple):
    """Bytes to learn from, bytes held out (the last five percent), and where they came from."""

    train: Tensor
    held_out: Tensor
    description: str
    fingerprint: str


def python_sources() -> Path:
    """Folder of the running Python's standard library: text that every machine has."""
    return Path(sysconfig.get_paths()["stdlib"])


def text_files(folder: Path | None) -> Iterator[Path]:
    """Files of a corpus: every file of `folder`, or the standard library's sources.

    The order is fixed but mixed, by a hash of the name: sorted, the held-out end would be whatever the last
    folder happens to hold.
    """
    root = folder if folder is not None else python_sources()
    pattern = "*" if folder is not None else "*.py"
    skip = {"site-packages", "dist-packages", "test", "tests", "__pycache__"} if folder is None else set[str]()
    names = [path.relative_to(root) for path in root.rglob(pattern) if path.is_file()]
    for name in sorted(names, key=lambda name: hashlib.blake2b(name.as_posix().encode()).digest()):
        if skip.isdisjoint(name.parts):
            yield root / name


def read_text(paths: Iterable[Path], limit_bytes: int) -> bytes:
    """Concatenate files up to a limit, leaving out those that hold a NUL byte early on: they are no text."""
    parts: list[bytes] = []
    size = 0
    for path in paths:
        if size >= limit_bytes:
            break
        data = path.read_bytes()
        if b"\0" in data[:4096]:
            continue
        parts.append(data)
        size += len(data)
    return b"".join(parts)[:limit_bytes]


@functools.cache
def load_corpus(folder: Path | None = None, limit_bytes: int = CORPUS_LIMIT_BYTES) -> Corpus:
    """Read a folder of text as bytes.

    Raises:
        TaskError: the folder does not exist, or holds too little text to learn from.
    """
    if folder is not None and not folder.is_dir():
        raise TaskError(f"--text {folder} is not a folder")
    name = str(folder) if folder else f"standard library of Python {sys.version.split()[0]}"
    data = read_text(text_files(folder), limit_bytes)
    if len(data) < 20_000:
        raise TaskError(f"{name} holds {len(data):,} bytes of text; the bytes task wants at least 20,000")
    tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    cut = len(data) - int(len(data) * HELD_OUT_SHARE)
    digest = hashlib.sha256(data).hexdigest()[:12]
    return Corpus(tensor[:cut], tensor[cut:], f"{name} ({len(data) / 1e6:.1f} MB)", f"{len(data)} bytes, {digest}")


def windows(data: Tensor, starts: Tensor, context: int) -> tuple[Tensor, Tensor]:
    """Inputs and next-byte targets (len(starts), context) cut from `data` at `starts`."""
    span = data[starts.unsqueeze(1) + torch.arange(context + 1)].long()
    return span[:, :-1], span[:, 1:]


def flat_cross_entropy(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    """Mean cross-entropy over batch and time, in nats."""
    return functional.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten())


def byte_gpt(seed: int, text: Path | None = None, *, batch_per_rank: int = 2, context: int = 128) -> Task:
    """Byte-level GPT of 1.85 M parameters on a folder of text; the metric is held-out loss in nats a byte."""
    corpus = load_corpus(text)
    torch.manual_seed(seed)
    model = ByteGPT(context=context)
    last = len(corpus.train) - context - 1

    def batch(step: int, rank: int, world_size: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(stream(seed, step, rank))
        starts = torch.randint(last, (batch_per_rank,), generator=generator)
        return windows(corpus.train, starts, context)

    def passages(indices: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        return windows(corpus.train, indices * context, context)

    def held_out_losses(model: nn.Module) -> Tensor:
        starts = torch.linspace(0, len(corpus.held_out) - context - 1, 64).long()
        inputs, targets = windows(corpus.held_out, starts, context)
        return functional.cross_entropy(model(inputs).transpose(1, 2), targets, reduction="none").mean(dim=1)

    return Task(
        model=model,
        batch=batch,
        loss=flat_cross_entropy,
        metric=held_out_losses,
        metric_name="held-out nats/byte",
        higher_is_better=False,
        optimizer=lambda p: torch.optim.AdamW(p, lr=2e-3, betas=(0.9, 0.95), weight_decay=0.1),
        schedule=functools.partial(warm_cosine, warm_up=20, floor=0.1),
        clip_norm=1.0,  # without it, whether a run leaves the first plateau early is luck, and lossy methods are lucky
        steps=60,
        evaluate_every=10,
        description=f"byte-level GPT of {count(model):,} parameters on the {corpus.description}, "
        f"{batch_per_rank} x {context} bytes a rank and step, AdamW",
        fingerprint=corpus.fingerprint,
        examples=Examples(last // context, None, passages),
    )


# --------------------------------------------------------------------------------------- finding tasks

BUILT_IN = ("digits", "bytes")


def make_task(name: str, seed: int, text: Path | None = None) -> Task:
    """Build a task by name: `digits`, `bytes`, or `package.module:function`.

    Args:
        name: which task.
        seed: decides the initial weights and the order of the data.
        text: folder of the bytes task; the standard library's sources by default.

    Raises:
        TaskError: nothing of that name exists, what it returned cannot be trained, or the task reads no text.
    """
    if text is not None and name != "bytes":
        raise TaskError(f"task {name} reads no text: leave --text out, or take the task bytes")
    if name == "digits":
        return digits(seed)
    if name == "bytes":
        return byte_gpt(seed, text)
    return as_task(call_user_task(name, seed), name)
