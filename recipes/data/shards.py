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
import json
import mmap
import os
import zlib
from collections.abc import Callable, Container, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recipes.config import UserError
from recipes.data.decoding import UnreadableImage
from recipes.data.imagenet import FOLDERS
from recipes.data.list_files import LISTS

VERSION = 1
KIND = "fleet-recipes prepared dataset"
DATASET = "dataset.json"
UNFINISHED = "unfinished"  # the folder of a preparation that goes on, or was interrupted
ORDER = "order.json"  # in it: what is to be made
ALIGNMENT = 64
FORMATS = ("jpeg", "raw")

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

AGAIN = "copy the prepared dataset again, or remove it and make it again with task=prepare"

SHOWN = 8  # findings listed in one message

_BLOCK = 1 << 22


class DamagedImage(UnreadableImage):
    """An image of a shard whose bytes are not those that were written."""

    remedy = f"task=prepare prepare.verify=true finds all damage; {AGAIN}"


@dataclass(frozen=True)
class FileRecord:
    """One file of a prepared dataset."""

    name: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class SplitRecord:
    """One split of a prepared dataset."""

    images: int
    kept: int  # of them, as they were in the source
    source_bytes: int  # of the images in the source
    skipped: list[str]  # names of source images that could not be read
    index: FileRecord
    names: FileRecord
    shards: list[FileRecord]

    @property
    def files(self) -> list[FileRecord]:
        """All files of the split."""
        return [self.index, self.names, *self.shards]


@dataclass(frozen=True)
class Manifest:
    """What ``dataset.json`` says.

    Attributes:
        classes: one name per label.
        settings: how images were converted: ``short_side``, ``quality``, ``format``, ``chroma``,
            ``shard_mib``.
        source: ``kind`` of the folder it was made from and, by split, the ``listing``: SHA-256 of
            names and labels.
        made_with: versions of the packages that decoded, resized and encoded.
        splits: "train" and "eval".
        checksum: SHA-256 of all this; it stands for the whole dataset.
    """

    classes: list[str]
    settings: dict[str, Any]
    source: dict[str, Any]
    made_with: dict[str, str]
    splits: dict[str, SplitRecord]
    checksum: str = ""

    def encode(self) -> bytes:
        """The content of ``dataset.json``, with the checksum of itself."""
        content = {"kind": KIND, "version": VERSION, **asdict(self)}
        content["checksum"] = ""
        content["checksum"] = hashlib.sha256(canonical(content)).hexdigest()
        return canonical(content)


def canonical(content: Mapping[str, Any]) -> bytes:
    """JSON in the one form that checksums are taken of."""
    return (json.dumps(content, indent=1, sort_keys=True) + "\n").encode()


def shard_name(split: str, number: int) -> str:
    """The file name of a shard."""
    return f"{split}-{number:05}.shard"


def index_name(split: str) -> str:
    """The file name of a split's index."""
    return f"{split}.index.npy"


def names_name(split: str) -> str:
    """The file name of a split's image names."""
    return f"{split}.names"


def is_prepared(root: Path) -> bool:
    """Whether a folder is a prepared dataset, or one that is being made.

    A folder of images is not, even if somebody has put a `DATASET` of another kind beside them.
    """
    if any((root / name).exists() for name in (*FOLDERS.values(), *LISTS.values())):
        return False
    return (root / DATASET).is_file() or (root / UNFINISHED / ORDER).is_file()


def read_manifest(root: Path) -> Manifest:
    """Read ``dataset.json``, and check that every file it names is there and has its size.

    Raises:
        UserError: naming the file and what is wrong with it.
    """
    manifest = _parse(root / DATASET)
    for split in manifest.splits.values():
        for record in split.files:
            _check_size(root / record.name, record)
    return manifest


def _parse(path: Path) -> Manifest:
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise UserError(
            f"{path}: missing: the preparation of this dataset has not ended",
            "run the same task=prepare command again: it goes on where it was",
        ) from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read: {error}", AGAIN) from None
    if not isinstance(content, dict) or content.pop("kind", None) != KIND:
        raise UserError(f"{path}: not the description of a prepared dataset", AGAIN)
    version, checksum = content.pop("version", None), content.get("checksum")
    if version != VERSION:
        raise UserError(
            f"{path}: format version {version}, this version of the recipes reads {VERSION}",
            "use the version of the recipes that made it, or make it again with task=prepare",
        )
    unsigned = {**content, "kind": KIND, "version": version, "checksum": ""}
    if hashlib.sha256(canonical(unsigned)).hexdigest() != checksum:
        raise UserError(
            f"{path}: it was changed after it was written (its own checksum differs)", AGAIN
        )
    try:
        splits = {name: _split_record(split) for name, split in content.pop("splits").items()}
        return Manifest(**content, splits=splits)
    except (TypeError, KeyError, AttributeError) as error:
        raise UserError(f"{path}: not a description of this format: {error}", AGAIN) from None


def _split_record(content: dict[str, Any]) -> SplitRecord:
    return SplitRecord(
        images=content["images"],
        kept=content["kept"],
        source_bytes=content["source_bytes"],
        skipped=content["skipped"],
        index=FileRecord(**content["index"]),
        names=FileRecord(**content["names"]),
        shards=[FileRecord(**shard) for shard in content["shards"]],
    )


def _check_size(path: Path, record: FileRecord) -> None:
    try:
        size = path.stat().st_size
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; {DATASET} names it", AGAIN) from None
    if size != record.bytes:
        raise UserError(f"{path}: it has {size} bytes, {DATASET} says {record.bytes}", AGAIN)


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
        rows = _read_index(root / record.index.name, record.index)
        _check_rows(root / record.index.name, rows, record, len(manifest.classes), self._raw)
        self._rows, self._names = rows, _map(root / record.names.name)
        self._maps = [memoryview(_map(path)) for path in self._files]
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
        row = self._rows[index]
        start = int(row["offset"])
        view = self._maps[int(row["shard"])][start : start + int(row["length"])]
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


def _read_index(path: Path, record: FileRecord) -> NDArray[Any]:
    """The index as an array in mapped memory, which all processes of a machine share."""
    if file_digest(path, lambda _: None) != record.sha256:
        raise UserError(f"{path}: altered (SHA-256 differs from {DATASET}'s)", AGAIN)
    try:
        rows = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: not an index: {error}", AGAIN) from None
    if rows.dtype != ROW or rows.ndim != 1:
        raise UserError(f"{path}: not an index of format version {VERSION}", AGAIN)
    return np.asarray(rows)


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
    starts = np.concatenate([[0], rows["name_end"][:-1]]).astype(np.uint64)
    problems["has no name"] = (rows["name_end"] < starts) | (rows["name_end"] > record.names.bytes)
    if raw:
        pixels = rows["height"].astype(np.uint64) * rows["width"].astype(np.uint64)
        problems["has another size than its pixels"] = pixels * 3 != rows["length"]
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
