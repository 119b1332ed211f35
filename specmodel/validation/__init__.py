"""Predictions held against what others have measured.

`rows` reads a table of published results, `cases` one of user reports; `setups` makes of a row
what can be predicted, or says why not; `judging` predicts and `scores` counts the errors.
"""

from specmodel.validation.cases import read_cases
from specmodel.validation.judging import PEAK, Judged, Validation, plain_rate, prepared, validate
from specmodel.validation.rows import Row, golden_rows, read_results

__all__ = [
    "PEAK",
    "Judged",
    "Row",
    "Validation",
    "golden_rows",
    "plain_rate",
    "prepared",
    "read_cases",
    "read_results",
    "validate",
]
