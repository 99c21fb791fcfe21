"""DALI under our random numbers, against Pillow and cv2. Its CPU form runs without a GPU."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from photographs import claiming, encoded, kinds, photo_folder, picture

from recipes.config import DatasetConfig, Machine, UserError
from recipes.data import Plan, build, dali
from recipes.data.photographs import PhotoDataset

DEVICES = ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    pytest.importorskip("nvidia.dali", reason="NVIDIA DALI is not installed")
    if request.param == "gpu" and not Machine.this().has_gpu:
        pytest.skip("no GPU with a GPU build of Paddle")
    return str(request.param)


def folder(tmp_path: Path, contents: list[bytes], **changes: Any) -> PhotoDataset:
    root = photo_folder(tmp_path, contents, contents)
    config = DatasetConfig(name="imagenet", path=str(root), image_size=32, **changes)
    dataset = build(config, "train", 3)
    assert isinstance(dataset, PhotoDataset)
    return dataset


def test_what_dali_would_be_given_is_read_within_the_limits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By threads of the rank, before there is a pipeline."""
    keys = [[(0, index) for index in range(4)]]
    good = encoded(picture(20, 30))
    bomb = claiming(60_000, 60_000)["progressive"]
    dataset = folder(tmp_path / "bomb", [good, good, bomb, good])
    with pytest.raises(UserError, match=r"it says that it has 60000 x 60000 pixels"):
        dali.DaliPipeline(dataset, keys, 2, 1, "cpu")
    dataset = folder(tmp_path / "stalled", [good] * 4)
    answers, read = threading.Event(), dataset.content

    def content(index: int) -> Any:
        if index == 2:
            answers.wait()
        return read(index)

    monkeypatch.setattr(dataset, "content", content)
    with pytest.raises(UserError, match=r"\.jpg: not read within 0\.3 s"):
        dali.DaliPipeline(dataset, keys, 2, 1, "cpu", deadline=0.3)
    answers.set()


def batches(dataset: PhotoDataset, device: str, prefetch: int = 2) -> list[Any]:
    plan = Plan(len(dataset), 7, 3, 0, 1)
    keys = (micro.keys for micro in plan.micro_batches(2))
    return list(dali.DaliPipeline(dataset, keys, threads=2, prefetch=prefetch, device=device))


def check(dataset: PhotoDataset, read: list[Any]) -> None:
    order = [key for micro in Plan(len(dataset), 7, 3, 0, 1).micro_batches(2) for key in micro.keys]
    assert [i for batch in read for i in batch.indices.tolist()] == [index for _, index in order]
    images = np.concatenate([np.asarray(batch.images) for batch in read])
    assert images.shape == (len(order), 32, 32, 3)
    assert images.dtype == np.uint8
    labels = [label for batch in read for label in batch.labels.tolist()]
    sources = [source for batch in read for source in batch.sources.tolist()]
    for key, image, label, source in zip(order, images, labels, sources, strict=True):
        sample = dataset[key]
        assert (label, source) == (sample.label, sample.source)
        assert np.abs(image.astype(int) - sample.image).mean() <= 3


@pytest.mark.parametrize("prefetch", [1, 2, 9])
def test_batches_are_those_of_pillow(tmp_path: Path, device: str, prefetch: int) -> None:
    dataset = folder(tmp_path, list(kinds(picture(90, 70)).values()))
    check(dataset, batches(dataset, device, prefetch))


def test_what_cannot_be_read_is_named_or_replaced(tmp_path: Path, device: str) -> None:
    contents = [encoded(picture(60, 70, seed)) for seed in range(16)]
    contents[5] = contents[5][:900]
    contents[11] = b"no image"
    with pytest.raises(UserError, match=r"0(05|11)\.jpg"):
        batches(folder(tmp_path / "a", contents), device)
    dataset = folder(tmp_path / "b", contents, on_corrupt="skip")
    check(dataset, batches(dataset, device))


def test_what_dali_alone_cannot_read_ends_the_run(
    tmp_path: Path, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = folder(tmp_path, [encoded(picture(60, 70, seed)) for seed in range(8)])
    no_image = dali._Encoded(np.zeros(100, np.uint8), 60, 70)
    monkeypatch.setattr(dali.DaliPipeline, "_encode", lambda *_: no_image)
    with pytest.raises(UserError, match="DALI cannot decode a batch that Pillow can"):
        batches(dataset, device)


def test_what_only_dali_notices_is_replaced(
    tmp_path: Path, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    contents = [encoded(picture(60, 70, seed)) for seed in range(16)]
    contents[5] = b"no image"
    dataset = folder(tmp_path, contents, on_corrupt="skip")
    encode = dali.DaliPipeline._encode

    def trusting(self: dali.DaliPipeline, source: int) -> dali._Encoded:
        if source != 5:
            return encode(self, source)
        return dali._Encoded(np.frombuffer(contents[5], np.uint8), 60, 70)

    monkeypatch.setattr(dali.DaliPipeline, "_encode", trusting)
    check(dataset, batches(dataset, device))
