"""What a compilation writes to torch's own logs: one line for people, one artifact for tlparse."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

SCRIPT = """
import torch
from inductor_grpo.backend import inductor_grpo

def loss(hidden, weight, labels):
    return (hidden @ weight.t()).log_softmax(-1).gather(-1, labels[:, None]).mean()

options = {"grpo.codegen": "eager", "grpo.min_logits_bytes": 0}
arguments = torch.randn(12, 8, requires_grad=True), torch.randn(60, 8), torch.randint(0, 60, (12,))
torch.compile(loss, backend=inductor_grpo, options=options)(*arguments)
"""


def test_log_line_and_artifact(tmp_path: pathlib.Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    traces = tmp_path / "traces"
    environment = {**os.environ, "TORCH_LOGS": "inductor_grpo", "TORCH_TRACE": str(traces)}
    environment["PYTHONPATH"] = os.pathsep.join(
        [str(pathlib.Path(__file__).parents[1]), environment.get("PYTHONPATH", "")]
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=200, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [line for line in done.stderr.splitlines() if "1 rewrite, 0 rejections" in line]
    assert len(lines) == 1, done.stderr[-2000:]
    written = "".join(path.read_text() for path in traces.iterdir())
    assert "inductor_grpo" in written
    assert '"rewrites"' in written
    assert '"engine"' in written  # in one pass
    assert '"one-pass"' in written
