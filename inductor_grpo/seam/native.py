"""Sums per segment on a CPU: one pass over ids and values in C++.

Runs of one id, which packed batches consist of, are summed in vector registers, in a fixed order: the result is the
same in every run, whatever the number of threads.  ``index_add_`` takes three nanoseconds a value.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .._compat import native
from .program import accumulator

log = logging.getLogger("inductor_grpo")

_SOURCE = """
#include <cstdint>

template <typename T, typename I>
static int64_t sums(const void* const* values, void* const* results, int64_t quantities, const I* ids,
                    int64_t tokens, int64_t count, int64_t wraps) {
  for (int64_t start = 0; start < tokens;) {
    const I own = ids[start];
    int64_t stop = start + 1;
    while (stop < tokens && ids[stop] == own) ++stop;
    const int64_t segment = own < 0 && wraps ? own + count : own;
    if (segment < 0 || segment >= count) return start;
    for (int64_t q = 0; q < quantities; ++q) {
      const T* from = static_cast<const T*>(values[q]);
      T lanes[8] = {0, 0, 0, 0, 0, 0, 0, 0};
      int64_t i = start;
      for (; i + 8 <= stop; i += 8)
        for (int lane = 0; lane < 8; ++lane) lanes[lane] += from[i + lane];
      for (; i < stop; ++i) lanes[0] += from[i];
      T total = 0;
      for (int lane = 0; lane < 8; ++lane) total += lanes[lane];
      static_cast<T*>(results[q])[segment] += total;
    }
    start = stop;
  }
  return -1;
}

#define FUNCTION(name, T)                                                                                    \\
  extern "C" int64_t name##_64(const void* const* v, void* const* r, int64_t q, const void* i, int64_t n,     \\
                               int64_t s, int64_t w) {                                                        \\
    return sums<T, int64_t>(v, r, q, static_cast<const int64_t*>(i), n, s, w);                                \\
  }                                                                                                           \\
  extern "C" int64_t name##_32(const void* const* v, void* const* r, int64_t q, const void* i, int64_t n,     \\
                               int64_t s, int64_t w) {                                                        \\
    return sums<T, int32_t>(v, r, q, static_cast<const int32_t*>(i), n, s, w);                                \\
  }

FUNCTION(f32, float)
FUNCTION(f64, double)
FUNCTION(i64, int64_t)
"""

_NAMES = {torch.float32: "f32", torch.float64: "f64", torch.int64: "i64"}
_WIDTHS = {torch.int64: "64", torch.int32: "32"}


@functools.cache
def _library() -> ctypes.CDLL | None:
    try:
        return native.load(_SOURCE)
    except Exception:  # no compiler: torch's own operators do it
        log.debug("sums per segment run without generated code", exc_info=True)
        return None


@functools.cache
def _function(dtype: torch.dtype, ids: torch.dtype) -> Any:
    library = _library()
    if library is None:
        return None
    function = getattr(library, f"{_NAMES[dtype]}_{_WIDTHS[ids]}")
    function.argtypes = [ctypes.c_void_p] * 2 + [ctypes.c_int64, ctypes.c_void_p] + [ctypes.c_int64] * 3
    function.restype = ctypes.c_int64
    return function


def segment_sums(values: Sequence[Tensor], ids: Tensor, count: int, wraps: bool) -> list[Tensor]:
    """``[count]`` for each of ``values`` ``[N]``, in fp32, fp64 or int64 (:func:`accumulator`); all on the CPU.

    Raises IndexError for an id outside of ``[0, count)`` (``[-count, count)`` with ``wraps``).
    """
    ids = ids.contiguous()
    values = [v.contiguous() if v.dtype in _NAMES else v.to(accumulator(v.dtype)).contiguous() for v in values]
    results: list[Tensor] = [torch.zeros(count, dtype=v.dtype, device=v.device) for v in values]
    for dtype in {v.dtype for v in values}:
        places = [i for i, v in enumerate(values) if v.dtype == dtype]
        function = _function(dtype, ids.dtype)
        if function is None:
            for i in places:
                results[i] = _by_torch(values[i], ids, count, wraps)
            continue
        pointers = _pointers(len(places))
        read = pointers(*[values[i].data_ptr() for i in places])
        written = pointers(*[results[i].data_ptr() for i in places])
        wrong = function(read, written, len(places), ids.data_ptr(), ids.numel(), count, wraps)
        if wrong >= 0:
            raise IndexError(f"segment id {ids[wrong].item()} of token {wrong} is out of range for {count} segments")
    return results


@functools.cache
def _pointers(number: int) -> Any:
    return ctypes.c_void_p * number


def _by_torch(values: Tensor, ids: Tensor, count: int, wraps: bool) -> Tensor:
    ids = torch.where(ids < 0, ids + count, ids) if wraps else ids
    return values.new_zeros(count).index_add_(0, ids, values)
