"""Which method for which link, model, layout and slow ranks; and when it is better to use none.

`gradwire choose` and docs/choosing.md show it. A method's step is predicted from three parts: computing, coding at the
rates of this machine (`coding_s`), and the messages of the step on the link (`gradwire.drivers.timing`), of which the
backward pass hides some (`Demand.beside`). What methods lose is what was measured of them (`CANDIDATES`).
"""

from gradwire.choosing.accuracy import ACCURACIES, CANDIDATES, Candidate, allowed
from gradwire.choosing.cases import CASES, DEVICES, LAYOUTS, SLOW, FixedCase
from gradwire.choosing.coding import coding_s
from gradwire.choosing.forecast import Demand, Forecast, demand
from gradwire.choosing.rules import NEAR, Case, Training, best_of, boundaries, choose, parameters_in, square_matrices

__all__ = [
    "ACCURACIES",
    "CANDIDATES",
    "CASES",
    "DEVICES",
    "LAYOUTS",
    "NEAR",
    "SLOW",
    "Candidate",
    "Case",
    "Demand",
    "FixedCase",
    "Forecast",
    "Training",
    "allowed",
    "best_of",
    "boundaries",
    "choose",
    "coding_s",
    "demand",
    "parameters_in",
    "square_matrices",
]
