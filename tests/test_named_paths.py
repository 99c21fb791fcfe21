"""Paths of the configuration that may not be looked at."""

from __future__ import annotations

from pathlib import Path

import pytest

from recipes import earlier_run, named_paths
from recipes.config import Config, DatasetConfig, ModelConfig, UserError


@pytest.fixture
def circle(tmp_path: Path) -> Path:
    """A path that nobody can follow, whoever runs the tests."""
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    return tmp_path / "a" / "below"


def naming(key: str, path: str) -> Config:
    if key == "dataset.path":
        return Config(dataset=DatasetConfig(name="imagenet", path=path))
    if key == "model.pretrained":
        return Config(model=ModelConfig(pretrained=path))
    return Config(resume=path) if key == "resume" else Config(checkpoint=path)


KEYS = ["dataset.path", "model.pretrained", "resume", "checkpoint"]


@pytest.mark.parametrize("key", KEYS)
def test_what_cannot_be_followed_is_named_with_its_key(key: str, circle: Path) -> None:
    with pytest.raises(UserError, match=f"{key}={circle} cannot be read by uid .*: Too many"):
        named_paths.check(naming(key, str(circle)))


@pytest.mark.parametrize("key", KEYS)
def test_what_may_not_be_read_is_named(
    key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.access", lambda *_: False)  # root may read all
    with pytest.raises(UserError, match=f"{key}={tmp_path} cannot be read .*: Permission denied"):
        named_paths.check(naming(key, str(tmp_path)))


@pytest.mark.parametrize("key", KEYS)
def test_what_is_absent_or_no_path_is_left_to_others(key: str, tmp_path: Path) -> None:
    named_paths.check(naming(key, str(tmp_path / "not" / "there")))
    named_paths.check(naming(key, str(tmp_path)))
    for word in ("auto", "paddleclas", "https://example.com/x", "~nobody-of-that-name/x"):
        named_paths.check(naming("model.pretrained", word))


def test_a_path_that_cannot_be_followed_has_no_configuration(circle: Path) -> None:
    assert earlier_run.config_beside(circle) is None
    assert earlier_run.config_beside(Path("a" * 5000)) is None
