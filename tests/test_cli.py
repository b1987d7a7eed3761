"""The command ``inductor-grpo``: each subcommand on a small module, its output, its files, its exit codes."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pathlib
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import inductor_grpo
from inductor_grpo import backend
from inductor_grpo.capture import CompiledGraph
from inductor_grpo.tools import cli
from inductor_grpo.tools.memory import timeline
from inductor_grpo.tools.progress import progress
from tests.snapshots import assert_file, pinned

ROOT = pathlib.Path(__file__).parents[1]
MODULE = """
import torch
import torch.nn.functional as F
from inductor_grpo.backend import inductor_grpo


def loss(hidden, weight, labels):
    logits = F.linear(hidden, weight)
    return -logits.log_softmax(-1).gather(-1, labels[:, None]).mean()


def over_tokens(hidden, weight, labels):
    logits = F.linear(hidden, weight)
    return -logits.log_softmax(0).gather(-1, labels[:, None]).mean()


def squares(hidden, weight, labels):
    z = F.linear(hidden, weight)
    return (z.gather(-1, labels[:, None])[:, 0] - (z - z.amax(-1, keepdim=True)).square().sum(-1).log()).sum()


def broken(hidden, weight, labels):
    logits = F.linear(hidden, weight)
    torch._dynamo.graph_break()
    return logits.logsumexp(-1).sum()


def per_sequence(hidden, weight, labels):
    logp = F.linear(hidden, weight).log_softmax(-1).gather(-1, labels[:, None])[:, 0]
    ids = torch.arange(24) // 8
    total = logp.new_zeros(3).index_add_(0, ids, logp - logp.detach())
    ratio = total.exp()[ids]
    return -torch.min(ratio, ratio.clamp(0.8, 1.2)).mean()


def inputs():
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 16, generator=generator, requires_grad=True) for n in (24, 101))
    return hidden, weight, torch.randint(0, 101, (24,), generator=generator)


def pair():
    return loss, inputs()


def with_keywords():
    hidden, weight, labels = inputs()
    return loss, (hidden,), {"weight": weight, "labels": labels}


def compiles():
    torch.compile(loss, backend=inductor_grpo)(*inputs()).backward()


def compiles_by_inductor():
    torch.compile(over_tokens)(*inputs())


def fails():
    torch.compile(loss, backend=inductor_grpo)(*inputs())
    raise KeyError("after the loss")


def nothing():
    pass


number = 3
"""
SCRIPT = """
import sys
import losses

print("arguments", sys.argv[1:])
if __name__ == "__main__":
    losses.compiles()
"""
SET = ("--set", "min_logits_bytes=0", "--quiet")
TWO_PASS = ("--set", "schedule=two-pass")
TILED = "two-pass, vocabulary tiles"


@pytest.fixture
def folder(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[pathlib.Path]:
    """A working directory with ``losses.py`` and ``script.py``."""
    (tmp_path / "losses.py").write_text(MODULE)
    (tmp_path / "script.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    yield tmp_path
    sys.modules.pop("losses", None)


@pytest.fixture
def call(folder: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs a command line; returns exit code, stdout and stderr."""

    def run(*argv: str) -> tuple[int, str, str]:
        torch._dynamo.reset()
        try:
            code = cli.main([str(a) for a in argv])
        except SystemExit as error:  # argparse
            code = int(error.code or 0)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


# ---------------------------------------------------------------- explain


def test_explain_function_with_inputs(call: Any) -> None:
    for schedule, expected, row in (
        ("auto", "engine=1", ("engine", "one-pass", "18.9 KiB", "9.5 KiB", "3")),
        ("two-pass", "selective_logprob=1", ("selective_logprob", TILED, "18.9 KiB", "9.5 KiB", "4")),
    ):
        more = ("--set", f"schedule={schedule}", "--expect", expected)
        code, out, err = call("explain", "losses:loss", "--inputs", "inputs", *SET, *more)
        assert code == cli.OK, err
        assert "1 graph compiled, 0 graph breaks: 1 rewrite, 0 rejections" in out
        line = next(line for line in out.splitlines() if "losses.py:8 in loss" in line)
        assert tuple(re.split(r"  +", line.strip())[1:]) == row


def test_a_seam_is_a_rewrite_without_matmuls(call: Any) -> None:
    code, out, err = call("explain", "losses:per_sequence", "--inputs", "inputs", *SET, "--expect", "segment_sums=2")
    assert code == cli.OK, err
    assert len(re.findall(r"in per_sequence  +segment_sums  +one call: 1 sum per segment +- +- +-\n", out)) == 2
    data = json.loads(call("explain", "losses:per_sequence", "--inputs", "inputs", "--json", *SET)[1])
    assert [r["pattern"] for r in data["graphs"][0]["rewrites"]][1:] == ["segment_sums", "segment_sums"]


@pytest.mark.parametrize("target", ["losses:pair", "losses:with_keywords", "losses:compiles", "script.py"])
def test_every_kind_of_target(call: Any, target: str) -> None:
    code, out, err = call("explain", target, *SET, "--expect", "rewrites=1")
    assert code == cli.OK, out + err


def test_script_has_its_arguments_and_is_main(call: Any) -> None:
    before = sys.argv
    code, out, _ = call("explain", "script.py", *SET, "--", "--steps", "3")
    assert code == cli.OK and "arguments ['--steps', '3']" in out and "1 rewrite" in out
    assert sys.argv is before


def test_plain_inductor_is_watched_and_left_as_it_was(call: Any) -> None:
    from torch._inductor import compile_fx

    before = compile_fx.compile_fx
    code, out, _ = call("explain", "losses:compiles_by_inductor", *SET)
    assert code == cli.OK and "MIXES_ROWS  losses.py:14 in over_tokens  by log_softmax" in out
    assert compile_fx.compile_fx is before and not inductor_grpo.capture.__module__.endswith("tools")


def test_expectations(call: Any) -> None:
    run = ("explain", "losses:over_tokens", "--inputs", "losses:inputs", *SET)
    assert call(*run, "--expect", "MIXES_ROWS=1", "--expect", "rewrites=0")[0] == cli.OK
    code, _, err = call(*run, "--expect", "selective_logprob=1")
    assert code == cli.UNMET and "expected selective_logprob=1, found 0" in err
    for bad in ("selective_logprob", "no_such=1", "rewrites=many"):
        code, _, err = call(*run, "--expect", bad)
        assert code == cli.USAGE and "--expect" in err


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (("losses:loss",), "--inputs inputs"),
        (("losses:absent",), "has no 'absent'"),
        (("losses:number",), "is a int, not a function"),
        (("absent:loss",), "there is no module 'absent'"),
        (("absent.py",), "there is no file absent.py"),
        (("losses",), "neither script.py nor module:function"),
        (("script.py", "--inputs", "x"), "a script makes its own"),
        (("losses:pair", "--set", "chunk_bites=1"), "chunk_bites"),
        (("losses:pair", "--set", "chunk_bytes=much"), "must be a whole number"),
        (("losses:pair", "--set", "chunk_bytes"), "NAME=VALUE"),
    ],
)
def test_what_cannot_be_run(call: Any, argv: tuple[str, ...], says: str) -> None:
    code, _, err = call("explain", *argv)
    assert code == cli.USAGE and says in err


def test_require_is_an_expectation_and_one_line(call: Any) -> None:
    code, out, err = call("explain", "losses:over_tokens", "--inputs", "inputs", *SET, "--set", "require=1")
    assert code == cli.UNMET and "MIXES_ROWS  losses.py:14 in over_tokens" in out
    assert re.fullmatch(r"inductor-grpo: require: 1 vocabulary-sized tensor stays in the graph: losses.py:14 .*\n", err)


def test_the_trace_of_a_target_is_the_users(call: Any, folder: pathlib.Path) -> None:
    err = call("explain", "losses:fails", *SET)[2]
    assert 'losses.py", line' in err and "in fails" in err and "tools" not in err
    (folder / "ends.py").write_text("import sys\nsys.exit(4)\n")
    code, _, err = call("explain", "ends.py", "--quiet")
    assert code == cli.FAILED and err == "inductor-grpo: the target called sys.exit(4); above is what was seen\n"
    (folder / "wrong.py").write_text("def f():\n    return 1 / 0\n\n\nf()\n")
    code, _, err = call("explain", "wrong.py", "--quiet")
    assert code == cli.FAILED and "runpy" not in err and "tools" not in err
    assert err.splitlines()[:2] == [
        "Traceback (most recent call last):",
        f'  File "{folder}/wrong.py", line 5, in <module>',
    ]
    assert "ended with ZeroDivisionError: division by zero" in err.splitlines()[-1]


def test_target_that_fails_still_shows_what_was_seen(call: Any) -> None:
    code, out, err = call("explain", "losses:fails", *SET)
    assert code == cli.FAILED and "1 rewrite" in out and "KeyError: 'after the loss'" in err
    code, out, err = call("explain", "losses:nothing")
    assert code == cli.FAILED and "Nothing was compiled" in out and "compiled nothing" in err


def test_json(call: Any) -> None:
    code, out, err = call("explain", "script.py", "--json", *SET)
    assert code == cli.OK and "arguments" in err
    data = json.loads(out)
    (rewrite,) = data["graphs"][0]["rewrites"]
    assert data["rewrites"] == 1 and data["graphs"][0]["near_misses"] == []
    assert (rewrite["pattern"], rewrite["schedule"], rewrite["matmuls"]) == ("engine", "one-pass", 3)
    _, out = call("explain", "script.py", "--json", *SET, *TWO_PASS)[:2]
    (rewrite,) = json.loads(out)["graphs"][0]["rewrites"]
    assert (rewrite["pattern"], rewrite["schedule"], rewrite["matmuls"]) == ("selective_logprob", TILED, 4)
    _, out, _ = call("explain", "losses:broken", "--inputs", "inputs", "--json", *SET)
    first, second = json.loads(out)["graphs"]
    assert first["graph_break"]["location"]["line"] == 24 and second["graph_break"] is None
    rejection = first["rejections"][0]
    assert rejection["code"] == "LOGITS_RETURNED" and rejection["location"]["line"] == 23
    assert "graph break" in rejection["why"] and "fullgraph" in rejection["cure"] and rejection["op"] == "mm"


def test_near_miss_names_pattern_and_first_difference(call: Any) -> None:
    _, out, _ = call("explain", "losses:squares", "--inputs", "inputs", *SET, *TWO_PASS)
    assert "losses.py:19 in squares  closest to selective_logprob: 3 of 4 operations agree" in out
    assert "expected aten.exp, found aten.pow.Tensor_Scalar" in out and "hint: " in out
    _, out, _ = call("explain", "losses:squares", "--inputs", "inputs", "--json", *SET, *TWO_PASS)
    (near,) = json.loads(out)["graphs"][0]["near_misses"]
    assert (near["pattern"], near["agree"], near["total"], near["location"]["line"]) == ("selective_logprob", 3, 4, 19)


@pytest.mark.parametrize("name", ["loss", "squares"])
def test_one_pass_has_no_near_misses(call: Any, name: str) -> None:
    """A pattern would not have been used in it."""
    _, out, _ = call("explain", f"losses:{name}", "--inputs", "inputs", *SET)
    assert "one-pass" in out and "Near misses" not in out


@pinned
def test_text(call: Any) -> None:
    texts = []
    for name, more in (
        ("loss", ()),
        ("loss", TWO_PASS),
        ("over_tokens", ()),
        ("squares", TWO_PASS),
        ("per_sequence", ()),
        ("broken", ()),
    ):
        text = call("explain", f"losses:{name}", "--inputs", "inputs", *SET, *more)[1]
        texts.append(f"$ {' '.join(('inductor-grpo explain', f'losses:{name}', *more))}\n{text}")
    assert_file("cli_explain", "\n".join(texts))


def test_a_sign_of_life() -> None:
    to = io.StringIO()
    with inductor_grpo.capture() as captured, progress(every=0.05, to=to)(captured):
        time.sleep(0.2)
    assert re.match(r"\[inductor-grpo\] 0 s: 0 graphs compiled, the target is running\n", to.getvalue())
    assert threading.active_count() < 50


# ---------------------------------------------------------------- dump and diff


@pytest.mark.parametrize("schedule", ["one-pass", "two-pass"])
def test_dump_and_its_scripts(call: Any, folder: pathlib.Path, schedule: str) -> None:
    more = ("--set", f"schedule={schedule}")
    code, out, _ = call("dump", "losses:compiles", "-o", "out", "--codegen", "eager", *SET, *more)
    assert code == cli.OK
    files = {path.name for path in (folder / "out" / "graph-1").iterdir()}
    stages = [f"{n:02}_{name}" for n, name in enumerate(("joint", "normalised", "rewritten", "forward", "backward"))]
    assert {f"{stage}.{kind}" for stage in stages for kind in ("txt", "py", "dot")} <= files
    programs = {f"05_program-{n}.{kind}" for n in range(1, 2 + (schedule == "two-pass")) for kind in ("txt", "json")}
    assert {name for name in files if "program" in name} == programs
    assert {"report.txt", "report.json"} <= files and schedule in (folder / "out" / "report.txt").read_text()
    assert sorted(out.split()) == sorted(
        str(path.relative_to(folder)) for path in (folder / "out").rglob("*") if path.is_file()
    )
    results = {}
    for stage in stages:
        namespace = {"__name__": stage}
        path = folder / "out" / "graph-1" / f"{stage}.py"
        exec(compile(path.read_text(), str(path), "exec"), namespace)
        torch.manual_seed(0)
        results[stage] = namespace["Graph"]().forward(*namespace["inputs"]())  # type: ignore[operator]
    for name in stages[1:3]:  # the same random inputs, the same results
        torch.testing.assert_close(results[name][:3], results[stages[0]][:3], rtol=1e-4, atol=1e-5)
    dot = (folder / "out" / "graph-1" / "00_joint.dot").read_text()
    assert dot.startswith("digraph") and dot.count("->") > 20
    code, out, _ = call("diff", "out/graph-1/00_joint.txt", "out/graph-1/01_normalised.txt")
    assert code == cli.UNMET and re.search(r"^-%alias", out, re.MULTILINE)
    assert call("diff", "out", "out") == (cli.OK, "no difference\n", "")
    assert call("diff", "out", "nowhere")[0] == cli.USAGE
    assert call("diff", "out", "out/report.txt")[0] == cli.USAGE


def test_dump_of_logits_and_a_seam(call: Any, folder: pathlib.Path) -> None:
    """What the logits became is a stage, with the sums as they were written; then these are programs, too."""
    run = ("losses:per_sequence", "--inputs", "inputs", "-o", "out", "--codegen", "eager", *SET)
    assert call("dump", *run)[0] == cli.OK
    streamed, rewritten = (folder / "out" / "graph-1" / f"{name}.txt" for name in ("02_streamed", "03_rewritten"))
    assert "inductor_grpo.rows" in streamed.read_text() and "inductor_grpo.segments" not in streamed.read_text()
    assert "index_put" in streamed.read_text() and "index_put" not in rewritten.read_text()
    assert rewritten.read_text().count("= inductor_grpo.segments(") == 2
    programs = [path.read_text() for path in sorted((folder / "out" / "graph-1").glob("*_program-*.txt"))]
    assert [p for p in programs if "keep sum per segment" in p] and [p for p in programs if "logits[0] =" in p]


def test_a_dump_is_never_replaced_by_a_poorer_one(call: Any, folder: pathlib.Path) -> None:
    from inductor_grpo.tools.dump import dump

    call("dump", "losses:pair", "-o", "out", "--codegen", "eager", *SET)
    before = {path: path.read_bytes() for path in (folder / "out").rglob("*") if path.is_file()}
    report = inductor_grpo.Report(from_cache=True)
    cached = inductor_grpo.Capture([CompiledGraph(1, report=report)])
    written, kept = dump(cached, folder / "out")
    assert kept == [folder / "out" / "graph-1"] and not set(written) & set(before)
    assert {path: path.read_bytes() for path in before} == before
    assert "(from cache)" in (folder / "out" / "graph-1" / "cached_report.txt").read_text()
    assert call("dump", "losses:nothing", "-o", "out", *SET)[0] == cli.FAILED, "nothing to write"
    assert {path: path.read_bytes() for path in before} == before
    (folder / "out" / "graph-2").mkdir()
    (folder / "out" / "graph-2" / "00_joint.txt").write_text("of an earlier dump")
    call("dump", "losses:pair", "-o", "out", "--codegen", "eager", *SET)
    assert {path for path in (folder / "out").rglob("*") if path.is_file()} == set(before)


def test_diff_sees_through_numbers_and_lines(call: Any, folder: pathlib.Path) -> None:
    before = "%mm : f32[2] = aten.mm(%a, %b)  # x.py:3  a @ b\n%exp : f32[2] = aten.exp(%mm)\nreturn (%exp)\n"
    moved = before.replace("x.py:3", "x.py:9")
    shifted = before.replace("%mm", "%mm_1").replace("%exp", "%exp_2")
    more = "%mm : f32[9] = aten.mm(%c, %d)\n" + shifted
    other = "%mm : f32[9] = aten.mm(%c, %d)\n" + shifted.replace("exp(%mm_1)", "exp(%mm)")
    for name, text in (("a", before), ("b", moved), ("c", shifted), ("d", more), ("e", other)):
        (folder / f"{name}.txt").write_text(text)
    for name in "bc":
        assert call("diff", "a.txt", f"{name}.txt")[0] == cli.OK
        assert call("diff", "a.txt", f"{name}.txt", "--exact")[0] == cli.UNMET
    code, out, _ = call("diff", "a.txt", "d.txt")
    assert code == cli.UNMET
    assert [line for line in out.splitlines() if re.match(r"[+-][^+-]", line)] == ["+%mm' : f32[9] = aten.mm(%c, %d)"]
    out = call("diff", "a.txt", "e.txt")[1]
    assert "-%exp : f32[2] = aten.exp(%mm)" in out and "+%exp : f32[2] = aten.exp(%mm')" in out, "another value is read"


def test_two_dumps_of_one_loss_are_equal(call: Any, folder: pathlib.Path) -> None:
    for name in ("a", "b"):
        call("dump", "losses:pair", "-o", name, "--codegen", "eager", *SET)
    assert call("diff", "a", "b")[0] == cli.OK


def test_dump_with_generated_code_and_from_a_warm_cache(folder: pathlib.Path) -> None:
    """In processes of its own, as a user runs it: the second finds everything in the cache of the first."""
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(folder / "cache"), "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), environment.get("PYTHONPATH", "")])
    for name in ("cold", "warm"):
        command = [sys.executable, "-m", "inductor_grpo.tools", "dump", "losses:pair", "-o", name, "--cached", *SET]
        done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment, cwd=folder)
        assert done.returncode == 0, done.stderr[-2000:]
    cold, warm = (folder / name / "graph-1" for name in ("cold", "warm"))
    code = (cold / "06_code_forward.py").read_text()
    assert "torch.ops.inductor_grpo" in code and (cold / "07_code_backward.py").exists()
    assert "came from Inductor's cache" in (warm / "00_no_graphs.txt").read_text()
    report = json.loads((warm / "report.json").read_text())
    assert report["from_cache"] and report["rewrites"][0]["schedule"] == "one-pass"
    assert "(from cache)" in (folder / "warm" / "report.txt").read_text()


# ---------------------------------------------------------------- report


def test_html_report(call: Any, folder: pathlib.Path) -> None:
    pytest.importorskip("jinja2")
    pytest.importorskip("matplotlib")
    code, out, _ = call("report", "losses:compiles", "-o", "page.html", *SET)
    assert code == cli.OK and "page.html: 1 rewrite" in out
    page = (folder / "page.html").read_text()
    assert "<svg" in page and "peak" in page and "logits = F.linear(hidden, weight)" in page
    assert page.count('class="op program"') == 1 and 'class="op region"' in page
    assert not re.search(r"""(?:src|href)=["']?(?:https?:)?//""", page), "it must open without a network"
    code, _, _ = call("report", "losses:over_tokens", "--inputs", "inputs", "-o", "page.html", *SET)
    page = (folder / "page.html").read_text()
    assert code == cli.OK and "Nothing was rewritten" in page and "log_softmax(dim=-1)" in page
    assert '<div class="hit"><i>14</i>' in page, "the line at fault, in its source"


def test_live_memory_is_that_of_the_tensors() -> None:
    def steps(x: torch.Tensor) -> torch.Tensor:
        a = x.sin()  # 400 bytes
        b = a.cos()  # 800 live, then a is gone
        c = b.view(10, 10).t().exp()
        return c.sum()

    with inductor_grpo.capture(codegen="eager") as captured:
        torch.compile(steps, backend=backend.inductor_grpo)(torch.randn(100))
    joint = captured.graphs[0].stage("joint")
    assert joint is not None
    line = timeline(joint)
    by_name = {m.node.name: m.live for m in line.moments}
    assert (by_name["sin"], by_name["cos"], by_name["exp"]) == (400, 800, 800)
    assert by_name["sum_1"] == 404 and line.peak == 800 and line.formula == "8*100"


def test_peak_formula_is_symbolic() -> None:
    with inductor_grpo.capture(codegen="eager") as captured:
        torch.compile(lambda x: x.sin().cos(), backend=backend.inductor_grpo, dynamic=True)(torch.randn(100))
    joint = captured.graphs[0].stage("joint")
    assert joint is not None
    assert (timeline(joint).formula, timeline(joint).peak) == ("8*s0", 800)


# ---------------------------------------------------------------- patterns and doctor


def test_patterns(call: Any) -> None:
    code, out, _ = call("patterns")
    assert code == cli.OK
    for name in ("selective_logprob", "logprob_entropy", "over_rows", "aten.gather", "SelectionScatter"):
        assert name in out
    for name in ("segment_sums: Sums per segment", "mean_by_index_add", "leaves  largest_by_scatter_reduce: a maximum"):
        assert name in out
    code, out, _ = call("patterns", "losses:per_sequence", "--inputs", "inputs", *SET)
    assert code == cli.OK and re.search(r"segment_sums: .* \[1 of 1 tries, \d+\.\d ms\]", out)
    code, out, _ = call("patterns", "losses:compiles", *SET)
    assert re.search(r"selective_logprob: .* \[0 of 0 tries", out), "one pass needs no pattern"
    assert re.search(r"segment_sums: .* \[0 of 1 tries", out)
    assert "1 graph compiled: 1 rewrite" in out and "No pattern was tried: one pass needs none of them" in out
    code, out, _ = call("patterns", "losses:compiles", *SET, *TWO_PASS)
    assert "No pattern was tried" not in out
    assert code == cli.OK and re.search(r"selective_logprob: .* \[1 of 1 tries, \d+\.\d ms\]", out)
    assert re.search(r"Gather: .* \[used [1-9]\d* times\]", out)


def test_patterns_check_runs_examples_and_near_misses(call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from inductor_grpo.tools import catalogue

    checks, trials = catalogue.check(["selective_logprob"])
    assert [c.ok for c in checks] == [True] * 7 and trials["selective_logprob"].hits >= 5
    checks, trials = catalogue.check(["segment_sums"])
    assert [(c.takes, c.should) for c in checks] == [(True, True)] * 3 + [(False, False)]
    assert (trials["segment_sums"].hits, trials["segment_sums"].tries) == (3, 4)
    broken = catalogue.Check("selective_logprob", "over_rows", takes=True, should=False)
    monkeypatch.setattr(catalogue, "check", lambda: ([broken], {}))
    code, out, _ = call("patterns", "--check")
    assert code == cli.UNMET and "FAIL  selective_logprob leaves over_rows" in out


def test_doctor(call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    code, out, _ = call("doctor", "--quick")
    assert code == cli.OK and torch.__version__ in out
    assert re.search(r"ok +rewrite +1 rewrite, result and gradients as in eager", out)
    from inductor_grpo._compat import hooks

    monkeypatch.setattr(hooks, "missing", lambda: "compile_fx(inner_compile=)")
    code, out, _ = call("doctor", "--quick")
    assert code == cli.UNMET and "BAD  hooks" in out


def test_help_tells_the_exit_codes(call: Any) -> None:
    for argv in ((), ("explain",), ("dump",), ("report",)):
        code, out, _ = call(*argv, "--help")
        assert code == 0 and "exit codes:" in out and ("module:function" in out or not argv)
    assert call()[0] == cli.USAGE


# ---------------------------------------------------------------- capture


def test_capture_says_why_it_is_empty_and_fresh_makes_it_compile_again() -> None:
    compiled = torch.compile(lambda x: x.sin(), backend=backend.inductor_grpo, options={"grpo.codegen": "eager"})
    compiled(torch.ones(3))
    with inductor_grpo.capture() as captured:
        compiled(torch.ones(3))
    assert not captured.graphs and "capture(fresh=True)" in str(captured)
    with inductor_grpo.capture(fresh=True) as captured:
        compiled(torch.ones(3))
    assert [s.name for s in captured.graphs[0].stages] == ["joint", "normalised", "inference"]
    assert captured.graphs[0].done and captured.graphs[0].seconds > 0


def test_the_tools_are_those_of_this_checkout() -> None:
    from inductor_grpo import tools

    assert pathlib.Path(tools.__file__).parents[1] == pathlib.Path(inductor_grpo.__file__).parents[1]


def test_equal_captures_end_apart() -> None:
    with inductor_grpo.capture() as outer:
        with inductor_grpo.capture():
            pass
        torch.compile(lambda x: x.sin(), backend=backend.inductor_grpo, options={"grpo.codegen": "eager"})(
            torch.ones(3)
        )
    assert len(outer.graphs) == 1


def test_nested_captures_both_see_a_compilation_in_another_thread() -> None:
    with inductor_grpo.capture() as outer, inductor_grpo.capture(codegen="eager") as inner:
        thread = threading.Thread(
            target=torch.compile(lambda x: x.sin(), backend=backend.inductor_grpo), args=(torch.ones(3),)
        )
        thread.start()
        thread.join()
    assert len(outer.graphs) == len(inner.graphs) == 1 and outer.graphs[0] is inner.graphs[0]


def test_stages_stay_as_they_were() -> None:
    def loss(h: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (h @ w.t()).logsumexp(-1).sum()

    args = torch.randn(24, 16, requires_grad=True), torch.randn(101, 16)
    with inductor_grpo.capture(codegen="eager") as captured, inductor_grpo.config.patch(min_logits_bytes=0):
        torch.compile(loss, backend=backend.inductor_grpo)(*args).backward()
    (graph,) = captured.graphs
    targets = {s.name: {str(n.target) for n in s.graph.nodes} for s in graph.stages}
    assert "aten.mm.default" in targets["joint"] and "inductor_grpo.rows.default" not in targets["normalised"]
    assert any("inductor_grpo" in t for t in targets["rewritten"])
    for stage in graph.stages:
        stage.graph.lint()


def test_no_tool_is_imported_and_nothing_kept_without_a_capture() -> None:
    code = (
        "import sys, torch\n"
        "from inductor_grpo import backend, capture as c\n"
        "f = torch.compile(lambda h, w: (h @ w.t()).logsumexp(-1).sum(), backend=backend.inductor_grpo,\n"
        "    options={'grpo.codegen': 'eager', 'grpo.min_logits_bytes': 0})\n"
        "f(torch.randn(24, 16), torch.randn(101, 16))\n"
        "assert backend.last_report().rewrites\n"
        "print([m for m in sys.modules if m.startswith(('inductor_grpo.tools', 'inductor_grpo.canonical'))])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, cwd=ROOT)
    assert done.stdout.strip() == "[]", done.stderr[-2000:]


def test_traces_hold_the_graphs(folder: pathlib.Path) -> None:
    environment = {**os.environ, "TORCH_TRACE": str(folder / "traces"), "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), environment.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "inductor_grpo.tools", "explain", "losses:pair", *SET]
    subprocess.run(command, check=True, capture_output=True, timeout=100, env=environment, cwd=folder)
    with contextlib.ExitStack() as stack:
        lines = [line for path in (folder / "traces").iterdir() for line in stack.enter_context(path.open())]
    text = "".join(lines)
    for name in ("inductor_grpo_joint", "inductor_grpo_rewritten", "inductor_grpo_report"):
        assert f'"name": "{name}"' in text
    assert "%mm : f32[24, 101] = aten.mm(%primal, %permute)" in text
