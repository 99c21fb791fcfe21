"""Whether a checkpoint is of the same training, or model, as a run; what to do where it is not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from recipes import models
from recipes.config import Config, UserError
from recipes.printable import printable

_REQUIRED = ("model", "num_classes")  # a checkpoint that does not say these is of another one
_OF_MODEL = ("model", "stem", "num_classes")
# What gives a run a checkpoint's setting; others are `key=value`.
_OVERRIDES = {
    "model": "model.name={}",
    "stem": "model.stem={}",
    "num_classes": "model.num_classes={}",
    "global_batch_size": "global_batch_size={} batch_size=null",
}


def identity(config: Config, train_size: int, num_classes: int) -> dict[str, Any]:
    """What must stay the same for a continued training to be the same training."""
    return {
        "model": config.model.name,
        "stem": models.chosen_stem(config.model, config.dataset.image_size),
        "num_classes": num_classes,
        "dataset": config.dataset.name,
        "train_size": train_size,
        "seed": config.seed,
        "global_batch_size": config.global_batch_size,
        "dtype": config.dtype,
    }


def refuse_another_training(
    saved: Mapping[str, Any], current: Mapping[str, Any], source: Path | str, classes: int
) -> None:
    """Refuse to continue a checkpoint with settings that would make it another training.

    Args:
        saved: `identity` of the checkpoint's run. What it does not hold is not compared, other
            than the model and its class count.
        current: `identity` of this run.
        classes: the dataset's.

    Raises:
        UserError: naming each field that differs with both values, and what can be done.
    """
    differing = _differing(saved, current)
    if not differing:
        return
    advice = []
    if ways := " ".join(_ways(saved, differing, current["dataset"], classes)):
        advice.append(f"continue it with {ways}")
    if not {"dataset", "train_size"}.isdisjoint(differing):
        advice.append("continue it on the images that it was trained on")
    if "model" not in differing:
        advice.append(
            f"model.pretrained={source} in place of resume starts another training from its weights"
        )
    advice.append("leave resume out to train from the start")
    raise _refusal(f"{source} is of another training", saved, current, differing, advice)


def refuse_another_model(
    saved: Mapping[str, Any], current: Mapping[str, Any], source: Path | str, classes: int
) -> None:
    """Refuse to evaluate a checkpoint as another model than it is of; as the function above."""
    differing = _differing(saved, {key: current[key] for key in _OF_MODEL})
    if not differing:
        return
    advice = []
    if ways := " ".join(_ways(saved, differing, current["dataset"], classes)):
        advice.append(f"evaluate it with {ways}")
    if _has_too_few(saved, classes):
        advice.append(
            f"evaluate it on images of its {printable(saved.get('num_classes', 'own'))} classes "
            "(where its run folder knows them: without dataset, dataset.path, model.num_classes)"
        )
    advice.append("name a checkpoint of this model")
    raise _refusal(f"{source} is of another model", saved, current, differing, advice)


def _differing(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    absent = object()
    return [
        key
        for key, value in current.items()
        if (key in saved or key in _REQUIRED) and saved.get(key, absent) != value
    ]


def _ways(
    saved: Mapping[str, Any], differing: list[str], dataset: str, classes: int
) -> Iterator[str]:
    """The overrides that take a checkpoint's settings, without those that would be refused."""
    for key in differing:
        if key not in saved:
            continue
        if key == "num_classes" and ("dataset" in differing or _has_too_few(saved, classes)):
            continue  # the dataset decides
        if key == "train_size":
            if dataset != "synthetic" or "dataset" in differing:
                continue
            yield f"dataset.train_size={printable(saved[key])}"
        else:
            yield _OVERRIDES.get(key, f"{key}={{}}").format(printable(saved[key]))


def _has_too_few(saved: Mapping[str, Any], classes: int) -> bool:
    """Whether a checkpoint's model tells fewer classes apart than the dataset has."""
    held = saved.get("num_classes")
    return not isinstance(held, int) or held < classes


def _refusal(
    what: str,
    saved: Mapping[str, Any],
    current: Mapping[str, Any],
    differing: list[str],
    advice: list[str],
) -> UserError:
    lines = [
        f"\n  {key}: {printable(saved.get(key, 'not recorded'))} in the checkpoint, "
        f"{current[key]} in this run{_reason(key, differing)}"
        for key in differing
    ]
    return UserError(f"{what}:{''.join(lines)}", "; or ".join(advice))


def _reason(key: str, differing: list[str]) -> str:
    if key == "stem" and "model" not in differing:
        return " (model.stem=auto goes by dataset.image_size)"
    return ""
