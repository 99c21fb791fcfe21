"""Preparing: the same files however it is interrupted, and refusing what would be wrong."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from photographs import claiming

from recipes.config import DatasetConfig, UserError
from recipes.data import build
from recipes.data import preparation as preparing
from recipes.data.conversion import Conversion
from recipes.data.decoding import decode, read_file
from recipes.data.description import Manifest
from recipes.data.photographs import PhotoDataset
from recipes.data.preparation import Preparation, prepare_shards, verify_prepared
from recipes.data.shards import UNFINISHED
from recipes.progress import NoDisplay

ROOT = Path(__file__).resolve().parents[2]
SHARD = 3000  # bytes: a handful of the images below
JPEG = Conversion(12, "jpeg", 90, "source")
RAW = Conversion(12, "raw", 90, "source")


def image(seed: int, height: int = 20, width: int = 24) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)


def folder(root: Path, train: int = 6, held_out: int = 3, classes: str = "abc") -> Path:
    """Class folders of small JPEGs and PNGs, in several sizes."""
    for split, each in (("train", train), ("val", held_out)):
        for label, name in enumerate(classes):
            (root / split / name).mkdir(parents=True)
            for number in range(each):
                seed = 100 * label + number + (split == "val") * 1000
                pixels = image(seed, 8 + seed % 13, 10 + seed % 7)
                suffix = "jpg" if number % 3 else "png"
                PIL.Image.fromarray(pixels).save(root / split / name / f"{number}.{suffix}")
    return root


def task(source: Path, output: Path, **changes: Any) -> Preparation:
    usual = Preparation(source, output, JPEG, SHARD, workers=2, max_skipped=None)
    return replace(usual, **changes)


def prepare(preparation: Preparation, log: Callable[[str], None] = lambda _: None) -> Manifest:
    return prepare_shards(preparation, NoDisplay(), log)


def contents(root: Path) -> dict[str, bytes]:
    return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}


def opened(path: Path, split: str, **changes: Any) -> PhotoDataset:
    settings_: dict[str, Any] = {"name": "imagenet", "path": str(path), "image_size": 8}
    dataset = build(DatasetConfig(**(settings_ | changes)), split, 3)
    assert isinstance(dataset, PhotoDataset)
    return dataset


class Killed(BaseException):
    """Stands for a kill: nothing handles it."""


@pytest.fixture
def killed_at(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], None]]:
    """Make the nth change of the disk, from 0, the last thing that is tried.

    Nothing is made durable meanwhile, which takes most of the time and is not what is tested.
    """
    left = [10**9]

    def before(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            if original is Path.open and "w" not in str(arguments[1:2]):
                return original(*arguments, **options)
            left[0] -= 1
            if left[0] < 0:
                raise Killed
            return original(*arguments, **options)

        return call

    monkeypatch.setattr(os, "fsync", lambda _: None)
    for owner, name in (
        (Path, "mkdir"),
        (Path, "open"),
        (Path, "replace"),
        (shutil, "rmtree"),
    ):
        monkeypatch.setattr(owner, name, before(getattr(owner, name)))

    def arm(count: int) -> None:
        left[0] = count

    yield arm
    arm(10**9)


def test_a_preparation_ends_the_same_wherever_it_was_killed(
    tmp_path: Path, killed_at: Callable[[int], None]
) -> None:
    source = folder(tmp_path / "images", train=2, held_out=2, classes="ab")
    (source / "train" / "a" / "1.jpg").write_bytes(b"broken")
    given_: dict[str, Any] = {"shard_bytes": 1500, "max_skipped": 2}
    prepare(task(source, tmp_path / "whole", **given_))
    expected = contents(tmp_path / "whole")
    assert sum(name.endswith(".shard") for name in expected) >= 3
    for count in range(1000):
        output = tmp_path / f"killed-{count}"
        killed_at(count)
        try:
            prepare(task(source, output, **given_))
        except Killed:
            killed_at(10**9)
            prepare(task(source, output, **given_, workers=1 + count % 3))
        else:
            break
        finally:
            killed_at(10**9)
        assert contents(output) == expected, f"killed at change {count}"
    assert 20 < count < 1000


def test_a_real_kill_is_survived(tmp_path: Path) -> None:
    source = folder(tmp_path / "images", train=40, held_out=10)
    prepare(task(source, tmp_path / "whole", conversion=RAW))
    program = (
        "import sys; from pathlib import Path; sys.path += ['tests', 'tests/data']\n"
        "from test_preparation import RAW, prepare, task\n"
        f"prepare(task(Path({str(source)!r}), Path({str(tmp_path / 'killed')!r}), conversion=RAW))"
    )
    kills = 0
    for wanted in (1, 5, 20):
        process = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT)
        records = tmp_path / "killed" / UNFINISHED
        while process.poll() is None and len(list(records.glob("*.json"))) <= wanted:
            time.sleep(0.001)
        process.send_signal(signal.SIGKILL)
        kills += process.wait() == -signal.SIGKILL
    assert kills >= 2
    prepare(task(source, tmp_path / "killed", conversion=RAW))
    assert contents(tmp_path / "killed") == contents(tmp_path / "whole")


names = st.text(
    st.characters(blacklist_characters="/\0.", blacklist_categories=("Cs", "Cc")),
    min_size=1,
    max_size=12,
)


@settings(max_examples=15, deadline=None)
@given(
    data=st.data(),
    classes=st.lists(names, min_size=1, max_size=3, unique_by=lambda name: name.casefold()),
    kind=st.sampled_from(["jpeg", "raw"]),
    short_side=st.sampled_from([0, 5, 9]),
    shard_bytes=st.sampled_from([1, 700, 10**6]),
)
def test_a_prepared_dataset_holds_the_images_of_the_folder_in_its_order(
    tmp_path_factory: pytest.TempPathFactory,
    data: st.DataObject,
    classes: list[str],
    kind: str,
    short_side: int,
    shard_bytes: int,
) -> None:
    root = tmp_path_factory.mktemp("property")
    for split in ("train", "val"):
        for name in classes:
            (root / "images" / split / name).mkdir(parents=True)
            for file in data.draw(st.lists(names, min_size=1, max_size=3, unique=True)):
                size = data.draw(st.tuples(st.integers(1, 14), st.integers(1, 14)))
                path = root / "images" / split / name / f"{file}.png"
                PIL.Image.fromarray(image(len(file), *size)).save(path)
    conversion = Conversion(short_side, kind, 95, "source")
    prepare(task(root / "images", root / "out", conversion=conversion, shard_bytes=shard_bytes))
    for split in ("train", "eval"):
        before, after = opened(root / "images", split), opened(root / "out", split)
        assert (after.classes, len(after)) == (before.classes, len(before))
        assert (after.labels == before.labels).all()
        for index in range(len(before)):
            name = os.path.relpath(before.path(index), root / "images")
            assert after.path(index).endswith(f"image {index} ({name})")
            expected = decode(before.content(index), "a")  # type: ignore[arg-type]
            stored = after.content(index)
            if kind == "raw":
                assert isinstance(stored, np.ndarray)
                if not 0 < short_side < min(expected.shape[:2]):
                    assert (stored == expected).all()
            else:
                assert not isinstance(stored, np.ndarray)
                stored = decode(stored, "b")
            limit = short_side or 99
            assert min(stored.shape[:2]) == min(limit, *expected.shape[:2])
        sample, reference = after[1, 0], before[1, 0]
        assert (sample.label, sample.source) == (reference.label, reference.source)


@pytest.mark.parametrize(
    "conversion", [Conversion(0, "raw", 90, "source"), Conversion(0, "jpeg", 1, "source")]
)
def test_samples_are_those_of_the_folder_where_nothing_was_lost(
    tmp_path: Path, conversion: Conversion
) -> None:
    source = folder(tmp_path / "images")
    if conversion.format == "jpeg":  # only those are kept as they are
        for path in source.rglob("*.png"):
            path.unlink()
    prepare(task(source, tmp_path / "out", conversion=conversion))
    for split in ("train", "eval"):
        before, after = opened(source, split), opened(tmp_path / "out", split)
        for index in range(len(before)):
            assert (after[4, index].image == before[4, index].image).all()


def test_names_that_are_not_utf8_are_kept(tmp_path: Path) -> None:
    source = folder(tmp_path / "images", 1, 1, "a")
    os.rename(source / "train/a/0.png", os.fsencode(source / "train/a") + b"/\xff.png")  # noqa: PTH104
    prepare(task(source, tmp_path / "out"))
    assert opened(tmp_path / "out", "train").path(0).endswith("(train/a/\udcff.png)")


def test_list_files_are_read_too(tmp_path: Path) -> None:
    source = folder(tmp_path / "images")
    for path, lines in (
        ("train", "train/b/1.jpg 4\ntrain/a/2.jpg 0\n"),
        ("val", "val/a/0.png 1\n"),
    ):
        (source / f"{path}_list.txt").write_text(lines)
    prepare(task(source, tmp_path / "out"))
    train = opened(tmp_path / "out", "train")
    assert (train.classes, train.labels.tolist()) == (list("01234"), [4, 0])
    assert train.path(0).endswith("(train/b/1.jpg)")


def test_classes_without_training_images_are_told(tmp_path: Path) -> None:
    source = folder(tmp_path / "source")
    for split in ("train", "val"):
        (source / f"{split}_list.txt").write_text(f"{split}/a/0.png 1\n{split}/b/0.png 2\n")
    said: list[str] = []
    prepare(task(source, tmp_path / "prepared"), said.append)
    assert said[0].startswith("warning: 1 of 3 classes have no training image: 0; ")
    assert opened(tmp_path / "prepared", "train").remarks() == [said[0].removeprefix("warning: ")]


def test_nothing_says_where_or_when_it_was_made(tmp_path: Path) -> None:
    for place in ("one", "elsewhere/two"):
        source = folder(tmp_path / place / "images")
        prepare(task(source, tmp_path / place / "out", workers=len(place)))
    one, two = (contents(tmp_path / place / "out") for place in ("one", "elsewhere/two"))
    assert one == two
    assert not any(os.fsencode(tmp_path) in content for content in one.values())


def test_starting_again_when_done_reads_no_image(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    source = folder(tmp_path / "images")
    made = prepare(task(source, tmp_path / "out"))
    before = contents(tmp_path / "out")
    monkeypatch.setattr(preparing, "read_file", None)
    assert prepare(task(source, tmp_path / "out", workers=7), lines.append) == made
    assert "is prepared already: 18 train and 9 eval images" in lines[0]
    assert contents(tmp_path / "out") == before


@pytest.mark.parametrize("done", [True, False])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"conversion": Conversion(13, "jpeg", 90, "source")}, "prepare.short_side: 12 there, 13"),
        ({"conversion": Conversion(12, "jpeg", 91, "source")}, "prepare.quality: 90 there, 91"),
        ({"conversion": RAW}, "prepare.format: jpeg there, raw now"),
        ({"conversion": Conversion(12, "jpeg", 90, "420")}, "prepare.chroma: source there, 420"),
        ({"shard_bytes": 5000}, "prepare.shard_mib"),
    ],
)
def test_other_settings_on_one_output_are_refused(
    tmp_path: Path, changes: dict[str, Any], message: str, done: bool
) -> None:
    source = folder(tmp_path / "images", 1, 1)
    prepare(task(source, tmp_path / "out"))
    if not done:
        undo(source, tmp_path / "out")
    before = contents(tmp_path / "out")
    with pytest.raises(UserError, match=message) as error:
        prepare(task(source, tmp_path / "out", **changes))
    assert "another prepare.output" in error.value.remedy
    assert contents(tmp_path / "out") == before


def undo(source: Path, output: Path) -> None:
    """Make a finished preparation one that has just begun."""
    shutil.rmtree(output)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preparing, "read_file", lambda *_: (_ for _ in ()).throw(Killed))
        with pytest.raises(Killed):
            prepare(task(source, output))


def test_another_source_on_one_output_is_refused(tmp_path: Path) -> None:
    source = folder(tmp_path / "images", 2, 2)
    prepare(task(source, tmp_path / "out"))
    (source / "train" / "a" / "0.png").rename(source / "train" / "a" / "new.png")
    with pytest.raises(UserError, match=r"source\.train: 6 images \(names and labels ") as error:
        prepare(task(source, tmp_path / "out"))
    assert "prepared in another way" in error.value.message


def test_an_output_with_other_files_is_refused(tmp_path: Path) -> None:
    source = folder(tmp_path / "images", 1, 1)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").touch()
    with pytest.raises(UserError, match=r"holds other files, such as thesis\.tex"):
        prepare(task(source, tmp_path / "out"))
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize("inside", [".", "train", "prepared/x"])
def test_an_output_in_the_source_is_refused(tmp_path: Path, inside: str) -> None:
    source = folder(tmp_path / "images", 1, 1)
    with pytest.raises(UserError, match=r"lies in dataset\.path="):
        prepare(task(source, source / inside))


def test_a_prepared_source_is_refused(tmp_path: Path) -> None:
    prepare(task(folder(tmp_path / "images", 1, 1), tmp_path / "out"))
    with pytest.raises(UserError, match="is a prepared dataset already"):
        prepare(task(tmp_path / "out", tmp_path / "again"))


def test_two_at_once_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = folder(tmp_path / "images", 1, 1)
    messages = []

    def read(path: str, _: int) -> bytes:
        with pytest.raises(UserError) as error:
            prepare(task(source, tmp_path / "out"))
        messages.append(error.value.message)
        return Path(path).read_bytes()

    monkeypatch.setattr(preparing, "read_file", read)
    prepare(task(source, tmp_path / "out", workers=1))
    assert messages[0] == f"another process is preparing {tmp_path / 'out'}"


def test_a_corrupt_image_ends_it_and_a_mended_one_lets_it_go_on(tmp_path: Path) -> None:
    source = folder(tmp_path / "images")
    broken = source / "train" / "c" / "5.jpg"
    whole = broken.read_bytes()
    broken.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match=str(broken)) as error:
        prepare(task(source, tmp_path / "out"))
    assert "dataset.on_corrupt=skip" in error.value.remedy
    with pytest.raises(UserError, match="the preparation of this dataset has not ended"):
        opened(tmp_path / "out", "train")
    broken.write_bytes(whole)
    lines: list[str] = []
    prepare(task(source, tmp_path / "out"), lines.append)
    assert lines[0].startswith(f"going on with {tmp_path / 'out'} after ")
    prepare(task(source, tmp_path / "whole"))
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_corrupt_images_are_left_out_and_listed(tmp_path: Path) -> None:
    source = folder(tmp_path / "images", 3, 2)
    for name in ("train/a/0.png", "train/c/2.jpg", "val/b/1.jpg"):
        (source / name).write_bytes(b"no image")
    lines: list[str] = []
    manifest = prepare(task(source, tmp_path / "out", max_skipped=3), lines.append)
    assert manifest.splits["train"].skipped == ["train/a/0.png", "train/c/2.jpg"]
    assert manifest.splits["eval"].skipped == ["val/b/1.jpg"]
    assert sum(line.startswith("left out ") for line in lines) == 3
    train = opened(tmp_path / "out", "train")
    assert train.labels.tolist() == [0, 0, 1, 1, 1, 2, 2]
    assert train.path(0).endswith("(train/a/1.jpg)")
    with pytest.raises(UserError, match=r"3 images could not be read, .*dataset\.max_skipped=2"):
        prepare(task(source, tmp_path / "few", max_skipped=2))


@pytest.mark.parametrize("kind", claiming(9, 9))
def test_a_source_that_claims_too_many_pixels_is_refused_or_left_out(
    kind: str, tmp_path: Path
) -> None:
    source = folder(tmp_path / "source")
    (source / "train/a/zz.jpg").write_bytes(claiming(60_000, 60_000)[kind])
    with pytest.raises(UserError, match=r"a/zz\.jpg: it says that it has 60000 x 60000 pixels"):
        prepare(task(source, tmp_path / "prepared"))
    made = prepare(task(source, tmp_path / "prepared", max_skipped=1))
    assert made.splits["train"].skipped == ["train/a/zz.jpg"]


def test_a_read_that_does_not_return_ends_a_preparation_with_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, answers = folder(tmp_path / "source"), threading.Event()

    def read(path: str, max_pixels: int) -> bytes:
        if path.endswith("train/b/0.png"):
            answers.wait()
        return read_file(path, max_pixels)

    monkeypatch.setattr(preparing, "read_file", read)
    with pytest.raises(UserError, match=r"train/b/0\.png: not read within 0\.3 s"):
        prepare(task(source, tmp_path / "prepared", deadline=0.3, workers=2))
    answers.set()
    assert prepare(task(source, tmp_path / "prepared")).splits["train"].images == 18


def test_a_split_without_a_readable_image_is_refused(tmp_path: Path) -> None:
    source = folder(tmp_path / "images", 1, 1, "a")
    (source / "val/a/0.png").write_bytes(b"no image")
    with pytest.raises(UserError, match="no image of eval could be read"):
        prepare(task(source, tmp_path / "out", max_skipped=9))


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_told_and_gone_on_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    source = folder(tmp_path / "images")
    synced = preparing._sync_and_close
    calls = []

    def full(stream: Any) -> None:
        calls.append(stream.name)
        if len(calls) == 5:
            raise OSError(number, os.strerror(number))
        synced(stream)

    with monkeypatch.context() as patch:
        patch.setattr(preparing, "_sync_and_close", full)
        with pytest.raises(UserError, match="disk") as error:
            prepare(task(source, tmp_path / "out"))
    assert "goes on where it was" in error.value.remedy
    assert str(tmp_path / "out") in error.value.message
    prepare(task(source, tmp_path / "out"))
    prepare(task(source, tmp_path / "whole"))
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_verifying_reads_every_byte(tmp_path: Path) -> None:
    prepare(task(folder(tmp_path / "images"), tmp_path / "out"))
    lines: list[str] = []
    verify_prepared(tmp_path / "out", NoDisplay(), lines.append)
    assert "all as they were written" in lines[-1]
    for path in sorted((tmp_path / "out").iterdir()):
        whole = path.read_bytes()
        for place in (0, len(whole) // 2, len(whole) - 1):
            path.write_bytes(whole[:place] + bytes([whole[place] ^ 16]) + whole[place + 1 :])
            with pytest.raises(UserError, match=path.name):
                verify_prepared(tmp_path / "out", NoDisplay(), lines.append)
        path.write_bytes(whole)
    with pytest.raises(UserError, match="is not a prepared dataset"):
        verify_prepared(tmp_path / "images", NoDisplay(), lines.append)


def test_verifying_names_damaged_images(tmp_path: Path) -> None:
    prepare(task(folder(tmp_path / "images"), tmp_path / "out"))
    path = tmp_path / "out" / "train-00001.shard"
    path.write_bytes(bytes(path.stat().st_size))
    with pytest.raises(UserError) as error:
        verify_prepared(tmp_path / "out", NoDisplay(), print)
    lines = error.value.message.splitlines()
    assert lines[0] == f"{path}: altered (SHA-256 differs)"
    assert all(f"{path}, image " in line for line in lines[1:])
    assert len(lines) > 2


def test_progress_is_told_in_a_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparing, "_SECONDS_BETWEEN_LINES", 0.0)
    lines: list[str] = []
    prepare(task(folder(tmp_path / "images", 2, 1), tmp_path / "out"), lines.append)
    assert sum(" of 9 images, " in line for line in lines) == 9
