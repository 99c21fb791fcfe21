"""The archive's reader against small archives of the official layout, and against hostile ones."""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import struct
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from recipes.config import DatasetConfig, UserError
from recipes.data import build, cifar10, prepare
from recipes.data.cifar10 import OFFICIAL, Archive, load, prepare_cifar10
from recipes.pickles import read_pickle

NAMES = [b"airplane", b"automobile", b"bird", b"cat", b"deer"]
NAMES += [b"dog", b"frog", b"horse", b"ship", b"truck"]
PER_FILE = 4


def config(path: Path | None, **changes: Any) -> DatasetConfig:
    settings: dict[str, Any] = {"name": "cifar10", "path": path and str(path), "image_size": 32}
    return DatasetConfig(**(settings | changes))


def python2_pickle(data: NDArray[np.uint8], labels: list[int]) -> bytes:
    """What Python 2 and the NumPy of its time wrote: byte strings, and numpy.core's old name."""

    def text(value: bytes) -> bytes:
        return b"T" + struct.pack("<i", len(value)) + value

    array = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85" + text(b"b")
    array += b"\x87R(K\x01J" + struct.pack("<i", data.shape[0]) + b"J"
    array += struct.pack("<i", data.shape[1]) + b"\x86cnumpy\ndtype\n" + text(b"u1")
    array += b"K\x00K\x01\x87R(K\x03" + text(b"|") + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    array += b"\x89" + text(data.tobytes()) + b"tb"
    numbers = b"](" + b"".join(b"K" + bytes([label]) for label in labels) + b"e"
    return b"\x80\x02}(" + text(b"data") + array + text(b"labels") + numbers + b"u."


def batches() -> dict[str, bytes]:
    rng = np.random.default_rng(0)
    files = {"batches.meta": pickle.dumps({b"label_names": NAMES}, protocol=2)}
    for number, name in enumerate((*cifar10.TRAIN_FILES, *cifar10.EVAL_FILES)):
        data = rng.integers(0, 256, (PER_FILE, 3072), dtype=np.uint8)
        files[name] = python2_pickle(data, [(number + k) % 10 for k in range(PER_FILE)])
    return files


def write_archive(folder: Path, files: dict[str, bytes]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / OFFICIAL.file_name
    with tarfile.open(path, "w:gz") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(f"{cifar10.FOLDER}/{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


def write_folder(folder: Path, files: dict[str, bytes]) -> Path:
    extracted = folder / cifar10.FOLDER
    extracted.mkdir(parents=True)
    for name, content in files.items():
        (extracted / name).write_bytes(content)
    return extracted


def test_pixels_labels_and_names_are_read(tmp_path: Path) -> None:
    files = batches()
    write_archive(tmp_path, files)
    arrays = load(config(tmp_path), "train")
    assert arrays.images.shape == (20, 32, 32, 3)
    assert arrays.labels.tolist() == [(n + k) % 10 for n in range(5) for k in range(4)]
    assert arrays.classes[:2] == ["airplane", "automobile"]
    raw = pickle.loads(files["data_batch_2"], encoding="bytes")[b"data"][3]
    for row, column, channel in ((0, 0, 0), (5, 17, 1), (31, 30, 2)):
        pixel = raw[channel * 1024 + row * 32 + column]
        assert arrays.images[7, row, column, channel] == pixel
    assert load(config(tmp_path), "eval").labels.tolist() == [5, 6, 7, 8]


@pytest.mark.parametrize("place", ["archive", "archive's folder", "extracted", "its parent"])
def test_every_place_is_found(tmp_path: Path, place: str) -> None:
    archive = write_archive(tmp_path / "a", batches())
    extracted = write_folder(tmp_path / "b", batches())
    path = {
        "archive": archive,
        "archive's folder": archive.parent,
        "extracted": extracted,
        "its parent": extracted.parent,
    }[place]
    assert len(load(config(path), "train").labels) == 20


def test_the_dataset_augments_in_training_only(tmp_path: Path) -> None:
    write_archive(tmp_path, batches())
    train, held_out = (build(config(tmp_path), split, seed=1) for split in ("train", "eval"))
    arrays = load(config(tmp_path), "eval")
    assert (held_out[3, 2].image == arrays.images[2]).all()
    views = {train[epoch, 0].image.tobytes() for epoch in range(20)}
    assert len(views) > 15
    assert train[4, 0].image.tobytes() == train[4, 0].image.tobytes()
    assert held_out.num_classes == 10
    plain = build(config(tmp_path, augment=False), "train", seed=1)
    assert (plain[0, 0].image == plain[1, 0].image).all()


def test_mean_and_std_are_in_range_of_the_pixels(tmp_path: Path) -> None:
    write_archive(tmp_path, batches())
    dataset = build(config(tmp_path), "train", seed=1)
    assert dataset.mean.dtype == dataset.std.dtype == np.float32
    assert ((dataset.mean > 100) & (dataset.mean < 130)).all()
    assert ((dataset.std > 60) & (dataset.std < 70)).all()


class Attack:
    """Unpickled by the standard module, this makes a file."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.target),)


def test_a_pickle_that_runs_code_is_refused_and_runs_nothing(tmp_path: Path) -> None:
    target = tmp_path / "made by the pickle"
    content = pickle.dumps({b"data": Attack(target), b"labels": []}, protocol=2)
    write_archive(tmp_path, batches() | {"data_batch_3": content})
    with pytest.raises(UserError, match=r"data_batch_3: refused: it names posix\.mkdir"):
        load(config(tmp_path), "train")
    assert not target.exists()
    pickle.loads(content)  # the attack is a real one
    assert target.exists()


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("builtins", "eval"),
        ("os", "system"),
        ("numpy", "load"),
        ("numpy", "ndarray.tofile"),
        ("numpy.core.multiarray", "fromfile"),
        ("_codecs", "lookup"),
    ],
)
def test_no_other_name_is_known(module: str, name: str) -> None:
    content = f"c{module}\n{name}\n.".encode()
    with pytest.raises(pickle.UnpicklingError, match="it names"):
        read_pickle(content, "bytes")


@pytest.mark.parametrize("protocol", range(5))
def test_arrays_of_every_protocol_are_accepted(protocol: int) -> None:
    value = {b"data": np.arange(6, dtype=np.uint8).reshape(2, 3), b"labels": [1, 2]}
    content = pickle.dumps(value, protocol=protocol)
    read = read_pickle(content, "bytes")
    assert (read[b"data"].array() == value[b"data"]).all()
    assert read[b"labels"] == [1, 2]


WIDE = np.zeros((4, 3072), np.uint8)
EMPTY = python2_pickle(WIDE[:0], [])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({b"labels": [0]}, "data is not an array of uint8"),
        ({b"data": WIDE.astype(np.float32), b"labels": [0] * 4}, "data is not an array of uint8"),
        ({b"data": WIDE[:, :9], b"labels": [0] * 4}, r"shape \(4, 9\), not \(images, 3072\)"),
        (EMPTY, r"shape \(0, 3072\)"),
        ({b"data": WIDE, b"labels": [0] * 3}, "one label for each of its 4 images"),
        ({b"data": WIDE, b"labels": [0, 1, 2, 10]}, r"not a whole number in 0 \.\. 9"),
        ({b"data": WIDE, b"labels": [0, 1, 2, -1]}, r"not a whole number in 0 \.\. 9"),
        ({b"data": WIDE, b"labels": [0, 1, 2, 1.5]}, r"not a whole number in 0 \.\. 9"),
        ([1, 2], "holds a list, not a dictionary"),
    ],
)
def test_unexpected_contents_are_named(tmp_path: Path, content: object, message: str) -> None:
    pickled = content if isinstance(content, bytes) else pickle.dumps(content, protocol=2)
    write_archive(tmp_path, batches() | {"test_batch": pickled})
    with pytest.raises(UserError, match=f"test_batch: .*{message}"):
        load(config(tmp_path), "eval")


def test_wrong_class_names_are_named(tmp_path: Path) -> None:
    meta = pickle.dumps({b"label_names": NAMES[:9]}, protocol=2)
    write_archive(tmp_path, batches() | {"batches.meta": meta})
    with pytest.raises(UserError, match=r"batches\.meta: does not hold 10 label_names"):
        load(config(tmp_path), "eval")


def test_a_missing_member_is_named(tmp_path: Path) -> None:
    files = batches()
    del files["data_batch_4"]
    write_archive(tmp_path / "a", files)
    write_folder(tmp_path / "b", files)
    with pytest.raises(UserError, match=r"tar\.gz: has no cifar-10-batches-py/data_batch_4"):
        load(config(tmp_path / "a"), "train")
    with pytest.raises(UserError, match="data_batch_4: cannot be read"):
        load(config(tmp_path / "b"), "train")


@pytest.mark.parametrize("damage", ["cut", "flipped", "not an archive"])
def test_a_damaged_archive_is_named(tmp_path: Path, damage: str) -> None:
    path = write_archive(tmp_path, batches())
    content = bytearray(path.read_bytes())
    if damage == "cut":
        content = content[: len(content) // 2]
    elif damage == "flipped":
        content[len(content) // 2] ^= 0xFF
    else:
        content = bytearray(b"<html>no such page</html>")
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"cifar-10-python\.tar\.gz") as error:
        load(config(tmp_path), "train")
    assert OFFICIAL.url in error.value.remedy


def test_nothing_there_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="CIFAR-10 is not there") as error:
        build(config(tmp_path), "train", seed=0)
    assert f"download {OFFICIAL.url} to {tmp_path}/" in error.value.remedy
    with pytest.raises(UserError, match=r"no dataset\.path"):
        build(config(None), "train", seed=0)
    with pytest.raises(UserError, match="CIFAR-10 is not there"):
        prepare(config(tmp_path, download=False))


def served(tmp_path: Path) -> Archive:
    """An archive at an address that needs no network."""
    path = write_archive(tmp_path / "served", batches())
    return Archive(path.as_uri(), hashlib.md5(path.read_bytes()).hexdigest())


def test_prepare_downloads_once_and_verifies(tmp_path: Path) -> None:
    archive, folder = served(tmp_path), tmp_path / "data"
    log: list[str] = []
    prepare_cifar10(config(folder), log.append, archive)
    assert [file.name for file in folder.iterdir()] == [OFFICIAL.file_name]
    prepare_cifar10(config(folder), log.append, archive)
    assert len(log) == 1
    assert archive.url in log[0]
    assert len(load(config(folder), "train").labels) == 20


def test_a_wrong_checksum_is_refused(tmp_path: Path) -> None:
    archive, folder = served(tmp_path), tmp_path / "data"
    wrong = Archive(archive.url, "0" * 32)
    with pytest.raises(UserError, match=rf"MD5 is {archive.md5} .* expected {'0' * 32}") as error:
        prepare_cifar10(config(folder), print, wrong)
    assert str(folder / OFFICIAL.file_name) in error.value.message
    assert list(folder.iterdir()) == []
    present = tmp_path / "served"
    with pytest.raises(UserError, match=f"{present}.*expected {OFFICIAL.md5}"):
        prepare(config(present))


def test_a_failed_download_says_how_to_go_on(tmp_path: Path) -> None:
    gone = Archive(f"file://{tmp_path}/none/{OFFICIAL.file_name}", "0" * 32)
    with pytest.raises(UserError, match="the download failed") as error:
        prepare_cifar10(config(tmp_path / "data"), print, gone)
    assert f"place the file by hand as {tmp_path}/data/{OFFICIAL.file_name}" in str(error.value)
    assert list((tmp_path / "data").iterdir()) == []


def test_the_official_archive_is_the_official_one() -> None:
    assert OFFICIAL.url == "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz"
    assert OFFICIAL.md5 == "c58f30108f718f92721af3b95e74349a"
