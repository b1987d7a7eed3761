"""Settings: which place wins, and what a wrong value says."""

from __future__ import annotations

import pickle

import pytest

from inductor_grpo import config
from inductor_grpo.config import Settings


def test_the_nearest_place_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    assert config.current() == Settings()
    monkeypatch.setenv("INDUCTOR_GRPO_CHUNK_BYTES", "1000")
    monkeypatch.setenv("INDUCTOR_GRPO_DISABLE", "tiles, selective_logprob")
    monkeypatch.setenv("INDUCTOR_GRPO_REQUIRE", "1")
    assert (config.chunk_bytes, config.disable, config.require) == (1000, ("selective_logprob", "tiles"), True)
    with config.patch(chunk_bytes=2000, require=False):
        assert config.current() == Settings(chunk_bytes=2000, disable=("selective_logprob", "tiles"))
        assert config.current().with_options({"grpo.chunk_bytes": 3000}).chunk_bytes == 3000
        with config.patch(chunk_bytes=None):
            assert config.chunk_bytes is None
        assert config.chunk_bytes == 2000
    assert config.chunk_bytes == 1000


def test_attributes_are_set_and_deleted() -> None:
    config.accumulate = "param"
    try:
        assert config.current().accumulate == "param"
    finally:
        del config.accumulate
    assert config.accumulate == "float32"


def test_patch_restores_after_an_error() -> None:
    with pytest.raises(KeyError), config.patch(max_rewrites=1):
        raise KeyError
    assert config.max_rewrites is None


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("min_logits_bytes", -1),
        ("min_logits_bytes", "many"),
        ("chunk_bytes", 1.5),
        ("chunk_bytes", True),
        ("accumulate", "fp32"),
        ("require", 2),
        ("require", "perhaps"),
        ("disable", 3),
        ("disable", [1]),
        ("disable", "selective_logprobs"),  # no pattern of that name
        ("max_rewrites", -1),
        ("codegen", "aot"),
    ],
)
def test_a_wrong_value_is_refused_where_it_is_set(name: str, bad: object, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=rf"inductor_grpo.config.{name} must"):
        setattr(config, name, bad)
    with pytest.raises(ValueError, match=rf"option 'grpo.{name}' must"):
        Settings().with_options({f"grpo.{name}": bad})
    if isinstance(bad, str):
        monkeypatch.setenv(f"INDUCTOR_GRPO_{name.upper()}", bad)
        with pytest.raises(ValueError, match=f"INDUCTOR_GRPO_{name.upper()} must"):
            config.current()


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(AttributeError, match="chunk_bites"):
        config.chunk_bites = 1
    with pytest.raises(AttributeError, match="chunk_bites"):
        config.patch(chunk_bites=1).__enter__()
    with pytest.raises(ValueError, match=r"grpo\.chunk_bites.*grpo\.chunk_bytes"):
        Settings().with_options({"grpo.chunk_bites": 1})


def test_options_are_split_by_prefix() -> None:
    ours, theirs = config.split_options({"grpo.require": True, "epilogue_fusion": False})
    assert (ours, theirs) == ({"grpo.require": True}, {"epilogue_fusion": False})
    assert config.split_options(None) == ({}, {})


def test_settings_survive_pickling() -> None:
    settings = Settings(chunk_bytes=7, disable=("tiles",))
    assert pickle.loads(pickle.dumps(settings)) == settings
