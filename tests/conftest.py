"""Every run has Inductor's caches in a new folder; every test starts from a Dynamo that knows nothing."""

from __future__ import annotations

import atexit
import logging
import os
import shutil
import tempfile
import zlib
from collections.abc import Iterator

if "PYTEST_XDIST_WORKER" not in os.environ:  # the workers take it over from the process that starts them
    _cache = tempfile.mkdtemp(prefix="inductor_grpo-")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = _cache
    atexit.register(shutil.rmtree, _cache, ignore_errors=True)
for _name in [name for name in os.environ if name.startswith("INDUCTOR_GRPO_")]:
    del os.environ[_name]

import pytest  # noqa: E402
import torch  # noqa: E402
import torch._dynamo  # noqa: E402
import torch._inductor.config  # noqa: E402
from torch._dynamo.utils import counters  # noqa: E402

from inductor_grpo import backend  # noqa: E402

if "inductor_grpo" not in torch._dynamo.list_backends(None):  # run from a checkout that is not installed
    torch._dynamo.register_backend(backend.inductor_grpo, name="inductor_grpo")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="every case of the tests that are marked as samples")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of a test marked ``sample(n)`` about one case in n runs, always the same ones; with ``only="dynamic"`` all others
    run too.  --all, or a case that is named on the command line, runs whatever is marked."""
    if config.getoption("--all") or any("::" in arg for arg in config.args):
        return
    left_out = [item for item in items if (mark := item.get_closest_marker("sample")) and not _is_in(item, mark)]
    if left_out:
        items[:] = [item for item in items if item not in set(left_out)]
        config.hook.pytest_deselected(items=left_out)


def _is_in(item: pytest.Item, mark: pytest.Mark) -> bool:
    _, _, case = item.nodeid.partition("[")
    return mark.kwargs.get("only", "") not in case or zlib.crc32(case.encode()) % mark.args[0] == 0


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Iterator[None]:
    """torch writes its structured trace, graphs and all, while that logger has a handler; pytest 9.2 gives it three."""
    logging.getLogger("torch.__trace").handlers.clear()
    return (yield)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """No compiled code, no counts, no caches, a fixed seed."""
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    with torch._inductor.config.patch(force_disable_caches=True):
        yield
    torch._dynamo.reset()
