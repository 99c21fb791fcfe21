"""What is said where a checkpoint is of another training or model, and whether that helps."""

from __future__ import annotations

from typing import Any

import pytest

from recipes.config import Config, DatasetConfig, ModelConfig, UserError
from recipes.same_training import identity, refuse_another_model, refuse_another_training

SAVED = {
    "model": "ResNet18",
    "stem": "cifar",
    "num_classes": 10,
    "dataset": "digits",
    "train_size": 1437,
    "seed": 1,
    "global_batch_size": 64,
    "dtype": "float32",
}


def refusal(classes: int = 10, saved: dict[str, Any] = SAVED, **current: Any) -> UserError:
    with pytest.raises(UserError) as caught:
        refuse_another_training(saved, {**SAVED, **current}, "outputs/a", classes)
    return caught.value


def test_the_same_training_is_not_refused() -> None:
    refuse_another_training(SAVED, dict(SAVED), "outputs/a", 10)
    refuse_another_training(SAVED, {**SAVED, "new_field": 3}, "outputs/a", 10)
    refuse_another_model(SAVED, {**SAVED, "seed": 3, "dataset": "other"}, "outputs/a", 10)


def test_each_difference_is_named_with_the_override_that_ends_it() -> None:
    error = refusal(model="ResNet50", num_classes=100, seed=2, global_batch_size=128)
    assert "outputs/a is of another training" in error.message
    assert "model: ResNet18 in the checkpoint, ResNet50 in this run" in error.message
    assert "num_classes: 10 in the checkpoint, 100 in this run" in error.message
    ways = "model.name=ResNet18 model.num_classes=10 seed=1 global_batch_size=64 batch_size=null"
    assert ways in error.remedy
    assert "dataset" not in str(error)
    assert "model.pretrained" not in error.remedy  # another backbone's weights fit nothing
    with pytest.raises(UserError, match="model: not recorded in the checkpoint"):
        refuse_another_training({}, SAVED, "outputs/a", 10)


def test_classes_that_the_dataset_has_more_of_are_no_remedy() -> None:
    error = refusal(classes=10, saved={**SAVED, "num_classes": 4}, dataset="cifar10")
    assert "model.num_classes" not in error.remedy
    assert "dataset=digits" in error.remedy
    assert "model.pretrained=outputs/a in place of resume" in error.remedy
    with pytest.raises(UserError) as caught:
        refuse_another_model({**SAVED, "num_classes": 4}, SAVED, "outputs/a", 10)
    assert "model.num_classes=4" not in caught.value.remedy
    assert "images of its 4 classes" in caught.value.remedy
    with pytest.raises(UserError, match=r"model\.num_classes=12"):
        refuse_another_model({**SAVED, "num_classes": 12}, SAVED, "outputs/a", 10)


def test_other_images_are_no_setting() -> None:
    error = refusal(train_size=1000)
    assert "train_size=" not in error.remedy
    assert "on the images that it was trained on" in error.remedy
    synthetic = {**SAVED, "dataset": "synthetic"}
    error = refusal(saved=synthetic, dataset="synthetic", train_size=1000)
    assert "dataset.train_size=1437" in error.remedy


def made(size: int) -> Config:
    return Config(model=ModelConfig("ResNet18"), dataset=DatasetConfig(image_size=size))


def test_a_stem_that_the_image_size_has_chosen_is_called_so() -> None:
    small, large = (
        identity(
            Config(model=ModelConfig("ResNet18"), dataset=DatasetConfig(image_size=size)), 9, 9
        )
        for size in (32, 224)
    )
    with pytest.raises(UserError) as caught:
        refuse_another_model(small, large, "outputs/a", 9)
    assert "stem: cifar in the checkpoint, imagenet in this run" in caught.value.message
    assert "dataset.image_size" in caught.value.message
    assert "evaluate it with model.stem=cifar" in caught.value.remedy
