"""How many images a second photographs are decoded by more and more threads, or processes.

    python -m benchmarks.decoders
    python -m benchmarks.decoders --counts 1 4 16 --dali FOLDER

The files are decoded as they are, and as a prepared dataset of the default settings, by threads of
one process and by processes forked from it; with `--dali`, the files by DALI's CPU backend besides.
All take turns. Training (`loader=turbojpeg`) uses a thread where a rank has one decoder, and else
processes.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from benchmarks import table
from benchmarks.loaders import (
    IMAGE_SIZE,
    add_options,
    check_dali,
    dali_on_cpu,
    measuring_of,
    prepared_folder,
)
from benchmarks.pictures import make_photographs
from benchmarks.prepared import make_prepared
from benchmarks.runs import told
from recipes.config import DatasetConfig
from recipes.cores import usable_cores
from recipes.data import Plan, build
from recipes.data.decoding_processes import DecodingProcesses
from recipes.data.decoding_threads import DecodingThreads
from recipes.data.photographs import PhotoDataset
from recipes.data.sampler import SampleKey

BATCH = 256
PREFETCH = 2

Batches = Callable[[int], Iterator[int]]
"""Batches without an end by so many decoders: how many images each has."""

Decoding = type[DecodingThreads | DecodingProcesses]
KINDS: dict[str, Decoding] = {"threads": DecodingThreads, "processes": DecodingProcesses}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and print a table in images a second."""
    summary = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.decoders", description=summary)
    parser.add_argument("--counts", type=int, nargs="+", help="of decoders; else 1, 2, 4 … cores")
    add_options(parser)
    parser.set_defaults(dali=None, photographs=2048)
    options = parser.parse_args(arguments)
    counts = options.counts or powers(usable_cores())
    with told(), measuring_of(options) as measuring:
        sides = sides_of(measuring.folder, measuring.photographs)
        if options.dali:
            check_dali(options.dali)
            sys.path.append(str(options.dali))
            sides["files, DALI on CPU"] = lambda count: dali_on_cpu(measuring.folder, count, BATCH)
        rates = measure(sides, counts, measuring.repetitions, measuring.seconds)
    headings = ["decoders", *sides]
    rows = [[str(count), *(table.spread(rates[name, count]) for name in sides)] for count in counts]
    print(table.markdown([headings, *rows]))
    return 0


def powers(cores: int) -> list[int]:
    """1, 2, 4 and so on, up to the number of cores."""
    return [1 << power for power in range(cores.bit_length())]


def sides_of(folder: Path, photographs: int) -> dict[str, Batches]:
    """What is measured, by name. Makes the photographs and the prepared dataset."""
    make_photographs(folder, photographs)
    make_prepared(folder, "prepared")
    return {
        f"{data}, {kind}": _batches(KINDS[kind], path)
        for data, path in (("files", folder), ("prepared", prepared_folder(folder, "prepared")))
        for kind in KINDS
    }


def measure(
    sides: dict[str, Batches], counts: Sequence[int], repetitions: int, seconds: float
) -> dict[tuple[str, int], list[float]]:
    """Images a second by side and number of decoders, `repetitions` of each in turns."""
    rates: dict[tuple[str, int], list[float]] = {}
    for _, count, name in itertools.product(range(repetitions), counts, sides):
        rates.setdefault((name, count), []).append(_rate(sides[name](count), seconds))
    return rates


def _rate(batches: Iterator[int], seconds: float) -> float:
    """Images a second over about so long, without the start and what was read ahead in it."""
    for _ in range(PREFETCH + 2):
        next(batches)
    images, start = 0, time.perf_counter()
    while (passed := time.perf_counter() - start) < seconds:
        images += next(batches)
    return images / passed


def _batches(kind: Decoding, path: Path) -> Batches:
    config = DatasetConfig(name="imagenet", path=str(path), image_size=IMAGE_SIZE)
    dataset = build(config, "train", 0)
    assert isinstance(dataset, PhotoDataset)

    def batches(count: int) -> Iterator[int]:
        stream = kind(dataset, _keys(len(dataset)), count, PREFETCH)
        try:
            for arrays in stream:
                yield len(arrays.labels)
        finally:
            stream.close()

    return batches


def _keys(size: int) -> Iterator[list[SampleKey]]:
    """Those of one epoch after the other."""
    plan = Plan(size, min(BATCH, size), 0, 0, 1)
    for epoch in itertools.count():
        for micro in plan.micro_batches(epoch):
            yield micro.keys


if __name__ == "__main__":
    sys.exit(main())
