"""Small inputs for fault classes seen in public issue trackers; each one written for this project.

``source`` names the public issue that reported the class of fault.  ``CASES`` are single calls, ``SEQUENCES`` several
calls of one function.
"""

from tests.corpus.faults import autograd, forms, near, precision, repeated, segment_ratio, values
from tests.corpus.faults.registry import CASES, SEQUENCES, Case, Sequence

__all__ = [
    "CASES",
    "SEQUENCES",
    "Case",
    "Sequence",
    "autograd",
    "forms",
    "near",
    "precision",
    "repeated",
    "segment_ratio",
    "values",
]
