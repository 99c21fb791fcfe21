"""The loaders' benchmark: its data, its sides, its table. The figures themselves are not judged."""

from __future__ import annotations

import time
from itertools import islice
from pathlib import Path

import cv2
import numpy as np
import psutil
import pytest
import simplejpeg

from benchmarks import loaders, pictures, prepared
from benchmarks.loaders import Measuring
from recipes.config import UserError


def test_photographs_are_like_those_of_imagenet(tmp_path: Path) -> None:
    pictures.make_photographs(tmp_path, 6)
    paths = sorted(tmp_path.rglob("*.jpg"))
    assert len(paths) == 6
    sizes = [path.stat().st_size for path in paths]
    assert 35_000 < np.mean(sizes) < 80_000
    assert len(set(sizes)) == 6
    for path in paths:
        assert simplejpeg.decode_jpeg_header(path.read_bytes())[:3] == (375, 500, "YCbCr")
    written = paths[0].stat().st_mtime_ns
    pictures.make_photographs(tmp_path, 6)
    assert paths[0].stat().st_mtime_ns == written
    assert (pictures.photograph(3) == pictures.photograph(3)).all()


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cifar10") / "small.tar.gz"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pictures, "CIFAR_BATCH", 300)
        pictures.make_cifar10(path)
    return path


@pytest.mark.parametrize("name", [name for name in loaders._SIDES if name != "DALI"])
def test_every_side_loads_every_image_once_an_epoch(
    tmp_path: Path, archive: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loaders, "PHOTO_WORKERS", 0)  # no processes that would outlive the test
    monkeypatch.setattr(loaders, "PHOTO_BATCH", 4)
    photographs = any(word in name for word in ("photographs", "DataLoader", "prepared"))
    if photographs:
        pictures.make_photographs(tmp_path, 6)
    if name in prepared.SIDES:
        prepared.make_prepared(tmp_path, name)
    epoch = 6 if photographs else 1500
    batches = loaders._SIDES[name](tmp_path if photographs else archive)
    count = 0
    for batch in islice(batches, 100):
        count += batch
        assert count % epoch == 0 or count % epoch >= batch  # an epoch ends with a batch
        if count == 2 * epoch:
            break
    assert count == 2 * epoch


def test_paddleclas_way_is_the_reference_augmentation_normalised(tmp_path: Path) -> None:
    grey = np.full((50, 60, 3), (20, 120, 220), np.uint8)
    assert cv2.imwrite(str(tmp_path / "a.png"), grey[:, :, ::-1])
    image = loaders._as_paddleclas(str(tmp_path / "a.png"))
    assert image.shape == (3, 224, 224)
    assert image.dtype == np.float32
    expected = (np.array([20, 120, 220]) - [123.675, 116.28, 103.53]) / [58.395, 57.12, 57.375]
    assert np.allclose(image.mean(axis=(1, 2)), expected, atol=1e-4)


def test_a_row_takes_pairs_and_notes_what_was_measured_besides() -> None:
    found = loaders.row("files", "peer", [8.0, 20.0, 9.0], [2.0, 4.0, 3.0], 4.0, {"more": [6.0]})
    assert (found.ratio, found.met) == (4.0, True)  # 4, 5 and 3
    assert found.note == "more: 6, 2x"
    assert not loaders.row("files", "peer", [3.0], [1.0], 3.1).met


def test_a_missing_dali_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="NVIDIA DALI is not there") as error:
        loaders.dali_row(Measuring(tmp_path, dali=tmp_path / "none"))
    assert "requirements-bench.lock" in error.value.remedy


def test_sides_are_measured_in_turn_in_processes_of_their_own(
    tmp_path: Path, archive: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loaders, "WARM_UP_SECONDS", 0.01)
    measuring = Measuring(tmp_path, repetitions=2, seconds=0.02)
    rates = loaders.measure(["cifar10"], archive, 1, measuring)
    assert len(rates["cifar10"]) == 2
    assert min(rates["cifar10"]) > 100
    with pytest.raises(RuntimeError, match="the side 'cifar10' ended"):
        loaders.measure(["cifar10"], tmp_path / "gone", 1, measuring)


def test_a_side_ends_with_its_worker_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loaders, "WARM_UP_SECONDS", 0.01)
    pictures.make_photographs(tmp_path, 6)
    start = time.monotonic()
    rates = loaders.measure(
        ["cv2 and DataLoader"], tmp_path, 2, Measuring(tmp_path, repetitions=1, seconds=0.02)
    )
    assert len(rates["cv2 and DataLoader"]) == 1
    assert time.monotonic() - start < 60
    named = [
        " ".join(process.info["cmdline"] or []) for process in psutil.process_iter(["cmdline"])
    ]
    assert not any(str(tmp_path) in command for command in named)
