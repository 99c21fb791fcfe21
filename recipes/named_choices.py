"""Choices that need no file in ``conf/``: any topology=NODESxDEVICES, any backbone as model=NAME.

Hydra asks this module after ``conf/``, so what has a file there is that file's.
"""

from __future__ import annotations

import re
from typing import Any

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigLoadError, ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import OmegaConf

from recipes import backbones

SCHEME = "named"
# Longer numbers are no count of machines, and Python reads no number of 5,000 digits.
_SHAPE = re.compile(r"(\d{1,9})[xX](\d{1,9})", re.ASCII)


def register() -> None:
    """Have Hydra ask for these choices, however it is called. May be called again."""
    for plugin in (NamedChoices, SearchNamedChoices):
        Plugins.instance().register(plugin)


def content_of(group: str, name: str) -> dict[str, Any] | None:
    """The keys that a choice sets; None where the name means nothing in its group."""
    if group == "topology" and (shape := _SHAPE.fullmatch(name)):
        return {"nodes": int(shape[1]), "devices": int(shape[2])}
    if group == "model" and (backbone := backbones.find(name)):
        return {"name": backbone}
    return None


class NamedChoices(ConfigSource):
    """A source of group entries that are made when they are asked for."""

    @staticmethod
    def scheme() -> str:
        return SCHEME

    def available(self) -> bool:
        return True

    def load_config(self, config_path: str) -> ConfigResult:
        content = self._content(config_path)
        if content is None:
            raise ConfigLoadError(f"Config not found : {config_path}")
        return ConfigResult(
            provider=self.provider,
            path=self.full_path(),
            config=OmegaConf.create(content),
            header={"package": None},
        )

    def is_config(self, config_path: str) -> bool:
        return self._content(config_path) is not None

    def is_group(self, config_path: str) -> bool:
        del config_path
        return False  # the groups themselves are those of conf/

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        del config_path, results_filter
        return []  # too many to list

    def _content(self, config_path: str) -> dict[str, Any] | None:
        group, _, name = config_path.removesuffix(".yaml").partition("/")
        return content_of(group, name)


class SearchNamedChoices(SearchPathPlugin):
    """Puts `NamedChoices` after ``conf/``."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        search_path.append("named choices", f"{SCHEME}://")
