"""How much of communication hides behind the backward pass, and the settings under which most of it does.

`tune` finds settings by measurement, which `gradwire.attach(..., overlap=settings)` takes, or `apply` for PyTorch's own
communication. `Overlap` has the figures, and `Stopwatch` measures them, on a CPU or a GPU.

>>> import gradwire
>>> settings = gradwire.overlap.OverlapSettings(bucket_bytes=1 << 20, waves_in_flight=4)
>>> settings.as_dict()
{'waves_in_flight': 4, 'bucket_bytes': 1048576}
"""

from gradwire.overlap.figures import Overlap, covered_s, hidden_share
from gradwire.overlap.isolated import all_reduce_alone, reduce_alone
from gradwire.overlap.meter import Stopwatch, Timings
from gradwire.overlap.tuning import Trial, Tuned, apply, tune
from gradwire.session.overlap_settings import OverlapSettings

__all__ = [
    "Overlap",
    "OverlapSettings",
    "Stopwatch",
    "Timings",
    "Trial",
    "Tuned",
    "all_reduce_alone",
    "apply",
    "covered_s",
    "hidden_share",
    "reduce_alone",
    "tune",
]
