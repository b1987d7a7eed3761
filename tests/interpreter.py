"""Kernels without a GPU: Triton's interpreter, in a process of its own.

Triton reads TRITON_INTERPRET when it is imported, so a process without it starts one of its own over a test file.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

outside = pytest.mark.skipif(INTERPRETED, reason="this is the interpreter's process")


def assert_passes(file: str) -> None:
    """The tests of ``file`` pass in the interpreter."""
    pytest.importorskip("triton", reason="needs triton")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", file]
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "passed" in done.stdout
