"""The names of PaddleClas's backbones, read without importing Paddle or PaddleClas.

`python -m recipes.backbones` lists them.
"""

from __future__ import annotations

import ast
import difflib
import functools
import importlib.util
import re
from pathlib import Path

from recipes.console import outlive_console

RESNET_MODULE = "legendary_models.resnet"  # the backbones that have a CIFAR form
LIST_COMMAND = "python -m recipes.backbones"


def folder() -> Path | None:
    """PaddleClas's package of backbones; None where PaddleClas is not installed."""
    spec = importlib.util.find_spec("paddleclas")
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(spec.submodule_search_locations[0]) / "ppcls" / "arch" / "backbone"


@functools.cache
def modules() -> dict[str, str]:
    """The names that PaddleClas's backbone package imports for its users, with their module.

    Empty where PaddleClas is not installed.
    """
    package = folder()
    if package is None:
        return {}
    tree = ast.parse((package / "__init__.py").read_text(encoding="utf-8"))
    return {
        alias.asname or alias.name: node.module
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and node.level == 1 and node.module
        for alias in node.names
    }


def names() -> list[str]:
    """The public backbones of the installed PaddleClas, sorted."""
    return sorted(modules())


def find(word: str) -> str | None:
    """The backbone that a word names, whatever its capitals, dashes and dots; None if none."""
    if word in modules():
        return word
    return _by_plain_name().get(_plain(word))


def near(word: str) -> list[str]:
    """Up to three backbones with names like the word."""
    known = _by_plain_name()
    return [known[each] for each in difflib.get_close_matches(_plain(word), known, n=3)]


@functools.cache
def _by_plain_name() -> dict[str, str]:
    return {_plain(name): name for name in names()}


def _plain(name: str) -> str:
    return re.sub(r"[-_. ]", "", name.lower())


if __name__ == "__main__":
    outlive_console()  # "| head" is for reading it
    print(*names(), sep="\n")
