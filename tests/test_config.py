"""`gradwire config` writes what its own checks find sound, and finds each planted fault by the check that is for it."""

from __future__ import annotations

import collections
import itertools
import json
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from config_faults import DEEPSPEED_FAULTS, MEGATRON_FAULTS, SOUND_MEGATRON, ConfigFault, sound_deepspeed, with_fault
from gradwire.cli.main import main
from gradwire.config import (
    TrainingShape,
    check_deepspeed,
    check_megatron,
    installed_deepspeed,
    write_deepspeed,
    write_fsdp2,
    write_megatron,
)
from gradwire.config.check_deepspeed import CHECKS, Check
from gradwire.config.check_megatron import CHECKS as CHECKS_OF_MEGATRON
from gradwire.config.deepspeed_file import read_deepspeed
from gradwire.config.deepspeed_keys import SECTIONS, TOP
from gradwire.config.megatron_arguments import read_megatron
from gradwire.core.errors import SpecError
from gradwire.doctor import Examination, Finding, Unchecked
from gradwire.network.loopback import loopback_environments
from gradwire.ranks.supervised import run_ranks

NOT_HERE = Unchecked("DeepSpeed's own models", "DeepSpeed is not installed here")


@pytest.fixture(autouse=True)
def no_deepspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is installed, the tables of gradwire are what is tested here."""

    def version(name: str) -> str:
        raise installed_deepspeed.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(installed_deepspeed.importlib.metadata, "version", version)


# DeepSpeed ------------------------------------------------------------------------------------------------------------


def told(found: Examination, fault: ConfigFault) -> list[Finding]:
    """The findings that say what a fault is."""
    return [each for each in found.findings if fault.says in each.what and each.severity == fault.severity]


def test_nothing_is_found_where_nothing_is_wrong() -> None:
    found = check_deepspeed(sound_deepspeed(), 16, 8)
    assert (found.findings, found.unchecked, found.status) == ((), (NOT_HERE,), 0)


@pytest.mark.parametrize("fault", DEEPSPEED_FAULTS, ids=lambda fault: fault.name)
def test_a_fault_is_found_with_evidence_and_remedy(fault: ConfigFault) -> None:
    found = check_deepspeed(with_fault(fault), fault.world_size, 8)
    (finding,) = told(found, fault)
    assert fault.remedy in finding.remedy
    assert finding.evidence
    assert finding.source
    assert finding.remedy.endswith((".", "?"))


@pytest.mark.parametrize("check", CHECKS[1:-1], ids=lambda check: check.__name__)
def test_no_other_check_finds_what_one_is_for(check: Check) -> None:
    """Without it some fault, or some value that nobody can check, would not be told at all."""
    if check.__name__ == "filled_in_later":
        auto = check_deepspeed({**sound_deepspeed(), "train_batch_size": "auto"}, 16, 8)
        assert [each.check for each in auto.unchecked] == ["values", NOT_HERE.check]
        return
    rest = [each for each in CHECKS if each is not check]
    for fault in DEEPSPEED_FAULTS:
        file = read_deepspeed(with_fault(fault), fault.world_size, 8)
        if not told(Examination.of(each for other in rest for each in other(file)), fault):
            return
    pytest.fail(f"{check.__name__} finds nothing that another check does not find")


def test_what_depends_on_an_unknown_cluster_is_told_as_not_checked() -> None:
    keys = with_fault(ConfigFault("", {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 8}}, ""))
    keys["zero_optimization"]["zero_quantized_gradients"] = True
    unchecked = [each.check for each in check_deepspeed(keys).unchecked]
    assert unchecked == ["batch", "quantized gradients", "partition size", NOT_HERE.check]


def test_a_file_is_read_as_deepspeed_reads_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "ds.json"
    file.write_text('{"train_batch_size": 8, "bf16": {"enabled": true, "enabled": true}}', encoding="utf-8")
    (finding,) = check_deepspeed(file, 8).findings
    assert finding.what == "enabled stands twice in one section, and DeepSpeed refuses that"
    file.write_text('{"train_batch_size": 8,\n# a comment\n}', encoding="utf-8")
    monkeypatch.setitem(sys.modules, "hjson", None)
    with pytest.raises(SpecError, match=r"ds\.json is no JSON at line 2, column 1"):
        check_deepspeed(file)
    hjson = types.ModuleType("hjson")
    hjson.loads = lambda text, object_pairs_hook: object_pairs_hook([("train_batch_size", 8)])  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "hjson", hjson)
    assert check_deepspeed(file, 8).findings == ()
    file.write_text("[]", encoding="utf-8")
    with pytest.raises(SpecError, match="holds no object"):
        check_deepspeed(file)
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(SpecError, match="no text in UTF-8"):
        check_deepspeed(file)
    with pytest.raises(SpecError, match="world_size=0 is no size"):
        check_deepspeed({}, 0)


_NAMES = st.sampled_from(sorted({*TOP, *(name for section in SECTIONS.values() for name in section), "type", "params"}))
_VALUES = st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(["auto", "nvme", "OneBitAdam", ""])
_JSON = st.recursive(_VALUES, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(_NAMES, inner, max_size=4))


@given(st.dictionaries(_NAMES, _JSON, max_size=6), st.integers(1, 4), st.integers(1, 4))
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_json_is_too_strange_to_be_checked(keys: dict[str, Any], world_size: int, gpus_per_node: int) -> None:
    found = check_deepspeed(keys, world_size, gpus_per_node)
    assert all(each.what and each.evidence and each.remedy for each in found.findings)
    json.dumps(found.to_words())


class _RefusalError(ValueError):
    def errors(self) -> list[dict[str, Any]]:
        return [{"loc": ("offload_param", "device"), "msg": "Input should be 'none'"}]


def test_the_models_of_an_installed_deepspeed_are_asked_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for DeepSpeed: what its models refuse becomes a finding, whatever they raise it by."""
    seen: list[dict[str, Any]] = []

    def refuses(error: Exception | None) -> Any:
        def model(**keys: Any) -> None:
            seen.append(keys)
            print("a greeting that nobody asked for")
            if error is not None:
                raise error

        return model

    zero, precision = types.ModuleType("zero"), types.ModuleType("precision")
    zero.DeepSpeedZeroConfig = refuses(_RefusalError())  # type: ignore[attr-defined]
    precision.DeepSpeedBF16Config = refuses(AssertionError("no such GPU"))  # type: ignore[attr-defined]
    for name, module in {
        "deepspeed": types.ModuleType("deepspeed"),
        "deepspeed.runtime": types.ModuleType("deepspeed.runtime"),
        "deepspeed.runtime.zero": types.ModuleType("deepspeed.runtime.zero"),
        "deepspeed.runtime.zero.config": zero,
        "deepspeed.runtime.precision_config": precision,
        "deepspeed.comm": None,
    }.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(installed_deepspeed.importlib.metadata, "version", "9.9".format)  # of whatever
    keys: dict[str, Any] = {**sound_deepspeed(), "comms_logger": {"enabled": False}}
    keys["zero_optimization"]["stage3_max_live_parameters"] = "auto"
    found = check_deepspeed(keys, 16, 8)
    assert [each.what for each in found.findings] == [
        "DeepSpeed 9.9 refuses zero_optimization.offload_param.device: Input should be 'none'",
        "DeepSpeed 9.9 refuses bf16: no such GPU",
    ]
    assert "stage3_max_live_parameters" not in seen[0]
    assert "DeepSpeed 9.9 has none where it is known" in found.unchecked[-1].why


def test_what_is_written_is_sound() -> None:
    """Every shape, stage and part that go together; those that do not are refused with a sentence."""
    parts = [(), ("qwz",), ("hpz",), ("qwz", "hpz", "qgz")]
    shapes = [TrainingShape(16, 4, 256, 8, "bf16"), TrainingShape(8, 2, precision="fp16", reduce="fp16")]
    refused: list[tuple[int, int]] = []
    for shape, stage, zeropp, offload in itertools.product(shapes, range(4), parts, ("none", "optimizer", "all")):
        try:
            file = write_deepspeed(shape, stage, zeropp, offload, hidden_size=4096)
        except SpecError:
            refused.append((shape.nodes, stage))
            continue
        keys = json.loads(file.text)
        found = check_deepspeed(keys, shape.world_size, shape.gpus_per_node)
        assert (found.findings, found.unchecked) == ((), (NOT_HERE,))
        assert keys["train_batch_size"] == shape.world_size * shape.micro_batch * keys["gradient_accumulation_steps"]
        assert all(each.why and each.source.startswith("https://") for each in file.settings)
    of_both = {0: 12 - 1, 1: 12 - 2, 2: 12 - 2}  # without ZeRO++; offload of the optimizer begins with stage 1
    assert collections.Counter(refused) == {(nodes, stage): n for nodes in (1, 2) for stage, n in of_both.items()} | {
        (1, 3): 2 * 3  # hpz, which needs nodes
    }


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("--world-size 8 --batch 30", "a batch of 30 is no multiple of 8"),
        ("--world-size 12 --gpus-per-node 8", "12 ranks do not fill nodes of 8 GPUs"),
        ("--world-size 8 --precision bf61", "did you mean 'bf16'?"),
        ("--world-size 8 --precision bf16 --reduce fp16", "cannot be summed in fp16"),
        ("--world-size 8 --stage 4", "no stage 4"),
        ("--world-size 8 --stage 1 --zero++ qwz", "only stage 3 shards parameters"),
        ("--world-size 8 --stage 3 --zero++ hpz", "give the GPUs of a node"),
        ("--world-size 8 --stage 3 --zero++ qgz --gpus-per-node 8", "no effect in one node"),
        ("--world-size 8 --stage 3 --zero++ qwx", "did you mean 'qwz'?"),
        ("--world-size 8 --offload optimiser", "did you mean 'optimizer'?"),
        ("--world-size 8 --stage 0 --offload optimizer", "that begins with stage 1"),
        ("--world-size 8 --hidden-size 0 --stage 3", "hidden_size=0 is no size"),
        ("--world-size 8 --clip -1", "cannot be clipped to a norm of -1"),
        ("--world-size 0", "world_size=0 is no size"),
        ("", "--world-size is missing"),
        ("--world-size 8 --json found.json", "--json is for what --check finds"),
    ],
)
def test_a_training_that_has_no_configuration_is_refused(
    arguments: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["config", "deepspeed", *arguments.split()]) == 2
    assert says in capsys.readouterr().err


def test_the_command_writes_and_checks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, findings = tmp_path / "ds.json", tmp_path / "findings.json"
    assert main(["config", "deepspeed", "--world-size", "8", "--stage", "3", "--out", str(file)]) == 0
    assert "zero_optimization.stage = 3: each rank has a shard of parameters too" in capsys.readouterr().out
    assert main(["config", "deepspeed", "--world-size", "8", "--stage", "3"]) == 0
    said = capsys.readouterr()
    assert said.out == file.read_text(encoding="utf-8")
    assert "bf16.enabled = true: half of the memory" in said.err
    assert main(["config", "deepspeed", "--check", str(file), "--world-size", "8"]) == 0
    assert "nothing found" in capsys.readouterr().out
    assert main(["config", "deepspeed", "--check", str(file), "--world-size", "6", "--json", str(findings)]) == 1
    assert "ERROR    train_batch_size is 8, which is not 1 x 1 x 6 = 6" in capsys.readouterr().out
    assert json.loads(findings.read_text(encoding="utf-8"))["status"] == 1
    assert main(["config", "deepspeed", "--check", str(tmp_path / "none.json")]) == 1
    assert "No such file" in capsys.readouterr().err


# Megatron -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], Path]:
    """A file with a text."""

    def written(text: str) -> Path:
        file = tmp_path / "args.sh"
        file.write_text(text, encoding="utf-8")
        return file

    return written


Written = Callable[[str], Path]


def test_nothing_is_found_where_arguments_are_sound(script: Written) -> None:
    found = check_megatron(script(f"export CUDA_DEVICE_MAX_CONNECTIONS=1\n{SOUND_MEGATRON}"), 16, 8)
    assert (found.findings, found.unchecked, found.status) == ((), (), 0)


@pytest.mark.parametrize("fault", MEGATRON_FAULTS, ids=lambda fault: fault.name)
def test_a_fault_in_arguments_is_found(fault: ConfigFault, script: Written) -> None:
    per_node = 4 if fault.name == "nodes" else 8
    (finding,) = told(check_megatron(script(fault.given), 16, per_node), fault)
    assert fault.remedy in finding.remedy
    assert finding.evidence
    assert finding.remedy.endswith(".")


@pytest.mark.parametrize("check", CHECKS_OF_MEGATRON, ids=lambda check: check.__name__)
def test_each_check_of_arguments_is_needed(check: Any, script: Written) -> None:
    rest = [each for each in CHECKS_OF_MEGATRON if each is not check]
    for fault in MEGATRON_FAULTS:
        read = read_megatron(script(fault.given), 16, 4 if fault.name == "nodes" else 8)
        if not told(Examination.of(each for other in rest for each in other(read)), fault):
            return
    pytest.fail(f"{check.__name__} finds nothing that another check does not find")


def test_a_script_of_a_shell_is_read(script: Written) -> None:
    """Arrays, remarks, lines that go on, variables that the shell fills in, and what torchrun is told."""
    text = """
        TP=4  # of a node
        ARGS=(
            --bf16 --micro-batch-size=1  # one at a time
            --tensor-model-parallel-size $TP --sequence-parallel
            --global-batch-size 12)
        torchrun --nproc-per-node 8 --nnodes=2 pretrain_gpt.py \\
            --pipeline-model-parallel-size 3 "${ARGS[@]}" --cp-comm-type p2p a2a
    """
    read = read_megatron(script(text))
    assert (read.world_size, read.gpus_per_node, read.model_parallel, read.copies) == (16, 8, None, None)
    assert read.given["--cp-comm-type"] == ["p2p", "a2a"]
    assert read.size("--global-batch-size") == 12
    with pytest.raises(SpecError, match="has no argument"):
        check_megatron(script("# nothing"))
    with pytest.raises(SpecError, match="cannot be read as arguments of a shell: No closing quotation"):
        check_megatron(script("--save '/tmp"))
    with pytest.raises(SpecError, match="gpus_per_node=0 is no size"):
        check_megatron(["--bf16"], gpus_per_node=0)
    assert [each.check for each in check_megatron(["--bf16", "--micro-batch-size", "1"]).unchecked] == ["ranks"]


def test_written_arguments_are_sound(script: Written) -> None:
    shapes = [
        TrainingShape(16, 1, 64, 8),
        TrainingShape(16, 2, 64, None, "fp16"),
        TrainingShape(16, 1, 64, 8, reduce="bf16"),
    ]
    refused = 0
    for shape, tensor, pipeline, context, stage in itertools.product(shapes, (1, 4), (1, 2), (1, 2), range(4)):
        try:
            file = write_megatron(shape, tensor, pipeline, context, stage)
        except SpecError as error:
            refused += "FSDP is not for pipelines" in str(error)
            continue
        found = check_megatron(script(file.text), shape.world_size, shape.gpus_per_node)
        assert (found.findings, found.unchecked) == ((), ())
        assert all(f"# {each.why} [{each.source}]\n" in file.text for each in file.settings)
    assert refused == 3 * 2 * 2 * 2
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"tensor": 0}, "tensor=0 is no size"),
        ({"stage": 4}, "no stage 4"),
        ({"tensor": 3}, "16 ranks are no multiple of 3"),
        ({"pipeline": 16}, "a batch of 30 is no multiple of 4"),
    ]
    for sizes, says in wrong:
        with pytest.raises(SpecError, match=says):
            write_megatron(TrainingShape(16, 4, 30), **sizes)


# FSDP2 ----------------------------------------------------------------------------------------------------------------


def test_a_script_for_fsdp2_has_what_was_asked_for() -> None:
    file = write_fsdp2(TrainingShape(16, 4, 256, 8, "fp16"), stage=2, method="int4", offload=True)
    for line in (
        'init_device_mesh(kind, (2, 8), mesh_dim_names=("replicate", "shard"))',
        'mesh=mesh["shard"], mp_policy=policy, reshard_after_forward=False)',
        'sharding["offload_policy"] = CPUOffloadPolicy(',
        'gradwire.attach(model, "int4", replicate=mesh["replicate"], scaler=scaler)',
        "MICRO_BATCH, ACCUMULATION = 16, 4, 4  # 256 samples a step",
        "param_dtype=torch.float16,",
        "scaler.step(optimizer)",
    ):
        assert line in file.text
    assert all(each.why in file.text for each in file.settings if each.name not in ("GradScaler",))
    alone = write_fsdp2(TrainingShape(8)).text
    assert "gradwire" not in alone
    assert 'init_device_mesh(kind, (8,), mesh_dim_names=("shard",))' in alone
    hybrid = write_fsdp2(TrainingShape(16, gpus_per_node=8)).text
    assert "sharding = dict(mesh=mesh," in hybrid
    for text in (file.text, alone, hybrid):
        compile(text, "train.py", "exec")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("--world-size 8 --method int44", "int4"),
        ("--world-size 8 --method powersgd:4", "FSDP2 needs a method that ends with shards"),
        ("--world-size 8 --method int4,parameters=topk:0.01", "parameters"),
        ("--world-size 8 --stage 1", "fully_shard has no stage 1"),
        ("--world-size 8 --gpus-per-node 1", "nothing could be sharded inside a node"),
        ("", "--world-size is missing"),
    ],
)
def test_what_fsdp2_cannot_be_given_is_refused(arguments: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "fsdp2", *arguments.split()]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.one_draw_in(4)
def test_a_script_for_fsdp2_trains_as_it_is(tmp_path: Path) -> None:
    """Two nodes of one rank each, with a method between them and micro-batches."""
    file = tmp_path / "train.py"
    shape = TrainingShape(2, micro_batch=4, batch=16, gpus_per_node=1)
    file.write_text(write_fsdp2(shape, method="int4").text, encoding="utf-8")
    said: list[str] = []
    run_ranks(
        [[sys.executable, str(file)]] * 2,
        [
            {**each, "STEPS": "21", "GRADWIRE_TIME_LINK": "0", "OMP_NUM_THREADS": "1"}
            for each in loopback_environments(2)
        ],
        log_dir=tmp_path,
        deadline_s=180,
        on_line=lambda rank, line: said.append(line) if rank == 0 else None,
    )
    losses = [float(line.split()[-1]) for line in said if line.startswith("step")]
    assert len(losses) == 3
    assert losses[-1] < losses[0]
    assert any("int4" in line for line in said)


def test_the_commands_of_megatron_and_fsdp2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "args.sh"
    sizes = ["--world-size", "16", "--gpus-per-node", "8", "--tp", "4"]
    assert main(["config", "megatron", *sizes, "--out", str(file)]) == 0
    assert "--sequence-parallel: activations between layers are cut too" in capsys.readouterr().out
    assert main(["config", "megatron", *sizes]) == 0
    assert capsys.readouterr() == (file.read_text(encoding="utf-8"), "")
    assert main(["config", "megatron", "--check", str(file), "--world-size", "6"]) == 1
    assert "ERROR    6 ranks are no multiple of 4" in capsys.readouterr().out
    assert main(["config", "fsdp2", "--world-size", "8"]) == 0
    assert "fully_shard(block, **sharding)" in capsys.readouterr().out
