"""Chunk bodies as one Triton program a row.

    recognise   which bodies fit, and in which passes over the row they run
    arguments   what the kernel of such a plan takes
    text        the kernel
    live        which rows it tells to have a gradient, and which it leaves out
    zeros       when a gradient is zero in a whole row
    moves       kernels that pack the live rows
    statistics  what a pass keeps online, in Triton
    launch      kernels by body and device
    reference   the same steps in plain torch, for reading and for tests

The first passes read the row and keep its reductions online; between them a program does the arithmetic of its row (the
bridge from log-probs to gradients) on single numbers; the last pass reads the row again, most of it from the cache, and
writes the gradient over the logits.
"""

FASTER_ON = ("cuda",)
"""Where ``grpo.row_kernel="auto"`` means "on": on an H200 they took 0.4 to 0.7 of the generated code's time."""


def wanted(setting: str, device: str) -> bool:
    """Whether chunk bodies are to run as row kernels where they fit."""
    return setting == "on" or (setting == "auto" and device in FASTER_ON)
