"""Odd neighbours of the losses: what looks like a stream of rows and is not one, or is one and hardly looks like it.

Every case pins down what becomes of it, so that a change of the rules shows here.
"""

from tests.corpus.odd import (
    dtypes,
    errors,
    feedback,
    heads,
    in_place,
    layouts,
    rows,
    sampling,
    sessions,
    tiles,
    transforms,
    wrong_dimension,
)
from tests.corpus.odd.registry import CASES, SEQUENCES, Case, Sequence

__all__ = ["CASES", "SEQUENCES", "Case", "Sequence"]
