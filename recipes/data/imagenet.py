"""Photographs in class folders, or named by PaddleClas's list files."""

from __future__ import annotations

import os
import unicodedata
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from recipes.config import DatasetConfig, UserError
from recipes.data.decoding import EXTENSIONS, read_file, what_is_at
from recipes.data.list_files import LISTS, check_labels, count_classes, read_list
from recipes.data.photographs import PhotoDataset

FOLDERS = {"train": "train", "eval": "val"}


class FileNames:
    """Many file names in one block of memory.

    A list of a million strings would be copied, page by page, into every loader process, as reading
    a Python object changes its reference count.
    """

    def __init__(self, names: Iterable[str]) -> None:
        encoded = [os.fsencode(name) for name in names]
        self._ends = np.cumsum([0, *map(len, encoded)], dtype=np.int64)
        self._bytes = b"".join(encoded)

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, index: int) -> str:
        return os.fsdecode(self._bytes[self._ends[index] : self._ends[index + 1]])


class Listing(NamedTuple):
    """The images of one split."""

    names: FileNames  # relative to the dataset's folder
    labels: NDArray[np.int64]
    classes: list[str]


class FolderDataset(PhotoDataset):
    """Photographs in files of their own."""

    def __init__(self, config: DatasetConfig, split: str, seed: int) -> None:
        self._root = dataset_root(config)
        listing = list_images(self._root, split, config.num_classes)
        self._names = listing.names
        super().__init__(config, split, seed, listing.labels, listing.classes)

    def path(self, index: int) -> str:
        return os.path.join(self._root, self._names[index])  # noqa: PTH118 (ten times faster)

    def content(self, index: int) -> bytes:
        return read_file(self.path(index), self.max_pixels)


def dataset_root(config: DatasetConfig) -> Path:
    """The dataset's folder.

    Raises:
        UserError: dataset.path is not set, or is not a folder.
    """
    remedy = (
        "set it to a folder with train/ and val/ class folders, or with train_list.txt "
        "and val_list.txt"
    )
    if not config.path:
        raise UserError("dataset=imagenet has no dataset.path", remedy)
    root = Path(config.path)
    if not root.is_dir():
        raise UserError(f"dataset.path={root} is not a folder", remedy)
    return root


def list_images(root: Path, split: str, num_classes: int | None) -> Listing:
    """Find the images of a split: by its list file where the folder has one, else by folders.

    The order is that of the list file, or sorted by class and name. Class folders are numbered in
    sorted order. No image is opened.

    Raises:
        UserError: something is missing, empty or contradictory; the message names the place.
    """
    if any((root / name).is_file() for name in LISTS.values()):
        return _from_lists(root, split, num_classes)
    return _from_folders(root, split, num_classes)


def _from_folders(root: Path, split: str, num_classes: int | None) -> Listing:
    classes = _classes(root, split)
    if num_classes is not None and num_classes != len(classes):
        raise UserError(
            f"{root / FOLDERS[split]} has {len(classes)} class folders, but "
            f"dataset.num_classes={num_classes}",
            "set dataset.num_classes=null to count them",
        )
    names: list[str] = []
    counts = []
    for name in classes:
        folder = f"{FOLDERS[split]}/{name}"
        found = sorted(_images_below(root, folder, set()))
        if not found:
            raise UserError(
                f"{root / folder}: the class folder has no images "
                f"({', '.join(sorted(EXTENSIONS))})",
                "add its images, or remove the folder from train/ and val/",
            )
        names += found
        counts.append(len(found))
    labels = np.repeat(np.arange(len(classes), dtype=np.int64), counts)
    return Listing(FileNames(names), labels, classes)


def _classes(root: Path, split: str) -> list[str]:
    """The class folders of a split, which must be those of the other split where there is one."""
    classes = _class_folders(root / FOLDERS[split])
    other = root / FOLDERS["eval" if split == "train" else "train"]
    if other.is_dir():
        own, others = set(classes), set(_class_folders(other))
        for only, there, missing in (
            (own - others, root / FOLDERS[split], other),
            (others - own, other, root / FOLDERS[split]),
        ):
            if only:
                raise UserError(
                    f"{there} has {len(only)} class folders that {missing} has not, such as "
                    f"{min(only)}",
                    "give both the same class folders: labels are numbered by their sorted names",
                )
    return classes


def _class_folders(folder: Path) -> list[str]:
    if not folder.is_dir():
        raise UserError(
            f"{folder}: no such folder",
            f"dataset.path needs train/ and val/ with class folders, or {LISTS['train']} "
            f"and {LISTS['eval']}",
        )
    classes = sorted(
        entry.name
        for entry in _scanned(folder)
        if not entry.name.startswith(".") and _is_folder(entry)
    )
    if not classes:
        raise UserError(
            f"{folder}: no class folders in it", "one folder per class holds its images"
        )
    for first, second in pairwise(sorted(classes, key=lambda name: (_folded(name), name))):
        if _folded(first) == _folded(second):
            raise UserError(
                f"{folder}: the class folders {first} and {second} differ only in case (or in how "
                "Unicode spells them), and are one folder on some systems",
                "rename or merge them",
            )
    return classes


def _folded(name: str) -> str:
    """What names have in common that some file systems take for one name."""
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", name).casefold())


def _images_below(root: Path, folder: str, seen: set[tuple[int, int]]) -> Iterator[str]:
    """Images in a folder and the folders in it, as names relative to the root, in no order.

    Args:
        seen: the folders read so far, by device and number: links may lead to one again, for ever.
    """
    try:
        status = (root / folder).stat()
    except OSError as error:
        raise _not_looked_at(root / folder, error) from None
    if (status.st_dev, status.st_ino) in seen:
        raise UserError(
            f"{root / folder}: leads to a folder that its class has already", "remove the link"
        )
    seen.add((status.st_dev, status.st_ino))
    for entry in _scanned(root / folder):
        if entry.name.startswith("."):
            continue
        if _is_image(entry.name):
            if _is_no_file(entry):
                raise _no_file(Path(entry.path))
            yield f"{folder}/{entry.name}"
        elif _is_folder(entry):
            yield from _images_below(root, f"{folder}/{entry.name}", seen)


def _is_no_file(entry: os.DirEntry[str]) -> bool:
    """Whether an entry is a folder, a FIFO, a device or a socket, by what its folder says of it.

    A link's target is looked at when it is read: one look at each of a million would take long.
    """
    return not entry.is_symlink() and not entry.is_file(follow_symlinks=False)


def _no_file(path: Path) -> UserError:
    return UserError(
        f"{path}: named like an image, but it is {what_is_at(path)}", "remove or rename it"
    )


def _scanned(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError as error:
        raise _not_looked_at(folder, error) from None


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError as error:  # links that lead to each other
        raise _not_looked_at(Path(entry.path), error) from None


def _not_looked_at(path: Path, error: OSError) -> UserError:
    return UserError(f"{path}: {error.strerror}", "mend it, or remove it from the dataset")


def _is_image(name: str) -> bool:
    dot = name.rfind(".")
    return dot >= 0 and name[dot:].lower() in EXTENSIONS


def _from_lists(root: Path, split: str, num_classes: int | None) -> Listing:
    path = root / LISTS[split]
    lines = read_list(path)
    if num_classes is None:
        training = root / LISTS["train"]
        counted = training if training.is_file() else root / LISTS["eval"]
        num_classes = count_classes(counted, lines if counted == path else read_list(counted))
    check_labels(path, lines, num_classes)
    names, labels = zip(*lines, strict=True)
    _check_present(root, path, names)
    classes = [str(label) for label in range(num_classes)]
    return Listing(FileNames(names), np.array(labels, np.int64), classes)


def _check_present(root: Path, path: Path, names: tuple[str, ...]) -> None:
    """One look at each folder instead of one at each file, as a file system may be far away."""
    folders: dict[str, _Entries] = {}
    for number, name in enumerate(names, 1):
        folder, file = os.path.split(name)
        if folder not in folders:
            folders[folder] = _Entries.of(root / folder)
        if file not in folders[folder].names:
            raise UserError(
                f"{root / name}: no such file; entry {number} of {path} names it",
                "the paths in a list are relative to dataset.path; mend the list or add the file",
            )
        if file in folders[folder].no_files:
            raise _no_file(root / name)


class _Entries(NamedTuple):
    """What is in a folder."""

    names: set[str]
    no_files: set[str]  # of them, see `_is_no_file`

    @classmethod
    def of(cls, folder: Path) -> _Entries:
        try:
            with os.scandir(folder) as scanned:
                entries = list(scanned)
        except OSError:
            return cls(set(), set())
        no_files = {entry.name for entry in entries if _is_no_file(entry)}
        return cls({entry.name for entry in entries}, no_files)
