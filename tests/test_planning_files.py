"""Configurations of other frameworks for a layout that was planned."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from gradwire.cli.main import main
from gradwire.config import check_deepspeed, check_megatron
from gradwire.core.errors import SpecError
from gradwire.planning import ParallelLayout, configurations, hardware, model, plan, written_by

LLAMA, MIXTRAL, H100 = model("llama2-7b"), model("mixtral-8x7b"), hardware("h100-80g")
DATA = ParallelLayout(dp=16, micro=2, batch=64, sharding="parameters", recompute="full")


def test_megatron_is_given_the_layout_and_the_model(tmp_path: Path) -> None:
    layout = ParallelLayout(dp=4, tp=2, pp=4, ep=8, micro=1, batch=64, interleave=2, recompute="full")
    files = configurations("megatron", MIXTRAL, layout, H100)
    both = tmp_path / "both.sh"
    both.write_text(files["megatron.sh"] + files["model.sh"])
    found = check_megatron(both, 32, 8)
    assert (found.findings, found.unchecked) == ((), ())
    for line in (
        "--tensor-model-parallel-size 2",
        "--pipeline-model-parallel-size 4",
        "--num-virtual-stages-per-pipeline-rank 2",
        "--expert-model-parallel-size 8",
        "--recompute-granularity full",
        "--global-batch-size 64",
        "--use-distributed-optimizer",
        "--num-experts 8",
        "--num-query-groups 8",
        "--swiglu",
        "--normalization RMSNorm",
        "--position-embedding-type rope",
        "--disable-bias-linear",
    ):
        assert f"  {line}\n" in both.read_text()
    assert "torchrun --nnodes 4 --nproc-per-node 8" in files["launch.sh"]
    spread = configurations("megatron", LLAMA, replace(DATA, sharding="optimizer", recompute="none"), H100)
    assert "instances" not in spread["megatron.sh"], "shards lie over all copies, as the memory was planned"


def test_megatron_is_told_which_layers_have_experts(tmp_path: Path) -> None:
    layout = ParallelLayout(dp=8, ep=8, batch=64)
    assert "moe-layer-freq" not in configurations("megatron", MIXTRAL, layout, H100)["model.sh"]
    file = tmp_path / "model.sh"
    file.write_text(configurations("megatron", replace(MIXTRAL, dense_layers=2), layout, H100)["model.sh"])
    shown = ["bash", "-c", f'. {file}; printf "%s\\n" "${{MODEL_ARGS[@]}}"']
    words = subprocess.run(shown, check=True, timeout=60, capture_output=True, text=True).stdout.split("\n")
    assert words[words.index("--moe-layer-freq") + 1] == "([0]*2+[1]*30)"


def test_megatron_keeps_norms_positions_and_biases_of_a_model_without_gates() -> None:
    text = configurations("megatron", model("gpt3-22b"), ParallelLayout(dp=8, batch=64), H100)["model.sh"]
    assert not any(word in text for word in ("RMSNorm\n", "rope", "--disable-bias-linear", "--swiglu"))
    assert "--attention-dropout 0" in text.partition("MODEL_ARGS")[0], "what is left to the user"


def test_deepspeed_is_given_the_stage(tmp_path: Path) -> None:
    for sharding, stage in (("none", 0), ("optimizer", 1), ("gradients", 2), ("parameters", 3)):
        text = configurations("deepspeed", LLAMA, replace(DATA, sharding=sharding), H100)["deepspeed.json"]
        keys = json.loads(text)
        assert keys["zero_optimization"]["stage"] == stage
        assert (keys["train_batch_size"], keys["train_micro_batch_size_per_gpu"]) == (64, 2)
        (tmp_path / "ds.json").write_text(text)
        assert check_deepspeed(tmp_path / "ds.json", 16, 8).status == 0


def test_fsdp2_is_given_shards_over_all_ranks() -> None:
    files = configurations("torchrun", LLAMA, replace(DATA, method="int4"), H100)
    for line in (
        "init_device_mesh(kind, (16,)",
        "reshard_after_forward=True)",
        "checkpoint(block, inputs, use_reentrant=False)",
        'gradwire.attach(model, "int4")',
        "WORLD_SIZE, MICRO_BATCH, ACCUMULATION = 16, 2, 2",
        "--nnodes 2 --nproc-per-node 8",
    ):
        assert line in files["train.py"]
    compile(files["train.py"], "train.py", "exec")
    kept = configurations("torchrun", LLAMA, replace(DATA, sharding="optimizer", recompute="none"), H100)["train.py"]
    assert "reshard_after_forward=False)" in kept
    assert "checkpoint" not in kept


@pytest.mark.parametrize(
    ("framework", "layout", "says"),
    [
        ("torchrun", replace(DATA, dp=4, tp=2, pp=1), "tp=2, and a script for torchrun has data parallelism alone"),
        ("torchrun", replace(DATA, sharding="none"), "FSDP2 shards"),
        ("deepspeed", replace(DATA, sharding="optimizer", dp=4, cp=4), "cp=4"),
        ("deepspeed", replace(DATA, method="int4"), "method=int4, which deepspeed does not know"),
        ("megatron", replace(DATA, sharding="none", every=8), "every=8, which no configuration says"),
        ("megatrons", DATA, "did you mean 'megatron'"),
    ],
)
def test_what_has_no_configuration_is_refused(framework: str, layout: ParallelLayout, says: str) -> None:
    with pytest.raises(SpecError, match=says):
        configurations(framework, LLAMA, layout, H100)


def test_search_keeps_to_what_can_be_written() -> None:
    whole = plan(model("llama2-70b"), H100, 64, 512)
    kept = plan(model("llama2-70b"), H100, 64, 512, suits=written_by("deepspeed"))
    assert kept.tried < whole.tried
    assert (kept.best[0].layout.tp, kept.best[0].layout.pp) == (1, 1)
    assert kept.best[0].time.total >= whole.best[0].time.total


def test_command_writes_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["plan", "--model", "llama2-7b", "--hardware", "h100-80g", "--gpus", "16", "--batch", "64"]
    asked += ["--write", "megatron", "--out", str(tmp_path / "run")]
    assert main(asked) == 0
    assert str(tmp_path / "run") in capsys.readouterr().out.replace("\n", "")
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["launch.sh", "megatron.sh", "model.sh"]
    for name in ("launch.sh", "megatron.sh", "model.sh"):
        subprocess.run(["bash", "-n", str(tmp_path / "run" / name)], check=True, timeout=60)
    assert main(asked) == 2
    assert "is there already" in capsys.readouterr().err
    assert main(asked[:-2]) == 2
    assert "--write NAME and --out DIR go together" in capsys.readouterr().err
    (tmp_path / "file").touch()
    assert main([*asked[:-1], str(tmp_path / "file")]) == 2
    assert "cannot be written to" in capsys.readouterr().err
