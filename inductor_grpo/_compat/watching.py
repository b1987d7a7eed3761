"""What Dynamo and Inductor tell about a compilation, for reports and captures."""

from __future__ import annotations

import contextlib
import platform
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch
import torch._dynamo
import torch._functorch.config
import torch._inductor.config as inductor_config


def graph_break(gm: object) -> tuple[str, str] | None:
    """The traceback and the reason of the graph break that a Dynamo graph ends with; None when it ends otherwise."""
    reason = getattr(gm, "compile_subgraph_reason", None)
    if not getattr(reason, "graph_break", False):
        return None
    trace = "".join(traceback.format_list(list(getattr(reason, "user_stack", None) or [])))
    return trace, _first_words(str(getattr(reason, "reason", "")))


_IN_WORDS = {
    "generic_jump": "a Python branch on the value of a tensor",
    "step_unsupported": "Dynamo leaves the rest of this function to Python",
}
"""Reasons that Dynamo gives as names of its own."""


def _first_words(reason: str) -> str:
    """Dynamo's explanation, where the reason has one, or its first line."""
    for name, words in _IN_WORDS.items():
        if reason.startswith(name):
            return words
    lines = [line.strip() for line in reason.strip().splitlines()]
    explanations = [line.removeprefix("Explanation: ") for line in lines if line.startswith("Explanation: ")]
    words = [*explanations, *lines, "unknown reason"][0].rstrip(".")
    return words if len(words) <= 120 else words[:117] + "..."


@contextlib.contextmanager
def no_caches() -> Iterator[None]:
    """Dynamo forgets what it compiled, and Inductor's caches are neither read nor written in the block."""
    torch._dynamo.reset()
    with inductor_config.patch(force_disable_caches=True), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="dynamo_pgo force disabled")  # as we asked for
        yield


@contextlib.contextmanager
def backward_at_once() -> Iterator[None]:
    """In the block, a backward graph compiles right after its forward, not when it first runs."""
    name = "force_non_lazy_backward_lowering"
    patch = torch._functorch.config.patch({name: True}) if hasattr(torch._functorch.config, name) else None
    with patch or contextlib.nullcontext():
        yield


def environment_facts() -> dict[str, str]:
    """What a bug report needs: versions, device, compiler, cache."""
    from torch._inductor.runtime.runtime_utils import cache_dir

    facts = {"python": platform.python_version(), "torch": torch.__version__, "platform": platform.platform()}
    try:
        import triton

        facts["triton"] = triton.__version__
    except ImportError:
        facts["triton"] = "not installed (only needed on a GPU)"
    if torch.cuda.is_available():
        capability = ".".join(map(str, torch.cuda.get_device_capability()))
        facts["device"] = f"{torch.cuda.get_device_name()}, capability {capability}, CUDA {torch.version.cuda}"
    else:
        facts["device"] = f"CPU, {torch.get_num_threads()} threads"
    facts["compiler"] = _compiler()
    folder = Path(cache_dir())
    size = sum(f.stat().st_size for f in folder.rglob("*") if f.is_file()) if folder.is_dir() else 0
    stored = len(list((folder / "inductor_grpo").rglob("*.json")))
    on = "off" if inductor_config.force_disable_caches or not inductor_config.fx_graph_cache else "on"
    facts["cache"] = f"{on}, {folder} ({size / 2**20:.1f} MiB, {stored} stored reports)"
    return facts


def _compiler() -> str:
    try:
        from torch._inductor.cpp_builder import get_cpp_compiler

        return str(get_cpp_compiler())
    except Exception as error:  # whatever is wrong with the compiler is what is to be told
        return f"none found ({type(error).__name__}: {error})".splitlines()[0]
