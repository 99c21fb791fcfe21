"""Prepared datasets: a few large files instead of a million small ones. Their format.

A prepared dataset is a folder::

    dataset.json          what it holds, with size and SHA-256 of the other files; written last
    train-00000.shard     images one after the other, each at a multiple of `ALIGNMENT` bytes
    train.index.npy       one `ROW` an image, in the order of the folder it was made from
    train.names           the images' names in that folder, one after the other
    eval-00000.shard …    the same of the held-out images

The folder may be copied or moved as a whole: nothing in it says where it lies.
"""

from __future__ import annotations

import errno
import hashlib
import io
import mmap
import os
import zlib
from collections.abc import Callable, Container
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recipes.config import UserError
from recipes.data.decoding import UnreadableImage
from recipes.data.description import (
    AGAIN,
    DATASET,
    VERSION,
    FileRecord,
    Manifest,
    SplitRecord,
    read_manifest,
)
from recipes.data.imagenet import FOLDERS
from recipes.data.list_files import LISTS
from recipes.printable import printable

UNFINISHED = "unfinished"  # the folder of a preparation that goes on, or was interrupted
ORDER = "order.json"  # in it: what is to be made
ALIGNMENT = 64

ROW = np.dtype(
    [
        ("offset", "<u8"),  # where the image begins in its shard, in bytes
        ("name_end", "<u8"),  # where its name ends in the file of names
        ("shard", "<u4"),
        ("length", "<u4"),  # bytes of the image, without the filling up to the next one
        ("height", "<u4"),
        ("width", "<u4"),
        ("label", "<u4"),
        ("crc32", "<u4"),  # of the image's bytes
    ]
)

_LONGEST_HEADER = 4096  # bytes of a NumPy file before its rows
SHOWN = 8  # findings listed in one message

_BLOCK = 1 << 22


class DamagedImage(UnreadableImage):
    """An image of a shard whose bytes are not those that were written."""

    remedy = f"task=prepare prepare.verify=true finds all damage; {AGAIN}"


def is_prepared(root: Path) -> bool:
    """Whether a folder is a prepared dataset, or one that is being made.

    A folder of images is not, even if somebody has put a `DATASET` of another kind beside them.
    """
    if any((root / name).exists() for name in (*FOLDERS.values(), *LISTS.values())):
        return False
    return (root / DATASET).is_file() or (root / UNFINISHED / ORDER).is_file()


def verify(root: Path, advance: Callable[[int], None]) -> Manifest:
    """Check every byte of a prepared dataset against its checksums.

    Args:
        advance: called with the number of bytes read since the call before.

    Raises:
        UserError: naming the files that differ and the images that are damaged.
    """
    manifest = read_manifest(root)
    damage: list[str] = []
    for name, split in manifest.splits.items():
        altered = {
            record.name
            for record in split.files
            if file_digest(root / record.name, advance) != record.sha256
        }
        damage += [f"{root / each}: altered (SHA-256 differs)" for each in sorted(altered)]
        if split.index.name not in altered:
            damage += ShardReader(root, manifest, name).damaged_images(altered)
    if damage:
        more = [f"and {len(damage) - SHOWN} more"] if len(damage) > SHOWN else []
        raise UserError("\n".join(damage[:SHOWN] + more), AGAIN)
    return manifest


def file_digest(path: Path, advance: Callable[[int], None]) -> str:
    """SHA-256 of a file.

    Raises:
        UserError: it cannot be read.
    """
    digest = hashlib.sha256()
    try:
        with path.open("rb") as stream:
            while block := stream.read(_BLOCK):
                digest.update(block)
                advance(len(block))
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}", AGAIN) from None
    return digest.hexdigest()


class ShardReader:
    """The images of one split, in any order, by memory maps.

    Any thread may read, and so may processes that are forked from this one: all that changes in a
    reader is which images have been checked, each on its own, which all of them know.

    Args:
        root: the prepared dataset's folder.
        manifest: of it, see `read_manifest`.
        split: "train" or "eval".

    Attributes:
        labels: int64[N].

    Raises:
        UserError: a file is missing, or the index is not the one that was written.
    """

    def __init__(self, root: Path, manifest: Manifest, split: str) -> None:
        self._root, self._raw = root, manifest.settings["format"] == "raw"
        record = manifest.splits[split]
        self._files = [root / shard.name for shard in record.shards]
        index = root / record.index.name
        self._index, rows = _read_index(index, record.index)
        # A map of a file that was cut short meanwhile would end the process at the first look.
        self._sizes = [shard.bytes for shard in record.shards]
        self._index_size, self._index_path = record.index.bytes, index
        _check_rows(root / record.index.name, rows, record, len(manifest.classes), self._raw)
        self._rows, self._names = rows, _map(root / record.names.name)
        self._mapped = [_map(path) for path in self._files]
        self._maps = [memoryview(mapped) for mapped in self._mapped]
        self._intact = np.frombuffer(mmap.mmap(-1, max(1, len(rows))), np.bool_)
        self.labels: NDArray[np.int64] = rows["label"].astype(np.int64)

    def __len__(self) -> int:
        return len(self._rows)

    def name(self, index: int) -> str:
        """An image's name in the folder that the dataset was made from."""
        start = int(self._rows["name_end"][index - 1]) if index else 0
        return os.fsdecode(self._names[start : int(self._rows["name_end"][index])])

    def place(self, index: int) -> str:
        """Where an image is, for a person."""
        return f"{self.whereabouts(index)} ({self.name(index)})"

    def whereabouts(self, index: int) -> str:
        """As `place`, by what is in memory."""
        path = self._files[int(self._rows["shard"][index])]
        return f"{path}, image {index}"

    def content(self, index: int) -> memoryview | NDArray[np.uint8]:
        """An image's file, or its pixels uint8[H, W, 3]; a read-only view of the mapped shard.

        An image is checked the first time. The check costs a fifth of what cropping raw pixels
        does, and little beside decoding a JPEG.

        Raises:
            DamagedImage: its bytes are not those that were written.
        """
        if _is_cut(self._index, self._index_size):
            raise DamagedImage(f"{self._index_path}: cut short since it was opened")
        row = self._rows[index]
        start, shard = int(row["offset"]), int(row["shard"])
        if _is_cut(self._mapped[shard], self._sizes[shard]):
            raise DamagedImage(f"{self.whereabouts(index)}: the file was cut short meanwhile")
        view = self._maps[shard][start : start + int(row["length"])]
        if not self._intact[index]:
            if zlib.crc32(view) != int(row["crc32"]):
                raise DamagedImage(f"{self.place(index)}: altered after it was written (CRC-32)")
            self._intact[index] = True
        if not self._raw:
            return view
        return np.frombuffer(view, np.uint8).reshape(int(row["height"]), int(row["width"]), 3)

    def damaged_images(self, files: Container[str]) -> list[str]:
        """What is wrong with the images in the shards of these names, one line an image."""
        suspects = [number for number, path in enumerate(self._files) if path.name in files]
        damage = []
        for index in np.flatnonzero(np.isin(self._rows["shard"], suspects)).tolist():
            try:
                self.content(index)
            except DamagedImage as error:
                damage.append(str(error))
        return damage


def _is_cut(mapped: mmap.mmap | bytes, size: int) -> bool:
    """Whether a mapped file has become shorter than it was."""
    return isinstance(mapped, mmap.mmap) and mapped.size() < size


def _read_index(path: Path, record: FileRecord) -> tuple[mmap.mmap | bytes, NDArray[Any]]:
    """The index as an array in mapped memory, which all processes of a machine share."""
    if file_digest(path, lambda _: None) != record.sha256:
        raise UserError(f"{path}: altered (SHA-256 differs from {DATASET}'s)", AGAIN)
    mapped = _map(path)
    try:
        return mapped, rows_in(mapped)
    except ValueError as error:
        raise UserError(f"{path}: not an index: {printable(error, 200)}", AGAIN) from None


def rows_in(content: mmap.mmap | bytes) -> NDArray[Any]:
    """The rows of an index, as a view of its content.

    Raises:
        ValueError: it is none.
    """
    header = io.BytesIO(content[:_LONGEST_HEADER])
    try:
        version = np.lib.format.read_magic(header)
        shape, _, dtype = np.lib.format.read_array_header_1_0(header)
    except Exception as error:  # NumPy's parser of headers is Python's
        raise ValueError(str(error)) from None
    if version != (1, 0) or dtype != ROW or len(shape) != 1:
        raise ValueError(f"no rows of format version {VERSION}")
    return np.frombuffer(content, ROW, shape[0], header.tell())


def _check_rows(
    path: Path, rows: NDArray[Any], record: SplitRecord, classes: int, raw: bool
) -> None:
    """See that every row lies within the files that ``dataset.json`` names."""
    sizes = np.array([shard.bytes for shard in record.shards], np.uint64)
    if len(rows) != record.images:
        raise UserError(f"{path}: {len(rows)} images, but {DATASET} says {record.images}", AGAIN)
    known = rows["shard"] < len(sizes)
    problems = {
        f"is in a shard that {DATASET} does not name": ~known,
        f"has a label beyond the {classes} classes": rows["label"] >= classes,
    }
    if known.all() and len(rows):
        room, length = sizes[rows["shard"]], rows["length"].astype(np.uint64)
        # Without a sum, which could pass 2**64.
        beyond = (length > room) | (rows["offset"] > room - np.minimum(length, room))
        problems["ends behind its shard's end"] = beyond
    starts = np.concatenate([np.zeros(1, np.uint64), rows["name_end"][:-1]])
    problems["has no name"] = (rows["name_end"] < starts) | (rows["name_end"] > record.names.bytes)
    if raw:
        pixels = rows["height"].astype(np.uint64) * rows["width"].astype(np.uint64)
        # Without a product that could pass 2**64.
        whole = (pixels == rows["length"] // 3) & (rows["length"] % 3 == 0) & (pixels > 0)
        problems["has another size than its pixels"] = ~whole
    for problem, where in problems.items():
        if where.any():
            raise UserError(f"{path}: image {int(np.argmax(where))} {problem}", AGAIN)


def _map(path: Path) -> mmap.mmap | bytes:
    """A file's bytes, mapped into memory for reading in any order."""
    try:
        with path.open("rb") as stream:
            if os.fstat(stream.fileno()).st_size == 0:
                return b""  # which cannot be mapped
            return mmap.mmap(stream.fileno(), 0, prot=mmap.PROT_READ)
    except OSError as error:
        raise UserError(
            f"{path}: cannot be mapped: {error.strerror}",
            "raise the limit of open files (ulimit -n), or prepare with a larger prepare.shard_mib"
            if error.errno == errno.EMFILE
            else AGAIN,
        ) from None
