"""How code that Inductor generates calls our operators.

In Python it can do without the dispatcher, which unpacks the lists of a call, packs them again for the Python function
behind the operator, and does both once more for the results: on the host that costs more than the launch of a small
kernel.  Inductor's code runs below autograd and knows its devices, so it needs none of it.

In C++ (``cpp_wrapper``) it calls the operator, and writes a string between quotes as it is, so programs go in hex.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from inductor_grpo.program import in_hex

_ATTRIBUTE = "inductor_grpo_function"
_installed: set[torch._ops.OpOverload] = set()


def install(operator: torch._ops.OpOverload, function: Callable[..., Any] | None = None) -> None:
    """From now on generated code hands programs over intact, and Python calls ``function`` in the operator's place.

    A torch without the means goes on as for any operator."""
    if operator in _installed:
        return
    _installed.add(operator)
    try:
        from torch._inductor import ir
        from torch._inductor.lowering import fallback_handler, lowerings
        from torch._inductor.virtualized import V

        setattr(operator, _ATTRIBUTE, function)
        fallback = fallback_handler(operator)
    except (ImportError, AttributeError):
        return
    # Generated code finds the function where it finds the operator: a stored graph needs no other import.
    name = f"torch.ops.{operator}.{_ATTRIBUTE}"

    def lower(*args: Any, **kwargs: Any) -> Any:
        if V.graph.cpp_wrapper:
            return fallback(*(in_hex(a) if isinstance(a, str) else a for a in args), **kwargs)
        result = fallback(*args, **kwargs)
        kernels = (x for x in reversed(V.graph.operations) if isinstance(x, ir.FallbackKernel))
        kernel = next((x for x in kernels if x.op_overload is operator), None)
        if kernel is not None and function is not None:
            kernel.python_kernel_name = name
        return result

    lowerings[operator] = lower
