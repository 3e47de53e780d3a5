"""What `gradwire.planning` predicts of published runs that nothing was fitted to: other clusters, GPUs and software.

python benchmarks/planning_elsewhere.py --save

The constants are those that `planning.py` fits to nine step times on A100. Predicted with them are Megatron-LM on up to
12,288 A100 and on up to 4,608 H100, Llama 3 405B on 16,384 H100, models with experts, and MPT models by PyTorch's FSDP.
Settings that a source does not tell are those that the planner finds fastest among layouts that fit into memory.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from common import save_result
from gradwire.core.errors import SpecError
from gradwire.planning import ParallelLayout, device_memory, hardware, model, plan, step_time
from planning import A100, DATA, table, transformer

H100 = hardware("h100-80g")


def megatron_on_a100(path: Path = DATA / "published_ampere_step_times.csv") -> list[dict[str, Any]]:
    """Megatron-LM of early 2023 on up to 12,288 A100, with the software of the rows that were fitted to.

    That is attention without a fused kernel, with dropout, and gradients that are sent at the end.
    """
    rows: list[dict[str, Any]] = []
    for row in table(path):
        sizes, gpus, batch = transformer(row), int(row["n_gpus"]), int(row["global_batch"])
        predicted: list[tuple[float, str]] = []
        for micro, recompute, sharding in itertools.product((1, 2, 4), ("none", "selective"), ("none", "optimizer")):
            try:
                layout = ParallelLayout(
                    dp=int(row["dp"]),
                    tp=int(row["tp"]),
                    pp=int(row["pp"]),
                    micro=micro,
                    batch=batch,
                    interleave=int(row["interleave"]),
                    sharding=sharding,
                    recompute=recompute,
                    flash=False,
                    dropout=True,
                    overlap=False,
                )
            except SpecError:  # as many micro-batches as no interleaved schedule takes
                continue
            if device_memory(sizes, layout).total <= 1e9 * A100.memory_gb:
                predicted.append((step_time(sizes, layout, A100).total, layout.says))
        at_peak = sizes.model_flops(batch) / gpus / A100.peak_tflops / 1e12
        published = float(row["step_time_s"]) if row["step_time_s"] else at_peak / float(row["mfu"])
        rows.append(_row(f"{sizes.name}, {gpus} A100", published, *min(predicted)))
    return rows


def megatron_on_h100() -> list[dict[str, Any]]:
    """GPT-3 with a vocabulary of 131,072 and 1,152 samples of 4,096 tokens a step, by the fastest layouts.

    Megatron-LM's README tells 47% of the peak on 96 H100 and 42% on 4,608, and no layouts.
    """
    sizes, batch = replace(model("gpt3-175b"), vocabulary=131_072).with_sequence(4096), 1152
    rows: list[dict[str, Any]] = []
    for gpus, published in ((96, 0.47), (4608, 0.42)):
        fastest = plan(sizes, H100, gpus=gpus, batch=batch).best[0]
        at_peak = sizes.model_flops(batch) / gpus / H100.peak_tflops / 1e12
        rows.append(_row(f"{sizes.name}, {gpus} H100", at_peak / published, fastest.time.total, fastest.layout.says))
    return rows


def llama3() -> list[dict[str, Any]]:
    """Llama 3 405B on H100 (Grattafiori et al. 2024, Table 4), with operations of causal attention counted once.

    Its stages have 8 layers, but for the first and the last one, which have 7 and an embedding: 128 equal layers here.
    """
    rows: list[dict[str, Any]] = []
    for gpus, dp, cp, sequence, published in (
        (8192, 64, 1, 8192, 430.0),
        (16_384, 128, 1, 8192, 400.0),
        (16_384, 8, 16, 131_072, 380.0),
    ):
        sizes = model("llama3-405b").with_sequence(sequence)
        batch = 2**24 // sequence  # samples of 16 Mi tokens
        layout = ParallelLayout(
            dp=dp, tp=8, pp=16, cp=cp, batch=batch, interleave=8 if batch // dp % 16 == 0 else 1, recompute="none"
        )
        seconds = step_time(replace(sizes, layers=128), layout, H100).total
        unmasked = 6 * batch * sequence * sizes.layers * sequence * sizes.heads * sizes.head
        tflop = (sizes.model_flops(batch) - unmasked) / gpus / 1e12
        name = f"Llama 3 405B, {gpus} H100, {sequence} tokens, {published:.0f} TFLOP/s"
        rows.append(_row(name, tflop / published, seconds, layout.says) | {"predicted_tflops": tflop / seconds})
    return rows


def with_experts(path: Path = DATA / "published_expert_step_times.csv") -> list[dict[str, Any]]:
    """Models with experts on H100.

    Where TFLOP/s are published, operations of attention count over the whole sequence, as Megatron counted them then.
    Qwen3's embedding and output layer count as a layer each when its pipeline is cut: 96 equal layers here.
    """
    rows: list[dict[str, Any]] = []
    for row in table(path):
        sizes = model(row["model"]).with_sequence(int(row["seq"]))
        layout = ParallelLayout(
            dp=int(row["dp"]),
            tp=int(row["tp"]),
            pp=int(row["pp"]),
            ep=int(row["ep"]),
            interleave=int(row["interleave"]),
            micro=int(row["micro_batch"]),
            batch=int(row["global_batch"]),
            sharding=row["sharding"],
            recompute=row["recompute"],
            dispatch=row["dispatch"],
        )
        tflop = sizes.model_flops(layout.batch) / layout.gpus / 1e12
        published = float(row["step_time_s"]) if row["step_time_s"] else tflop / float(row["tflops"])
        cut = replace(sizes, layers=-(-sizes.layers // layout.pp // layout.interleave) * layout.pp * layout.interleave)
        predicted = step_time(cut, layout, H100).total
        told = {"like_the_planner": row["like_the_planner"], "source": row["source"]}
        rows.append(_row(f"{sizes.name}, {layout.gpus} H100", published, predicted, layout.says) | told)
    return rows


def by_fsdp(path: Path = DATA / "published_fsdp_step_times.csv") -> list[dict[str, Any]]:
    """MPT models by PyTorch's FSDP on A100 and H100.

    Rows are of llm-foundry (scripts/train/benchmarking/README.md at 061f2c7), whose attention was FlashAttention's
    first version, written in Triton, and whose loss was fused. Those with gradients of 4 bytes were trained in mixed
    precision, the others in 16 bits.
    """
    rows: list[dict[str, Any]] = []
    for row in table(path):
        sizes, on, batch = transformer(row), hardware(row["hardware"]), int(row["global_batch"])
        layout = ParallelLayout(
            dp=int(row["gpus"]),
            micro=int(row["micro_batch"]),
            batch=batch,
            sharding="parameters",
            recompute=row["recompute"],
            gradient_bytes=int(row["gradient_bytes"]),
            fused_loss=True,
        )
        seconds, predicted = batch * sizes.sequence / float(row["tokens_per_s"]), step_time(sizes, layout, on).total
        told = {"hardware": on.name, "sequence": sizes.sequence, "recompute": layout.recompute}
        fits = device_memory(sizes, layout).total <= 1e9 * on.memory_gb
        name = f"{sizes.name}, {layout.gpus} {on.name}, {sizes.sequence} tokens"
        rows.append(_row(name, seconds, predicted, layout.says) | told | {"fits": fits})
    return rows


def memory_of_torchtitan() -> list[dict[str, Any]]:
    """Llama 3.1 by torchtitan on H100 of 96 GB with whole layers computed anew: what the allocator reserved, in GiB.

    Rows are of its benchmarks/llama3_h100_202412_torchtitan.md (Tables 2 and 4). Matrices were multiplied in 8 bits.
    """
    rows: list[dict[str, Any]] = []
    for name, sequence, dp, tp, cp, micro, published_gib in (
        ("llama3-8b", 32_768, 8, 1, 1, 1, 83.9),
        ("llama3-8b", 65_536, 4, 1, 2, 1, 84.2),
        ("llama3-8b", 131_072, 2, 1, 4, 1, 84.0),
        ("llama3-8b", 262_144, 1, 1, 8, 1, 84.5),
        ("llama3-70b", 8192, 32, 8, 1, 16, 71.9),
    ):
        layout = ParallelLayout(
            dp=dp, tp=tp, cp=cp, micro=micro, batch=dp * micro, sharding="parameters", recompute="full"
        )
        published_gb = published_gib * 2**30 / 1e9
        predicted_gb = device_memory(model(name).with_sequence(sequence), layout).total / 1e9
        rows.append(
            {
                "row": f"{name}, {layout.gpus} H100, {sequence} tokens",
                "layout": layout.says,
                "published_gb": published_gb,
                "predicted_gb": predicted_gb,
                "error": predicted_gb / published_gb - 1,
            }
        )
    return rows


def _row(name: str, published_s: float, predicted_s: float, layout: str) -> dict[str, Any]:
    error = predicted_s / published_s - 1
    return {"row": name, "layout": layout, "seconds": published_s, "predicted_s": predicted_s, "error": error}


def print_by_fsdp(rows: Sequence[dict[str, Any]]) -> None:
    """The median error by hardware and sequence, and which of the rows would not fit."""
    for name in dict.fromkeys(row["hardware"] for row in rows):
        for least, most in ((0, 2048), (2049, 8192), (8193, 65_536)):
            for kind in ("full", "none"):
                some = [row for row in rows if row["hardware"] == name and row["recompute"] == kind]
                errors = [row["error"] for row in some if least <= row["sequence"] <= most]
                if errors:
                    where = f"FSDP on {name}, up to {most} tokens, recompute={kind}"
                    print(f"{where}: {statistics.median(errors):+.1%} in the median of {len(errors)}")
    unfit = [row["row"] for row in rows if not row["fits"]]
    print(f"{len(unfit)} of {len(rows)} rows that were trained are said not to fit: {'; '.join(unfit)}")


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", action="store_true", help="write a dated file into benchmarks/results")
    arguments = parser.parse_args()
    found = {each.__name__: each() for each in (megatron_on_a100, megatron_on_h100, llama3, with_experts, by_fsdp)}
    for kind, rows in found.items():
        errors = [abs(row["error"]) for row in rows]
        print(f"\n{kind}: mean absolute error {statistics.mean(errors):.1%}, worst {max(errors):.1%}")
        for row in rows if kind != "by_fsdp" else ():
            print(f"  {row['row']}: {row['seconds']:.2f} s, predicted {row['error']:+.1%} ({row['layout']})")
    print_by_fsdp(found["by_fsdp"])
    found["memory_of_torchtitan"] = memory_of_torchtitan()
    for row in found["memory_of_torchtitan"]:
        print(f"{row['row']}: {row['published_gb']:.1f} GB, predicted {row['error']:+.1%} ({row['layout']})")
    if arguments.save:
        save_result("planning_elsewhere", found)


if __name__ == "__main__":
    main()
