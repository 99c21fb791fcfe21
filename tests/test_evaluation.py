"""Scores against numpy, over any number of ranks, and with images that cannot be read."""

from __future__ import annotations

import dataclasses
from dataclasses import asdict
from typing import Any

import numpy as np
import paddle
import pytest
from ranks import run_ranks

from recipes.config import Config, DatasetConfig, UserError
from recipes.data.base import ImageDataset, Sample
from recipes.data.synthetic import SyntheticDataset
from recipes.evaluation import Scores, evaluate
from recipes.pulse import NoPulse
from recipes.topology import Place

ALONE = Place(0, 1, 0, 0)
SIDE = 4
SIZES = (7, 360, 10_000)


class WithHoles(SyntheticDataset):
    """Held-out noise of which some images cannot be read."""

    def __init__(self, config: DatasetConfig, missing: frozenset[int]) -> None:
        super().__init__(config, "eval", seed=1)
        self.missing = missing

    def __getitem__(self, key: tuple[int, int]) -> Sample:
        sample = super().__getitem__(key)
        if key[1] not in self.missing:
            return sample
        return dataclasses.replace(sample, label=-1)

    def path(self, index: int) -> str:
        return f"val/{index}.jpeg"


def a_config(size: int, classes: int = 10, **changes: Any) -> Config:
    dataset = DatasetConfig(
        name="synthetic", image_size=SIDE, num_classes=classes, train_size=1, eval_size=size
    )
    return Config(dataset=dataset, device="cpu", **changes)


def a_model(classes: int = 10, dtype: str = "float32") -> paddle.nn.Layer:
    """Tells training from evaluation by its dropout and batch norm."""
    paddle.seed(5)
    features = 3 * SIDE * SIDE
    model = paddle.nn.Sequential(
        paddle.nn.Flatten(),
        paddle.nn.BatchNorm1D(features),
        paddle.nn.Dropout(0.5),
        paddle.nn.Linear(features, classes),
    )
    rng = np.random.default_rng(9)
    for tensor in model.parameters():
        if not tensor.stop_gradient:  # the running statistics are among them
            tensor.set_value(rng.normal(size=tensor.shape).astype("float32"))
    return model.to(dtype=dtype)


def expected_scores(model: paddle.nn.Layer, dataset: ImageDataset) -> Scores:
    """In numpy, one sample after the other."""
    _, norm, _, linear = model
    weight, bias = (t.numpy().astype("float64") for t in (linear.weight, linear.bias))
    scale, shift = (t.numpy().astype("float64") for t in (norm.weight, norm.bias))
    mean, std = (a.astype("float64") for a in (dataset.mean, dataset.std))
    losses, ranks = [], []
    for index in range(len(dataset)):
        sample = dataset[0, index]
        if sample.label < 0:
            continue
        x = ((sample.image - mean) / std).transpose(2, 0, 1).ravel()
        logits = (x / np.sqrt(1 + norm._epsilon) * scale + shift) @ weight + bias
        top = logits.max()
        losses.append(top + np.log(np.exp(logits - top).sum()) - logits[sample.label])
        ranks.append(int((logits > logits[sample.label]).sum()))
    hits = np.asarray(ranks)
    top5 = float((hits < 5).mean()) if len(bias) > 5 else None
    return Scores(float((hits < 1).mean()), top5, float(np.mean(losses)), len(hits))


@pytest.fixture(autouse=True)
def cpu() -> None:
    paddle.set_device("cpu")


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("size", SIZES[:2])
def test_scores_are_exact(size: int, dtype: str) -> None:
    config, model = a_config(size, dtype=dtype), a_model(dtype=dtype)
    dataset = SyntheticDataset(config.dataset, "eval", seed=1)
    expected = expected_scores(model, dataset)
    assert expected.top5 is not None
    assert expected.top1 < expected.top5 < 1  # the comparison can tell them apart
    scores = evaluate(model, dataset, config, ALONE, NoPulse())
    assert (scores.top1, scores.top5, scores.samples) == (expected.top1, expected.top5, size)
    assert scores.loss == pytest.approx(expected.loss, rel=1e-12 if dtype == "float64" else 1e-5)


@pytest.mark.parametrize("classes", [1, 2, 4, 5, 6])
def test_there_is_no_top5_of_few_classes(classes: int) -> None:
    config, model = a_config(60, classes), a_model(classes)
    dataset = SyntheticDataset(config.dataset, "eval", seed=1)
    scores, expected = (
        evaluate(model, dataset, config, ALONE, NoPulse()),
        expected_scores(model, dataset),
    )
    assert (scores.top1, scores.top5) == (expected.top1, expected.top5)
    assert ("top5" in scores.as_dict()) == (classes > 5)


@pytest.mark.parametrize("batch", [1, 7, 64, 360, 1000])
def test_the_batch_size_does_not_change_what_counts(batch: int) -> None:
    config, model = a_config(360, eval_batch_size=batch), a_model()
    dataset = SyntheticDataset(config.dataset, "eval", seed=1)
    scores, expected = (
        evaluate(model, dataset, config, ALONE, NoPulse()),
        expected_scores(model, dataset),
    )
    assert (scores.top1, scores.top5, scores.samples) == (expected.top1, expected.top5, 360)
    assert scores.loss == pytest.approx(expected.loss, rel=1e-5)


@pytest.mark.parametrize("training", [True, False])
def test_the_model_is_left_as_it_was(training: bool) -> None:
    config, model = a_config(20), a_model()
    model.train() if training else model.eval()
    before = {name: t.numpy().copy() for name, t in model.state_dict().items()}
    evaluate(model, SyntheticDataset(config.dataset, "eval", seed=1), config, ALONE, NoPulse())
    assert [layer.training for layer in model.sublayers(include_self=True)] == [training] * 5
    for name, tensor in model.state_dict().items():
        np.testing.assert_array_equal(tensor.numpy(), before[name])
    assert all(p.grad is None for p in model.parameters())


def test_unreadable_images_do_not_count(caplog: pytest.LogCaptureFixture) -> None:
    config, model = a_config(30, eval_batch_size=10), a_model()
    missing = frozenset({3, *range(10, 20)})  # the whole second batch too
    dataset = WithHoles(config.dataset, missing)
    with caplog.at_level("WARNING", "recipes.evaluation"):
        scores = evaluate(model, dataset, config, ALONE, NoPulse())
    expected = expected_scores(model, dataset)
    assert asdict(scores) == pytest.approx(asdict(expected), rel=1e-5)
    assert scores.samples == 19
    messages = [record.getMessage() for record in caplog.records]
    assert messages == [f"skipped val/{i}.jpeg: cannot be read" for i in sorted(missing)]


def test_no_readable_image_is_an_error() -> None:
    config = a_config(8)
    with pytest.raises(UserError, match="none of the 8 held-out images could be read") as caught:
        evaluate(
            a_model(), WithHoles(config.dataset, frozenset(range(8))), config, ALONE, NoPulse()
        )
    assert "warnings" in caught.value.remedy


def test_too_many_unreadable_images_end_the_run() -> None:
    config = a_config(8)
    config.dataset.max_skipped = 2
    with pytest.raises(UserError, match=r"3 images could not be read.*max_skipped=2.*val/5"):
        evaluate(
            a_model(), WithHoles(config.dataset, frozenset({1, 4, 5})), config, ALONE, NoPulse()
        )


def test_a_model_that_gives_no_numbers_scores_without_an_error() -> None:
    config, model = a_config(20), a_model()
    model[3].bias.set_value(np.full(10, np.nan, "float32"))
    scores = evaluate(
        model, SyntheticDataset(config.dataset, "eval", seed=1), config, ALONE, NoPulse()
    )
    assert np.isnan(scores.loss)
    assert scores.samples == 20


def exact(scores: Scores) -> list[Any]:
    assert scores.top5 is not None
    return [scores.top1.hex(), scores.top5.hex(), scores.loss.hex(), scores.samples]


def on_rank(place: Place) -> dict[str, Any]:
    """One rank's scores on each size; 7 samples are fewer batches than there are ranks."""
    found: dict[str, Any] = {}
    for size in SIZES:
        config, model = a_config(size), a_model()
        dataset = SyntheticDataset(config.dataset, "eval", seed=1)
        found[str(size)] = exact(evaluate(model, dataset, config, place, NoPulse()))
    config = a_config(30, eval_batch_size=10)
    dataset = WithHoles(config.dataset, frozenset({3, *range(10, 20)}))
    found["holes"] = exact(evaluate(a_model(), dataset, config, place, NoPulse()))
    try:
        evaluate(
            a_model(), WithHoles(config.dataset, frozenset(range(30))), config, place, NoPulse()
        )
    except UserError as error:
        found["none"] = error.message
    return found


@pytest.mark.launch
def test_the_scores_are_the_same_bits_on_any_number_of_ranks(
    three_ranks: dict[str, list[Any]],
) -> None:
    alone = on_rank(ALONE)
    assert alone["none"].startswith("none of the 30")
    assert "nan" not in str(alone)
    name = "test_evaluation:on_rank"
    for found in [*three_ranks[name], *run_ranks(4, name)[name]]:
        assert found == alone
