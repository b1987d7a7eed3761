"""Reports as data: text, JSON, sums, source lines."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch._inductor.custom_graph_pass import CustomGraphPass

from inductor_grpo import Location, Rejection, Report, RequireError, Rewrite

HERE = Location("/home/user/loss.py", 41, "step", "logits = h @ w.T")
REWRITE = Rewrite("engine", "two-pass", HERE, 3 << 30, 1 << 20, 4)
REJECTION = Rejection("MIXES_ROWS", "cumsum runs over tokens", HERE, 5 << 20)


def test_text() -> None:
    report = Report([REWRITE], [REJECTION, Rejection("NO_HEAD", "nothing here")])
    assert str(report).splitlines() == [
        "1 rewrite, 2 rejections, 3.0 GiB saved [MIXES_ROWS, NO_HEAD]",
        "  rewritten   loss.py:41 in step: logits = h @ w.T [engine, two-pass, 4 matmuls] 3.0 GiB -> 1.0 MiB",
        "  left alone  loss.py:41 in step: logits = h @ w.T MIXES_ROWS: cumsum runs over tokens (5.0 MiB)",
        "  left alone  (unknown line) NO_HEAD: nothing here",
    ]


def test_json_gives_the_same_report() -> None:
    report = Report([REWRITE, Rewrite("p", "s", None, 1, 0, 1)], [REJECTION], from_cache=True)
    again = Report.from_json(report.to_json())
    assert again == report and again.from_cache and again.rejections[0].location == HERE
    for broken in ("", "{}", "[]", '{"rewrites": [{"location": null}], "rejections": [], "from_cache": false}'):
        with pytest.raises((ValueError, KeyError, TypeError)):
            Report.from_json(broken)


def test_sum() -> None:
    cached = Report([REWRITE], from_cache=True)
    fresh = Report(rejections=[REJECTION])
    assert (cached + fresh) == Report([REWRITE], [REJECTION])
    assert not (cached + fresh).from_cache
    assert (Report() + cached).from_cache and (cached + cached).bytes_saved == 2 * cached.bytes_saved > 0


def test_rejection_is_an_exception_and_a_value() -> None:
    with pytest.raises(Rejection, match="cumsum"):
        raise REJECTION
    assert pickle.loads(pickle.dumps(REJECTION)) == copy.deepcopy(REJECTION) == REJECTION
    assert REJECTION != Rejection("MIXES_ROWS", "cumsum runs over tokens", HERE, 6 << 20)
    with pytest.raises(ValueError, match="MIXED"):
        Rejection("MIXED", "no such code")


def test_require_error_lists_what_stays() -> None:
    error = RequireError(Report([REWRITE], [REJECTION, Rejection("NO_HEAD", "nothing here")]))
    assert "cumsum runs over tokens" in str(error) and "nothing here" not in str(error)


def _user_function(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.softmax(x, dim=-1)  # a comment


class _Locations(CustomGraphPass):
    """Notes the line of every node of the joint graph."""

    def __init__(self) -> None:
        self.found: dict[str, Location | None] = {}

    def __call__(self, graph: torch.fx.Graph) -> None:
        self.found.update({node.name: Location.of(node) for node in graph.nodes})

    def uuid(self) -> None:
        return None


def test_location_is_the_innermost_line_of_the_user() -> None:
    def outer(x: torch.Tensor) -> torch.Tensor:
        return _user_function(x).sum()

    locations = _Locations()
    options = {"grpo.codegen": "eager", "joint_custom_pre_pass": locations}
    torch.compile(outer, backend="inductor_grpo", options=options)(torch.randn(2, 3, requires_grad=True))
    assert locations.found["primals_1"] is None
    forward, backward = locations.found["exp"], locations.found["mul"]
    for location in (forward, backward):
        assert location is not None and location.code.startswith("return torch.nn.functional.softmax(x, dim=-1)")
        assert (location.file, location.function) == (__file__, "_user_function")
        assert location.line == _user_function.__code__.co_firstlineno + 1


def test_location_is_in_the_script_where_a_library_made_the_tensor() -> None:
    script = '  File "/home/user/train.py", line 7, in step\n    logits = model(ids).logits\n'
    helper = '  File "/home/user/loss.py", line 3, in pick\n    return logp.gather(-1, y)\n'
    library = (
        '  File "/venv/lib/python3.11/site-packages/transformers/model.py", line 99, in forward\n    self.lm_head(h)\n'
    )
    found = [Location.from_trace(t) for t in (script + library, script + helper, script + helper + library, library)]
    assert [(f.line, f.code) if f else None for f in found] == [
        (7, "logits = model(ids).logits"),
        (3, "return logp.gather(-1, y)"),
        (3, "return logp.gather(-1, y)"),
        (99, "self.lm_head(h)"),
    ]
