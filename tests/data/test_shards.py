"""Reading a prepared dataset, and naming what is wrong with one."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import threading
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest

from recipes.config import DatasetConfig, UserError
from recipes.data import build, prepare
from recipes.data.base import ImageDataset
from recipes.data.conversion import Conversion
from recipes.data.decoding_processes import DecodingProcesses
from recipes.data.decoding_threads import DecodingThreads
from recipes.data.description import FileRecord, canonical, read_manifest
from recipes.data.known import Known, known
from recipes.data.photographs import PhotoDataset
from recipes.data.preparation import Preparation, prepare_shards
from recipes.data.prepared import ShardDataset
from recipes.data.shards import ROW, file_digest, is_prepared
from recipes.progress import NoDisplay

SHARD = 4000  # bytes


@pytest.fixture(scope="module", params=["jpeg", "raw"])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prepared dataset of two classes; not to be changed."""
    root = tmp_path_factory.mktemp(request.param)
    rng = np.random.default_rng(0)
    for split, each in (("train", 7), ("val", 3)):
        for name in ("frog", "newt"):
            (root / "images" / split / name).mkdir(parents=True)
            for number in range(each):
                pixels = rng.integers(0, 256, (20, 25, 3), np.uint8)
                path = root / "images" / split / name / f"{number}.jpg"
                PIL.Image.fromarray(pixels).save(path)
    conversion = Conversion(16, request.param, 90, "source")
    given = Preparation(root / "images", root / "out", conversion, SHARD, 2, None)
    prepare_shards(given, NoDisplay(), lambda _: None)
    return root / "out"


@pytest.fixture
def copy(made: Path, tmp_path: Path) -> Path:
    """One that may be changed."""
    for path in made.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


def config(path: Path, **changes: Any) -> DatasetConfig:
    settings: dict[str, Any] = {"name": "imagenet", "path": str(path), "image_size": 8}
    return DatasetConfig(**(settings | changes))


def opened(path: Path, split: str = "train", **changes: Any) -> PhotoDataset:
    dataset = build(config(path, **changes), split, 3)
    assert isinstance(dataset, ShardDataset)
    return dataset


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def rewrite_index(root: Path, change: Callable[[np.ndarray], Any]) -> None:
    """Change the index of the training images, and let ``dataset.json`` vouch for it."""
    path = root / "train.index.npy"
    rows = np.load(path)
    changed = change(rows)
    manifest = read_manifest(root)
    np.save(path, rows if changed is None else changed)
    record = FileRecord(path.name, path.stat().st_size, file_digest(path, lambda _: None))
    train = replace(manifest.splits["train"], index=record)
    altered = replace(manifest, splits={**manifest.splits, "train": train})
    (root / "dataset.json").write_bytes(altered.encode())


def write_signed(root: Path, content: dict[str, Any]) -> None:
    """Write a ``dataset.json`` that its writer could not have written, with the right checksum."""
    content["checksum"] = ""
    content["checksum"] = hashlib.sha256(canonical(content)).hexdigest()
    (root / "dataset.json").write_bytes(canonical(content))


def test_a_folder_is_known_by_its_description(made: Path, tmp_path: Path) -> None:
    assert is_prepared(made)
    assert not is_prepared(made.parent / "images")
    assert not is_prepared(tmp_path)
    # Somebody's own file of that name beside class folders is nothing to us.
    (tmp_path / "train").mkdir()
    (tmp_path / "dataset.json").write_text("{}")
    assert not is_prepared(tmp_path)


def test_images_are_views_of_the_mapped_shards(made: Path) -> None:
    dataset = opened(made)
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    for index in range(len(dataset)):
        content = dataset.content(index)
        if isinstance(content, np.ndarray):
            assert content.shape == (16, 20, 3)
            assert not content.flags.owndata
            assert not content.flags.writeable
        else:
            assert isinstance(content, memoryview)
            assert content.readonly
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208


def samples(dataset: ImageDataset) -> list[bytes]:
    return [dataset[1, index].image.tobytes() for index in range(len(dataset))]


@pytest.mark.parametrize("split", ["train", "eval"])
def test_decoding_threads_give_the_samples_of_the_dataset(made: Path, split: str) -> None:
    dataset = opened(made, split)
    keys = [[(2, index) for index in range(len(dataset))]]
    batch = next(DecodingThreads(dataset, keys, threads=2, prefetch=1))
    expected = [dataset[2, index] for index in range(len(dataset))]
    assert batch.labels.tolist() == [sample.label for sample in expected]
    difference = np.abs(batch.images.astype(int) - [sample.image for sample in expected])
    exact = split == "eval" or read_manifest(made).settings["format"] == "raw"
    assert difference.max() == 0 if exact else difference.mean() < 12


def test_threads_may_read_at_once(made: Path) -> None:
    dataset, found = opened(made), {}

    def read(number: int) -> None:
        found[number] = [samples(dataset) for _ in range(3)]

    threads = [threading.Thread(target=read, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = samples(opened(made))
    assert all(found[number] == [expected] * 3 for number in range(8))


def test_forked_processes_may_read(made: Path) -> None:
    dataset = opened(made)
    expected = samples(dataset)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writing, b"same" if samples(dataset) == expected else b"other")
        os._exit(0)
    os.close(writing)
    assert os.waitpid(child, 0)[1] == 0
    with os.fdopen(reading, "rb") as stream:
        assert stream.read() == b"same"
    assert samples(dataset) == expected


def test_the_index_needs_no_pickle(made: Path) -> None:
    content = (made / "train.index.npy").read_bytes()
    with pytest.raises(pickle.UnpicklingError):
        pickle.loads(content)
    assert np.load(made / "train.index.npy", allow_pickle=False).dtype == ROW


def test_a_flipped_byte_is_found_when_its_image_is_read(copy: Path) -> None:
    rows = np.load(copy / "train.index.npy")
    damaged = 9
    shard = copy / f"train-{rows['shard'][damaged]:05}.shard"
    flip(shard, int(rows["offset"][damaged] + rows["length"][damaged] // 2))
    dataset = opened(copy)
    for index in set(range(len(dataset))) - {damaged}:
        dataset[0, index]
    with pytest.raises(UserError) as error:
        dataset[0, damaged]
    place = f"{shard}, image 9 (train/newt/2.jpg)"
    assert error.value.message == f"{place}: altered after it was written (CRC-32)"
    assert "prepare.verify=true" in error.value.remedy
    assert "dataset.on_corrupt=skip" in error.value.remedy
    skipping = opened(copy, on_corrupt="skip")
    assert (skipping[0, damaged].source, skipping.path(damaged)) == (10, place)


@pytest.mark.parametrize("made", ["jpeg"], indirect=True)  # raw: any bytes are pixels
def test_something_else_than_an_image_is_named(copy: Path) -> None:
    rows = np.load(copy / "train.index.npy")
    shard, start, length = (int(rows[key][0]) for key in ("shard", "offset", "length"))
    path = copy / f"train-{shard:05}.shard"
    content = bytearray(path.read_bytes())
    content[start : start + length] = b"#" * length
    path.write_bytes(content)

    def vouch(rows: np.ndarray) -> None:
        rows["crc32"][0] = zlib.crc32(b"#" * length)

    rewrite_index(copy, vouch)
    with pytest.raises(UserError, match=r"00000\.shard, image 0 \(train/frog/0\.jpg\)"):
        opened(copy)[0, 0]


@pytest.mark.parametrize("name", ["train-00001.shard", "eval-00000.shard", "train.names"])
def test_a_missing_file_is_named(copy: Path, name: str) -> None:
    (copy / name).unlink()
    for attempt in (lambda: prepare(config(copy)), lambda: opened(copy)):
        with pytest.raises(UserError, match=rf"{name}: No such file.*dataset\.json names") as error:
            attempt()
        assert "copy the prepared dataset again" in error.value.remedy


@pytest.mark.parametrize("name", ["train-00001.shard", "eval.index.npy", "train.names"])
@pytest.mark.parametrize("change", [-1, 1])
def test_a_file_of_another_size_is_named(copy: Path, name: str, change: int) -> None:
    content = (copy / name).read_bytes()
    (copy / name).write_bytes(content[:-1] if change < 0 else content + b"\0")
    size = len(content)
    message = rf"{name}: it has {size + change} bytes, dataset\.json says {size}"
    with pytest.raises(UserError, match=message):
        prepare(config(copy))


def test_every_byte_of_the_description_counts(copy: Path) -> None:
    path = copy / "dataset.json"
    whole = path.read_bytes()
    for place in range(0, len(whole), 7):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 2]) + whole[place + 1 :])
        with pytest.raises(UserError, match=r"dataset\.json: ") as error:
            prepare(config(copy))
        assert error.value.remedy
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match=r"dataset\.json: cannot be read"):
        prepare(config(copy))


def test_another_version_is_named(copy: Path) -> None:
    content = json.loads((copy / "dataset.json").read_bytes())
    write_signed(copy, {**content, "version": 2})
    with pytest.raises(UserError, match="format version 2, this version of the recipes reads 1"):
        opened(copy)


def test_a_description_with_other_fields_is_refused(copy: Path) -> None:
    content = json.loads((copy / "dataset.json").read_bytes())
    del content["splits"]["train"]["index"]
    write_signed(copy, content)
    with pytest.raises(UserError, match=r"dataset\.json: not a description of this format"):
        opened(copy)


@pytest.mark.parametrize("name", ["/etc/passwd", "../other.shard", "train-00001.shard"])
def test_a_file_of_another_name_is_not_looked_at(copy: Path, name: str) -> None:
    content = json.loads((copy / "dataset.json").read_bytes())
    content["splits"]["train"]["shards"][0]["name"] = name
    write_signed(copy, content)
    message = r"dataset\.json: .*shards: name: .*, where train-00000\.shard has to be"
    with pytest.raises(UserError, match=message):
        opened(copy)


def test_files_may_be_links(copy: Path, tmp_path: Path) -> None:
    """As some stores of data keep them."""
    linked = tmp_path / "linked"
    linked.mkdir()
    for path in copy.iterdir():
        (linked / path.name).symlink_to(path)
    assert samples(opened(linked)) == samples(opened(copy))


@pytest.mark.parametrize("what", ["link to a FIFO", "folder"])
def test_what_is_no_file_is_named(copy: Path, what: str) -> None:
    path = copy / "train-00000.shard"
    path.unlink()
    if what == "folder":
        path.mkdir()
    else:
        os.mkfifo(copy / "fifo")
        path.symlink_to("fifo")
    with pytest.raises(UserError, match=r"00000\.shard: no file"):
        opened(copy)


@pytest.mark.parametrize("name", ["train-00000.shard", "train.index.npy"])
@pytest.mark.parametrize("workers", [1, 2])
def test_a_file_that_is_cut_short_while_it_is_mapped_is_named(
    copy: Path, name: str, workers: int
) -> None:
    """Reading behind the end of a mapped file would end the process by SIGBUS."""
    dataset = opened(copy)
    os.truncate(
        copy / name, 0
    )  # before a decoder reads: between its look and its reading is a race
    keys = [[(0, index) for index in range(4)]] * 9
    kind = DecodingThreads if workers == 1 else DecodingProcesses
    stream = kind(dataset, keys, workers, 1)
    with pytest.raises(UserError, match=rf"{name}.* cut short"):
        list(stream)
    stream.close()


def test_a_flipped_byte_of_the_index_is_found_at_once(copy: Path) -> None:
    flip(copy / "train.index.npy", -7)
    with pytest.raises(UserError, match=r"train\.index\.npy: altered"):
        opened(copy)


def change(key: str, image: int, value: int) -> Callable[[np.ndarray], None]:
    def apply(rows: np.ndarray) -> None:
        rows[key][image] = value

    return apply


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (change("shard", 3, 90), r"image 3 is in a shard that dataset\.json does not name"),
        (change("label", 4, 2), "image 4 has a label beyond the 2 classes"),
        (change("offset", 5, 10**6), "image 5 ends behind its shard's end"),
        (change("offset", 5, 2**64 - 1), "image 5 ends behind its shard's end"),
        (change("length", 5, 2**32 - 1), "image 5 "),
        (change("name_end", 6, 10**6), "image 6 has no name"),
        (change("name_end", 6, 0), "image 6 has no name"),
        (lambda rows: rows[:-1], r"13 images, but dataset\.json says 14"),
        (lambda _: np.zeros(14, np.int64), "not an index: no rows of format version 1"),
    ],
)
def test_an_index_that_contradicts_the_files_is_refused(
    copy: Path, broken: Callable[[np.ndarray], Any], message: str
) -> None:
    rewrite_index(copy, broken)
    with pytest.raises(UserError, match=rf"train\.index\.npy: {message}"):
        opened(copy)
    opened(copy, "eval")


@pytest.mark.parametrize("made", ["raw"], indirect=True)
def test_raw_images_have_the_size_of_their_pixels(copy: Path) -> None:
    rewrite_index(copy, change("height", 2, 17))
    with pytest.raises(UserError, match="image 2 has another size than its pixels"):
        opened(copy)


def test_a_wrong_class_count_is_refused(made: Path) -> None:
    with pytest.raises(UserError, match=r"dataset\.num_classes=3, but imagenet has 2 classes"):
        opened(made, num_classes=3)


def test_a_description_survives_being_written_and_read(copy: Path) -> None:
    manifest = read_manifest(copy)
    odd = replace(manifest, classes=["ü漢", "\udcff\n"])
    (copy / "dataset.json").write_bytes(odd.encode())
    assert replace(read_manifest(copy), checksum="") == replace(odd, checksum="")


def test_a_prepared_dataset_is_known_before_it_is_read(made: Path) -> None:
    dataset = opened(made)
    assert known(config(made)) == Known("imagenet", dataset.num_classes, len(dataset))
    for path in (made.parent / "images", made.parent / "none"):
        assert known(config(path)) is None  # the ranks look through folders
