"""Every method of gradients, one line each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gradwire.advice import ADVICE
from gradwire.baselines import TORCH
from gradwire.codecs import (
    BF16,
    FP8,
    FP16,
    QSGD,
    AffineInt,
    BlockInt,
    DCTTopK,
    Hadamard,
    Identity,
    Natural,
    OneBit,
    RandomK,
    Sign,
    StochasticBF16,
    TernGrad,
    Threshold,
    TopK,
)
from gradwire.core.registry import Method, advise, methods, register, register_all
from gradwire.core.uses import Recommended, Special, Study, Use
from gradwire.reducers import (
    ACPSGD,
    DGC,
    SVD,
    AdaptivePrecision,
    AdaptiveThreshold,
    CountSketch,
    GradZip,
    MajorityVote,
    PowerSGD,
    ScaledFP16,
    Sketch,
    TernarySum,
)
from gradwire.reducers.aggregate import (
    Adasum,
    Bulyan,
    CenteredClipping,
    GeometricMedian,
    Krum,
    Median,
    MultiKrum,
    PrivateMean,
    TrimmedMean,
)

__all__ = ["methods", "register"]

_AT_20 = "docs/results.md#ten-methods-at-20-mbits"
_AT_100 = "docs/results.md#ten-methods-at-100-mbits"
_FSDP2 = "docs/results.md#fsdp2-nine-methods-at-100-mbits"
_DIGITS = "docs/results.md#digits-ten-methods-at-20-and-100-mbits"

_ROUTES = tuple(f"none,exchange={route}" for route in ("direct", "ring", "tree", "rhd"))
_TOPK = (
    *("topk:0.01", "topk:0.3,values=bf16", "topk:0.05+int8", "topk:0.1+qsgd:15,ef=off", "topk:0.02,exchange=twoshot"),
    *("topk:0.1,ef=ef21", "topk:0.1,residual=factored:2", "topk:0.05,worker_momentum=0.9"),
)
_RANDOMK = ("randomk:0.1", "randomk:0.2,scaled=on,ef=off", "randomk:0.2+int8")
_INTEGER_SYNONYMS = {4: ("fp4", "nf4", "mxfp4"), 8: ("int", "integer", "quantize", "quantization", "blockint")}
_TERNGRAD = ("terngrad", "terngrad:0,block=40,digits=4")


def _integers(bits: int, *examples: str, use: Use) -> Method:
    """One width of `BlockInt`."""
    summary = f"{bits}-bit integers with block scales"
    synonyms = (f"{bits}bit", f"{bits}bits", f"uint{bits}", f"q{bits}", f"i{bits}", *_INTEGER_SYNONYMS.get(bits, ()))
    return Method(f"int{bits}", BlockInt, summary, "twoshot", True, "block", {"bits": bits}, examples, synonyms, use)


def _rule(
    name: str,
    build: Callable[..., Any],
    summary: str,
    argument: str | None,
    *examples: str,
    synonyms: tuple[str, ...] = (),
    use: Use,
) -> Method:
    """A rule for what the gradients of all ranks become."""
    return Method(name, build, summary, "own", argument=argument, examples=examples, synonyms=synonyms, use=use)


# name, what builds it, summary, exchange, error feedback, what follows the colon, examples
_METHODS = (
    # dense
    Method(
        *("none", Identity, "uncompressed", "allreduce"),
        examples=("none", *_ROUTES),
        synonyms=(
            "fp32",
            "float32",
            "float",
            "32bit",
            "fp64",
            "float64",
            "allreduce",
            "identity",
            "uncompressed",
            "mean",
        ),
        use=Special("the baseline; exact means by another route (exchange=) or around slow links alone (node=)"),
    ),
    Method(
        *("fp16", FP16, "cast to half precision", "allreduce"),
        examples=("fp16",),
        synonyms=("float16", "half", "16bit", "16bits", "f16"),
        use=Special("16 bits without memory, where gradients are above 6e-8: half of the bytes"),
    ),
    Method(
        *("fp16_scaled", ScaledFP16, "fp16 in the range that is needed", "own"),
        examples=("fp16_scaled",),
        synonyms=("scaled", "scaled_fp16"),
        use=Special("16 bits without memory, of gradients too small or too large for fp16"),
    ),
    Method(
        *("adaptive", AdaptivePrecision, "fp16 where the range fits it, else more", "own"),
        argument="wide",
        examples=("adaptive", "adaptive:bf16"),
        synonyms=("mixed", "mixed_precision", "amp"),
        use=Special("16 bits where the measured range fits them, else more: when nothing is known of the gradients"),
    ),
    Method(
        *("bf16", BF16, "cast to bfloat16", "allreduce"),
        examples=("bf16",),
        synonyms=("bfloat16", "bfloat", "brain_float"),
        use=Special("16 bits without memory, of gradients of any range"),
    ),
    Method(
        *("bf16_stochastic", StochasticBF16, "bfloat16, rounded at random", "twoshot"),
        examples=("bf16_stochastic",),
        synonyms=("stochastic_rounding", "stochastic"),
        use=Study("16 bits without bias, in two shots; not measured in training"),
    ),
    # sparse
    Method(
        *("topk", TopK, "largest magnitudes", "allgather", True, "density"),
        examples=_TOPK,
        synonyms=("sparse", "sparsify", "sparsification", "largest", "gtopk", "gradient_dropping"),
        use=Special(
            "long runs on very slow links, and what `local` sends; too little for runs of 60 to 150 steps of byte-GPT"
        ),
    ),
    Method(
        "randomk",
        RandomK,
        "one of each run of neighbours, drawn alike",
        "allreduce",
        True,
        "density",
        examples=_RANDOMK,
        synonyms=("randk", "rand", "random", "random_sparsification"),
        use=Study("digits: 21.7 points of accuracy lost at 10 % of the entries"),
    ),
    Method(
        *("threshold", Threshold, "magnitudes above a fixed one", "allgather", True, "tau"),
        examples=("threshold:1.5,cap=0.8",),
        synonyms=("hard_threshold", "tau", "cutoff"),
        use=Study("a magnitude has to be known; residuals of digits grew for 500 steps"),
    ),
    Method(
        *("adaptive_threshold", AdaptiveThreshold, "magnitudes above a quantile that is followed", "own"),
        *(True, "density"),
        examples=("adaptive_threshold:0.05",),
        synonyms=("quantile", "sampled_topk", "redsync", "sidco"),
        use=Study("a threshold that follows a quantile, where topk selects exactly"),
    ),
    Method(
        *("dgc", DGC, "top-k of momentum", "own"),
        argument="density",
        examples=("dgc:0.05,ramp=2,clip=2",),
        synonyms=("deep_gradient_compression", "momentum_correction"),
        use=Special("top-k under an optimizer that would have momentum: it moves in here"),
    ),
    # quantised
    Method(
        *("sign", Sign, "one bit and a scale", "twoshot", True, "block"),
        examples=("sign", "sign:64"),
        synonyms=("signsgd", "efsignsgd", "scaled_sign", "1bit", "binary"),
        use=Study("byte-GPT with blocks of 64: held-out loss 2.834 after 150 steps, fp32 2.409"),
    ),
    Method(
        *("onebit", OneBit, "one bit and a mean on either side of zero", "twoshot", True, "block"),
        examples=("onebit",),
        synonyms=("1bit_sgd", "onebit_sgd", "1bit_adam", "1bit_lamb"),
        use=Study("one bit and two means; digits: accuracy 97.59, fp32 99.16"),
    ),
    Method(
        *("signsgd_mv", MajorityVote, "majority of signs", "own"),
        argument="block",
        examples=("signsgd_mv",),
        synonyms=("majority", "majority_vote", "vote", "signum"),
        use=Special("bad gradients at one bit an element; with worker_momentum=0.5"),
    ),
    Method(
        *("terngrad", TernGrad, "random ternary digits", "twoshot"),
        argument="clip",
        examples=_TERNGRAD,
        synonyms=("ternary", "trinary", "tern"),
        use=Study("unbiased digits but for what clipping changes; digits: accuracy 98.51, fp32 99.16"),
    ),
    Method(
        *("terngrad_sum", TernarySum, "the same, summed exactly", "own"),
        argument="clip",
        examples=("terngrad_sum",),
        synonyms=("ternary_sum",),
        use=Study("ternary digits that are rounded once; digits: accuracy 99.07, fp32 99.16"),
    ),
    _integers(2, use=Study("byte-GPT with blocks of 64: held-out loss 2.460 after 150 steps, fp32 2.409")),
    _integers(3, "int3", use=Study("byte-GPT: held-out loss 2.466 after 120 steps, fp32 2.448, int4 2.445")),
    _integers(
        4,
        "int4",
        "int4,stochastic=on,ef=off",
        "int8,exchange=allgather",
        "int4,node=2",
        use=Recommended(
            "int4",
            "100 Mbit/s and slower: fp32's loss 4.2 times sooner at 100 Mbit/s (under FSDP2 3.6), 5.8 times at 20",
            'any model: begin with it; under FSDP2 with parameters="int8"',
            "byte-GPT: held-out loss 2.402 ± 0.020, fp32 2.409 ± 0.023; under FSDP2 2.602 ± 0.009, fp32 2.617 ± 0.043; "
            "digits: accuracy 98.98, fp32 99.35",
            (_AT_20, _AT_100, _FSDP2, _DIGITS),
        ),
    ),
    _integers(5, use=Study("between int4 and int8; not measured in training")),
    _integers(6, use=Study("between int4 and int8; not measured in training")),
    _integers(7, use=Study("between int4 and int8; not measured in training")),
    _integers(
        8,
        "int8",
        use=Special(
            "where int4 loses too much; digits: accuracy 0.1 points below 99.0; what FSDP2 gathers (parameters=)"
        ),
    ),
    Method(
        *("affine", AffineInt, "8-bit integers between each block's extremes", "allgather", True, "block"),
        examples=("affine", "affine:256"),
        synonyms=("minmax", "per_tensor", "per_channel", "asymmetric"),
        use=Study("one-sided values; the grid of PyTorch's quantization hooks"),
    ),
    Method(
        *("fp8", FP8, "8-bit floats with block scales", "twoshot", True, "format"),
        examples=("fp8", "fp8:e5m2"),
        synonyms=("float8", "f8", "mxfp8", "e4m3", "e5m2"),
        use=Study("loses three times what int8 loses of recorded gradients; digits: accuracy 98.70, fp32 99.16"),
    ),
    Method(
        *("natural", Natural, "random powers of two", "twoshot"),
        examples=("natural",),
        synonyms=("natural_compression", "cnat", "power_of_two", "powers_of_two"),
        use=Study("no bias in 9 bits; digits: accuracy 98.89, fp32 99.16"),
    ),
    Method(
        *("qsgd", QSGD, "stochastic levels of a norm", "twoshot", False, "levels"),
        examples=("qsgd:15", "qsgd:3,ef=on"),
        synonyms=("stochastic_quantization", "random_quantization", "dithering"),
        use=Special("no memory at all and no bias: what is lost is gone, and nothing has to be saved"),
    ),
    # low rank, sketches and transforms
    Method(
        *("powersgd", PowerSGD, "low rank by subspace iteration", "own", True, "rank"),
        examples=("powersgd:1", "powersgd:4", "powersgd:2,factors=fp16", "powersgd:4,factors=int8"),
        synonyms=("low_rank", "lora", "power_iteration", "subspace_iteration"),
        use=Recommended(
            "powersgd:8,factors=fp16",
            "100 Mbit/s and slower: fp32's loss 5.0 times sooner at 100 Mbit/s, 14.9 times at 20",
            "large matrices, as transformers have; small convolutional nets gain more by int4",
            "byte-GPT: held-out loss 2.414 ± 0.013, fp32 2.409 ± 0.023; digits: accuracy 98.89, fp32 99.35",
            (_AT_20, _AT_100, _DIGITS),
        ),
    ),
    Method(
        *("acpsgd", ACPSGD, "one factor of low rank a step, in turn", "own", True, "rank"),
        examples=("acpsgd:2", "acpsgd:4,factors=fp16"),
        synonyms=("acp", "alternate_compressed_powersgd", "alternating_powersgd"),
        use=Study("byte-GPT takes 1.2 to 2.5 times the steps of powersgd with the same bytes"),
    ),
    Method(
        *("gradzip", GradZip, "low rank by least squares", "own", True, "rank"),
        examples=("gradzip:2",),
        synonyms=("als", "least_squares", "alternating_least_squares"),
        use=Study("digits at 20 Mbit/s: fp32's loss 2.0 times sooner, powersgd:8,factors=fp16 2.6 times"),
    ),
    Method(
        *("svd", SVD, "best low rank, for reference", "own", True, "rank"),
        examples=("svd:2",),
        synonyms=("atomo", "spectral", "truncated_svd"),
        use=Study("the best that low rank can do, for hundreds of times the work of powersgd"),
    ),
    Method(
        *("sketch", Sketch, "random directions of matrices", "own", True, "rank"),
        examples=("sketch:8",),
        synonyms=("random_projection", "projection"),
        use=Study("low rank that remembers nothing; not measured in training"),
    ),
    Method(
        *("hadamard", Hadamard, "random directions of flat tensors", "allreduce", True, "density"),
        examples=("hadamard:0.125",),
        synonyms=("walsh_hadamard", "fwht", "srht"),
        use=Study("random directions that ride an all-reduce; not measured in training"),
    ),
    Method(
        *("countsketch", CountSketch, "largest of the mean, found in a sum of sketches", "own", True, "density"),
        examples=("countsketch:0.05",),
        synonyms=("sketched_sgd", "fetchsgd", "heavy_hitters"),
        use=Study("top-k of the mean, with bytes that do not grow with the ranks; not measured in training"),
    ),
    Method(
        *("dct_topk", DCTTopK, "largest coefficients of cosine transforms", "allgather", True, "density"),
        examples=("dct_topk:0.0625,residual=bf16",),
        synonyms=("dct", "cosine", "fft"),
        use=Study("what the optimizer demo selects by; not measured as a method of gradients"),
    ),
    # rules that guard against bad gradients, and other results than a mean
    _rule(
        "median",
        Median,
        "median of each coordinate",
        None,
        "median",
        synonyms=("coordinate_median", "comed"),
        use=Special("bad gradients, of up to half of the ranks, without a number to be told"),
    ),
    _rule(
        *("trimmed", TrimmedMean, "mean of each coordinate without its extremes", "bad", "trimmed:1"),
        synonyms=("trimmed_mean", "trim"),
        use=Special("bad gradients of a known number of ranks; close to the mean where all are good"),
    ),
    _rule(
        *("krum", Krum, "the gradient with the nearest neighbours", "bad", "krum:1", "krum:1,worker_momentum=0.5"),
        synonyms=("byzantine", "robust"),
        use=Special("bad gradients of a known number of ranks; with worker_momentum=0.5 digits lose nothing"),
    ),
    _rule(
        "multikrum",
        MultiKrum,
        "mean of the gradients with the nearest neighbours",
        "bad",
        "multikrum:1",
        use=Special("bad gradients of a known number of ranks, with less noise than krum alone"),
    ),
    _rule(
        "bulyan",
        Bulyan,
        "Krum's choices, averaged around their median",
        "bad",
        "bulyan:1",
        use=Study("Krum against colluding ranks; gradwire guards against bad gradients, not against malice"),
    ),
    _rule(
        *("rfa", GeometricMedian, "geometric median", "iterations", "rfa"),
        synonyms=("geometric_median", "geomed", "weiszfeld"),
        use=Special("bad gradients, without a number to be told"),
    ),
    _rule(
        *("clip", CenteredClipping, "mean of differences to the last result, clipped", "radius", "clip:1"),
        synonyms=("centered_clipping", "centred_clipping", "cclip", "clipping"),
        use=Special("bad gradients, where a radius is known that good ones keep"),
    ),
    _rule(
        "adasum",
        Adasum,
        "the mean of parallel gradients, the sum of orthogonal ones",
        None,
        "adasum",
        synonyms=("adaptive_sum",),
        use=Study("large batches without another learning rate; not measured in training"),
    ),
    _rule(
        *("dp", PrivateMean, "differentially private mean", "clip", "dp:1", "dp:1,rule=median"),
        synonyms=("dp_sgd", "private", "privacy", "differential_privacy", "opacus"),
        use=Special("differential privacy"),
    ),
)

register_all({_method.name: _method for _method in _METHODS})
register_all(TORCH)
for _advice, _names in ADVICE.items():
    advise(_advice, *_names.split())
