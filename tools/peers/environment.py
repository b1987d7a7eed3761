"""The environment that the packages are installed in: a virtual environment, and a folder for each older release.

Most of these packages pin torch, transformers or a CUDA-only dependency to what they were released with, so they go in
without their dependencies, and what their loss functions import is named here.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import inductor_grpo

TORCH = "torch==2.13.0"
WITH_DEPENDENCIES = ("numpy", "trl==1.16.0", "transformers==5.24.0", "datasets", "tensordict==0.14.3", "hoptorch")
ALONE = (
    "verl==0.9.1",
    "areal==1.0.4",
    "rlinf==0.3.0",
    "torchrl==0.14.1",
    "liger-kernel==0.8.5",
    "torchtune==0.6.1",
    "torchao==0.9.0",
)
IMPORTED = (
    *("ray", "omegaconf", "codetiming", "orjson", "peft"),  # verl
    *("aiofiles", "aiohttp", "colorlog", "einops", "flask", "httpx", "hydra-core", "lark", "numba"),  # AReaL
    *("openai", "pillow", "tenacity", "torchdata", "uvloop"),
    *("sentencepiece", "tiktoken", "blobfile", "kagglehub"),  # torchtune
)
TESTS = ("pytest", "pytest-timeout", "expecttest", "hypothesis")
OLDER: dict[str, tuple[str, ...]] = {
    "trl-1.9.2": ("trl==1.9.2",),
    "trl-0.17.0": (
        *("trl==0.17.0", "transformers==4.51.3", "tokenizers==0.21.1", "huggingface_hub==0.30.2"),
        *("datasets==3.5.0", "accelerate==1.6.0"),
    ),
}
"""Releases that hide those of the environment, each in a folder of its own: what is in it, without dependencies."""


def make(folder: Path, torch: str = TORCH) -> None:
    """Creates the environment in ``folder``, or completes it; raises CalledProcessError where pip fails.

    ``torch`` is a requirement with a version (``torch==2.13.0``): everything else is held to it.
    """
    if not python(folder).exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    constraint = folder / "constraints.txt"
    constraint.write_text(f"{torch}\n", encoding="utf-8")
    _pip(folder, torch)
    _pip(folder, *WITH_DEPENDENCIES, *TESTS, "--constraint", str(constraint))
    _pip(folder, "--no-deps", *ALONE)
    _pip(folder, *IMPORTED, "--constraint", str(constraint))
    for name, packages in OLDER.items():
        target = older(folder, name)
        if not target.exists():
            _pip(folder, "--no-deps", "--target", str(target), *packages)


def _pip(folder: Path, *arguments: str) -> None:
    quiet = ["--quiet", "--disable-pip-version-check"]
    subprocess.run([str(python(folder)), "-m", "pip", "install", *quiet, *arguments], check=True)


def python(folder: Path) -> Path:
    """The interpreter of the environment."""
    return folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def older(folder: Path, name: str) -> Path:
    """The folder of an older release."""
    return folder / "older" / name


def variables(folder: Path, name: str | None) -> dict[str, str]:
    """The process environment to run in: this very package, with the older release ``name`` in front of the others."""
    own = Path(inductor_grpo.__file__).resolve().parent.parent
    paths = [*([str(older(folder, name))] if name else []), str(own)]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONWARNINGS": "ignore"}
