"""What a run that scores or continues an earlier one takes over from its configuration.

A run folder knows how it was set up. ``task=evaluate checkpoint=RUN`` and ``resume=RUN`` (a run
folder or a checkpoint in one) take that, so that nothing has to be typed again; what the command
line names wins. A checkpoint without a ``config.yaml`` beside it gives nothing, and a recipe that
is named again counts as the one the run began from.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from recipes import answering, backbones, checkpoint, models, reading
from recipes.bounds import text_problems
from recipes.config import Config, ModelConfig, UserError, dump, explain
from recipes.printable import printable
from recipes.telemetry import RunFolder

# What scores depend on, but for the machine's part.
_OF_SCORES = ("model", "dataset", "eval_batch_size", "dtype", "seed", "recipe_name")
# What is the launch's and not the training's: where it runs, how far, and on what conditions.
_OF_LAUNCH = (
    *("task", "prepare", "benchmark", "runs", "topology", "network", "deadlines", "preflight"),
    *("device", "threads", "affinity", "restarts", "resume", "checkpoint", "max_steps"),
    *("dataset.workers", "dataset.download"),
)
_REMEDY = f"{reading.RESTORE}; without it the command line has to give every setting"
_BATCHES = ("batch_size", "global_batch_size")


def with_its_settings(
    composed: DictConfig, settings: Sequence[str], folder: Path, conf: Path
) -> DictConfig:
    """The composed configuration with the settings of the run that it scores or continues.

    Args:
        composed: of the command line alone.
        settings: of the command line, KEY=VALUE and GROUP=CHOICE.
        folder: the run folder, which ``resume=auto`` continues.
        conf: where the recipes are.

    Raises:
        UserError: the earlier run's ``config.yaml`` is no configuration, or a path does not answer.
    """
    answering.require(composed)
    file = _file_of(composed, folder)
    if file is None:
        return composed
    saved = dict(_leaves(read(file)))
    named = set(_named(settings, conf, saved.get("recipe_name")))
    taken = {
        key: value
        for key, value in saved.items()
        if _is_wanted(key, composed) and not any(_covers(each, key) for each in named)
    }
    _adjust(taken, saved, named, composed)
    result = composed.copy()
    for key, value in taken.items():
        try:
            OmegaConf.update(result, key, value, force_add=key.startswith("model.arguments."))
        except OmegaConfBaseException as error:
            raise UserError(f"{file}: {printable(explain(error), 200)}", _REMEDY) from None
    return result


def config_beside(path: Path) -> Path | None:
    """The ``config.yaml`` of the run that a path is, or is a checkpoint of; None without one."""
    for each in (path, Path(os.path.realpath(path))):  # resolve() raises at a loop of links
        holder = each if each.name != "checkpoints" else each.parent
        if each.parent.name == "checkpoints":
            holder = each.parent.parent
        file = RunFolder(holder).config
        if os.path.exists(file):  # noqa: PTH110  (Path raises at a long name)
            return file
    return None


def goes_on_from(resume: str | None, run: RunFolder) -> str:
    """What a further attempt at a run continues, as ``resume=`` says it.

    Its own newest checkpoint (``auto``); before it has one, the checkpoint of another run that it
    was to continue.

    Args:
        resume: of the attempt before, or of the command line.

    Raises:
        UserError: the run's ``config.yaml`` is no configuration.
    """
    if checkpoint.any_in(run.checkpoints):
        return "auto"
    if resume not in (None, "auto"):
        return str(resume)
    return _began_from(run) or "auto"


def changed(config: Config, run: RunFolder) -> list[str]:
    """Where a run is set up otherwise than the one it scores or continues: ``key: then -> now``.

    Args:
        config: of this run; what a scored run's scores do not depend on is left out.
        run: this run's folder, which ``resume=auto`` continues.

    Raises:
        UserError: the earlier run's ``config.yaml`` is no configuration.
    """
    evaluates = config.task.name == "evaluate"
    source = config.checkpoint if evaluates else config.resume
    if source is None:
        return []
    file = config_beside(run.path if source == "auto" else Path(source))
    if file is None:
        return []
    before, now = read(file), dict(_leaves(yaml.safe_load(dump(config))))
    if before.get("model.stem") == "auto" and now["model.stem"] == _stem_of(before):
        before["model.stem"] = now["model.stem"]
    return [
        f"{printable(key)}: {printable(before.get(key, 'not set'))} -> {now.get(key, 'not set')}"
        for key in [*now, *(key for key in before if key not in now)]
        if before.get(key, "not set") != now.get(key, "not set")
        and (_is_of_scores(key) if evaluates else key not in ("task.name", "resume"))
    ]


def read(file: Path) -> dict[str, Any]:
    """The settings in a run folder's ``config.yaml`` by key, such as ``model.name``.

    Raises:
        UserError: it cannot be read, or is not what `config.dump` writes.
    """
    content = reading.yaml_of(file)
    if not isinstance(content, dict):
        raise UserError(f"{file}: not a run's configuration: it holds no keys", _REMEDY)
    found = dict(_leaves(content))
    for key, value in found.items():
        if "${" in f"{key}{value}":
            raise UserError(f"{file}: {key[:80]!r}: not a value that a run was made with", _REMEDY)
    return found


def _file_of(composed: DictConfig, folder: Path) -> Path | None:
    """The configuration of the run that this one scores or continues, where it has one."""
    task, resume, scored = (composed.task.name, composed.resume, composed.checkpoint)
    if [*text_problems("resume", str(resume)), *text_problems("checkpoint", str(scored))]:
        return None  # no path: the check of the whole refuses it
    if task == "evaluate" and scored:
        return config_beside(Path(scored))
    if task != "train" or not resume:
        return None
    if resume != "auto":
        return config_beside(Path(resume))
    # Also where no checkpoint has been taken yet: it is the same run that begins anew.
    return config_beside(folder)


def _began_from(run: RunFolder) -> str | None:
    """The checkpoint of another run that this one was to continue when it was started last."""
    if not run.config.exists():
        return None
    resume = read(run.config).get("resume")
    return str(resume) if resume not in (None, "auto") else None


def _named(settings: Sequence[str], conf: Path, recipe_of_run: Any) -> Iterator[str]:
    """The keys and groups that the command line sets, by itself or by a recipe."""
    for override in OverridesParser.create().parse_overrides(list(settings)):
        if override.key_or_group != "recipe":
            yield override.key_or_group
        elif override.value() not in (None, recipe_of_run):
            yield from _set_by(conf / "recipe" / f"{override.value()}.yaml")


def _set_by(recipe: Path) -> Iterator[str]:
    if not recipe.is_file():
        return  # of a folder of the user's
    content = yaml.safe_load(recipe.read_text(encoding="utf-8"))
    for each in content.pop("defaults", []):
        yield from (key.removeprefix("override ").lstrip("/") for key in each)
    yield from (key for key, _ in _leaves(content))


def _is_wanted(key: str, composed: DictConfig) -> bool:
    if composed.task.name == "evaluate":
        return _is_of_scores(key)
    return not any(_covers(each, key) for each in _OF_LAUNCH)


def _is_of_scores(key: str) -> bool:
    # Other weights come first, and where decoding is done is this machine's affair.
    others = key.startswith(("model.pretrained", "dataset.workers"))
    return not others and any(_covers(each, key) for each in _OF_SCORES)


def _adjust(
    taken: dict[str, Any], saved: dict[str, Any], named: set[str], composed: DictConfig
) -> None:
    """Settle what does not go by one key alone."""
    for key in _BATCHES:
        taken.pop(key, None)
    if composed.task.name == "train" and not named & set(_BATCHES):
        # On another topology the global batch stays, not each device's share of it.
        taken |= {"batch_size": None, "global_batch_size": saved.get("global_batch_size")}
    if taken.get("model.stem") == "auto" and "dataset.image_size" not in taken:
        # The images may be of another size now; the weights are not of another stem.
        taken["model.stem"] = _stem_of(saved) or "auto"


def _stem_of(saved: Mapping[str, Any]) -> str | None:
    """The stem that ``model.stem=auto`` was in a run; None where its settings do not tell."""
    name, size = str(saved.get("model.name")), saved.get("dataset.image_size")
    if not isinstance(size, int) or name not in backbones.modules():
        return None
    return models.chosen_stem(ModelConfig(name=name), size)


def _covers(group: str, key: str) -> bool:
    return key == group or key.startswith(f"{group}.")


def _leaves(content: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in content.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        elif value != {}:
            yield f"{prefix}{key}", value
