"""The page on continuing says of every setting what a change does."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest

from recipes.config import Config, DatasetConfig, ModelConfig, UserError, with_batch_sizes
from recipes.same_training import identity, refuse_another_training

PAGE = (Path(__file__).parent.parent / "docs" / "continuing.md").read_text()
ROWS = [line for line in PAGE.splitlines() if line.startswith("| `")]


def keys(node: Any, prefix: str = "") -> Iterator[str]:
    for field in fields(node):
        value = getattr(node, field.name)
        if is_dataclass(value):
            yield from keys(value, f"{prefix}{field.name}.")
        else:
            yield prefix + field.name


def named(row: str) -> set[str]:
    return set(re.findall(r"`([a-z_0-9.*]+)`", row.split("|")[1]))


@pytest.mark.parametrize("key", list(keys(Config())))
def test_the_page_has_every_setting(key: str) -> None:
    group = f"{key.partition('.')[0]}.*"
    assert any({key, group} & named(row) for row in ROWS)


def test_the_page_has_no_other_setting() -> None:
    known = set(keys(Config())) | {f"{key.partition('.')[0]}.*" for key in keys(Config())}
    assert {word for row in ROWS for word in named(row)} - known == {"off"}


def test_the_first_row_is_what_makes_another_training() -> None:
    made = with_batch_sizes(
        Config(
            batch_size=8,
            model=ModelConfig(name="ResNet18"),
            dataset=DatasetConfig(name="digits", image_size=8),
        )
    )
    described = identity(made, 100, 10)
    assert len(described) == len(named(ROWS[0])) + 1  # and the number of images
    for key, value in described.items():
        other = value + 1 if isinstance(value, int) else f"{value}x"
        with pytest.raises(UserError, match="of another training"):
            refuse_another_training({**described, key: other}, described, "there", 10)
