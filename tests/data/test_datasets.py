"""Digits, synthetic images, and what `build` refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import sklearn.datasets

from recipes.config import DatasetConfig, UserError
from recipes.data import build, prepare


def digits(**changes: Any) -> DatasetConfig:
    settings: dict[str, Any] = {"name": "digits", "image_size": 8, "num_classes": 10}
    return DatasetConfig(**(settings | changes))


def synthetic(**changes: Any) -> DatasetConfig:
    settings: dict[str, Any] = {"name": "synthetic", "image_size": 12, "num_classes": 7}
    return DatasetConfig(**(settings | {"train_size": 50, "eval_size": 20} | changes))


def test_every_fifth_digit_is_held_out() -> None:
    data = sklearn.datasets.load_digits()
    held_out = build(digits(), "eval", seed=0)
    train = build(digits(augment=False), "train", seed=0)
    assert (len(train), len(held_out)) == (1437, 360)
    for dataset, source in (
        (held_out, list(range(0, 1797, 5))),
        (train, [i for i in range(1797) if i % 5]),
    ):
        for index in range(len(dataset)):
            sample = dataset[0, index]
            expected = data.images[source[index]] * 15
            assert (sample.image == expected[:, :, None]).all()
            assert sample.label == data.target[source[index]]
            assert sample.index == sample.source == index
            assert dataset.path(index) is None
    assert held_out.classes == list("0123456789")


def test_digits_mean_and_std_normalise_the_training_images() -> None:
    train = build(digits(augment=False), "train", seed=0)
    images = np.stack([train[0, index].image for index in range(len(train))])
    normalised = (images - train.mean) / train.std
    assert abs(normalised.mean()) < 1e-5
    assert abs(normalised.std() - 1) < 1e-5


def test_digits_shift_by_one_pixel_at_most_and_are_not_mirrored() -> None:
    plain = build(digits(augment=False), "train", seed=3)
    train = build(digits(), "train", seed=3)
    for index in range(5):
        padded = np.pad(plain[0, index].image, ((1, 1), (1, 1), (0, 0)))
        shifts = {
            padded[y : y + 8, x : x + 8].tobytes(): (y, x) for y in range(3) for x in range(3)
        }
        seen = {shifts[train[epoch, index].image.tobytes()] for epoch in range(100)}
        assert len(seen) == 9


def test_digits_can_be_larger() -> None:
    small, large = build(digits(), "eval", 0), build(digits(image_size=32), "eval", 0)
    image = large[0, 7].image
    assert image.shape == (32, 32, 3)
    assert abs(float(image.mean()) - float(small[0, 7].image.mean())) < 3


def test_augmentation_depends_on_seed_and_epoch() -> None:
    train, other = build(digits(), "train", seed=0), build(digits(), "train", seed=1)
    views = [
        [dataset[epoch, index].image.tobytes() for index in range(40)]
        for dataset, epoch in ((train, 0), (train, 1), (other, 0), (train, 0))
    ]
    assert views[0] == views[3]
    assert views[0] != views[1]
    assert views[0] != views[2]


def test_synthetic_images_are_noise_by_index() -> None:
    train, held_out = build(synthetic(), "train", 5), build(synthetic(), "eval", 5)
    assert (len(train), len(held_out), train.num_classes) == (50, 20, 7)
    assert [train[0, index].label for index in range(9)] == [0, 1, 2, 3, 4, 5, 6, 0, 1]
    assert (train[0, 3].image == train[9, 3].image).all()
    images = [dataset[0, i].image for dataset in (train, held_out) for i in range(len(dataset))]
    assert len({image.tobytes() for image in images}) == 70
    stacked = np.stack(images)
    assert stacked.shape[1:] == (12, 12, 3)
    assert (np.abs(stacked.mean(axis=(0, 1, 2)) - train.mean) < 3).all()
    assert (np.abs(stacked.std(axis=(0, 1, 2)) - train.std) < 2).all()


def test_a_wrong_class_count_is_refused() -> None:
    with pytest.raises(UserError, match=r"num_classes=11, but digits has 10 classes"):
        build(digits(num_classes=11), "train", 0)


def test_a_synthetic_set_without_sizes_is_refused() -> None:
    with pytest.raises(UserError, match=r"dataset=synthetic has no size"):
        build(synthetic(eval_size=None), "eval", 0)


def test_an_unknown_dataset_is_refused() -> None:
    with pytest.raises(UserError, match=r"dataset.name=mnist is not one of digits, cifar10"):
        build(digits(name="mnist"), "train", 0)
    with pytest.raises(ValueError, match="split=test is not one of"):
        build(digits(), "test", 0)


def test_prepare_has_nothing_to_do_for_made_data(
    capsys: pytest.CaptureFixture[str],
) -> None:
    prepare(digits())
    prepare(synthetic())
    assert capsys.readouterr().out == ""
