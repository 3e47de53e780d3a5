"""Are arguments of Megatron right? Checks of their names, and of what Megatron asserts once all ranks have started."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from gradwire.config.megatron_arguments import (
    CONNECTIONS,
    FSDP_SOURCE,
    MEANT,
    NAMES,
    SOURCE,
    MegatronArguments,
    read_megatron,
)
from gradwire.core.nearest import fold
from gradwire.doctor.finding import Examination, Finding, Outcome, Severity, Unchecked

Check = Callable[[MegatronArguments], Iterator[Outcome]]
_TENSOR, _PIPELINE, _CONTEXT, _EXPERT = (
    f"--{kind}-parallel-size" for kind in ("tensor-model", "pipeline-model", "context", "expert-model")
)
_SHARDED_OPTIMIZER = "--use-distributed-optimizer"
_VIRTUAL = ("--num-layers-per-virtual-pipeline-stage", "--num-virtual-stages-per-pipeline-rank")
_FOLDED = {fold(name): name for name in NAMES}


def names(read: MegatronArguments) -> Iterator[Outcome]:
    """Arguments that are spelled almost like one of Megatron's."""
    for name in read.given:
        meant = MEANT.get(name)
        if name in NAMES or (meant is None and len(name) < 6):
            continue
        sure = meant or _FOLDED.get(fold(name))
        near = sure or next(iter(difflib.get_close_matches(name, NAMES, n=1, cutoff=0.9)), None)
        if near is not None:
            severity: Severity = "error" if sure else "warning"
            what = f"Megatron has no argument {name}, and refuses unknown ones"
            yield _found(severity, "names", what, f"{name} is there", f"Did you mean {near}? Correct its name.")


def _found(severity: Severity, check: str, what: str, evidence: str, remedy: str, source: str = SOURCE) -> Finding:
    return Finding(severity, check, what, evidence, remedy, source)


def ranks(read: MegatronArguments) -> Iterator[Outcome]:
    """Copies of the model fill all ranks, and layers that are cut stay inside a node."""
    together, world = read.model_parallel, read.world_size
    if world is None:
        yield Unchecked("ranks", "the number of ranks was not given")
    elif together is not None and world % together:
        what = f"{world} ranks are no multiple of {together}, those of one copy of the model"
        evidence = " x ".join(f"{name} {read.size(name)}" for name in (_TENSOR, _PIPELINE, _CONTEXT))
        yield _found("error", "ranks", what, evidence, f"Take a multiple of {together} ranks, or smaller sizes.")
    tensor = read.size(_TENSOR)
    if tensor and read.gpus_per_node and (tensor > read.gpus_per_node or read.gpus_per_node % tensor):
        what = f"layers are cut over {tensor} ranks, which lie on more than one node of {read.gpus_per_node} GPUs"
        remedy = f"Take a {_TENSOR} that divides {read.gpus_per_node}: each layer waits for these exchanges."
        yield _found("warning", "ranks", what, f"{_TENSOR} {tensor}", remedy)


def batches(read: MegatronArguments) -> Iterator[Outcome]:
    """The batch of a step is a multiple of what all copies have at once."""
    if not read.has("--micro-batch-size"):
        what = "there is no --micro-batch-size, and Megatron refuses to start without"
        yield _found("error", "batch", what, "--micro-batch-size is missing", "Write --micro-batch-size 1, or more.")
        return
    micro, batch = read.size("--micro-batch-size"), read.size("--global-batch-size", None)
    if read.copies and micro and batch and batch % (micro * read.copies):
        at_once = micro * read.copies
        what = (
            f"--global-batch-size {batch} is no multiple of {at_once}, {micro} samples for each of {read.copies} copies"
        )
        evidence = f"{read.world_size} ranks, {read.model_parallel} for each copy of the model"
        low = batch // at_once * at_once
        remedy = f"Write {f'{low} or ' if low else ''}{low + at_once}."
        yield _found("error", "batch", what, evidence, remedy)


def sequence_parallelism(read: MegatronArguments) -> Iterator[Outcome]:
    """Cutting sequences goes with cutting layers."""
    tensor, is_on = read.size(_TENSOR), read.has("--sequence-parallel")
    if tensor == 1 and is_on:
        what = "--sequence-parallel has no effect: layers are not cut over ranks, and Megatron turns it off"
        yield _found("warning", "parallelism", what, f"{_TENSOR} is 1", f"Leave it out, or set {_TENSOR}.")
    if tensor and tensor > 1 and not is_on:
        expert = (read.size(_EXPERT) or 1) > 1
        what = "experts and cut layers together need --sequence-parallel in training"
        what = what if expert else "activations between cut layers are kept whole on each rank"
        severity: Severity = "error" if expert else "note"
        remedy = "Write --sequence-parallel: it cuts them too, and sends as many bytes."
        yield _found(severity, "parallelism", what, f"{_TENSOR} {tensor} without --sequence-parallel", remedy)
    if read.has("--tp-comm-overlap") and not (is_on and tensor != 1):
        what = "--tp-comm-overlap needs --sequence-parallel, and Megatron refuses it without"
        remedy = "Write --sequence-parallel too, or leave --tp-comm-overlap out."
        yield _found("error", "communication", what, "--tp-comm-overlap is there", remedy)


def overlap(read: MegatronArguments) -> Iterator[Outcome]:
    """What the overlap of communication needs."""
    gathers = read.has("--overlap-param-gather")
    if gathers and not (read.has(_SHARDED_OPTIMIZER) or read.has("--use-megatron-fsdp")):
        what = "--overlap-param-gather needs a sharded optimizer, and Megatron refuses it without"
        remedy = f"Write {_SHARDED_OPTIMIZER} too, or leave --overlap-param-gather out."
        yield _found("error", "communication", what, f"{_SHARDED_OPTIMIZER} is missing", remedy)
    if gathers and not read.has("--overlap-grad-reduce"):
        what = "--overlap-param-gather needs --overlap-grad-reduce, and Megatron refuses it without"
        yield _found(
            "error", "communication", what, "--overlap-grad-reduce is missing", "Write --overlap-grad-reduce too."
        )
    if read.has("--overlap-param-gather-with-optimizer-step") and not (gathers and any(map(read.has, _VIRTUAL))):
        what = "--overlap-param-gather-with-optimizer-step needs --overlap-param-gather and an interleaved pipeline"
        remedy = "Write --overlap-param-gather and --num-virtual-stages-per-pipeline-rank too, or leave it out."
        yield _found("error", "communication", what, "one of them is missing", remedy)
    if not read.has("--overlap-grad-reduce") and (read.copies or 1) > 1:
        what = "gradients are sent after the backward pass, and not during it"
        remedy = "Write --overlap-grad-reduce."
        yield _found("note", "communication", what, f"{read.copies} copies, --overlap-grad-reduce is missing", remedy)


def buckets(read: MegatronArguments) -> Iterator[Outcome]:
    """Buckets are given by their number or by their size in parameters."""
    size = read.size("--ddp-bucket-size", None)
    if read.has("--ddp-num-buckets") and read.has("--ddp-bucket-size"):
        what = "--ddp-num-buckets and --ddp-bucket-size both say how large buckets are"
        yield _found("error", "communication", what, "both are there", "Leave one of them out.")
    elif size is not None and size < 1_000_000:
        what = f"buckets of {size} parameters are so small that latency counts"
        remedy = "Leave --ddp-bucket-size out, for max(40e6, 1e6 x copies). It is a number of parameters, not of bytes."
        yield _found("warning", "communication", what, f"--ddp-bucket-size {size}", remedy)


def precision(read: MegatronArguments) -> Iterator[Outcome]:
    """What is computed in, and what gradients are summed in."""
    if read.has("--fp16") and read.has("--bf16"):
        what = "--fp16 and --bf16 are both there, and Megatron refuses that"
        remedy = "Leave one of them out. Take --bf16 where the GPU has it: its range needs no loss scaler."
        yield _found("error", "precision", what, "--fp16 --bf16", remedy)
    elif not read.has("--fp16") and not read.has("--bf16"):
        what = "parameters and products are in float32, which takes twice the memory and more time"
        yield _found("note", "precision", what, "neither --bf16 nor --fp16 is there", "Write --bf16.")
    if read.has("--grad-reduce-in-bf16") and not read.has("--bf16"):
        what = "--grad-reduce-in-bf16 has no effect without --bf16"
        yield _found("warning", "precision", what, "--bf16 is missing", "Write --bf16 too, or leave it out.")
    elif read.has("--grad-reduce-in-bf16") and read.has("--accumulate-allreduce-grads-in-fp32"):
        what = "gradients are summed in bf16: --grad-reduce-in-bf16 overrules --accumulate-allreduce-grads-in-fp32"
        yield _found("warning", "precision", what, "both are there", "Leave out the one that is not meant.")
    if read.has("--fp16") and (read.size(_EXPERT) or 1) > 1:
        what = "experts on several ranks do not go with --fp16, and Megatron refuses that"
        yield _found("error", "precision", what, f"{_EXPERT} {read.size(_EXPERT)}", "Write --bf16.")
    sharded = (_SHARDED_OPTIMIZER, "--use-torch-fsdp2", "--use-megatron-fsdp")
    if read.has("--fp8-param-gather") and not any(map(read.has, sharded)):
        what = "--fp8-param-gather gathers parameters, which nothing shards, and Megatron refuses that"
        yield _found("error", "precision", what, "no sharding is there", f"Write {_SHARDED_OPTIMIZER} too.")


def pipeline(read: MegatronArguments) -> Iterator[Outcome]:
    """Layers are cut evenly over stages, unless it is said how."""
    stages, layers = read.size(_PIPELINE), read.size("--num-layers", None)
    says_how = any("pipeline-num-layers" in name or name.startswith("--account-for") for name in read.given)
    if stages and layers and layers % stages and not says_how and not read.has("--pipeline-model-parallel-layout"):
        what = f"{layers} layers cannot be cut evenly into {stages} stages, and Megatron refuses that"
        remedy = f"Take a {_PIPELINE} that divides {layers}, or write --pipeline-model-parallel-layout."
        yield _found("error", "parallelism", what, f"--num-layers {layers} {_PIPELINE} {stages}", remedy)
    virtual = [name for name in _VIRTUAL if read.has(name)]
    if len(virtual) > 1:
        what = f"{' and '.join(virtual)} say the same, and Megatron refuses both together"
        yield _found("error", "parallelism", what, "both are there", "Leave one of them out.")
    least = 3 if read.has("--no-overlap-p2p-communication") else 2
    if virtual and stages is not None and stages < least:
        what = f"an interleaved pipeline needs {least} stages or more, and Megatron refuses it with {stages}"
        yield _found("error", "parallelism", what, f"{_PIPELINE} {stages}", f"Leave {virtual[0]} out.")


def model_sizes(read: MegatronArguments) -> Iterator[Outcome]:
    """Heads and sequences that are cut over ranks are cut evenly."""
    tensor, context = read.size(_TENSOR), read.size(_CONTEXT)
    for name in ("--num-attention-heads", "--num-query-groups"):
        heads = read.size(name, None)
        if tensor and heads and heads % tensor:
            what = f"{name} {heads} cannot be cut over {tensor} ranks, and Megatron refuses that"
            yield _found("error", "parallelism", what, f"{_TENSOR} {tensor}", f"Take a {_TENSOR} that divides {heads}.")
    length = read.size("--seq-length", None)
    if context and context > 1 and length and length % (2 * context):
        what = f"--seq-length {length} is no multiple of {2 * context}, two parts for each of {context} ranks"
        remedy = f"Write {length // (2 * context) * 2 * context + 2 * context}, or a smaller {_CONTEXT}."
        yield _found("error", "parallelism", what, f"{_CONTEXT} {context}", remedy)


def sharding(read: MegatronArguments) -> Iterator[Outcome]:
    """What shards the optimizer, and FSDP's two implementations, need and do not take."""
    copies = None if read.copies is None else read.copies * (read.size(_CONTEXT) or 1)
    instances = read.size("--num-distributed-optimizer-instances")
    if copies and instances and copies % instances:
        what = f"{copies} ranks that share gradients cannot be cut into {instances} groups that shard the optimizer"
        remedy = f"Write a number that divides {copies}: the nodes."
        yield _found("error", "sharding", what, f"--num-distributed-optimizer-instances {instances}", remedy)
    if instances != 1 and not (read.has(_SHARDED_OPTIMIZER) or read.has("--use-megatron-fsdp")):
        what = "--num-distributed-optimizer-instances has no effect: nothing shards the optimizer"
        yield _found(
            "warning", "sharding", what, f"{_SHARDED_OPTIMIZER} is missing", f"Write {_SHARDED_OPTIMIZER} too."
        )
    if read.has("--data-parallel-sharding-strategy") and not read.has("--use-megatron-fsdp"):
        what = "--data-parallel-sharding-strategy has no effect without --use-megatron-fsdp"
        remedy = "Write --use-megatron-fsdp too, or leave it out."
        yield _found("warning", "sharding", what, "--use-megatron-fsdp is missing", remedy, FSDP_SOURCE)
    if read.has("--use-megatron-fsdp") and read.text("--ckpt-format", "torch_dist") != "fsdp_dtensor":
        what = "--use-megatron-fsdp saves in its own format alone, and Megatron refuses others"
        remedy = "Write --ckpt-format fsdp_dtensor."
        yield _found("error", "sharding", what, f"--ckpt-format {read.text('--ckpt-format', 'torch_dist')}", remedy)
    if read.has("--use-torch-fsdp2"):
        yield from _torch_fsdp2(read)
    if "muon" in read.text("--optimizer") and read.has(_SHARDED_OPTIMIZER):
        what = f"Muon does not go with {_SHARDED_OPTIMIZER}, and Megatron refuses that"
        yield _found(
            "error", "sharding", what, f"--optimizer {read.text('--optimizer')}", f"Leave {_SHARDED_OPTIMIZER} out."
        )
    if read.has("--optimizer-cpu-offload") and not read.has("--use-precision-aware-optimizer"):
        what = "--optimizer-cpu-offload needs --use-precision-aware-optimizer, and Megatron refuses it without"
        yield _found("error", "sharding", what, "it is missing", "Write --use-precision-aware-optimizer too.")


def _torch_fsdp2(read: MegatronArguments) -> Iterator[Outcome]:
    """What Megatron's use of PyTorch's FSDP2 does not take, and what it needs."""
    fails = {
        _PIPELINE: (read.size(_PIPELINE) or 1) > 1,
        _EXPERT: (read.size(_EXPERT) or 1) > 1,
        _SHARDED_OPTIMIZER: read.has(_SHARDED_OPTIMIZER),
        "--fp16": read.has("--fp16"),
    }
    for name in (name for name, is_there in fails.items() if is_there):
        what = f"--use-torch-fsdp2 does not go with {name}, and Megatron refuses that"
        yield _found("error", "sharding", what, f"{name} is there", f"Leave {name} out.")
    for name in ("--no-gradient-accumulation-fusion", "--untie-embeddings-and-output-weights"):
        if not read.has(name):
            what = f"--use-torch-fsdp2 needs {name}, and Megatron refuses it without"
            yield _found("error", "sharding", what, f"{name} is missing", f"Write {name} too.")


def connections(read: MegatronArguments) -> Iterator[Outcome]:
    """One queue to the GPU keeps communication of cut layers in order; FSDP needs several."""
    cut = (read.size(_TENSOR) or 1) > 1 or (read.size(_CONTEXT) or 1) > 1
    fsdp = read.has("--use-megatron-fsdp") or read.has("--use-torch-fsdp2")
    evidence = f"{CONNECTIONS}={read.connections}"
    if fsdp and read.connections == "1":
        what = f"FSDP does not go with {CONNECTIONS}=1, and Megatron refuses that"
        yield _found("error", "environment", what, evidence, f"Leave {CONNECTIONS} out.", FSDP_SOURCE)
    elif cut and not fsdp and read.connections is None:
        yield Unchecked(CONNECTIONS, "the file does not set it: before Blackwell it must be 1 where layers are cut")
    elif cut and not fsdp and read.connections != "1":
        what = f"{CONNECTIONS} must be 1 where layers are cut, before Blackwell, or Megatron refuses to start"
        yield _found("error", "environment", what, evidence, f"export {CONNECTIONS}=1.")


CHECKS: tuple[Check, ...] = (
    names,
    ranks,
    batches,
    sequence_parallelism,
    overlap,
    buckets,
    precision,
    pipeline,
    model_sizes,
    sharding,
    connections,
)
"""Each looks at all arguments, and yields what it finds."""


def check_megatron(
    given: str | Path | Sequence[str], world_size: int | None = None, gpus_per_node: int | None = None
) -> Examination:
    """Check arguments of Megatron, and tell what is wrong, the worst first.

    Values that the shell fills in, such as `$TP`, cannot be read, and what depends on them is passed by.

    Args:
        given: the path of a shell script, or of lines of arguments; or the arguments themselves.
        world_size: how many ranks there are; None reads it off torchrun's arguments, if they are there too.
        gpus_per_node: ranks that share a node; None does the same.

    Raises:
        SpecError: the file has no argument, or a number is no size.
        OSError: the file cannot be read.

    >>> found = check_megatron(["--bf16", "--micro-batch-size", "1", "--overlap-param-gather"], 8)
    >>> print(*(each.what for each in found.findings), sep="\\n")
    --overlap-param-gather needs a sharded optimizer, and Megatron refuses it without
    --overlap-param-gather needs --overlap-grad-reduce, and Megatron refuses it without
    gradients are sent after the backward pass, and not during it
    """
    read = read_megatron(given, world_size, gpus_per_node)
    subject = f"{given}, of Megatron" if isinstance(given, (str, Path)) else "arguments of Megatron"
    return Examination.of((each for check in CHECKS for each in check(read)), subject)
