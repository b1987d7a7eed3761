"""A ``torch.compile`` backend that runs language-model losses without ever holding the logits.

``torch.compile(fn, backend="inductor_grpo")`` works without importing this package.
"""

from __future__ import annotations

from inductor_grpo import _checkout

_checkout.install()

from inductor_grpo import config  # noqa: E402
from inductor_grpo.backend import disable, enable, enabled, last_report  # noqa: E402
from inductor_grpo.capture import Capture, capture  # noqa: E402
from inductor_grpo.explain import explain  # noqa: E402
from inductor_grpo.report import CODES, Location, Rejection, Report, RequireError, Rewrite  # noqa: E402

__version__ = "0.1.0"

__all__ = [
    "CODES",
    "Capture",
    "Location",
    "Rejection",
    "Report",
    "RequireError",
    "Rewrite",
    "capture",
    "config",
    "disable",
    "enable",
    "enabled",
    "explain",
    "last_report",
]
