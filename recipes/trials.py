"""The trials of a ``--multirun``: how many, what each one sets, how its folder is named."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import OmegaConf

from recipes.config import HYDRAS_OWN
from recipes.ending import COMPLETED, FAILED, REFUSED

_ENDS = {FAILED: "failed", REFUSED: "was refused"}
_LONGEST = 100  # characters of a folder's name
# A name that needs no quotes, in a shell or in a setting such as resume=.
_NOT_IN_A_NAME = re.compile(r"[^\w.+-]+", re.ASCII)


@dataclass(frozen=True)
class Sweep:
    """What a command line varies.

    Attributes:
        keys: the settings that have several values.
        trials: how many runs that makes; None where only Hydra knows, as of ``glob(*)``.
    """

    keys: tuple[str, ...] = ()
    trials: int | None = 1

    @classmethod
    def of(cls, settings: Sequence[str]) -> Sweep:
        """The sweep of a command line's settings; none where Hydra refuses them."""
        try:
            parsed = OverridesParser.create().parse_overrides(list(settings))
        except (HydraException, *HYDRAS_OWN):
            return cls()
        last = {each.key_or_group: each for each in parsed}  # of a key given twice Hydra takes it
        swept = [each for each in last.values() if each.is_sweep_override()]
        try:
            count = math.prod(len(list(each.sweep_string_iterator())) for each in swept)
        except HydraException:
            return cls(tuple(each.key_or_group for each in swept), None)
        return cls(tuple(each.key_or_group for each in swept), count)

    def settings_of(self, overrides: Sequence[str]) -> list[str]:
        """Those of a trial's settings that tell it from the others."""
        return [each for each in overrides if each.partition("=")[0].lstrip("+~") in self.keys]

    def title(self, number: int, overrides: Sequence[str]) -> str:
        """What a person reads before a trial, whose number counts from 0."""
        of_all = "" if self.trials is None else f" of {self.trials}"
        own = " ".join(self.settings_of(overrides))
        return f"trial {number + 1}{of_all}{': ' if own else ''}{own}"

    def folder(self, number: int, overrides: Sequence[str]) -> str:
        """The name of a trial's folder: its number, and what it sets."""
        words = [str(number), *self.settings_of(overrides)]
        return "-".join(_NOT_IN_A_NAME.sub("_", each) for each in words)[:_LONGEST].rstrip("_-")


def how_they_ended(statuses: Mapping[str, int], expected: int | None) -> list[str]:
    """What a person reads after a sweep: how many trials completed, and which did not.

    Args:
        statuses: exit statuses by the trials' titles, in their order.
        expected: how many trials there were to be; None where that is not known.
    """
    others = {title: status for title, status in statuses.items() if status != COMPLETED}
    count = len(statuses) if expected is None else expected
    lines = [f"{len(statuses) - len(others)} of {count} trials completed"]
    for title, status in others.items():
        lines.append(f"  {title}: {_ENDS.get(status, 'was interrupted')} (exit status {status})")
    if count > len(statuses):
        lines.append(f"  not started: {count - len(statuses)}")
    return lines


def name_folders(sweep: Sweep) -> None:
    """Have ``hydra.sweep.subdir`` in ``conf/`` name folders by a sweep."""
    OmegaConf.register_new_resolver("trial_folder", sweep.folder, replace=True)
