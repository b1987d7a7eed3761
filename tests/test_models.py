"""Whole models of transformers: the model and a naive loss compiled as one function, streamed and right."""

from __future__ import annotations

import pytest

from tests import models

SHAPES = [models.batch(shape) for shape in models.SHAPES]


@pytest.mark.parametrize("name", models.ZOO)
def test_training(name: str) -> None:
    facts = models.check(models.step, models.build(name), [models.batch(shape) for shape in models.SHAPES])
    assert facts.matmuls == 3
