"""Configurations of torchrun with FSDP2, DeepSpeed and Megatron for a layout that was planned."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from gradwire.config import TrainingShape, write_deepspeed, write_fsdp2, write_megatron
from gradwire.config.megatron_arguments import SOURCE
from gradwire.config.setting import Setting
from gradwire.core.errors import SpecError
from gradwire.core.nearest import meant
from gradwire.planning.hardware import Hardware
from gradwire.planning.layout import SHARDINGS, ParallelLayout
from gradwire.planning.transformer import Transformer


def unwritten(framework: str, layout: ParallelLayout) -> str | None:
    """Why a framework has no configuration for a layout; None: it has one.

    Args:
        framework: "torchrun" (FSDP2), "deepspeed" or "megatron".
        layout: which.

    Raises:
        SpecError: a framework that is not known.

    >>> unwritten("torchrun", ParallelLayout(dp=8, tp=2, batch=8))
    'tp=2, and a script for torchrun has data parallelism alone'
    """
    if framework not in _WRITERS:
        raise SpecError(f"configurations for {framework!r} cannot be written: {meant(framework, _WRITERS)}")
    if layout.every > 1:
        return f"every={layout.every}, which no configuration says: see docs/sync.md"
    if framework != "torchrun" and layout.method != "none":
        return f"method={layout.method}, which {framework} does not know"
    if framework == "megatron":
        return None
    for name in ("tp", "pp", "cp", "ep"):
        if (size := getattr(layout, name)) > 1:
            return f"{name}={size}, and a script for {framework} has data parallelism alone"
    if framework == "torchrun" and layout.sharding == "none":
        return "sharding=none, and FSDP2 shards"
    return None


def written_by(framework: str) -> Callable[[ParallelLayout], bool]:
    """Return what tells whether a framework has a configuration for a layout, for `plan(suits=)`.

    Raises:
        SpecError: a framework that is not known.

    >>> written_by("deepspeed")(ParallelLayout(dp=8, batch=8))
    True
    """
    unwritten(framework, ParallelLayout())
    return lambda layout: unwritten(framework, layout) is None


def configurations(framework: str, model: Transformer, layout: ParallelLayout, on: Hardware) -> dict[str, str]:
    """Return the files for a layout, by name: what the framework reads, and `launch.sh`, which starts a node.

    Args:
        framework: "torchrun" (FSDP2), "deepspeed" or "megatron".
        model, layout, on: what is trained, how it is spread, on which hardware.

    Raises:
        SpecError: a framework that is not known, or that has no configuration for the layout.

    >>> from gradwire.planning import hardware, model
    >>> layout = ParallelLayout(dp=16, batch=64, sharding="parameters")
    >>> list(configurations("torchrun", model("llama2-7b"), layout, hardware("a100-80g")))
    ['train.py', 'launch.sh']
    """
    layout.require(model, on)
    if why := unwritten(framework, layout):
        raise SpecError(f"{framework} has no configuration for {layout.says}: it has {why}")
    per_node = min(layout.gpus, on.node)
    reduce = "fp32" if layout.gradient_bytes == 4 else "bf16"
    shape = TrainingShape(layout.gpus, layout.micro, layout.batch, per_node, reduce=reduce)
    files = _WRITERS[framework](model, layout, shape)
    return {**files, "launch.sh": _launch(framework, layout, shape)}


def write(framework: str, model: Transformer, layout: ParallelLayout, on: Hardware, folder: Path) -> list[Path]:
    """Write the files of `configurations` into a folder, which is made where it is missing; return them.

    Raises:
        SpecError: as `configurations`, a folder that cannot be written to, or files that are there already.
    """
    files = configurations(framework, model, layout, on)
    there = [name for name in files if (folder / name).exists()]
    if there:
        raise SpecError(f"{folder / there[0]} is there already: name a new folder, or remove it")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise SpecError(f"{folder} cannot be written to: {error.strerror or error}") from error
    (folder / "launch.sh").chmod(0o755)
    return [folder / name for name in files]


def _fsdp2(model: Transformer, layout: ParallelLayout, shape: TrainingShape) -> dict[str, str]:
    method = None if layout.method == "none" else layout.method
    stage = 3 if layout.sharding == "parameters" else 2
    written = write_fsdp2(shape, stage, method, node_copies=False, recompute=layout.recompute == "full")
    return {"train.py": written.text}


def _deepspeed(model: Transformer, layout: ParallelLayout, shape: TrainingShape) -> dict[str, str]:
    written = write_deepspeed(shape, SHARDINGS.index(layout.sharding), hidden_size=model.hidden)
    return {"deepspeed.json": written.text}


def _megatron(model: Transformer, layout: ParallelLayout, shape: TrainingShape) -> dict[str, str]:
    written = write_megatron(
        shape,
        layout.tp,
        layout.pp,
        layout.cp,
        SHARDINGS.index(layout.sharding),
        expert=layout.ep,
        interleave=layout.interleave,
        recompute=layout.recompute,
        node_copies=False,
    )
    lines = [*_HEAD, "MODEL_ARGS=("]
    for each in _sizes(model, layout):
        lines += [f"  {each.name}" if each.value is None else f"  {each.name} {shlex.quote(str(each.value))}"]
    return {"megatron.sh": written.text, "model.sh": "\n".join([*lines, ")", ""])}


_HEAD = (
    "# Sizes of the model, as Megatron-LM calls them. Left to you is what sizes do not tell: the tokenizer; the base",
    "# of rotary positions (--rotary-base), or other positions; --norm-epsilon; norms and gates other than RMSNorm and",
    "# SwiGLU; biases (--add-qkv-bias) and norms (--qk-layernorm) of queries and keys; how experts are balanced; and",
    "# dropout, of which the search assumes none: Megatron has 0.1 without --attention-dropout 0 --hidden-dropout 0.",
)
"""Of the file with the sizes."""


def _sizes(model: Transformer, layout: ParallelLayout) -> Iterator[Setting]:
    def one(name: str, value: int | str | None = None) -> Setting:
        return Setting(f"--{name}", value, "of the model", SOURCE)

    yield one("num-layers", model.layers)
    yield one("hidden-size", model.hidden)
    yield one("num-attention-heads", model.heads)
    yield one("kv-channels", model.head)
    yield one("ffn-hidden-size", model.dense_width if model.experts else model.width)
    yield one("seq-length", model.sequence)
    yield one("max-position-embeddings", model.sequence)
    if model.keys != model.heads:
        yield one("group-query-attention")
        yield one("num-query-groups", model.keys)
    if model.gated:
        yield one("swiglu")
        yield one("normalization", "RMSNorm")
        yield one("position-embedding-type", "rope")
        yield one("disable-bias-linear")
    if not model.tied:
        yield one("untie-embeddings-and-output-weights")
    if model.experts:
        yield one("num-experts", model.experts)
        yield one("moe-router-topk", model.chosen)
        yield one("moe-ffn-hidden-size", model.width)
        yield one("moe-grouped-gemm")
        if model.dense_layers:  # they come first
            yield one("moe-layer-freq", f"([0]*{model.dense_layers}+[1]*{model.expert_layers})")
    if model.shared_inner:
        yield one("moe-shared-expert-intermediate-size", model.shared_inner)
    if layout.flash:
        yield one("use-flash-attn")


_WRITERS: Mapping[str, Callable[[Transformer, ParallelLayout, TrainingShape], dict[str, str]]] = {
    "torchrun": _fsdp2,
    "deepspeed": _deepspeed,
    "megatron": _megatron,
}
FRAMEWORKS = tuple(_WRITERS)
"""What configurations are written for."""

_STARTED = {
    "torchrun": '"$here/train.py" "$@"',
    "deepspeed": (
        '"${SCRIPT:?set SCRIPT to your training script}" --deepspeed --deepspeed_config "$here/deepspeed.json" "$@"'
    ),
    "megatron": (
        '"${MEGATRON:?set MEGATRON to the folder of Megatron-LM}/pretrain_gpt.py" "${MEGATRON_ARGS[@]}" '
        '"${MODEL_ARGS[@]}" "$@"'
    ),
}


def _launch(framework: str, layout: ParallelLayout, shape: TrainingShape) -> str:
    """A script that starts the ranks of one node."""
    lines = ["#!/usr/bin/env bash", f"# {layout.says}"]
    lines += [f"# Start it on each of {shape.nodes} nodes: NODE_RANK=0 HEAD=address-of-node-0 ./launch.sh ..."]
    lines += ["set -eu", 'here="$(dirname "$0")"']
    if framework == "megatron":
        lines += ['. "$here/megatron.sh"', '. "$here/model.sh"']
    node = '--node-rank "${NODE_RANK:-0}" --master-addr "${HEAD:-localhost}" --master-port "${PORT:-29500}"'
    lines += [f"exec torchrun --nnodes {shape.nodes} --nproc-per-node {shape.gpus_per_node} {node} \\"]
    return "\n".join([*lines, f"  {_STARTED[framework]}", ""])
