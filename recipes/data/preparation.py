"""``task=prepare``: a folder of images to a prepared dataset, in parallel and resumable.

Threads read and convert images; this one writes them in order, so the shards do not depend on how
many threads there are. A finished shard is put on record in the folder ``unfinished``; whoever
starts again goes on behind the last record. See `recipes.data.shards` for the format.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import math
import os
import shutil
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import cv2
import numpy as np
import PIL
import simplejpeg
from numpy.typing import NDArray

from recipes import file_lock
from recipes.config import Config, UserError
from recipes.cores import usable_cores
from recipes.data.build import SPLITS
from recipes.data.conversion import Conversion, Stored, convert
from recipes.data.decoding import MAX_PIXELS, UnreadableImage, read_file
from recipes.data.description import (
    DATASET,
    FileRecord,
    Manifest,
    SplitRecord,
    canonical,
    file_record,
    index_name,
    names_name,
    read_manifest,
    shard_name,
)
from recipes.data.imagenet import Listing, dataset_root, list_images
from recipes.data.in_hand import InHand, Patience, Source, read_seconds
from recipes.data.jpeg import Scratch
from recipes.data.list_files import LISTS
from recipes.data.photographs import remarks_on
from recipes.data.reading_threads import ReadingThreads
from recipes.data.shards import ALIGNMENT, ORDER, ROW, UNFINISHED, is_prepared, rows_in, verify
from recipes.disk import sync_folder
from recipes.forms import Malformed, a_list, an_integer, of_form
from recipes.printable import printable
from recipes.progress import StepDisplay
from recipes.reading import bytes_of, json_of

_MOST_ROWS_BYTES = 1 << 32  # of a shard
_LOCK = "lock"
_MIB = 1 << 20
_WINDOW = 8  # images of each thread that may wait to be written
_SECONDS_BETWEEN_LINES = 30.0  # of progress in a log
_SECONDS_BETWEEN_DRAWINGS = 0.2


@dataclass(frozen=True)
class Order:
    """What is to be made; a preparation goes on only with the order that it began with."""

    settings: dict[str, Any]
    source: dict[str, Any]
    made_with: dict[str, str]

    def encode(self) -> bytes:
        """As kept in the folder of an unfinished preparation."""
        return canonical(asdict(self))


class Converted(NamedTuple):
    """A converted image, on its way to a shard."""

    stored: Stored
    crc32: int
    source_bytes: int
    kept: bool


@dataclass
class ShardRecord:
    """A finished shard, beside which lie the rows of its images.

    Attributes:
        first, next: numbers of the source images that it covers: first, first + 1, …, next - 1.
        skipped: those of them that could not be read.
        source_bytes: size of the others in the source.
        kept: how many are stored as they were.
    """

    file: FileRecord
    first: int
    next: int
    skipped: list[int]
    source_bytes: int
    kept: int

    @property
    def images(self) -> int:
        """How many it holds."""
        return self.next - self.first - len(self.skipped)

    @classmethod
    def read(cls, path: Path, name: str) -> ShardRecord:
        """As written to `path`, of the shard that has this name.

        Raises:
            UserError, Malformed: it is none.
        """
        form = {
            "file": lambda value: file_record(value, name),
            **dict.fromkeys(("first", "next", "source_bytes", "kept"), an_integer),
            "skipped": lambda value: [an_integer(number) for number in a_list(value)],
        }
        return cls(**of_form(json_of(path), form))


@dataclass(frozen=True)
class Preparation:
    """The task, with all that it depends on.

    Attributes:
        source, output: folders.
        shard_bytes: a shard ends before the image that would make it larger.
        workers: threads that convert.
        max_skipped: of images that cannot be read; None: the first one ends it.
        num_classes: see `list_images`.
        deadline: seconds for one image.
        max_pixels: of a source image.
    """

    source: Path
    output: Path
    conversion: Conversion
    shard_bytes: int
    workers: int
    max_skipped: int | None
    num_classes: int | None = None
    deadline: float = math.inf
    max_pixels: int = MAX_PIXELS

    @property
    def unfinished(self) -> Path:
        """The folder of records while the preparation goes on."""
        return self.output / UNFINISHED


def prepare_or_verify(config: Config, display: StepDisplay, log: Callable[[str], None]) -> None:
    """Run ``task=prepare`` as configured.

    Raises:
        UserError: with the file and the remedy.
    """
    root = dataset_root(config.dataset)
    if config.prepare.verify:
        verify_prepared(root, display, log)
        return
    assert config.prepare.output is not None
    skip = config.dataset.on_corrupt == "skip"
    prepare_shards(
        Preparation(
            source=root,
            output=Path(config.prepare.output),
            conversion=Conversion(
                config.prepare.short_side,
                config.prepare.format,
                config.prepare.quality,
                config.prepare.chroma,
            ),
            shard_bytes=int(config.prepare.shard_mib * _MIB),
            workers=config.prepare.workers or usable_cores(),
            max_skipped=config.dataset.max_skipped if skip else None,
            num_classes=config.dataset.num_classes,
            deadline=read_seconds(config.deadlines),
            max_pixels=config.dataset.max_pixels,
        ),
        display,
        log,
    )


def verify_prepared(root: Path, display: StepDisplay, log: Callable[[str], None]) -> None:
    """Read a whole prepared dataset and check every byte.

    Raises:
        UserError: naming what differs.
    """
    if not is_prepared(root):
        raise UserError(
            f"dataset.path={root} is not a prepared dataset (no {DATASET})",
            "task=prepare prepare.output=FOLDER makes one of it",
        )
    manifest = read_manifest(root)
    files = [record for split in manifest.splits.values() for record in split.files]
    progress = _Progress(display, log, "MiB verified")
    progress.start(sum(record.bytes for record in files) // _MIB, 0)
    read = 0

    def advance(count: int) -> None:
        nonlocal read
        read += count
        progress.advance(read // _MIB)

    try:
        verify(root, advance)
    finally:
        progress.stop()
    log(f"{root}: {len(files)} files verified, {read / 1e9:.3g} GB: all as they were written")


def prepare_shards(
    preparation: Preparation, display: StepDisplay, log: Callable[[str], None]
) -> Manifest:
    """Make a prepared dataset, or go on with one that was interrupted.

    Raises:
        UserError: the source or the output cannot be used, an image cannot be read, or the disk
            is full; what is done so far stays, and counts when it is started again.
    """
    _refuse_unfit_folders(preparation)
    try:
        listings = {
            split: list_images(preparation.source, split, preparation.num_classes)
            for split in SPLITS
        }
        order = _order(preparation, listings)
        done = _finished(preparation, order)
        if done is not None:
            log(
                f"{preparation.output} is prepared already: {_summary(preparation, done)}\n"
                "(not looked into: dataset.path=… prepare.verify=true checks its files; a source "
                "whose images have other contents under the same names is prepared anew after "
                "removing it)"
            )
            return done
        for remark in remarks_on(listings["train"].labels, listings["train"].classes):
            log(f"warning: {remark}")
        with _claimed(preparation, order):
            manifest = _make(preparation, order, listings, display, log)
    except OSError as error:
        raise _write_error(error, preparation) from error
    log(f"prepared {preparation.output}: {_summary(preparation, manifest)}")
    return manifest


def _refuse_unfit_folders(preparation: Preparation) -> None:
    source, output = preparation.source.resolve(), preparation.output.resolve()
    if is_prepared(source):
        raise UserError(
            f"dataset.path={preparation.source} is a prepared dataset already",
            "name the folder of the original images, or check this one with prepare.verify=true",
        )
    if output == source or source in output.parents:
        raise UserError(
            f"prepare.output={preparation.output} lies in dataset.path={preparation.source}",
            "choose a folder of its own",
        )


def _order(preparation: Preparation, listings: dict[str, Listing]) -> Order:
    lists = any((preparation.source / name).is_file() for name in LISTS.values())
    return Order(
        settings={**asdict(preparation.conversion), "shard_mib": preparation.shard_bytes / _MIB},
        source={
            "kind": "list files" if lists else "class folders",
            "classes": len(listings["train"].classes),
            **{split: _listing_facts(listing) for split, listing in listings.items()},
        },
        made_with={
            "pillow": PIL.__version__,
            "opencv": cv2.__version__,
            "simplejpeg": simplejpeg.__version__,
        },
    )


def _listing_facts(listing: Listing) -> dict[str, Any]:
    digest = hashlib.sha256("\n".join(listing.classes).encode(errors="surrogateescape"))
    for number in range(len(listing.names)):
        digest.update(b"\0" + os.fsencode(listing.names[number]))
    digest.update(listing.labels.astype("<i8").tobytes())
    return {"images": len(listing.names), "listing": digest.hexdigest()}


def _finished(preparation: Preparation, order: Order) -> Manifest | None:
    """What was made by this order before, if it was.

    Raises:
        UserError: something else is in the folder.
    """
    output = preparation.output
    if not (output / DATASET).is_file():
        return None
    manifest = read_manifest(output)
    made = Order(manifest.settings, manifest.source, order.made_with)
    _refuse_other_order(output, made, order)
    shutil.rmtree(preparation.unfinished, ignore_errors=True)
    return manifest


def _refuse_other_order(output: Path, theirs: Order, ours: Order) -> None:
    differences = []
    for name, before, now in (
        ("prepare", theirs.settings, ours.settings),
        ("source", theirs.source, ours.source),
        ("package", theirs.made_with, ours.made_with),
    ):
        differences += [
            f"  {name}.{key}: {_shown(before.get(key))} there, {_shown(value)} now"
            for key, value in now.items()
            if before.get(key) != value
        ]
    if differences:
        raise UserError(
            f"{output} holds what was prepared in another way:\n" + "\n".join(differences),
            "use the same settings and source, choose another prepare.output, or remove the folder",
        )


def _shown(value: Any) -> str:
    """A setting, or the facts of a listing, in a message."""
    if isinstance(value, dict):
        listing = printable(value.get("listing"), 12)
        return f"{printable(value.get('images'))} images (names and labels {listing})"
    return printable(value)


@contextlib.contextmanager
def _claimed(preparation: Preparation, order: Order) -> Iterator[None]:
    """Hold the output folder: no other process may prepare into it meanwhile.

    Raises:
        UserError: another one does, or the folder holds something else.
    """
    output, unfinished = preparation.output, preparation.unfinished
    output.mkdir(parents=True, exist_ok=True)
    foreign = sorted(path.name for path in output.iterdir() if path.name != UNFINISHED)
    if foreign and not (unfinished / ORDER).is_file():
        raise UserError(
            f"prepare.output={output} holds other files, such as {foreign[0]}",
            "choose a new or an empty folder",
        )
    unfinished.mkdir(exist_ok=True)
    with (unfinished / _LOCK).open("w") as lock:
        if not file_lock.taken(lock.fileno(), str(output)):
            raise UserError(f"another process is preparing {output}", "wait for it, or end it")
        if (unfinished / ORDER).is_file():
            theirs = _read_order(unfinished / ORDER)
            _refuse_other_order(output, theirs, order)
        else:
            _write_whole(unfinished / ORDER, order.encode())
        yield


def _read_order(path: Path) -> Order:
    """What a preparation that has not ended was begun with."""
    form = {"settings": _an_object, "source": _an_object, "made_with": _an_object}
    try:
        return Order(**of_form(json_of(path), form))
    except (UserError, Malformed) as error:
        raise UserError(
            f"{path}: not as a preparation leaves it: {printable(error, 200)}",
            f"remove {path.parent.parent} and begin again, or choose another prepare.output",
        ) from None


def _an_object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise Malformed("no object")
    return value


def _make(
    preparation: Preparation,
    order: Order,
    listings: dict[str, Listing],
    display: StepDisplay,
    log: Callable[[str], None],
) -> Manifest:
    splits = [_Split(preparation, split, listings[split]) for split in SPLITS]
    skipped = _SkippedImages(preparation.max_skipped, log)
    for split in splits:
        split.resume()
        skipped.count += sum(len(record.skipped) for record in split.records)
    progress = _Progress(display, log, "images")
    done = sum(split.done for split in splits)
    if done:
        log(f"going on with {preparation.output} after {done} images")
    progress.start(sum(split.size for split in splits), done)
    cv2.setNumThreads(1)  # the threads are ours
    in_hand = InHand()
    pool = ReadingThreads(preparation.workers, "prepare", "prepare.workers", in_hand.number_reader)
    try:
        for split in splits:
            for _ in split.write_shards(pool, in_hand, skipped):
                progress.advance(sum(each.done for each in splits))
    finally:
        pool.close()
        progress.stop()
    manifest = Manifest(
        classes=listings["train"].classes,
        **asdict(order),
        splits={split.name: split.finish() for split in splits},
    )
    _write_whole(preparation.output / DATASET, manifest.encode())
    shutil.rmtree(preparation.unfinished)
    return read_manifest(preparation.output)


class _Split:
    """One split on its way into shards."""

    def __init__(self, preparation: Preparation, name: str, listing: Listing) -> None:
        self.name, self.size = name, len(listing.names)
        self.records: list[ShardRecord] = []
        self.done = 0  # source images whose fate is known
        self._listing, self._preparation = listing, preparation
        self._own = threading.local()

    def resume(self) -> None:
        """Take over the shards on record."""
        while (record := self._recorded(len(self.records))) and record.first == self.done:
            self.records.append(record)
            self.done = record.next

    def write_shards(
        self, pool: ReadingThreads, in_hand: InHand, skipped: _SkippedImages
    ) -> Iterator[None]:
        """Write what is not on record, yielding after each image.

        Raises:
            UserError: an image cannot be read, and may not be skipped, or not in time.
            OSError: a file cannot be written.
        """
        if self.done == self.size:
            return
        shard = self._new_shard()
        try:
            numbers = range(self.done, self.size)
            for number, image in zip(numbers, self._converted(pool, in_hand, numbers), strict=True):
                if isinstance(image, UnreadableImage):
                    skipped.add(image)
                    shard.skipped.append(number)
                else:
                    if shard.rows and shard.size + len(image.stored.content) > self._limit:
                        self._close(shard, number)
                        shard = self._new_shard()
                    shard.add(image, int(self._listing.labels[number]))
                self.done = number + 1
                yield
            self._close(shard, self.size)
        finally:
            shard.stream.close()

    def finish(self) -> SplitRecord:
        """Write the index and the names.

        Raises:
            UserError: there are no images.
        """
        parts = [self._rows(number) for number in range(len(self.records))]
        rows = np.concatenate(parts)
        if not len(rows):
            raise UserError(f"no image of {self.name} could be read", "see the images named above")
        left_out = {number for record in self.records for number in record.skipped}
        names = [
            os.fsencode(self._listing.names[number])
            for number in range(self.size)
            if number not in left_out
        ]
        rows["name_end"] = np.cumsum([len(name) for name in names])
        output = self._preparation.output
        return SplitRecord(
            images=len(rows),
            kept=sum(record.kept for record in self.records),
            source_bytes=sum(record.source_bytes for record in self.records),
            skipped=[self._listing.names[number] for number in sorted(left_out)],
            index=_write_whole(output / index_name(self.name), _npy(rows)),
            names=_write_whole(output / names_name(self.name), b"".join(names)),
            shards=[record.file for record in self.records],
        )

    @property
    def _limit(self) -> int:
        return self._preparation.shard_bytes

    def _recorded(self, number: int) -> ShardRecord | None:
        """A shard on record, if it and its rows are there; else it is made again."""
        try:
            record = ShardRecord.read(self._record_path(number), shard_name(self.name, number))
            size = (self._preparation.output / record.file.name).stat().st_size
            described = len(self._rows(number)) == record.images
        except (FileNotFoundError, UserError, ValueError):
            return None
        fits = self.done < record.next <= self.size
        return record if size == record.file.bytes and described and fits else None

    def _record_path(self, number: int) -> Path:
        return self._preparation.unfinished / f"{self.name}-{number:05}.json"

    def _rows(self, number: int) -> NDArray[Any]:
        return rows_in(bytes_of(self._rows_path(number), _MOST_ROWS_BYTES))

    def _rows_path(self, number: int) -> Path:
        return self._preparation.unfinished / f"{self.name}-{number:05}.npy"

    def _new_shard(self) -> _Shard:
        name = shard_name(self.name, len(self.records))
        stream = (self._preparation.unfinished / name).open("wb")
        return _Shard(stream, len(self.records), self.done)

    def _close(self, shard: _Shard, following: int) -> None:
        """Put a shard in its place and on record, the record last."""
        number = len(self.records)
        name = shard_name(self.name, number)
        _sync_and_close(shard.stream)
        _write_whole(self._rows_path(number), _npy(np.array(shard.rows, ROW)))
        (self._preparation.unfinished / name).replace(self._preparation.output / name)
        sync_folder(self._preparation.output)
        record = ShardRecord(
            file=FileRecord(name, shard.size, shard.digest.hexdigest()),
            first=shard.first,
            next=following,
            skipped=shard.skipped,
            source_bytes=shard.source_bytes,
            kept=shard.kept,
        )
        _write_whole(self._record_path(number), canonical(asdict(record)))
        self.records.append(record)

    def _converted(
        self, pool: ReadingThreads, in_hand: InHand, numbers: Iterable[int]
    ) -> Iterator[Converted | UnreadableImage]:
        """Convert in the pool's threads, a few images ahead; in order."""
        waiting: deque[Future[Converted | UnreadableImage]] = deque()
        patience = Patience(
            [Source(in_hand, self._path)], self._preparation.deadline, pool.leave_behind
        )
        for number in numbers:
            waiting.append(pool.submit(self._convert, number, in_hand))
            if len(waiting) >= _WINDOW * self._preparation.workers:
                yield patience.result(waiting.popleft())
        while waiting:
            yield patience.result(waiting.popleft())

    def _path(self, number: int) -> str:
        return str(self._preparation.source / self._listing.names[number])

    def _convert(self, number: int, in_hand: InHand) -> Converted | UnreadableImage:
        path = self._path(number)
        in_hand.take(number)
        try:
            most = self._preparation.max_pixels
            content = read_file(path, most)
            stored = convert(content, path, self._preparation.conversion, self._scratch(), most)
        except UnreadableImage as error:
            return error
        finally:
            in_hand.put_down()
        return Converted(
            stored, zlib.crc32(stored.content), len(content), stored.content is content
        )

    def _scratch(self) -> Scratch:
        """This thread's own."""
        if not hasattr(self._own, "scratch"):
            self._own.scratch = Scratch()
        scratch: Scratch = self._own.scratch
        return scratch


@dataclass
class _Shard:
    """A shard that is being written."""

    stream: BinaryIO
    number: int
    first: int
    size: int = 0
    rows: list[tuple[int, ...]] = field(default_factory=list)
    skipped: list[int] = field(default_factory=list)
    source_bytes: int = 0
    kept: int = 0
    digest: Any = field(default_factory=hashlib.sha256)

    def add(self, image: Converted, label: int) -> None:
        """Append an image, and fill up to where the next one begins."""
        content, height, width = image.stored
        self.rows.append(
            (self.size, 0, self.number, len(content), height, width, label, image.crc32)
        )
        for part in (content, bytes(-len(content) % ALIGNMENT)):
            self.stream.write(part)
            self.digest.update(part)
            self.size += len(part)
        self.source_bytes += image.source_bytes
        self.kept += image.kept


@dataclass
class _SkippedImages:
    """Counts the images that cannot be read, over both splits."""

    limit: int | None
    log: Callable[[str], None]
    count: int = 0

    def add(self, error: UnreadableImage) -> None:
        """Leave out one image more.

        Raises:
            UserError: it may not be left out.
        """
        if self.limit is None:
            raise UserError(str(error), f"{error.remedy}, or set dataset.on_corrupt=skip")
        self.count += 1
        if self.count > self.limit:
            raise UserError(
                f"{self.count} images could not be read, more than dataset.max_skipped="
                f"{self.limit}; the last: {error}",
                "mend the files, or raise dataset.max_skipped",
            )
        self.log(f"left out {error}")


class _Progress:
    """Shows progress on a terminal, or a line now and then in a log."""

    def __init__(self, display: StepDisplay, log: Callable[[str], None], what: str) -> None:
        self._display, self._log, self._what = display, log, what
        self._total, self._first = 0, 0
        self._began = self._told = self._drawn = time.monotonic()

    def start(self, total: int, done: int) -> None:
        """Begin with `done` of `total`."""
        self._total, self._first = total, done
        self._display.start(total, done)

    def advance(self, done: int) -> None:
        """`done` are done."""
        now = time.monotonic()
        if now - self._drawn >= _SECONDS_BETWEEN_DRAWINGS:
            self._drawn = now
            self._display.advance(done)
        if now - self._told >= _SECONDS_BETWEEN_LINES:
            self._told = now
            rate = (done - self._first) / (now - self._began)
            self._log(f"{done:,} of {self._total:,} {self._what}, {rate:,.0f}/s")

    def stop(self) -> None:
        """Leave the terminal as it was."""
        self._display.stop()


def _summary(preparation: Preparation, manifest: Manifest) -> str:
    splits = [manifest.splits[name] for name in SPLITS]
    images = sum(split.images for split in splits)
    stored = sum(record.bytes for split in splits for record in split.files)
    before = sum(split.source_bytes for split in splits)
    skipped = sum(len(split.skipped) for split in splits)
    counts = " and ".join(f"{manifest.splits[name].images:,} {name}" for name in SPLITS)
    return (
        f"{counts} images, {stored / 1e6:,.1f} MB or {stored / images / 1e3:.1f} kB an image "
        f"(the source has {before / images / 1e3:.1f} kB); {sum(s.kept for s in splits):,} kept as "
        f"they were, {skipped:,} left out\n"
        f"train on it with dataset=imagenet dataset.path={preparation.output}"
    )


def _npy(array: np.ndarray) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array, allow_pickle=False)
    return stream.getvalue()


def _write_whole(path: Path, data: bytes) -> FileRecord:
    """Write a file so that it is there whole or not at all, also after a power cut."""
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("wb") as stream:
        stream.write(data)
        _sync_and_close(stream)
    partial.replace(path)
    sync_folder(path.parent)
    return FileRecord(path.name, len(data), hashlib.sha256(data).hexdigest())


def _sync_and_close(stream: BinaryIO) -> None:
    stream.flush()
    os.fsync(stream.fileno())
    stream.close()


def _write_error(error: OSError, preparation: Preparation) -> UserError:
    full = {errno.ENOSPC: "the disk is full", errno.EDQUOT: "the disk quota is used up"}
    if error.errno in full:
        return UserError(
            f"{preparation.output}: {full[error.errno]}",
            "make room and run the same command again: it goes on where it was; a smaller "
            "prepare.short_side or prepare.quality needs less, in another prepare.output",
        )
    return UserError(
        f"{error.filename or preparation.output}: {error.strerror or error}",
        "make the folder readable and writable, or choose another prepare.output; the same "
        "command goes on where it was",
    )
