"""Arguments of Megatron for sharding, precision and communication, with a reason for each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gradwire.config.check_megatron import check_megatron
from gradwire.config.megatron_arguments import CONNECTIONS, FSDP_SOURCE, SOURCE
from gradwire.config.setting import ConfigFile, Setting
from gradwire.config.shape import TrainingShape, require_one_of
from gradwire.core.errors import SpecError

_STRATEGIES = {2: "optim_grads", 3: "optim_grads_params"}
_GUIDE = "https://docs.nvidia.com/megatron-core/developer-guide/latest/user-guide/parallelism-guide.html"
_DDP = "https://github.com/NVIDIA/Megatron-LM/blob/main/megatron/core/distributed/distributed_data_parallel_config.py"


def write_megatron(
    shape: TrainingShape,
    tensor: int = 1,
    pipeline: int = 1,
    context: int = 1,
    stage: int = 1,
    *,
    expert: int = 1,
    interleave: int = 1,
    recompute: str = "none",
    node_copies: bool = True,
) -> ConfigFile:
    """Write arguments of Megatron as an array of a shell script. Those of the model and of data are left to you.

    What is written is checked as `check_megatron` does, and refused where that finds an error.

    Args:
        shape: ranks, batches and precision.
        tensor: ranks that each layer is cut over.
        pipeline: stages that layers are cut into.
        context: ranks that each sequence is cut over.
        stage: what is sharded over copies of the model, by the numbers of ZeRO: 0 nothing, 1 the optimizer's states,
            2 gradients too, 3 parameters too. 2 and 3 are Megatron's own FSDP.
        expert: ranks that the experts of a layer are spread over, each of them whole.
        interleave: parts of each stage.
        recompute: what the backward pass computes anew: "none", "selective" (attention) or "full" (whole layers).
        node_copies: whether the optimizer's shards lie inside nodes, where they can; False: over all copies.

    Raises:
        SpecError: numbers that make no training, with what to do instead.

    >>> written = write_megatron(TrainingShape(16, micro_batch=1, batch=64, gpus_per_node=8), tensor=4, pipeline=2)
    >>> print(*written.text.splitlines()[4:8], sep="\\n")
    export CUDA_DEVICE_MAX_CONNECTIONS=1
    MEGATRON_ARGS=(
      # layers are cut over 4 ranks, which lie on one node [...]
      --tensor-model-parallel-size 4
    """
    sizes = (("tensor", tensor), ("pipeline", pipeline), ("context", context))
    for name, value in (*sizes, ("expert", expert), ("interleave", interleave)):
        if value < 1:
            raise SpecError(f"{name}={value} is no size: give 1 or more")
    if stage not in range(4):
        raise SpecError(f"there is no stage {stage}: take 0, 1, 2 or 3, by the numbers of ZeRO")
    if stage > 1 and pipeline > 1:
        raise SpecError("FSDP is not for pipelines, whose stages are shards already: take stage=1, or pipeline=1")
    require_one_of("recompute", recompute, ("none", "selective", "full"))
    if interleave > 1 and pipeline == 1:
        raise SpecError(
            f"interleave={interleave} cuts the stages of a pipeline: take pipeline=2 or more, or leave it out"
        )
    together = tensor * pipeline * context
    if shape.world_size // pipeline % expert:
        ranks = shape.world_size // pipeline
        raise SpecError(
            f"experts cannot be spread over {expert} of the {ranks} ranks of a stage: take one that divides it"
        )
    if shape.world_size % together:
        raise SpecError(
            f"{shape.world_size} ranks are no multiple of {together}, those of one copy of the model: "
            f"take a multiple of {together} ranks, or smaller sizes"
        )
    arguments = (
        *_parallelism(shape, tensor, pipeline, context),
        *_layers(expert, interleave, recompute),
        *_batches(shape, together),
        *_precision(shape),
        *_sharding(shape, shape.world_size // together, context, pipeline, stage, node_copies),
    )
    is_cut = stage < 2 and (tensor > 1 or context > 1)
    environment = [Setting(f"export {CONNECTIONS}", 1, _ORDER, SOURCE)] if is_cut else []
    text = _script(environment, arguments)
    _require_sound(arguments, shape)
    return ConfigFile(text, (*environment, *arguments))


_ORDER = "one queue keeps communication of cut layers in order; Megatron refuses another number before Blackwell"


def _parallelism(shape: TrainingShape, tensor: int, pipeline: int, context: int) -> Iterator[Setting]:
    if tensor > 1:
        inside = shape.gpus_per_node is None or shape.gpus_per_node % tensor == 0
        where = "which lie on one node" if inside else "which lie on SEVERAL NODES: each layer waits for the link"
        yield Setting("--tensor-model-parallel-size", tensor, f"layers are cut over {tensor} ranks, {where}", _GUIDE)
        yield Setting("--sequence-parallel", None, "activations between layers are cut too, for as many bytes", _GUIDE)
    if pipeline > 1:
        why = "stages send activations alone, so that they may lie on slow links"
        yield Setting("--pipeline-model-parallel-size", pipeline, why, _GUIDE)
    if context > 1:
        yield Setting("--context-parallel-size", context, f"each sequence is cut over {context} ranks", _GUIDE)


def _batches(shape: TrainingShape, together: int) -> Iterator[Setting]:
    steps = shape.accumulation(together)
    copies = shape.world_size // together
    yield Setting("--micro-batch-size", shape.micro_batch, "what one copy of the model has in one pass", SOURCE)
    product = f"{shape.micro_batch} x {steps} micro-batches x {copies} copies"
    yield Setting("--global-batch-size", shape.micro_batch * steps * copies, product, SOURCE)


def _precision(shape: TrainingShape) -> Iterator[Setting]:
    if shape.precision == "bf16":
        yield Setting("--bf16", None, "half of the memory, and the range of float32: no loss scaler", SOURCE)
        if shape.reduce == "bf16":
            yield Setting("--grad-reduce-in-bf16", None, "half of the bytes of fp32; each addition rounds", SOURCE)
    if shape.precision == "fp16":
        yield Setting("--fp16", None, "for GPUs without bfloat16; the loss scale follows the gradients", SOURCE)
    if shape.precision != "fp32" and shape.reduce == "fp32":
        why = "sums over micro-batches and ranks keep their small parts; twice the bytes of 16 bits"
        yield Setting("--accumulate-allreduce-grads-in-fp32", None, why, SOURCE)


def _layers(expert: int, interleave: int, recompute: str) -> Iterator[Setting]:
    if interleave > 1:
        why = f"each stage has {interleave} parts, so that the pipeline fills in a fraction of the time"
        yield Setting("--num-virtual-stages-per-pipeline-rank", interleave, why, _GUIDE)
    if expert > 1:
        why = f"experts are spread over {expert} ranks, and tokens travel to them"
        yield Setting("--expert-model-parallel-size", expert, why, _GUIDE)
        yield Setting(
            "--expert-tensor-parallel-size", 1, "each expert is whole, so that its products stay large", _GUIDE
        )
    if recompute != "none":
        what = "whole layers are" if recompute == "full" else "attention's core is"
        why = f"{what} computed anew in the backward pass, for memory"
        yield Setting("--recompute-granularity", recompute, why, SOURCE)
    if recompute == "full":
        yield Setting("--recompute-method", "uniform", "all layers alike", SOURCE)
        yield Setting("--recompute-num-layers", 1, "the inputs of each layer are kept", SOURCE)


def _sharding(
    shape: TrainingShape, copies: int, context: int, pipeline: int, stage: int, node_copies: bool
) -> Iterator[Setting]:
    if copies * context == 1:
        return  # nobody to share with
    if stage > 1:
        yield Setting("--use-megatron-fsdp", None, "shards gradients and more, as FSDP2 does", FSDP_SOURCE)
        what = "parameters, gradients and states" if stage == 3 else "gradients and states"
        yield Setting("--data-parallel-sharding-strategy", _STRATEGIES[stage], f"{what} are sharded", FSDP_SOURCE)
        yield Setting("--no-gradient-accumulation-fusion", None, "FSDP keeps gradients in its own buffers", FSDP_SOURCE)
        yield Setting("--ckpt-format", "fsdp_dtensor", "the only format that its checkpoints have", SOURCE)
    if stage:
        why = "each rank keeps and steps a shard of the optimizer's states; it sends as many bytes as without"
        why = why if stage == 1 else "the optimizer steps the shards that FSDP keeps"
        yield Setting("--use-distributed-optimizer", None, why, SOURCE)
    yield Setting("--overlap-grad-reduce", None, "gradients travel while the backward pass goes on", _DDP)
    if stage:
        yield Setting("--overlap-param-gather", None, "parameters travel while the forward pass goes on", _DDP)
    if node_copies and stage == 1 and pipeline == 1 and shape.nodes > 1 and (copies * context) % shape.nodes == 0:
        why = "shards lie inside a node, so that parameters are gathered there; gradients alone travel between nodes"
        yield Setting("--num-distributed-optimizer-instances", shape.nodes, why, _DDP)


def _script(environment: Sequence[Setting], arguments: Sequence[Setting]) -> str:
    """A shell script that sets an array, since a remark fits between its lines."""
    lines = [
        "# Arguments of Megatron-LM for sharding, precision and communication. Source this file, and add those of the",
        '# model and of data: torchrun ... pretrain_gpt.py "${MEGATRON_ARGS[@]}" --num-layers 32 ...',
    ]
    lines += [line for each in environment for line in ("", _remark(each), f"{each.name}={each.value}")]
    lines += [*([] if environment else [""]), "MEGATRON_ARGS=("]
    for each in arguments:
        lines += [f"  {_remark(each)}", f"  {each.name}" if each.value is None else f"  {each.name} {each.value}"]
    return "\n".join([*lines, ")", ""])


def _remark(setting: Setting) -> str:
    return f"# {setting.why} [{setting.source}]"


def _require_sound(arguments: Sequence[Setting], shape: TrainingShape) -> None:
    """Refuse what the checks find an error in, so that what may go together is written in one place."""
    words = [word for each in arguments for word in (each.name, *([] if each.value is None else [str(each.value)]))]
    wrong = [each for each in check_megatron(words, shape.world_size).findings if each.severity == "error"]
    if wrong:
        raise SpecError(f"{wrong[0].what}: {wrong[0].remedy[:1].lower()}{wrong[0].remedy[1:]}")
