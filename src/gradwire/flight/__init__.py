"""The flight recorder of each rank, and what the records of all ranks tell: why it hangs, and who.

recorder      the last thousand events of a process, in memory
keeping       when they are written, and how ranks are asked
earlier       records of earlier runs in the same folder
record        the file of a rank
threads       what threads do
doing         what a rank does, in a sentence
diagnosis     the records of all ranks, and the first rank that differs
"""

from gradwire.flight.diagnosis import Diagnosis, RankLine, judge, stacks_of
from gradwire.flight.record import FlightRecord
from gradwire.flight.recorder import Recorder, recorder

__all__ = ["Diagnosis", "FlightRecord", "RankLine", "Recorder", "judge", "recorder", "stacks_of"]
