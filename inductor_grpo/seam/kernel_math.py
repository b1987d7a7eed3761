"""What stands in for CUDA's libdevice in Triton's interpreter, composed of Triton's own functions.

Accurate to a few ulp where the seam's tests look; only the interpreter ever runs it.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def exp(x):  # type: ignore[no-untyped-def]
    return tl.exp(x)


@triton.jit
def exp2(x):  # type: ignore[no-untyped-def]
    return tl.exp2(x)


@triton.jit
def log(x):  # type: ignore[no-untyped-def]
    return tl.log(x)


@triton.jit
def log2(x):  # type: ignore[no-untyped-def]
    return tl.log2(x)


@triton.jit
def erf(x):  # type: ignore[no-untyped-def]
    return tl.erf(x)


@triton.jit
def floor(x):  # type: ignore[no-untyped-def]
    return tl.floor(x)


@triton.jit
def ceil(x):  # type: ignore[no-untyped-def]
    return tl.ceil(x)


@triton.jit
def rsqrt(x):  # type: ignore[no-untyped-def]
    return tl.rsqrt(x)


@triton.jit
def sqrt_rn(x):  # type: ignore[no-untyped-def]
    return tl.sqrt(x)


@triton.jit
def div_rn(a, b):  # type: ignore[no-untyped-def]
    return a / b


@triton.jit
def expm1(x):  # type: ignore[no-untyped-def]
    u = tl.exp(x)
    return tl.where(u == 1, x, tl.where((u == 0) | (u - 1 == u), u - 1, (u - 1) * x / tl.log(u)))


@triton.jit
def log1p(x):  # type: ignore[no-untyped-def]
    u = 1 + x
    return tl.where(u == 1, x, tl.where(u - 1 == u, tl.log(u), tl.log(u) * x / (u - 1)))


@triton.jit
def tanh(x):  # type: ignore[no-untyped-def]
    e = expm1(-2 * tl.abs(x))
    return tl.where(x < 0, e / (e + 2), -e / (e + 2))


@triton.jit
def pow(a, b):  # type: ignore[no-untyped-def]
    size = tl.exp(b * tl.log(tl.abs(a)))
    whole = tl.where(b == tl.floor(b), size, tl.where(tl.abs(a) == float("inf"), size, float("nan")))
    signed = tl.where(a < 0, tl.where(tl.abs(b) % 2 == 1, -size, whole), size)
    return tl.where(b == 0, 1.0, signed)


@triton.jit
def fmod(a, b):  # type: ignore[no-untyped-def]
    return a % b


@triton.jit
def trunc(x):  # type: ignore[no-untyped-def]
    return tl.where(x < 0, tl.ceil(x), tl.floor(x))


@triton.jit
def rint(x):  # type: ignore[no-untyped-def]
    low = tl.floor(x)
    up = (x - low > 0.5) | ((x - low == 0.5) & (low % 2 != 0))
    return tl.where(up, low + 1, low)
