"""Snapshots of text: short ones inline (expecttest), long ones in ``tests/expected``.

``EXPECTTEST_ACCEPT=1`` writes both.
What torch traces changes with its versions, so texts are compared on one of them only; counts are compared on all.
"""

from __future__ import annotations

import difflib
import os
from pathlib import Path

import expecttest
import pytest
import torch

PINNED = "2.13"
FOLDER = Path(__file__).parent / "expected"
ACCEPT = bool(os.environ.get("EXPECTTEST_ACCEPT"))

pinned = pytest.mark.skipif(
    torch.__version__.split("+")[0].rsplit(".", 1)[0] != PINNED, reason=f"texts are those of torch {PINNED}"
)


class Inline(expecttest.TestCase):
    """``assertExpectedInline`` outside of a TestCase: ``Inline().assertExpectedInline(text, '''...''')``."""

    def runTest(self) -> None:
        """unittest wants one."""


def assert_file(name: str, text: str) -> None:
    """``text`` is what ``tests/expected/<name>.txt`` holds."""
    path = FOLDER / f"{name}.txt"
    text = "\n".join(line.rstrip() for line in text.splitlines()) + "\n"
    if ACCEPT:
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return
    expected = path.read_text(encoding="utf-8") if path.exists() else ""
    difference = difflib.unified_diff(expected.splitlines(), text.splitlines(), str(path), "now", lineterm="", n=2)
    assert text == expected, "accept with EXPECTTEST_ACCEPT=1\n" + "\n".join(difference)
