"""PaddleClas's list files: a path and a label on each line, read as a stranger's."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from recipes.bounds import MOST_CLASSES
from recipes.config import UserError
from recipes.printable import printable
from recipes.reading import bytes_of

LISTS = {"train": "train_list.txt", "eval": "val_list.txt"}

_MOST_BYTES = 1 << 30  # of a list: ten million images
# A list of few of a dataset's images has gaps; one of a label that is none has a million classes.
_FEW_CLASSES, _MOST_CLASSES_AN_IMAGE = 1000, 100
_FORM = "write each line as: relative/path label"


class Line(NamedTuple):
    """One image."""

    name: str  # relative to the dataset's folder
    label: int


def read_list(path: Path) -> list[Line]:
    """The images of a list file, at least one.

    Raises:
        UserError: naming the file, the line and what is wrong with it.
    """
    if not path.exists():
        raise UserError(f"{path}: No such file or directory", "each split needs its list file")
    # With or without the byte-order mark that some editors write.
    text = bytes_of(path, _MOST_BYTES, links=True).decode("utf-8-sig", "surrogateescape")
    lines = list(_lines(path, text))
    if not lines:
        raise UserError(f"{path}: the list is empty", _FORM)
    return lines


def count_classes(path: Path, lines: Sequence[Line]) -> int:
    """How many classes a list has, by its highest label.

    Raises:
        UserError: that cannot be meant.
    """
    name, highest = max(lines, key=lambda line: line.label)
    if highest >= max(_FEW_CLASSES, _MOST_CLASSES_AN_IMAGE * len(lines)):
        raise UserError(
            f"{path}: {printable(name)} has label {highest}, which makes {highest + 1:,} classes, "
            f"but the list has {len(lines):,} images",
            "mend the list, or set dataset.num_classes",
        )
    return highest + 1


def check_labels(path: Path, lines: Sequence[Line], num_classes: int) -> None:
    """See that each label is a class's number.

    Raises:
        UserError: naming an image whose label is not.
    """
    name, highest = max(lines, key=lambda line: line.label)
    if highest >= num_classes:
        raise UserError(
            f"{path}: {printable(name)} has label {highest}, out of range: there are "
            f"{num_classes} classes (0 .. {num_classes - 1})",
            f"mend the list; classes are counted in {LISTS['train']} unless "
            "dataset.num_classes is set",
        )


def _lines(path: Path, text: str) -> Iterator[Line]:
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        name, _, label = line.strip().rpartition(" ")
        where = f"{path}, line {number}: "
        if not name or not label.isascii() or not label.isdigit():
            raise UserError(
                f"{where}{printable(repr(line.strip()), 300)} does not end in a label "
                "(a whole number from 0)",
                _FORM,
            )
        if len(label.lstrip("0")) >= len(str(MOST_CLASSES)):
            raise UserError(
                f"{where}{printable(label)} is no class's number (0 .. {MOST_CLASSES - 1})",
                "mend the list",
            )
        if "\0" in name:
            raise UserError(f"{where}{printable(name)} is no file's name", _FORM)
        if os.path.isabs(name) or ".." in name.split("/"):  # noqa: PTH117 (ten times faster)
            raise UserError(
                f"{where}{printable(name, 300)} is outside dataset.path",
                "the paths in a list are relative to dataset.path and stay below it",
            )
        yield Line(name, int(label))
