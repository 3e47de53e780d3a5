"""Case studies with formulas and published figures, and calculators of what a setting saves.

| name | what it is |
|---|---|
| `case_study`, `STUDIES` | a published training: bytes, memory and time with formulas, and what was reported |
| `CaseStudy`, `Figure`, `spoken` | what that is made of; a number in its unit |
| `step_volumes`, `Volume`, `SYMBOLS` | bytes that a GPU sends in a step, by kind; what symbols stand for |
| `MEMORY` | the formula of each part of memory |
| `window_bytes`, `utilisation` | islands that average their models every few steps |
| `parameter_shapes` | the matrices of a transformer by name, for `gradwire.cost` |
"""

from gradwire.cases.figure import CaseStudy as CaseStudy
from gradwire.cases.figure import Figure as Figure
from gradwire.cases.figure import spoken as spoken
from gradwire.cases.islands import parameter_shapes as parameter_shapes
from gradwire.cases.islands import utilisation as utilisation
from gradwire.cases.islands import window_bytes as window_bytes
from gradwire.cases.studies import STUDIES as STUDIES
from gradwire.cases.studies import case_study as case_study
from gradwire.cases.volumes import MEMORY as MEMORY
from gradwire.cases.volumes import SYMBOLS as SYMBOLS
from gradwire.cases.volumes import Volume as Volume
from gradwire.cases.volumes import step_volumes as step_volumes
