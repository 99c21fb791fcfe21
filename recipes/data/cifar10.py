"""CIFAR-10 from its official archive: fetched once, verified, read without running its pickles."""

from __future__ import annotations

import errno
import gzip
import hashlib
import os
import socket
import tarfile
import urllib.request
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from recipes.config import DatasetConfig, UserError
from recipes.data.arrays import ArrayDataset
from recipes.pickles import PickledArray, read_pickle
from recipes.printable import printable

FOLDER = "cifar-10-batches-py"
TRAIN_FILES = tuple(f"data_batch_{number}" for number in range(1, 6))
EVAL_FILES = ("test_batch",)
META_FILE = "batches.meta"
IMAGE_SHAPE = (3, 32, 32)  # channel, row, column: how a row of 3,072 bytes is laid out
NUM_CLASSES = 10
# Over the 50,000 training images, on the scale of 0 .. 255.
MEAN = (125.31, 122.95, 113.87)
STD = (62.99, 62.09, 66.70)
PAD = 4  # He et al., "Deep Residual Learning for Image Recognition", CVPR 2016, section 4.2

_TIMEOUT_S = 60
_BLOCK = 1 << 20
_MOST_BYTES = 1 << 26  # of a file in the archive; the official ones have 31 MB
_MOST_UNPACKED = 1 << 29  # of the archive; the official one has 186 MB


class Archive(NamedTuple):
    """A file on the network, and what it must be."""

    url: str
    md5: str

    @property
    def file_name(self) -> str:
        return self.url.rsplit("/", 1)[-1]


OFFICIAL = Archive(
    "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz", "c58f30108f718f92721af3b95e74349a"
)


class Arrays(NamedTuple):
    """One split."""

    images: NDArray[np.uint8]  # [N, 32, 32, 3], RGB
    labels: NDArray[np.int64]  # [N]
    classes: list[str]


def locate(path: Path, file_name: str = OFFICIAL.file_name) -> Path | None:
    """The archive, or the folder of its extracted files; None if neither is there.

    `path` is either of the two, or a folder that holds one of them.
    """
    for extracted in (path, path / FOLDER):
        if (extracted / META_FILE).is_file():
            return extracted
    for archive in (path, path / file_name):
        if archive.is_file():
            return archive
    return None


def prepare_cifar10(
    config: DatasetConfig, log: Callable[[str], None], archive: Archive = OFFICIAL
) -> None:
    """Have the archive in place and verified. For one process, before the ranks start.

    Raises:
        UserError: it is missing and may not or cannot be downloaded, or it has the wrong checksum.
    """
    path = _configured_path(config)
    found = locate(path, archive.file_name)
    if found is None:
        if not config.download:
            raise _missing(path, archive)
        _download(path / archive.file_name, archive, log)
    elif found.is_file():
        _verify(found, found, archive)


def cifar10(config: DatasetConfig, split: str, seed: int) -> ArrayDataset:
    """50,000 training and 10,000 test images of 32x32 pixels. Errors as for `load`.

    Source: A. Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009.
    """
    arrays = load(config, split)
    return ArrayDataset(
        name="cifar10",
        images=arrays.images,
        labels=arrays.labels,
        classes=arrays.classes,
        mean=np.array(MEAN, np.float32),
        std=np.array(STD, np.float32),
        image_size=config.image_size,
        seed=seed,
        pad=PAD if split == "train" and config.augment else None,
        flips=True,
        cutout=config.cutout,
    )


def load(config: DatasetConfig, split: str) -> Arrays:
    """Read one split, from the archive or from the extracted folder.

    Raises:
        UserError: nothing is at dataset.path, or a file is missing, damaged or not CIFAR-10.
    """
    path = _configured_path(config)
    found = locate(path)
    if found is None:
        raise _missing(path, OFFICIAL)
    names = TRAIN_FILES if split == "train" else EVAL_FILES
    contents = _read_folder(found, names) if found.is_dir() else _read_archive(found, names)
    images, labels = zip(
        *(_batch(contents[name], found / name) for name in names),
        strict=True,
    )
    stacked = np.concatenate(images).reshape(-1, *IMAGE_SHAPE).transpose(0, 2, 3, 1)
    classes = _classes(contents[META_FILE], found / META_FILE)
    return Arrays(np.ascontiguousarray(stacked), np.concatenate(labels), classes)


def _configured_path(config: DatasetConfig) -> Path:
    if not config.path:
        raise UserError(
            "dataset=cifar10 has no dataset.path",
            "set it to the folder that holds the archive, or that it may be downloaded to",
        )
    return Path(config.path)


def _missing(path: Path, archive: Archive) -> UserError:
    return UserError(
        f"{path}: CIFAR-10 is not there (neither {archive.file_name} nor {FOLDER}/)",
        f"download {archive.url} to {path}/, set dataset.path to the folder that holds it, "
        "or let one process fetch it with dataset.download=true",
    )


def _download(target: Path, archive: Archive, log: Callable[[str], None]) -> None:
    part = target.with_name(f"{target.name}.{socket.gethostname()}-{os.getpid()}.part")
    log(f"downloading {archive.url} to {target}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with (
            urllib.request.urlopen(archive.url, timeout=_TIMEOUT_S) as response,
            part.open("wb") as file,
        ):
            while block := response.read(_BLOCK):
                file.write(block)
        _verify(part, target, archive)
        part.replace(target)  # atomic: nobody ever sees half a file under the final name
    except OSError as error:
        raise UserError(
            f"{archive.url}: the download failed: {error}",
            f"place the file by hand as {target}, or set dataset.path to where it is",
        ) from None
    finally:
        part.unlink(missing_ok=True)


def _verify(file: Path, name: Path, archive: Archive) -> None:
    digest = hashlib.md5(usedforsecurity=False)
    with file.open("rb") as content:
        while block := content.read(_BLOCK):
            digest.update(block)
    if digest.hexdigest() != archive.md5:
        raise UserError(
            f"{name}: MD5 is {digest.hexdigest()} ({file.stat().st_size} bytes), "
            f"expected {archive.md5}",
            f"delete the file if it is there and start again, or download {archive.url} by hand",
        )


@contextmanager
def _damage_named(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, EOFError, tarfile.TarError, zlib.error) as error:
        raise UserError(
            f"{path}: cannot be read: {error}", f"download {OFFICIAL.url} again"
        ) from None


def _read_archive(path: Path, names: tuple[str, ...]) -> dict[str, dict[bytes, Any]]:
    wanted = {f"{FOLDER}/{name}": name for name in (*names, META_FILE)}
    contents = {}
    with (
        _damage_named(path),
        gzip.open(path) as stream,
        tarfile.open(fileobj=stream, mode="r:") as archive,
    ):
        for member in archive:
            if member.offset_data + member.size > _MOST_UNPACKED:
                raise _unexpected(path, f"holds more than {_MOST_UNPACKED} bytes")
            # A link could lead to another one, and so on.
            file = archive.extractfile(member) if member.name in wanted and member.isreg() else None
            if file is not None:
                name = wanted[member.name]
                contents[name] = _unpickle(file, path / name)
        while stream.read(_BLOCK):  # gzip compares its checksum at the end of the file only
            if stream.tell() > _MOST_UNPACKED:
                raise _unexpected(path, f"holds more than {_MOST_UNPACKED} bytes")
    missing = sorted(set(wanted.values()) - set(contents))
    if missing:
        raise UserError(f"{path}: has no {FOLDER}/{missing[0]}", f"download {OFFICIAL.url} again")
    return contents


def _read_folder(path: Path, names: tuple[str, ...]) -> dict[str, dict[bytes, Any]]:
    contents = {}
    for name in (*names, META_FILE):
        with _damage_named(path / name), _opened(path / name) as file:
            contents[name] = _unpickle(file, path / name)
    return contents


def _opened(path: Path) -> IO[bytes]:
    """A regular file; a FIFO would be waited for."""
    if not path.is_file():
        raise FileNotFoundError(errno.ENOENT, "no such file")
    return path.open("rb")


def _unpickle(file: IO[bytes], path: Path) -> dict[bytes, Any]:
    try:
        data = file.read(_MOST_BYTES + 1)
        if len(data) > _MOST_BYTES:
            raise ValueError(f"it has more than {_MOST_BYTES} bytes")
        content = _with_arrays(read_pickle(data, "bytes"))
    except (OSError, zlib.error, tarfile.TarError):
        raise  # the archive around it is damaged
    except Exception as error:  # a damaged pickle may raise anything
        raise UserError(
            f"{path}: refused: {printable(error, 200)}", f"use the official archive, {OFFICIAL.url}"
        ) from None
    if not isinstance(content, dict):
        raise _unexpected(path, f"holds a {type(content).__name__}, not a dictionary")
    return content


def _with_arrays(content: Any) -> Any:
    if not isinstance(content, dict):
        return content
    return {
        name: value.array() if isinstance(value, PickledArray) else value
        for name, value in content.items()
    }


def _unexpected(path: Path, what: str) -> UserError:
    return UserError(f"{path}: {what}", f"use the official archive, {OFFICIAL.url}")


def _batch(content: dict[bytes, Any], path: Path) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    images, labels = content.get(b"data"), content.get(b"labels")
    width = int(np.prod(IMAGE_SHAPE))
    if not (isinstance(images, np.ndarray) and images.dtype == np.uint8):
        raise _unexpected(path, "data is not an array of uint8")
    if images.ndim != 2 or images.shape[1] != width or not len(images):
        raise _unexpected(path, f"data has shape {images.shape}, not (images, {width})")
    if not isinstance(labels, list) or len(labels) != len(images):
        raise _unexpected(path, f"does not hold one label for each of its {len(images)} images")
    if not all(type(label) is int and 0 <= label < NUM_CLASSES for label in labels):
        raise _unexpected(path, f"a label is not a whole number in 0 .. {NUM_CLASSES - 1}")
    return images, np.array(labels, np.int64)


def _classes(content: dict[bytes, Any], path: Path) -> list[str]:
    names = content.get(b"label_names")
    if (
        not isinstance(names, list)
        or len(names) != NUM_CLASSES
        or not all(isinstance(name, bytes) for name in names)
    ):
        raise _unexpected(path, f"does not hold {NUM_CLASSES} label_names")
    return [name.decode("utf-8", "replace") for name in names]
