"""How much of communication hides behind the backward pass, and the settings under which most of it does.

`Overlap` has the figures, `Stopwatch` measures them on a CPU or a GPU.
"""

from gradwire.overlap.figures import Overlap, covered_s, hidden_share
from gradwire.overlap.isolated import all_reduce_alone, reduce_alone
from gradwire.overlap.meter import Stopwatch, Timings

__all__ = ["Overlap", "Stopwatch", "Timings", "all_reduce_alone", "covered_s", "hidden_share", "reduce_alone"]
