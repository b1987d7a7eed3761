"""What an installation holds, and that torch finds the backend in it without an import."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCES = {"inductor_grpo": "inductor_grpo", "patterns": "inductor_grpo/patterns", "tools": "inductor_grpo/tools"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Built from a copy: setuptools leaves a build folder in the source tree and would take stale files from it.
    copy = tmp_path_factory.mktemp("source") / "copy"
    ignore = shutil.ignore_patterns(".*", "tests", "build", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, copy, ignore=ignore)
    out = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--wheel-dir", str(out), str(copy)], check=True)
    (built,) = out.glob("*.whl")
    return built


def test_the_wheel_holds_every_source_file_and_nothing_else(wheel: Path) -> None:
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    expected = {"inductor_grpo/py.typed"}
    for folder, target in SOURCES.items():
        files = [file for kind in ("*.py", "*.j2") for file in (ROOT / folder).rglob(kind)]
        expected |= {f"{target}/{file.relative_to(ROOT / folder).as_posix()}" for file in files}
    assert names == expected


def test_torch_finds_the_backend_without_an_import(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    script = (
        "import torch, sys\n"
        "assert 'inductor_grpo' not in sys.modules\n"
        "fn = torch.compile(lambda x: x.sin(), backend='inductor_grpo', options={'grpo.codegen': 'eager'})\n"
        "assert torch.equal(fn(torch.ones(3)), torch.ones(3).sin())\n"
        "import inductor_grpo, inductor_grpo.patterns, inductor_grpo.tools\n"
        "print(inductor_grpo.__file__, inductor_grpo.last_report().rejections[0].code)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(site), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    run = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240
    )
    assert run.returncode == 0, run.stderr
    file, code = run.stdout.split()
    assert Path(file).is_relative_to(site) and code == "NO_HEAD"


def test_the_version_has_one_value() -> None:
    import inductor_grpo

    declared = re.search(r'^version = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert declared is not None and declared[1] == inductor_grpo.__version__
