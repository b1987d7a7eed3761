"""Inductor's C++ compiler and its cache, for a library with C functions."""

from __future__ import annotations

import ctypes
from typing import cast


def load(source: str) -> ctypes.CDLL:
    """Compiles ``source`` once, for every process that shares Inductor's cache, and loads it; raises what the compiler
    raises."""
    from torch._inductor.codecache import CppCodeCache

    return cast(ctypes.CDLL, CppCodeCache.load(source))
