"""Whether the package works here: versions, device, caches, and two functions compiled for a try."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

import inductor_grpo
from inductor_grpo import backend, config
from inductor_grpo._compat import hooks, watching
from inductor_grpo.capture import capture

TESTED = ("2.11", "2.12", "2.13", "2.14", "2.15")
"""torch versions that the test suite is written for."""


@dataclasses.dataclass(frozen=True)
class Finding:
    """One line: a name, what was found, and whether it is as it should be (None: no judgement)."""

    name: str
    text: str
    ok: bool | None = None

    def __str__(self) -> str:
        mark = {True: "ok", False: "BAD", None: ""}[self.ok]
        return f"{mark:<4} {self.name:<14} {self.text}"


def examine(quick: bool = False) -> list[Finding]:
    """All findings; ``quick`` leaves out the compilation by Inductor, which takes some seconds."""
    facts = watching.environment_facts()
    minor = ".".join(torch.__version__.split(".")[:2])
    found = [Finding("inductor_grpo", inductor_grpo.__version__)]
    found += [Finding(name, text) for name, text in facts.items()]
    found.append(
        Finding("version", f"torch {minor} is {'one of' if minor in TESTED else 'none of'} {', '.join(TESTED)}", True)
        if minor in TESTED
        else Finding("version", f"torch {minor} is not tested; tested are {', '.join(TESTED)}")
    )
    lacking = hooks.missing()
    found.append(Finding("hooks", f"this torch has no {lacking}" if lacking else "all found", not lacking))
    named = "inductor_grpo" in torch._dynamo.list_backends(exclude_tags=())
    text = "backend='inductor_grpo' is known to torch" if named else "not installed: pass the backend as a function"
    found.append(Finding("entry point", text, named or None))
    changed = {f.name: getattr(config.current(), f.name) for f in dataclasses.fields(config.Settings)}
    defaults = config.Settings()
    settings = ", ".join(f"{k}={v!r}" for k, v in changed.items() if v != getattr(defaults, k))
    found.append(Finding("settings", settings or "all at their defaults"))
    found.append(_try("rewrite", "eager"))
    if not quick:
        found.append(_try("compilation", "inductor"))
    return found


def _loss(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    logits = F.linear(hidden, weight)
    return -logits.log_softmax(-1).gather(-1, labels[:, None]).mean()


def _try(name: str, codegen: str) -> Finding:
    """Compiles a loss on the device that is here, and compares value and gradients with eager."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator().manual_seed(0)

    def inputs() -> list[torch.Tensor]:
        generator.manual_seed(0)
        hidden, weight = (torch.randn(n, 16, generator=generator).to(device).requires_grad_() for n in (24, 101))
        return [hidden, weight, torch.randint(0, 101, (24,), generator=generator).to(device)]

    started = time.perf_counter()
    try:
        options: dict[str, Any] = {"grpo.min_logits_bytes": 0, "grpo.codegen": codegen, "grpo.chunk_bytes": 101 * 4 * 7}
        with capture(codegen=codegen) as captured:
            ours = _run(torch.compile(_loss_again(), backend=backend.inductor_grpo, options=options), inputs())
        eager = _run(_loss, inputs())
        for mine, theirs in zip(ours, eager):
            torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4)
    except Exception as error:  # whatever it is, it is what the user wants to know
        return Finding(name, f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}", False)
    seconds = time.perf_counter() - started
    rewrites = len(captured.report.rewrites)
    return Finding(name, f"{rewrites} rewrite, result and gradients as in eager ({seconds:.1f} s)", rewrites == 1)


def _loss_again() -> Callable[..., Any]:
    from inductor_grpo.explain import fresh_copy

    return fresh_copy(_loss)


def _run(function: Callable[..., Any], inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    loss = function(*inputs)
    return [loss.detach(), *torch.autograd.grad(loss, inputs[:2])]
