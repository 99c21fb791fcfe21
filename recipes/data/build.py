"""From the configuration to a dataset."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from recipes.config import DATASETS, DatasetConfig, UserError

if TYPE_CHECKING:  # the parent process calls `prepare`, and needs no OpenCV for it
    from recipes.data.base import ImageDataset

SPLITS = ("train", "eval")


def prepare(config: DatasetConfig, log: Callable[[str], None] = print) -> None:
    """Have the data in place, downloading it if need be. For one process, before the ranks start.

    Raises:
        UserError: the data is missing, cannot be fetched, or has the wrong checksum.
    """
    if config.name == "cifar10":
        from recipes.data.cifar10 import prepare_cifar10

        prepare_cifar10(config, log)
    elif config.name == "imagenet":
        from recipes.data.description import read_manifest
        from recipes.data.imagenet import dataset_root
        from recipes.data.shards import is_prepared

        root = dataset_root(config)
        if is_prepared(root):
            read_manifest(root)


def build(config: DatasetConfig, split: str, seed: int) -> ImageDataset:
    """The dataset of a split, "train" or "eval", ready to be read.

    It reads files only; `prepare` is what downloads.

    Raises:
        UserError: the data is missing or is not what it should be, naming the file, or the dataset
            has another number of classes than dataset.num_classes says.
    """
    if split not in SPLITS:
        raise ValueError(f"split={split} is not one of {', '.join(SPLITS)}")
    dataset = _build(config, split, seed)
    check_classes(config, dataset.num_classes)
    return dataset


def check_classes(config: DatasetConfig, found: int) -> None:
    """Compare what is configured with how many classes the dataset has.

    Raises:
        UserError: dataset.num_classes says another number.
    """
    if config.num_classes not in (None, found):
        raise UserError(
            f"dataset.num_classes={config.num_classes}, but {config.name} has {found} classes",
            "set dataset.num_classes=null, and model.num_classes for a wider classifier",
        )


def _build(config: DatasetConfig, split: str, seed: int) -> ImageDataset:
    # Imported where needed: scikit-learn alone takes over a second.
    if config.name == "digits":
        from recipes.data.digits import digits

        return digits(config, split, seed)
    if config.name == "cifar10":
        from recipes.data.cifar10 import cifar10

        return cifar10(config, split, seed)
    if config.name == "imagenet":
        from recipes.data.imagenet import FolderDataset, dataset_root
        from recipes.data.prepared import ShardDataset
        from recipes.data.shards import is_prepared

        root = dataset_root(config)
        if is_prepared(root):
            return ShardDataset(config, root, split, seed)
        return FolderDataset(config, split, seed)
    if config.name == "synthetic":
        from recipes.data.synthetic import SyntheticDataset

        return SyntheticDataset(config, split, seed)
    raise UserError(f"dataset.name={config.name} is not one of {', '.join(DATASETS)}")
