"""What the parent finds out about model and data before it starts ranks."""

from __future__ import annotations

import pytest
from test_config import made

from recipes import foresight
from recipes.config import UserError


@pytest.mark.parametrize(
    ("overrides", "message", "remedy"),
    [
        ("model.name=resnet5O", "model.name=resnet5O is not one of PaddleClas's", "ResNet50"),
        ("model=vgg11 model.stem=cifar", "VGG11 has no CIFAR form", "model.stem=imagenet"),
        ("+model.arguments.class_num=3", "has a key of its own", "model.num_classes"),
        ("model.num_classes=4", "model.num_classes=4, but digits has 10", "model.num_classes=null"),
        ("dataset.num_classes=4", "dataset.num_classes=4, but digits", "dataset.num_classes=null"),
        ("batch_size=2000", "1437 images, fewer than the 2000", "global_batch_size=1437"),
        ("topology=1x64", "1437 images, fewer than the 2048", "global_batch_size=1437"),
        ("dataset=synthetic batch_size=20000", "12800 images, fewer than", "=12800"),
        ("task=benchmark batch_size=2000", "1437 images, fewer than the 2000", "=1437"),
    ],
)
def test_what_the_ranks_would_find_is_found_before(
    overrides: str, message: str, remedy: str
) -> None:
    with pytest.raises(UserError) as caught:
        foresight.check(made(*overrides.split()))
    assert message in caught.value.message
    assert remedy in caught.value.remedy


@pytest.mark.parametrize(
    "overrides",
    [
        "model.num_classes=11",
        "recipe=cifar10_resnet18 batch_size=50000",
        "batch_size=null global_batch_size=1437",
        "task=evaluate checkpoint=x batch_size=2000",
        "task=preflight model.name=Nonsense",
        "recipe=smoke batch_size=2000",
    ],
)
def test_what_can_run_is_let_through(overrides: str) -> None:
    foresight.check(made(*overrides.split()))
