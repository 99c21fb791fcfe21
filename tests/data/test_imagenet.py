"""Decoding every kind of file, listing folders and list files, and what is refused."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import socket
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest

from recipes.config import DatasetConfig, UserError
from recipes.data import build, prepare
from recipes.data.augmentation import CROP_UNIFORMS, Image, central_crop, random_resized_crop
from recipes.data.decoding import UnreadableImage, read_file, read_image
from recipes.data.imagenet import FileNames, list_images
from recipes.data.randomness import sample_rng


def config(path: Path, **changes: Any) -> DatasetConfig:
    settings: dict[str, Any] = {"name": "imagenet", "path": str(path), "image_size": 16}
    return DatasetConfig(**(settings | changes))


def gradient(height: int = 40, width: int = 50) -> Image:
    rows, columns = np.mgrid[:height, :width]
    return np.stack([rows * 5, columns * 4, 100 + rows + columns], axis=2).astype(np.uint8)


def save(path: Path, image: Image | None = None) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    PIL.Image.fromarray(gradient() if image is None else image).save(path)


def class_folders(root: Path, names: tuple[str, ...] = ("cat", "dog"), each: int = 3) -> Path:
    for split in ("train", "val"):
        for label, name in enumerate(names):
            for number in range(each):
                save(root / split / name / f"{number}.png", gradient() // (1 + label + number))
    return root


def listed(root: Path, lines: str, split: str = "train") -> Path:
    for number in range(3):
        save(root / "photos of pets" / f"{number} a.png")
    for name in {"train", "val", split}:
        (root / f"{name}_list.txt").write_text(
            lines if name == split else "photos of pets/0 a.png 0\nphotos of pets/1 a.png 2\n"
        )
    return root


def pillow(mode: str, **options: Any) -> tuple[Image, PIL.Image.Image]:
    rgb = gradient()
    return rgb, PIL.Image.fromarray(rgb).convert(mode, **options)


@pytest.mark.parametrize("name", ["a.jpg", "a.png", "a.bmp", "a.webp", "a.tiff", "a.ppm"])
def test_colours_are_rgb_in_every_format(tmp_path: Path, name: str) -> None:
    rgb, image = pillow("RGB")
    image.save(tmp_path / name, quality=100)  # where the format has one
    read = read_image(str(tmp_path / name))
    assert read.dtype == np.uint8
    assert read.shape == rgb.shape
    assert np.abs(read.astype(int) - rgb).mean() < 3


@pytest.mark.parametrize("name", ["a.jpg", "a.png"])
def test_grey_is_repeated(tmp_path: Path, name: str) -> None:
    _, image = pillow("L")
    image.save(tmp_path / name, quality=100)
    read = read_image(str(tmp_path / name))
    assert (read[:, :, 0] == read[:, :, 1]).all()
    assert (read[:, :, 0] == read[:, :, 2]).all()
    assert np.abs(read[:, :, 0].astype(int) - np.asarray(image)).max() <= 2


def test_cmyk_jpeg_keeps_its_colours(tmp_path: Path) -> None:
    rgb, image = pillow("CMYK")
    image.save(tmp_path / "a.jpg", quality=100)
    read = read_image(str(tmp_path / "a.jpg"))
    assert np.abs(read.astype(int) - rgb).mean() < 4


def test_alpha_is_dropped(tmp_path: Path) -> None:
    rgb, image = pillow("RGBA")
    alpha = np.full(rgb.shape[:2], 10, np.uint8)
    image.putalpha(PIL.Image.fromarray(alpha))
    image.save(tmp_path / "a.png")
    assert (read_image(str(tmp_path / "a.png")) == rgb).all()
    grey = PIL.Image.fromarray(rgb[:, :, 0]).convert("LA")
    grey.save(tmp_path / "la.png")
    assert (read_image(str(tmp_path / "la.png")) == rgb[:, :, :1]).all()


@pytest.mark.parametrize("transparency", [None, 3])
def test_palette(tmp_path: Path, transparency: int | None) -> None:
    _, image = pillow("P", palette=PIL.Image.Palette.ADAPTIVE)
    options: dict[str, Any] = {} if transparency is None else {"transparency": transparency}
    image.save(tmp_path / "a.png", **options)
    assert (read_image(str(tmp_path / "a.png")) == np.asarray(image.convert("RGB"))).all()


def test_one_bit(tmp_path: Path) -> None:
    bits = np.eye(8, dtype=bool)
    PIL.Image.fromarray(bits).save(tmp_path / "a.png")
    assert (read_image(str(tmp_path / "a.png"))[:, :, 1] == bits * 255).all()


def test_sixteen_bit_grey_is_scaled_not_clipped(tmp_path: Path) -> None:
    deep = (np.arange(40 * 50).reshape(40, 50) * 32).astype(np.uint16)
    PIL.Image.fromarray(deep).save(tmp_path / "a.png")
    read = read_image(str(tmp_path / "a.png"))
    assert (read == (deep >> 8)[:, :, None]).all()


def test_sixteen_bit_colour(tmp_path: Path) -> None:
    import cv2

    deep = gradient().astype(np.uint16) * 257
    assert cv2.imwrite(str(tmp_path / "a.png"), deep[:, :, ::-1])
    assert (read_image(str(tmp_path / "a.png")) == gradient()).all()


def test_exif_orientation_is_applied(tmp_path: Path) -> None:
    rgb, image = pillow("RGB")
    exif = PIL.Image.Exif()
    exif[0x0112] = 6  # turned a quarter
    image.save(tmp_path / "a.jpg", quality=100, exif=exif)
    read = read_image(str(tmp_path / "a.jpg"))
    assert np.abs(read.astype(int) - np.rot90(rgb, -1)).mean() < 3


def broken(kind: str) -> bytes:
    stream = io.BytesIO()
    PIL.Image.fromarray(gradient()).save(stream, "JPEG" if kind != "cut png" else "PNG")
    content = stream.getvalue()
    return {
        "empty": b"",
        "text": b"this is not an image",
        "cut jpeg": content[: len(content) * 2 // 3],
        "cut png": content[: len(content) * 2 // 3],
        "header alone": content[:20],
    }[kind]


BROKEN = ["empty", "text", "cut jpeg", "cut png", "header alone"]


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_file_is_named(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "x.jpeg"
    path.write_bytes(broken(kind))
    with pytest.raises(UnreadableImage, match=str(path)):
        read_image(str(path))


def test_a_mount_that_does_not_answer_may_do_so_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = build(config(class_folders(tmp_path)), "train", 0)
    for number, may_pass in ((errno.ESTALE, True), (errno.EIO, True), (errno.EACCES, False)):

        def refuse(*_: object, number: int = number) -> int:
            raise OSError(number, os.strerror(number))

        with monkeypatch.context() as patch:
            patch.setattr(os, "open", refuse)
            with pytest.raises(UserError, match=r"train/cat/0\.png: cannot be read") as error:
                dataset[0, 0]
        assert error.value.may_pass == may_pass


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UnreadableImage, match=r"gone\.png"):
        read_image(str(tmp_path / "gone.png"))


@pytest.mark.parametrize("kind", BROKEN)
@pytest.mark.parametrize("split", ["train", "eval"])
def test_on_corrupt_fail_names_the_path_and_the_remedy(
    tmp_path: Path, kind: str, split: str
) -> None:
    class_folders(tmp_path)
    path = tmp_path / ("train" if split == "train" else "val") / "cat" / "1.png"
    path.write_bytes(broken(kind))
    dataset = build(config(tmp_path), split, 0)
    assert dataset[0, 0].label == 0
    with pytest.raises(UserError, match=str(path)) as error:
        dataset[0, 1]
    assert "dataset.on_corrupt=skip" in error.value.remedy


def test_on_corrupt_skip_replaces_in_training(tmp_path: Path) -> None:
    class_folders(tmp_path)
    for number in (1, 2):
        (tmp_path / "train" / "cat" / f"{number}.png").write_bytes(broken("text"))
    (tmp_path / "train" / "dog" / "2.png").write_bytes(broken("text"))
    dataset = build(config(tmp_path, on_corrupt="skip"), "train", 4)
    sample = dataset[2, 1]
    assert (sample.index, sample.source, sample.label) == (1, 3, 1)
    u = sample_rng(4, 2, 1).random(CROP_UNIFORMS)
    expected = random_resized_crop(read_image(dataset.path(3) or ""), 16, u)
    assert (sample.image == expected).all()
    assert (dataset[0, 5].source, dataset[0, 5].label) == (0, 0)
    assert dataset[0, 4].source == 4


def test_on_corrupt_skip_marks_in_evaluation(tmp_path: Path) -> None:
    class_folders(tmp_path)
    (tmp_path / "val" / "dog" / "0.png").write_bytes(broken("empty"))
    dataset = build(config(tmp_path, on_corrupt="skip"), "eval", 0)
    sample = dataset[0, 3]
    assert (sample.index, sample.source, sample.label) == (3, 3, -1)
    assert sample.image.shape == (16, 16, 3)
    assert not sample.image.any()


def test_skipping_ends_where_nothing_can_be_read(tmp_path: Path) -> None:
    class_folders(tmp_path)
    for path in (tmp_path / "train").rglob("*.png"):
        path.write_bytes(b"")
    dataset = build(config(tmp_path, on_corrupt="skip", max_skipped=3), "train", 0)
    with pytest.raises(UserError, match=r"cat/2\.png: cannot be read, nor can the 3 images after"):
        dataset[0, 2]


def test_class_folders_give_sorted_labels(tmp_path: Path) -> None:
    class_folders(tmp_path, ("zebra", "ant", "Lion"))
    (tmp_path / "train" / "ant" / "more").mkdir()
    save(tmp_path / "train" / "ant" / "more" / "x.JPEG")
    (tmp_path / "train" / "ant" / "notes.txt").write_text("no image")
    (tmp_path / "train" / ".cache").mkdir()
    dataset = build(config(tmp_path), "train", 0)
    assert dataset.classes == ["Lion", "ant", "zebra"]
    paths = [os.path.relpath(dataset.path(i) or "", tmp_path) for i in range(len(dataset))]
    expected = [f"train/Lion/{n}.png" for n in range(3)] + [f"train/ant/{n}.png" for n in range(3)]
    expected += ["train/ant/more/x.JPEG"] + [f"train/zebra/{n}.png" for n in range(3)]
    assert paths == expected
    assert [dataset[0, i].label for i in range(len(dataset))] == [0] * 3 + [1] * 4 + [2] * 3


def test_train_and_evaluation_views(tmp_path: Path) -> None:
    class_folders(tmp_path)
    train, held_out = (build(config(tmp_path), split, 8) for split in ("train", "eval"))
    plain = build(config(tmp_path, augment=False), "train", 8)
    image = read_image(train.path(1) or "")
    u = sample_rng(8, 5, 1).random(CROP_UNIFORMS)
    assert (train[5, 1].image == random_resized_crop(image, 16, u)).all()
    assert (held_out[5, 1].image == central_crop(image, 16)).all()
    assert (plain[5, 1].image == held_out[0, 1].image).all()
    assert np.allclose(train.mean, [123.675, 116.28, 103.53])
    assert np.allclose(train.std, [58.395, 57.12, 57.375])


def test_list_files(tmp_path: Path) -> None:
    root = listed(tmp_path, "photos of pets/1 a.png 2\n\nphotos of pets/0 a.png 0\r\n")
    dataset = build(config(root), "train", 0)
    assert dataset.path(0) == str(root / "photos of pets/1 a.png")
    assert [dataset[0, i].label for i in range(2)] == [2, 0]
    assert dataset.classes == ["0", "1", "2"]
    assert build(config(root, num_classes=5), "train", 0).num_classes == 5


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("photos of pets/0 a.png 0\nphotos of pets/1 a.png cat", r"line 2: .* not end in a label"),
        ("photos of pets/0 a.png -1", "line 1: .* not end in a label"),
        ("photos of pets/0 a.png 1.5", "line 1: .* not end in a label"),
        ("7", "line 1: '7' does not end in a label"),
        ("photos of pets/9 a.png 0", r"9 a\.png: no such file; entry 1 of .*train_list\.txt"),
        ("nowhere/9.png 0", r"nowhere/9\.png: no such file"),
        (
            "photos of pets/1 a.png 99999999999999999999",
            r"line 1: 9+ is no class's number",
        ),
        ("photos of pets/1 a.png " + "7" * 5000, r"line 1: 7{80} … is no class's number"),
        ("photos of pets/1 a.png 1000000", "line 1: 1000000 is no class's number"),
        (
            "photos of pets/1 a.png 999999",
            r"1 a\.png has label 999999, which makes 1,000,000 classes, but the list has 1 images",
        ),
        ("photos of pets/1\0a.png 0", r"line 1: photos of pets/1\\x00a\.png is no file's name"),
        ("photos of pets/1\x1b[31m.png x", r"line 1: '.*\\x1b\[31m.* does not end in a label"),
        ("\n\n", r"train_list\.txt: the list is empty"),
    ],
)
def test_a_wrong_list_is_named(tmp_path: Path, lines: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        build(config(listed(tmp_path, lines)), "train", 0)
    assert error.value.remedy


def test_a_list_of_few_of_many_classes_is_taken(tmp_path: Path) -> None:
    root = listed(tmp_path, "photos of pets/1 a.png 999\n")
    assert build(config(root), "train", 0).num_classes == 1000


def test_classes_without_training_images_are_told(tmp_path: Path) -> None:
    lines = "".join(f"photos of pets/{number} a.png {number + 1}\n" for number in range(3))
    (remark,) = build(config(listed(tmp_path, lines)), "train", 0).remarks()
    assert remark == (
        "1 of 4 classes have no training image: 0; labels are counted from 0, and these begin at 1"
    )
    lines = "photos of pets/0 a.png 0\nphotos of pets/1 a.png 20\n"
    (remark,) = build(config(listed(tmp_path / "gaps", lines)), "train", 0).remarks()
    assert remark == ("19 of 21 classes have no training image: 1, 2, 3, 4, 5, 6, 7, 8 and 11 more")
    assert build(config(class_folders(tmp_path / "whole")), "train", 0).remarks() == []


def test_a_byte_order_mark_is_no_part_of_a_name(tmp_path: Path) -> None:
    dataset = build(config(listed(tmp_path, "\ufeffphotos of pets/1 a.png 2\n")), "train", 0)
    assert str(dataset.path(0)).endswith("pets/1 a.png")


def test_a_label_out_of_range_is_named(tmp_path: Path) -> None:
    root = listed(tmp_path, "photos of pets/0 a.png 3\n", split="val")
    with pytest.raises(UserError, match=r"val_list\.txt: .*0 a\.png has label 3, out of range"):
        build(config(root), "eval", 0)
    root = listed(tmp_path / "b", "photos of pets/0 a.png 3\n")
    with pytest.raises(UserError, match=r"label 3, out of range: there are 3 classes \(0 \.\. 2\)"):
        build(config(root, num_classes=3), "train", 0)


def test_a_missing_list_is_named(tmp_path: Path) -> None:
    root = listed(tmp_path, "photos of pets/0 a.png 0\n")
    (root / "val_list.txt").unlink()
    with pytest.raises(UserError, match=r"val_list\.txt: No such file"):
        build(config(root), "eval", 0)


def test_missing_folders_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"dataset\.path=.*nowhere is not a folder"):
        prepare(config(tmp_path / "nowhere"))
    with pytest.raises(UserError, match=r"no dataset\.path"):
        prepare(DatasetConfig(name="imagenet", image_size=16))
    with pytest.raises(UserError, match=r"train: no such folder"):
        build(config(tmp_path), "train", 0)
    (tmp_path / "train").mkdir()
    with pytest.raises(UserError, match=r"train: no class folders in it"):
        build(config(tmp_path), "train", 0)


def test_an_empty_class_folder_is_named(tmp_path: Path) -> None:
    class_folders(tmp_path)
    for split in ("train", "val"):
        (tmp_path / split / "bird").mkdir()
    (tmp_path / "train" / "bird" / "readme.txt").write_text("none yet")
    with pytest.raises(UserError, match=r"train/bird: the class folder has no images"):
        build(config(tmp_path), "train", 0)


def test_a_loop_of_folders_is_named(tmp_path: Path) -> None:
    root = class_folders(tmp_path)
    (root / "train/cat/again").symlink_to(root / "train/cat")
    with pytest.raises(
        UserError, match=r"train/cat/again: leads to a folder that its class has"
    ) as error:
        build(config(root), "train", 0)
    assert "remove" in error.value.remedy


def test_links_that_lead_to_each_other_are_named(tmp_path: Path) -> None:
    root = class_folders(tmp_path)
    for folder, other in (("cat", "dog"), ("dog", "cat")):
        for number in range(3):
            (root / f"train/{folder}/to-{other}-{number}").symlink_to(root / "train" / other)
    with pytest.raises(UserError, match=r"leads to a folder that its class has") as error:
        build(config(root), "train", 0)
    assert "remove" in error.value.remedy


@pytest.mark.parametrize("place", ["train/cat", "train"])
def test_links_that_lead_nowhere_but_to_each_other_are_named(tmp_path: Path, place: str) -> None:
    root = class_folders(tmp_path)
    (root / place / "one").symlink_to("other")
    (root / place / "other").symlink_to("one")
    with pytest.raises(UserError, match=r"(one|other): Too many levels of symbolic links"):
        build(config(root), "train", 0)


def special(path: Path, kind: str) -> str:
    """Make something that is no file; what a message calls it."""
    match kind:
        case "folder":
            path.mkdir()
        case "FIFO":
            os.mkfifo(path)
        case "socket":
            with contextlib.chdir(path.parent), socket.socket(socket.AF_UNIX) as server:
                server.bind(path.name)
    return kind


@pytest.mark.parametrize("kind", ["folder", "FIFO", "socket"])
@pytest.mark.parametrize("listing", [False, True])
def test_what_is_no_file_is_named_at_the_scan(tmp_path: Path, kind: str, listing: bool) -> None:
    root = class_folders(tmp_path)
    what = special(root / "train/cat/zz.jpg", kind)
    if listing:
        listed(root, "train/cat/0.png 0\ntrain/cat/zz.jpg 1\n")
    for skip in ("fail", "skip"):
        with pytest.raises(UserError, match=rf"train/cat/zz\.jpg: .* it is a {what}"):
            build(config(root, on_corrupt=skip), "train", 0)


@pytest.mark.parametrize("kind", ["FIFO", "socket", "device", "folder"])
def test_a_link_to_what_is_no_file_is_not_waited_for(tmp_path: Path, kind: str) -> None:
    target = Path("/dev/zero") if kind == "device" else tmp_path / "target"
    if kind != "device":
        special(target, kind)
    (tmp_path / "link.jpg").symlink_to(target)
    with pytest.raises(UnreadableImage, match=r"link\.jpg: (it is a|cannot be read)"):
        read_file(str(tmp_path / "link.jpg"))


@pytest.mark.parametrize("name", ["/etc/hosts", "../secret.jpg", "train/../../secret.jpg"])
def test_a_list_names_nothing_outside_the_dataset(tmp_path: Path, name: str) -> None:
    root = class_folders(tmp_path / "data")
    save(tmp_path / "secret.jpg")
    listed(root, f"{name} 0\n")
    with pytest.raises(UserError, match=r"train_list.txt, line 1: .* is outside dataset.path"):
        build(config(root), "train", 0)


@pytest.mark.parametrize(
    ("first", "second"), [("Cat", "cat"), ("caf\u00c9", "cafe\u0301"), ("STRASSE", "stra\u00dfe")]
)
def test_classes_that_differ_only_in_case_are_named(
    tmp_path: Path, first: str, second: str
) -> None:
    class_folders(tmp_path, (second, "dog", first))
    one, other = sorted((first, second))
    with pytest.raises(UserError, match=f"class folders {one} and {other} differ only in case"):
        build(config(tmp_path), "train", 0)


@pytest.mark.parametrize("split", ["train", "val"])
def test_classes_of_one_split_alone_are_named(tmp_path: Path, split: str) -> None:
    class_folders(tmp_path)
    save(tmp_path / split / "yak" / "0.png")
    for built in ("train", "eval"):
        with pytest.raises(UserError, match=rf"/{split} has 1 class folders that .* such as yak"):
            build(config(tmp_path), built, 0)


def test_a_wrong_class_count_is_refused(tmp_path: Path) -> None:
    class_folders(tmp_path)
    with pytest.raises(UserError, match=r"train has 2 class folders, but dataset\.num_classes=10"):
        build(config(tmp_path, num_classes=10), "train", 0)


def test_evaluation_needs_no_training_images(tmp_path: Path) -> None:
    class_folders(tmp_path)
    for path in sorted((tmp_path / "train").rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    (tmp_path / "train").rmdir()
    assert len(build(config(tmp_path), "eval", 0)) == 6


def test_file_names_are_kept_whole() -> None:
    names = ["a/b.png", "", "ü/漢 字.jpg", "bad\udcff.png", "x" * 300]
    kept = FileNames(names)
    assert [kept[index] for index in range(len(kept))] == names


def test_listing_is_sorted_whatever_the_file_system_gives(tmp_path: Path) -> None:
    for number in np.random.default_rng(0).permutation(40):
        path = tmp_path / "train" / "a" / f"{number:02}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    names = list_images(tmp_path, "train", None).names
    assert [names[i] for i in range(40)] == [f"train/a/{number:02}.png" for number in range(40)]
