"""How fast a prepared dataset is read, and how large it is, against DALI on the original files.

    python -m benchmarks.prepared --dali FOLDER

The peer is what `benchmarks.loaders` compares the original files with: NVIDIA DALI's CPU backend,
on the same photographs, crops and cores. Sides are measured in turns, as there. Below the table of
speeds is one of sizes. The exit status is 0 where the ratio reaches its target.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import table
from benchmarks.loaders import (
    PHOTO_WORKERS,
    Measuring,
    add_options,
    check_dali,
    measure,
    measuring_of,
    prepared_folder,
    row,
)
from benchmarks.pictures import make_photographs
from benchmarks.runs import told
from benchmarks.table import Row
from recipes.config import PrepareConfig
from recipes.data.conversion import Conversion
from recipes.data.preparation import Preparation, prepare_shards
from recipes.progress import NoDisplay

TARGET = 2.5
RAW_SIDE = 256  # pixels; at the default side raw images take twelve times a JPEG's room
# By the name of the side: the settings of `task=prepare`.
_USUAL = PrepareConfig()
SIDES = {
    "prepared": Conversion(_USUAL.short_side, "jpeg", _USUAL.quality, _USUAL.chroma),
    "prepared raw": Conversion(RAW_SIDE, "raw", _USUAL.quality, _USUAL.chroma),
}
SIZES = (
    *(Conversion(side, "jpeg", 90, "source") for side in (256, 320, 352, 0)),
    *(Conversion(side, "raw", 90, "source") for side in (256, 320)),
)


@dataclass(frozen=True)
class Size:
    """What a conversion makes of the photographs."""

    conversion: Conversion
    source_bytes: float  # an image
    stored_bytes: float  # an image, with its share of the index
    images_per_second: float  # of the preparation


def prepared_row(measuring: Measuring) -> Row:
    """A prepared dataset of the default settings on two cores, against DALI on the files.

    Raises:
        UserError: DALI is not there.
    """
    check_dali(measuring.dali)
    make_photographs(measuring.folder, measuring.photographs)
    for name in SIDES:
        make_prepared(measuring.folder, name)
    names = ["prepared", "photographs", "prepared raw", "DALI"]
    rates = measure(names, measuring.folder, PHOTO_WORKERS, measuring)
    usual = SIDES["prepared"]
    return row(
        f"Prepared, {usual.short_side} pixels, quality {usual.quality}, {PHOTO_WORKERS} cores",
        f"DALI on CPU, {PHOTO_WORKERS} threads, the files",
        rates["prepared"],
        rates["DALI"],
        TARGET,
        {
            f"ours, raw {RAW_SIDE} pixels": rates["prepared raw"],
            "ours, the files": rates["photographs"],
        },
    )


def measure_sizes(folder: Path) -> list[Size]:
    """Prepare the photographs of a folder in several ways, each anew."""
    return [_size(folder, conversion) for conversion in SIZES]


def _size(folder: Path, conversion: Conversion) -> Size:
    with tempfile.TemporaryDirectory() as scratch:
        start = time.perf_counter()
        preparation = _preparation(folder, Path(scratch) / "out", conversion)
        splits = prepare_shards(preparation, NoDisplay(), lambda _: None).splits.values()
        seconds = time.perf_counter() - start
    images = sum(split.images for split in splits)
    stored = sum(record.bytes for split in splits for record in split.files)
    before = sum(split.source_bytes for split in splits)
    return Size(conversion, before / images, stored / images, images / seconds)


def make_prepared(folder: Path, name: str) -> None:
    """Have a prepared dataset of the photographs in `prepared_folder`, of the settings `name`."""
    preparation = _preparation(folder, prepared_folder(folder, name), SIDES[name])
    prepare_shards(preparation, NoDisplay(), lambda _: None)


def _preparation(folder: Path, output: Path, conversion: Conversion) -> Preparation:
    shard_bytes = int(_USUAL.shard_mib * 2**20)
    return Preparation(_source(folder), output, conversion, shard_bytes, PHOTO_WORKERS, None)


def _source(folder: Path) -> Path:
    """The photographs, with one of each class as held-out images, as there have to be some."""
    source = folder / "prepared" / "source"
    source.mkdir(parents=True, exist_ok=True)
    if not (source / "train").exists():
        (source / "train").symlink_to(folder.resolve() / "train")
    for images in (source / "train").iterdir():
        first = min(images.iterdir())
        link = source / "val" / images.name / first.name
        if not link.exists():
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(first)
    return source


def render_sizes(sizes: Sequence[Size]) -> str:
    """Sizes as a Markdown table."""
    lines = [
        "| short side | format | an image | of the file | prepared images a second |",
        "| --- | --- | --- | --- | --- |",
    ]
    for size in sizes:
        conversion = size.conversion
        encoding = f"jpeg {conversion.quality}" if conversion.format == "jpeg" else "raw"
        lines.append(
            f"| {conversion.short_side or 'as it is'} | {encoding} | "
            f"{size.stored_bytes / 1e3:.1f} kB | {size.stored_bytes / size.source_bytes:.0%} | "
            f"{size.images_per_second:,.0f} |"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print."""
    summary = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(prog="benchmarks.prepared", description=summary)
    add_options(parser)
    options = parser.parse_args(arguments)
    with told(), measuring_of(options) as measuring:
        found = prepared_row(measuring)
        sizes = measure_sizes(measuring.folder)
    print(table.text([found]), "\n", render_sizes(sizes), sep="\n")
    return 0 if found.met else 1


if __name__ == "__main__":
    sys.exit(main())
