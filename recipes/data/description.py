"""What a prepared dataset says of itself: ``dataset.json``, read as a stranger's.

Its checksum says that nobody has changed it by mistake, and not who has written it.
"""

from __future__ import annotations

import hashlib
import json
import re
import stat
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from recipes.bounds import MOST_CLASSES
from recipes.config import UserError
from recipes.data.build import SPLITS
from recipes.forms import Malformed, a_list, a_text, an_integer, of_form
from recipes.printable import printable
from recipes.reading import bytes_of

VERSION = 1
KIND = "fleet-recipes prepared dataset"
DATASET = "dataset.json"
FORMATS = ("jpeg", "raw")

AGAIN = "copy the prepared dataset again, or remove it and make it again with task=prepare"

_MOST_BYTES = 1 << 25
_LONGEST_NAME = 4096  # characters
_SHA256 = re.compile(r"[0-9a-f]{64}")


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
    if not path.exists():
        raise UserError(
            f"{path}: missing: the preparation of this dataset has not ended",
            "run the same task=prepare command again: it goes on where it was",
        )
    try:
        content = json.loads(bytes_of(path, _MOST_BYTES, links=True))
    except UserError as error:
        raise UserError(error.message, AGAIN) from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: cannot be read: {printable(error, 200)}", AGAIN) from None
    if not isinstance(content, dict) or content.get("kind") != KIND:
        raise UserError(f"{path}: not the description of a prepared dataset", AGAIN)
    version, checksum = content.get("version"), content.get("checksum")
    if version != VERSION:
        raise UserError(
            f"{path}: format version {printable(version)}, this version of the recipes reads "
            f"{VERSION}",
            "use the version of the recipes that made it, or make it again with task=prepare",
        )
    unsigned = {**content, "checksum": ""}
    if hashlib.sha256(canonical(unsigned)).hexdigest() != checksum:
        raise UserError(
            f"{path}: it was changed after it was written (its own checksum differs)", AGAIN
        )
    try:
        return _manifest(content)
    except Malformed as fault:
        raise UserError(f"{path}: not a description of this format: {fault}", AGAIN) from None


def _manifest(content: dict[str, Any]) -> Manifest:
    form = {
        "classes": _classes,
        "settings": _settings,
        "source": _source,
        "made_with": _made_with,
        "splits": _splits,
        "checksum": _digest,
    }
    return Manifest(**of_form(content, form))


def _classes(value: Any) -> list[str]:
    names = [a_text(_LONGEST_NAME)(name) for name in a_list(value)]
    if not 0 < len(names) <= MOST_CLASSES:
        raise Malformed(f"not 1 to {MOST_CLASSES} names")
    return names


def _settings(value: Any) -> dict[str, Any]:
    form = {
        "short_side": _a_count,
        "format": _a_format,
        "quality": _a_count,
        "chroma": a_text(20),
        "shard_mib": _a_size,
    }
    return of_form(value, form)


def _source(value: Any) -> dict[str, Any]:
    listing = {"images": _a_count, "listing": _digest}
    form = {"kind": a_text(100), "classes": _a_count}
    splits = {split: lambda each: of_form(each, listing) for split in SPLITS}
    return of_form(value, form | splits)


def _made_with(value: Any) -> dict[str, str]:
    if not isinstance(value, dict):
        raise Malformed("no object")
    return {str(name): a_text(100)(version) for name, version in value.items()}


def _splits(value: Any) -> dict[str, SplitRecord]:
    return {
        split: _split(split, content)
        for split, content in of_form(value, dict.fromkeys(SPLITS, _anything)).items()
    }


def _split(split: str, value: Any) -> SplitRecord:
    form = {
        "images": _a_count,
        "kept": _a_count,
        "source_bytes": _a_count,
        "skipped": _names,
        "index": lambda each: file_record(each, index_name(split)),
        "names": lambda each: file_record(each, names_name(split)),
        "shards": lambda each: [
            file_record(shard, shard_name(split, number))
            for number, shard in enumerate(a_list(each))
        ],
    }
    return SplitRecord(**of_form(value, form))


def file_record(value: Any, name: str) -> FileRecord:
    """The record of the file that has this name, and so lies in the dataset's folder.

    Raises:
        Malformed: it is none, or of another file.
    """
    form = {"name": a_text(_LONGEST_NAME), "bytes": _a_count, "sha256": _digest}
    record = FileRecord(**of_form(value, form))
    if record.name != name:
        raise Malformed(f"name: {printable(record.name)}, where {name} has to be")
    return record


def _names(value: Any) -> list[str]:
    return [a_text(_LONGEST_NAME)(name) for name in a_list(value)]


def _anything(value: Any) -> Any:
    return value


def _a_count(value: Any) -> int:
    if an_integer(value) < 0:
        raise Malformed("less than 0")
    return int(value)


def _a_format(value: Any) -> str:
    if value not in FORMATS:
        raise Malformed(f"none of {', '.join(FORMATS)}")
    return str(value)


def _a_size(value: Any) -> float:
    if type(value) not in (int, float) or not 0 < value < 2**40:
        raise Malformed("no size")
    return float(value)


def _digest(value: Any) -> str:
    if not isinstance(value, str) or not _SHA256.fullmatch(value):
        raise Malformed("no SHA-256")
    return value


def _check_size(path: Path, record: FileRecord) -> None:
    try:
        status = path.stat()
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; {DATASET} names it", AGAIN) from None
    if not stat.S_ISREG(status.st_mode):
        raise UserError(f"{path}: no file; {DATASET} names it", AGAIN)
    if status.st_size != record.bytes:
        raise UserError(
            f"{path}: it has {status.st_size} bytes, {DATASET} says {record.bytes}", AGAIN
        )
