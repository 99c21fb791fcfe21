"""Made-up data for measuring loaders: photographs as JPEG files, and an archive like CIFAR-10's."""

from __future__ import annotations

import io
import pickle
import tarfile
from pathlib import Path

import cv2
import numpy as np
import sklearn.datasets
from numpy.typing import NDArray

from recipes.data.cifar10 import FOLDER, IMAGE_SHAPE, META_FILE, NUM_CLASSES, TRAIN_FILES

HEIGHT, WIDTH, QUALITY = 375, 500, 92  # ImageNet's most common size, about 55 KB a file
NOISE = 3.0  # standard deviation of a camera's, on the scale of 0 .. 255
CLASSES = 10
CIFAR_BATCH = 10_000


def photograph(number: int) -> NDArray[np.uint8]:
    """A turned, scaled and toned view of one of scikit-learn's two photographs, with noise.

    Returns:
        uint8[HEIGHT, WIDTH, 3], RGB; always the same for a number.
    """
    rng = np.random.default_rng([number, HEIGHT, WIDTH])
    source = _SOURCES[number % len(_SOURCES)]
    height, width = source.shape[:2]
    scale = rng.uniform(1.2, 3.0) * max(HEIGHT / height, WIDTH / width)
    turn = cv2.getRotationMatrix2D((width / 2, height / 2), rng.uniform(-8, 8), scale)
    spare = (scale * width - WIDTH) / 2, (scale * height - HEIGHT) / 2
    turn[:, 2] += [
        target / 2 - middle / 2 + rng.uniform(-room, room)
        for target, middle, room in zip((WIDTH, HEIGHT), (width, height), spare, strict=True)
    ]
    view = cv2.warpAffine(
        source, turn, (WIDTH, HEIGHT), flags=cv2.INTER_CUBIC, borderMode=cv2.BORDER_REFLECT_101
    ).astype(np.float32)
    toned = view * rng.uniform(0.75, 1.2, 3).astype(np.float32) + np.float32(rng.uniform(-15, 15))
    toned += rng.normal(0, NOISE, view.shape)
    clipped: NDArray[np.uint8] = toned.clip(0, 255).astype(np.uint8)
    return clipped if rng.random() < 0.5 else np.ascontiguousarray(clipped[:, ::-1])


def make_photographs(root: Path, count: int) -> None:
    """Write photographs as ``train/classK/N.jpg`` below `root`, where they are not there yet."""
    for number in range(count):
        path = root / "train" / f"class{number % CLASSES}" / f"{number:05}.jpg"
        if path.is_file():
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        image = cv2.cvtColor(photograph(number), cv2.COLOR_RGB2BGR)
        encoded = cv2.imencode(".jpg", image, [cv2.IMWRITE_JPEG_QUALITY, QUALITY])[1]
        path.write_bytes(encoded.tobytes())


def make_cifar10(path: Path) -> None:
    """Write an archive of random images in the form of CIFAR-10's official one: 50,000 of them."""
    rng = np.random.default_rng(0)
    with tarfile.open(path, "w:gz", compresslevel=1) as archive:
        for name in TRAIN_FILES:
            pixels = rng.integers(0, 256, (CIFAR_BATCH, int(np.prod(IMAGE_SHAPE))), dtype=np.uint8)
            labels = rng.integers(0, NUM_CLASSES, CIFAR_BATCH).tolist()
            _add(archive, name, {b"data": pixels, b"labels": labels})
        _add(archive, META_FILE, {b"label_names": [b"class %d" % n for n in range(NUM_CLASSES)]})


def _add(archive: tarfile.TarFile, name: str, content: dict[bytes, object]) -> None:
    pickled = pickle.dumps(content, protocol=2)
    member = tarfile.TarInfo(f"{FOLDER}/{name}")
    member.size = len(pickled)
    archive.addfile(member, io.BytesIO(pickled))


_SOURCES = tuple(np.asarray(image) for image in sklearn.datasets.load_sample_images().images)
