"""One tensor, one payload; one file, one class each."""

from gradwire.codecs.affine_int import AffineInt
from gradwire.codecs.base import Codec
from gradwire.codecs.block_int import BlockInt
from gradwire.codecs.cast import BF16, FP16, Identity
from gradwire.codecs.chain import Chain
from gradwire.codecs.qsgd import QSGD
from gradwire.codecs.randomk import RandomK
from gradwire.codecs.sign import Sign
from gradwire.codecs.threshold import Threshold
from gradwire.codecs.topk import TopK

__all__ = [
    "BF16",
    "FP16",
    "QSGD",
    "AffineInt",
    "BlockInt",
    "Chain",
    "Codec",
    "Identity",
    "RandomK",
    "Sign",
    "Threshold",
    "TopK",
]
