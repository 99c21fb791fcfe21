"""What is known of a dataset before it is read, compared with what it then is."""

from __future__ import annotations

from pathlib import Path

from test_cifar10 import batches, write_archive, write_folder

from recipes import data
from recipes.config import DatasetConfig
from recipes.data.known import _CIFAR10_IMAGES, known


def agrees_with_the_data(config: DatasetConfig) -> None:
    found = known(config)
    assert found is not None
    dataset = data.build(config, "train", 0)
    assert (found.name, found.num_classes) == (dataset.name, dataset.num_classes)
    assert found.train_images in (None, len(dataset))


def test_what_is_known_of_made_up_data_is_so() -> None:
    agrees_with_the_data(DatasetConfig(name="digits", image_size=8))
    agrees_with_the_data(
        DatasetConfig(name="synthetic", image_size=8, train_size=31, eval_size=7, num_classes=5)
    )


def test_what_is_known_of_cifar10_depends_on_who_extracted_it(tmp_path: Path) -> None:
    config = DatasetConfig(name="cifar10", image_size=32, path=str(tmp_path))
    assert known(config) == data.Known("cifar10", 10, _CIFAR10_IMAGES)  # to be downloaded
    archive = write_archive(tmp_path, batches())
    assert known(config) == data.Known("cifar10", 10, _CIFAR10_IMAGES)  # its checksum is compared
    archive.unlink()
    write_folder(tmp_path, batches())
    agrees_with_the_data(config)
    assert known(config) == data.Known("cifar10", 10, None)
