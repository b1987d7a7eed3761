"""Inductor's caches between processes: each run here is a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent

PROGRAM = """
import json, sys
import torch
from inductor_grpo import backend, last_report, passes

calls = 0
original = passes.rewrite_graph

def counting(graph, settings):
    global calls
    calls += 1
    return original(graph, settings)

passes.rewrite_graph = counting

def loss(x, w, ids):
    logp = torch.log_softmax((x @ w.t()).float(), -1).gather(-1, ids.unsqueeze(-1)).squeeze(-1)
    return -logp.mean()

torch.manual_seed(0)
x, w = torch.randn(24, 8, requires_grad=True), torch.randn(64, 8, requires_grad=True)
ids = torch.randint(64, (24,))
options = {"grpo.min_logits_bytes": 0, **json.loads(sys.argv[1])}
value = torch.compile(loss, backend=backend.inductor_grpo, options=options)(x, w, ids)
value.backward()
report = last_report()
numbers = [tensor.double().sum().item().hex() for tensor in (value, x.grad, w.grad)]
print(json.dumps([calls, numbers, report.from_cache, json.loads(report.to_json())["rewrites"]]))
"""


def start(folder: Path, options: dict[str, Any]) -> subprocess.Popen[str]:
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(folder), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", PROGRAM, json.dumps(options)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def result(process: subprocess.Popen[str]) -> list[Any]:
    out, err = process.communicate(timeout=280)
    assert process.returncode == 0, err
    return json.loads(out.splitlines()[-1])


def test_processes_share_the_cache(tmp_path: Path) -> None:
    first, second = [result(process) for process in [start(tmp_path, {}) for _ in range(2)]]
    warm = result(start(tmp_path, {}))
    other = result(start(tmp_path, {"grpo.accumulate": "param"}))
    calls, numbers, from_cache, rewrites = first
    assert calls >= 1 and not from_cache and len(rewrites) == 1
    assert second[1] == numbers and second[3] == rewrites
    assert warm == [0, numbers, True, rewrites]
    assert other[0] >= 1 and not other[2]
    assert not list((tmp_path / "inductor_grpo").rglob("*.tmp"))
    assert len(list((tmp_path / "inductor_grpo").rglob("*.json"))) == 2
