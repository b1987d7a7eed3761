"""Every run has Inductor's caches in a new folder; every test starts from a Dynamo that knows nothing."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
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


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """No compiled code, no counts, no caches, a fixed seed."""
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    with torch._inductor.config.patch(force_disable_caches=True):
        yield
    torch._dynamo.reset()
