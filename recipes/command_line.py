"""What stands on the command line, made ready for Hydra: options, settings, sweeps.

Everything here works on words. What the settings mean is known once Hydra has composed them.
"""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from hydra._internal.utils import get_args_parser  # the parser that `hydra.main` itself uses
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, QuotedString
from hydra.errors import OverrideParseException

from recipes import hints
from recipes.config import HYDRAS_OWN, ConfigError, known_keys

GROUPS = (
    *("task", "model", "dataset", "topology", "amp", "optimizer", "schedule", "network"),
    "recipe",
)
# The two of which one gives the other; a set-up may give either.
_BATCHES = ("batch_size", "global_batch_size")


@dataclass(frozen=True)
class CommandLine:
    """The arguments of ``train.py``.

    Attributes:
        options: Hydra's own, such as ``--multirun``, with their values.
        settings: KEY=VALUE and GROUP=CHOICE.
    """

    options: tuple[str, ...]
    settings: tuple[str, ...]

    @property
    def arguments(self) -> list[str]:
        """As Hydra takes them: it refuses options between settings."""
        return [*self.options, *self.settings]


def read(arguments: Sequence[str]) -> CommandLine:
    """Tell options from settings, and see what can be seen of the settings themselves.

    Raises:
        ConfigError: an option that there is not, or a choice that is no name.
    """
    parser = get_args_parser()
    with _no_exit():
        found, rest = parser.parse_known_args(list(arguments))
    if any(word.startswith("-") for word in rest):
        raise _unknown_option(next(each for each in rest if each.startswith("-")), arguments)
    settings = [*found.overrides, *rest]
    options = list(arguments)
    for word in reversed(settings):  # from the end: an option's value may be the same word
        del options[len(options) - 1 - options[::-1].index(word)]
    if found.config_name or found.config_path:
        raise ConfigError(
            "--config-name and --config-path lead away from the set-ups in conf/",
            "recipe=NAME chooses a set-up; --config-dir=FOLDER adds a folder of yours, in which "
            "recipe/NAME.yaml is one",
        )
    parsed = _parsed(settings)
    _refuse_choices_that_are_no_names(parsed)
    return CommandLine(tuple(options), (*settings, *_batches_given_up(parsed)))


def settings_only(arguments: Sequence[str]) -> list[str]:
    """The settings of a rank that was started by hand, where Hydra's options do nothing.

    Raises:
        ConfigError: as `read`, or there is an option.
    """
    line = read(arguments)
    if line.options:
        raise ConfigError(
            f"{' '.join(line.options)}: a rank of paddle.distributed.launch takes settings only",
            "start python train.py itself with it, without paddle.distributed.launch",
        )
    return list(line.settings)


def _parsed(settings: Sequence[str]) -> list[Override]:
    """The settings as Hydra reads them; none where it refuses one, which it says itself."""
    try:
        return list(OverridesParser.create().parse_overrides(list(settings)))
    except (OverrideParseException, *HYDRAS_OWN):
        return []


def _batches_given_up(parsed: Sequence[Override]) -> list[str]:
    """Settings that give up a set-up's batch size for the one that is given here.

    A recipe gives batch_size or global_batch_size. Whoever sets the other one means it instead.
    """
    given = {each.key_or_group: each for each in parsed if each.key_or_group in _BATCHES}
    if len(given) != 1:
        return []  # none, or both: these have to agree
    (key, override), *_ = given.items()
    if override.is_delete() or override.value() is None:
        return []
    other = _BATCHES[1 - _BATCHES.index(key)]
    return [f"{other}=null"]


def _refuse_choices_that_are_no_names(parsed: Sequence[Override]) -> None:
    """Refuse topology=4 and the like, of which Hydra says neither what nor where."""
    for override in parsed:
        group = override.key_or_group
        if group not in GROUPS or override.is_delete() or override.is_sweep_override():
            continue
        value = override.value()
        if isinstance(value, str | QuotedString):
            continue
        if value is None and group == "recipe":
            continue
        raise ConfigError(
            f"{override.input_line}: {group} is chosen by name", _choice_instead(group, value)
        )


def _choice_instead(group: str, value: Any) -> str:
    """What to write for a group's value that is no name."""
    if group == "topology" and type(value) is int and value > 0:
        return f"topology=1x{value} for {value} devices of one machine"
    meant = hints.choice_like(group, str(value), ())
    return f"{group}={meant}" if meant else f"{group}=NAME; `--help` lists the names"


def _unknown_option(option: str, arguments: Sequence[str]) -> ConfigError:
    """What to write instead of an option in the style of other programs."""
    name, has_value, value = option.partition("=")
    after = next(iter(arguments[list(arguments).index(option) + 1 :]), "")
    if not has_value and after and not re.match(r"-|[\w.]+=", after):
        value = after
    meant = hints.settings_like(name.strip("-"), known_keys())
    key = meant[0] if meant else name.strip("-").replace("-", "_") or "KEY"
    return ConfigError(
        f"there is no option {name}: settings are written KEY=VALUE, without dashes",
        key if "=" in key else f"{key}={value or '…'}",
    )


@contextlib.contextmanager
def _no_exit() -> Iterator[None]:
    """Turn argparse's usage and exit into one message.

    Raises:
        ConfigError: what argparse found, in its words.
    """
    told = io.StringIO()
    try:
        with contextlib.redirect_stderr(told):
            yield
    except SystemExit as end:
        if not end.code:
            raise  # --version has been answered
        reason = told.getvalue().strip().rpartition("error: ")[2]
        raise ConfigError(reason or "the options cannot be read", "see `--help`") from None
