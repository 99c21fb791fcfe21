"""What is known of a dataset before it is read: its classes and how many images it has.

The parent of a run asks, so nothing here reads images or imports what decodes them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from recipes.config import DatasetConfig

# As `recipes.data.digits` and `recipes.data.cifar10` find them.
_DIGITS_IMAGES, _CIFAR10_IMAGES = 1437, 50_000
_CLASSES = 10


@dataclass(frozen=True)
class Known:
    """A dataset as far as it is known.

    Attributes:
        name: the configuration's name for it.
        num_classes: how many labels there are.
        train_images: of the training set; None where only reading tells.
    """

    name: str
    num_classes: int
    train_images: int | None


def known(config: DatasetConfig) -> Known | None:
    """What can be said of the configured dataset; None where it has to be looked through.

    Raises:
        UserError: of a prepared dataset, what `read_manifest` finds.
    """
    if config.name == "digits":
        return Known(config.name, _CLASSES, _DIGITS_IMAGES)
    if config.name == "cifar10":
        # Its checksum is compared before anything reads it; extracted files may be anybody's.
        extracted = config.path is not None and _is_extracted(Path(config.path))
        return Known(config.name, _CLASSES, None if extracted else _CIFAR10_IMAGES)
    if config.name == "synthetic" and config.num_classes is not None:
        return Known(config.name, config.num_classes, config.train_size)
    if config.name == "imagenet" and config.path is not None:
        return _prepared(Path(config.path))
    return None


def _is_extracted(path: Path) -> bool:
    from recipes.data.cifar10 import locate

    found = locate(path)
    return found is not None and found.is_dir()


def _prepared(root: Path) -> Known | None:
    from recipes.data.description import read_manifest
    from recipes.data.shards import is_prepared

    if not is_prepared(root):
        return None  # folders and lists: the ranks look through them, at once
    manifest = read_manifest(root)
    return Known("imagenet", len(manifest.classes), manifest.splits["train"].images)
