"""Files of datasets as chance, or somebody, has changed them: a message, or a correct result.

Never a traceback, a wait, a look outside of the dataset's folder, or memory beyond a bound.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import json
import os
import random
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mutations import ODD, little_memory, mutated, mutated_json
from photographs import encoded, kinds, photo_folder, picture
from test_cifar10 import batches, write_archive, write_folder

from recipes.config import DatasetConfig, UserError
from recipes.data import build, cifar10
from recipes.data.augmentation import CROP_UNIFORMS
from recipes.data.base import ImageDataset
from recipes.data.conversion import Conversion
from recipes.data.decoding import UnreadableImage
from recipes.data.description import canonical
from recipes.data.jpeg import Scratch, decode_exactly, decode_random_crop
from recipes.data.preparation import Preparation, prepare_shards, verify_prepared
from recipes.progress import NoDisplay

ROOT = Path(__file__).resolve().parents[2]
ROUNDS = 110
MEBIBYTES = 400

_opened: list[str] = []


def _note(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open":
        _opened.append(os.fsdecode(arguments[0]) if not isinstance(arguments[0], int) else "")


sys.addaudithook(_note)


@contextlib.contextmanager
def inside(root: Path) -> Iterator[None]:
    """Only files below a folder are opened meanwhile, and Python's own modules."""
    _opened.clear()
    yield
    own = (str(root), str(ROOT), sys.prefix, sys.base_prefix, "/proc/self/")
    outside = [path for path in _opened if path and not str(Path(path).absolute()).startswith(own)]
    assert outside == []


def read_all(config: DatasetConfig) -> list[ImageDataset]:
    """Open both splits, and read every sample."""
    datasets = [build(config, split, 0) for split in ("train", "eval")]
    for dataset in datasets:
        for index in range(len(dataset)):
            dataset[0, index]
    return datasets


def try_out(root: Path, attempt: Callable[[], object]) -> bool:
    """Whether it worked; a `UserError` is the only other end."""
    with little_memory(MEBIBYTES), inside(root):
        error = _error_of(attempt)
    assert error is None or (error.remedy and len(str(error)) < 9000)
    return error is None


def _error_of(attempt: Callable[[], object]) -> UserError | None:
    try:
        attempt()
    except UserError as error:
        return error
    return None


def photographs(root: Path) -> Path:
    contents = [
        encoded(picture(20, 30, seed), kind) for seed in range(4) for kind in ("JPEG", "PNG")
    ]
    return photo_folder(root, contents, contents[:4])


@pytest.fixture(scope="module", params=["jpeg", "raw"])
def prepared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("prepared")
    conversion = Conversion(16, request.param, 90, "source")
    preparation = Preparation(
        photographs(root / "source"), root / "made", conversion, 2000, 2, max_skipped=None
    )
    prepare_shards(preparation, NoDisplay(), lambda _: None)
    return root / "made"


def imagenet(path: Path) -> DatasetConfig:
    return DatasetConfig(name="imagenet", path=str(path), image_size=8)


def signed(root: Path, content: Any) -> None:
    """Write a description with the right checksum, where it can have one."""
    if isinstance(content, dict):
        content["checksum"] = ""
        with contextlib.suppress(ValueError, RecursionError):
            content["checksum"] = hashlib.sha256(canonical(content)).hexdigest()
        (root / "dataset.json").write_bytes(canonical(content))
    else:
        (root / "dataset.json").write_text(json.dumps(content))


def vouch_for(root: Path, name: str) -> None:
    """Have the description say what a file has become."""
    content = json.loads((root / "dataset.json").read_bytes())
    data = (root / name).read_bytes()
    for split in content["splits"].values():
        for record in (split["index"], split["names"], *split["shards"]):
            if record["name"] == name:
                record |= {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    signed(root, content)


def test_a_description_of_others(prepared: Path, tmp_path: Path) -> None:
    whole = (prepared / "dataset.json").read_bytes()
    root = shutil.copytree(prepared, tmp_path / "copy")
    for seed in range(ROUNDS):
        chance = random.Random(seed)
        if seed % 3:
            signed(root, mutated_json(json.loads(whole), chance))
        else:
            (root / "dataset.json").write_bytes(mutated(whole, chance))
        try_out(root, lambda: read_all(imagenet(root)))


@pytest.mark.parametrize("text", ["[" * 10**5, "{}", "9" * 10**5, "[]" * 9, "\xff\xfe", "NaN", ""])
def test_a_description_that_is_none(prepared: Path, tmp_path: Path, text: str) -> None:
    root = shutil.copytree(prepared, tmp_path / "copy")
    (root / "dataset.json").write_text(text)
    assert not try_out(root, lambda: read_all(imagenet(root)))


@pytest.mark.parametrize("name", ["train.index.npy", "eval.names", "train-00000.shard"])
def test_files_of_others_that_their_description_vouches_for(
    prepared: Path, tmp_path: Path, name: str
) -> None:
    root = shutil.copytree(prepared, tmp_path / "copy")
    whole = (root / name).read_bytes()
    for seed in range(ROUNDS):
        (root / name).write_bytes(mutated(whole, random.Random(seed)))
        vouch_for(root, name)
        try_out(root, lambda: read_all(imagenet(root)))
        try_out(root, lambda: verify_prepared(root, NoDisplay(), lambda _: None))


def test_an_index_whose_rows_others_have_written(prepared: Path, tmp_path: Path) -> None:
    root = shutil.copytree(prepared, tmp_path / "copy")
    whole = np.load(root / "train.index.npy")
    for seed in range(ROUNDS):
        chance, rows = random.Random(seed), whole.copy()
        for _ in range(chance.randint(1, 3)):
            key = chance.choice(rows.dtype.names or ())
            largest = np.iinfo(rows.dtype[key]).max
            value = chance.choice((0, 1, 3, 1000, largest, largest // 3, chance.randrange(largest)))
            rows[key][chance.randrange(len(rows))] = value
        np.save(root / "train.index.npy", rows)
        vouch_for(root, "train.index.npy")
        try_out(root, lambda: read_all(imagenet(root)))


def test_an_unfinished_preparation_of_others(tmp_path: Path) -> None:
    """What it left is taken where it is whole, and the result is the same in any case."""
    source = photographs(tmp_path / "source")
    whole, root = tmp_path / "whole", tmp_path / "made"
    conversion = Conversion(16, "jpeg", 90, "source")
    task = Preparation(source, whole, conversion, 2000, 1, max_skipped=None)
    kept: dict[str, bytes] = {}

    def keep(_: object) -> None:
        if not kept:
            unfinished = sorted((whole / "unfinished").glob("*.*"))
            kept.update({path.name: path.read_bytes() for path in unfinished})

    class Keeping(NoDisplay):
        def stop(self) -> None:
            keep(None)

    prepare_shards(task, Keeping(), lambda _: None)
    files = {path.name: path.read_bytes() for path in whole.iterdir()}
    assert {"order.json", "train-00000.json", "train-00000.npy"} <= kept.keys()
    again = Preparation(source, root, conversion, 2000, 1, max_skipped=None)
    done = 0
    for seed in range(ROUNDS):
        chance = random.Random(seed)
        shutil.rmtree(root, ignore_errors=True)
        (root / "unfinished").mkdir(parents=True)
        for name in files:
            if name.endswith(".shard"):
                (root / name).write_bytes(files[name])
        name = chance.choice(sorted(kept))
        for each, data in kept.items():
            changed = mutated(data, chance) if each == name else data
            if each == name and name.endswith(".json") and seed % 2:
                changed = json.dumps(mutated_json(json.loads(data), chance)).encode()
            (root / "unfinished" / each).write_bytes(changed)
        if try_out(tmp_path, lambda: prepare_shards(again, NoDisplay(), lambda _: None)):
            done += 1
    assert done > ROUNDS / 3


def test_lists_of_others(tmp_path: Path) -> None:
    root = photographs(tmp_path / "data")
    names = sorted(path.relative_to(root) for path in root.glob("train/*/*"))
    whole = "".join(f"{name} {number % 2}\n" for number, name in enumerate(names)).encode()
    (root / "val_list.txt").write_bytes(whole)
    for seed in range(ROUNDS):
        chance = random.Random(seed)
        data = mutated(whole, chance)
        if seed % 2:
            lines = whole.splitlines()
            odd = str(chance.choice(ODD)).encode(errors="surrogateescape")
            at = chance.randrange(len(lines))
            lines[at] = chance.choice((odd + b" 1", lines[at].split()[0] + b" " + odd, odd))
            data = b"\n".join(lines)
        (root / "train_list.txt").write_bytes(data)
        try_out(root, lambda: read_all(imagenet(root)))


def test_cifar10_of_others(tmp_path: Path) -> None:
    files = batches()
    folder = write_folder(tmp_path / "folder", files)
    archive = write_archive(tmp_path / "archive", files)
    packed = archive.read_bytes()
    unpacked = gzip.decompress(packed)
    for seed in range(ROUNDS):
        chance = random.Random(seed)
        name = chance.choice(sorted(files))
        (folder / name).write_bytes(mutated(files[name], chance))
        try_out(tmp_path, lambda: read_cifar10(tmp_path / "folder"))
        (folder / name).write_bytes(files[name])
        changed = mutated(packed, chance)
        if seed % 2:
            changed = gzip.compress(mutated(unpacked, chance), 1)
        archive.write_bytes(changed)
        try_out(tmp_path, lambda: read_cifar10(tmp_path / "archive"))


def read_cifar10(path: Path) -> None:
    config = DatasetConfig(name="cifar10", path=str(path), image_size=32)
    for split in ("train", "eval"):
        found = cifar10.load(config, split)
        assert found.images.shape[1:] == (32, 32, 3)


def test_images_of_others() -> None:
    contents = list(kinds(picture(40, 60)).values())
    out, scratch = np.empty((16, 16, 3), np.uint8), Scratch()
    for seed in range(4 * ROUNDS):
        chance = random.Random(seed)
        data = mutated(contents[seed % len(contents)], chance)
        uniforms = np.random.default_rng(seed).random(CROP_UNIFORMS)
        with little_memory(MEBIBYTES), inside(Path("/nowhere")):
            with contextlib.suppress(UnreadableImage):
                decode_exactly(data, "x", scratch, 10**6)
            with contextlib.suppress(UnreadableImage):
                decode_random_crop(data, "x", uniforms, out, scratch, 10**6)
