"""How many images a second our loaders and their peers give, both sides in one run.

    python -m benchmarks.loaders
    python -m benchmarks.loaders --rows cifar10 paddleclas --repetitions 5

Each side is a process of its own, bound to as many cores as its row allows, and is measured in turn
with the others, several times; while one works, the others wait. The table has the median of each
side, its lowest and highest value, and the ratio of the medians. What a side has to do is what a
training takes from it: every image once an epoch in a new order, a random crop and mirroring, and
batches ready for the model's first step, which for our side is the normalisation on the device.
Figures that end in "normalised" have that done on the same cores besides.

NVIDIA DALI is not among the packages of this project's environment: `--dali FOLDER` names a folder
that has it :

    pip install --target FOLDER --no-deps --require-hashes -r docker/requirements-bench.lock

The exit status is 0 where every ratio reaches its target.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from benchmarks import table
from benchmarks.runs import told
from benchmarks.table import Row
from recipes.config import Config, DatasetConfig, UserError

ROOT = Path(__file__).resolve().parent.parent
DALI = ROOT / ".bench-packages"
IMAGE_SIZE = 224
PHOTO_BATCH = 64
PHOTO_WORKERS = 2
CIFAR_BATCH = 512
WARM_UP_SECONDS = 0.5  # longer than what was read ahead while the side waited lasts
_RATE = "images a second:"


@dataclass(frozen=True)
class Measuring:
    """What all rows share.

    Attributes:
        folder: holds the data, or will.
        photographs: how many.
        repetitions: of each side.
        seconds: that each repetition takes.
        dali: a folder of packages with NVIDIA DALI.
    """

    folder: Path
    photographs: int = 640
    repetitions: int = 5
    seconds: float = 2.0
    dali: Path = DALI


def cifar10_row(measuring: Measuring) -> Row:
    """CIFAR-10 on one core, against the faster backend of `paddle.vision`.

    Its transforms are those of Paddle's own examples, which normalise a tensor (`ToTensor`). They
    are faster with arrays; that is measured besides.
    """
    from benchmarks.pictures import make_cifar10

    archive = measuring.folder / "cifar10-like.tar.gz"
    if not archive.is_file():
        make_cifar10(archive)
    peers = ["paddle.vision, cv2", "paddle.vision, pil"]
    names = ["cifar10", "cifar10 normalised", *peers, "paddle.vision, cv2, arrays"]
    rates = measure(names, archive, 1, measuring)
    peer = max(peers, key=lambda name: statistics.median(rates[name]))
    besides = {"ours, normalised": rates[names[1]]}
    besides |= {name: rates[name] for name in names[2:] if name != peer}
    return row("CIFAR-10, 1 core", peer, rates[names[0]], rates[peer], 40.0, besides)


def paddleclas_row(measuring: Measuring) -> Row:
    """Photographs on two cores, against cv2 in the worker processes of Paddle's loader."""
    rates = measure(
        ["photographs", "photographs normalised", "cv2 and DataLoader"],
        _photographs(measuring),
        PHOTO_WORKERS,
        measuring,
    )
    ours, normalised, peers = rates.values()
    peer = f"cv2, DataLoader, {PHOTO_WORKERS} workers"
    besides = {"ours, normalised": normalised}
    return row(f"JPEG files, {PHOTO_WORKERS} cores", peer, ours, peers, 4.0, besides)


def dali_row(measuring: Measuring) -> Row:
    """Photographs on two cores, against DALI's CPU backend with two threads.

    Raises:
        UserError: DALI is not there.
    """
    check_dali(measuring.dali)
    rates = measure(["photographs", "DALI"], _photographs(measuring), PHOTO_WORKERS, measuring)
    peer = f"DALI on CPU, {PHOTO_WORKERS} threads"
    ours, peers = rates.values()
    return row(f"JPEG files, {PHOTO_WORKERS} cores", peer, ours, peers, 1.5)


def _prepared_row(measuring: Measuring) -> Row:
    from benchmarks.prepared import prepared_row  # which imports this module

    return prepared_row(measuring)


def check_dali(folder: Path) -> None:
    """See that a folder of packages has NVIDIA DALI.

    Raises:
        UserError: it has not.
    """
    if not (folder / "nvidia" / "dali").is_dir():
        raise UserError(
            f"{folder}: NVIDIA DALI is not there",
            f"pip install --target {folder} --no-deps --require-hashes "
            "-r docker/requirements-bench.lock, or --dali FOLDER",
        )


ROWS: dict[str, Callable[[Measuring], Row]] = {
    "cifar10": cifar10_row,
    "paddleclas": paddleclas_row,
    "dali": dali_row,
    "prepared": _prepared_row,
}


def row(
    name: str,
    against: str,
    ours: list[float],
    peer: list[float],
    limit: float,
    besides: Mapping[str, list[float]] = MappingProxyType({}),
) -> Row:
    """A row in images a second, both sides measured in turns.

    Args:
        limit: the least ratio that is wanted.
        besides: other sides, by name, which go into the note.
    """
    base = statistics.median(peer)
    others = [
        f"{side}: {table.spread(rates)}, {statistics.median(rates) / base:.3g}x"
        for side, rates in besides.items()
    ]
    return Row(
        name=name,
        against=against,
        target=f"{limit:g}x or more",
        limit=limit,
        better="higher",
        unit="images/s",
        ours=ours,
        peer=peer,
        paired=True,
        note="; ".join(others),
    )


def prepared_folder(folder: Path, name: str) -> Path:
    """Where a prepared dataset of the photographs is: below their folder."""
    return folder / "prepared" / name


def _photographs(measuring: Measuring) -> Path:
    from benchmarks.pictures import make_photographs

    make_photographs(measuring.folder, measuring.photographs)
    return measuring.folder


# --- measuring sides in turn


def measure(
    names: Sequence[str], data: Path, cores: int, measuring: Measuring
) -> dict[str, list[float]]:
    """Images a second of each side, one value for each repetition, in turns."""
    with contextlib.ExitStack() as stack:
        sides = {
            name: stack.enter_context(_Side(name, data, cores, measuring.dali)) for name in names
        }
        rates: dict[str, list[float]] = {name: [] for name in names}
        for _ in range(measuring.repetitions):
            for name, side in sides.items():
                rates[name].append(side.measure(measuring.seconds))
        return rates


class _Side:
    """A process that loads batches when told to."""

    def __init__(self, name: str, data: Path, cores: int, dali: Path) -> None:
        self._name = name
        environment = os.environ | {
            "OMP_NUM_THREADS": str(cores),
            "PYTHONPATH": os.pathsep.join([str(ROOT), *([str(dali)] if name == "DALI" else [])]),
        }
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed by __exit__)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.loaders", "--serve", name, str(cores), str(data)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            cwd=ROOT,
            env=environment,
            start_new_session=True,
        )

    def __enter__(self) -> _Side:
        return self

    def __exit__(self, *_: object) -> None:
        # With its worker processes, which would wait for ever and hold the pipe open.
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()
        self._errors.close()

    def measure(self, seconds: float) -> float:
        """Images a second over about so long."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # what it said is more telling
            print(seconds, file=self._process.stdin, flush=True)
        for line in self._process.stdout:
            if line.startswith(_RATE):
                return float(line.removeprefix(_RATE))
        self._errors.seek(0)
        raise RuntimeError(f"the side {self._name!r} ended:\n{self._errors.read()[-3000:]}")


def _serve(name: str, cores: int, data: Path) -> None:
    """Measure one side each time a line with a number of seconds comes in."""
    available = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, available[:cores])  # before any library starts its threads
    batches = _SIDES[name](data)
    next(batches)
    for line in sys.stdin:
        _count(batches, WARM_UP_SECONDS)
        images, seconds = _count(batches, float(line))
        print(f"\n{_RATE}{images / seconds}", flush=True)


def _count(batches: Iterator[int], seconds: float) -> tuple[int, float]:
    """Images loaded, and the time they took: at least so long."""
    start = time.perf_counter()
    images = 0
    for count in batches:
        images += count
        elapsed = time.perf_counter() - start
        if elapsed >= seconds:
            return images, elapsed
    raise AssertionError("the sides have no end")


# --- the sides: iterators without an end that load a batch and yield how many images it has


def _our_cifar10(archive: Path, normalised: bool = False) -> Iterator[int]:
    from recipes.data.cifar10 import cifar10

    config = DatasetConfig(name="cifar10", path=str(archive), image_size=32)
    return _ours(cifar10(config, "train", 0), Config(dataset=config), CIFAR_BATCH, normalised)


def _our_photographs(root: Path, normalised: bool = False) -> Iterator[int]:
    from recipes.data import build

    config = DatasetConfig(
        name="imagenet", path=str(root), image_size=IMAGE_SIZE, workers=PHOTO_WORKERS
    )
    dataset = build(config, "train", 0)
    return _ours(dataset, Config(dataset=config), PHOTO_BATCH, normalised)


def _ours(dataset: Any, config: Config, batch: int, normalised: bool) -> Iterator[int]:
    from recipes.data import Plan
    from recipes.data.loader import start_decoders, train_loader

    ready: Callable[[Any], object] = lambda images: images  # noqa: E731
    if normalised:
        from recipes.data.normalisation import Normalise

        ready = Normalise(dataset, "float32")
    plan = Plan(len(dataset), batch, 0, 0, 1)
    config.global_batch_size = batch
    decoders = start_decoders(config, dataset)
    for epoch in itertools.count():
        for loaded in train_loader(dataset, plan, epoch, 0, config, decoders):
            ready(loaded.images)
            yield len(loaded.labels)


def _paddle_vision(archive: Path, backend: str, tensors: bool = True) -> Iterator[int]:
    import paddle
    from paddle.vision import transforms

    from recipes.data.cifar10 import MEAN, PAD, STD

    steps = [transforms.RandomCrop(32, padding=PAD), transforms.RandomHorizontalFlip()]
    if tensors:  # ToTensor divides by 255
        mean, std = ([value / 255 for value in values] for values in (MEAN, STD))
        steps += [transforms.ToTensor(), transforms.Normalize(mean, std)]
    else:
        steps += [transforms.Normalize(MEAN, STD, data_format="HWC"), transforms.Transpose()]
    dataset = paddle.vision.datasets.Cifar10(
        str(archive), mode="train", transform=transforms.Compose(steps), backend=backend
    )
    return _through_paddle(dataset, CIFAR_BATCH, 0)


def _cv2_and_data_loader(root: Path) -> Iterator[int]:
    import paddle

    from recipes.data.imagenet import FolderDataset

    config = DatasetConfig(name="imagenet", path=str(root), image_size=IMAGE_SIZE)
    listed = FolderDataset(config, "train", 0)

    class Photographs(paddle.io.Dataset):  # type: ignore[misc]
        def __len__(self) -> int:
            return len(listed)

        def __getitem__(self, index: int) -> tuple[Any, int]:
            return _as_paddleclas(listed.path(index)), int(listed.labels[index])

    return _through_paddle(Photographs(), PHOTO_BATCH, PHOTO_WORKERS)


def _as_paddleclas(path: str) -> Any:
    """A training image as PaddleClas's reader makes it: float32[3, IMAGE_SIZE, IMAGE_SIZE]."""
    import cv2

    from recipes.data.augmentation import CROP_UNIFORMS, random_resized_crop
    from recipes.data.photographs import MEAN, STD

    with open(path, "rb") as file:  # noqa: PTH123 (as fast as it goes)
        content = file.read()
    decoded: Any = cv2.imdecode(np.frombuffer(content, np.uint8), cv2.IMREAD_COLOR)
    image = np.ascontiguousarray(decoded[:, :, ::-1])
    view = random_resized_crop(image, IMAGE_SIZE, np.random.random(CROP_UNIFORMS))
    mean, std = (np.array(values, np.float32) for values in (MEAN, STD))
    scaled = (view.astype(np.float32) - mean) / std
    return np.ascontiguousarray(scaled.transpose(2, 0, 1))


def _through_paddle(dataset: Any, batch: int, workers: int) -> Iterator[int]:
    import paddle

    loader = paddle.io.DataLoader(
        dataset,
        batch_size=batch,
        shuffle=True,
        num_workers=workers,
        persistent_workers=workers > 0,
        places=paddle.CPUPlace(),
    )
    while True:
        for images, *_ in loader:
            yield int(images.shape[0])


def dali_on_cpu(
    root: Path, threads: int = PHOTO_WORKERS, batch: int = PHOTO_BATCH
) -> Iterator[int]:
    """DALI's own reader, order and random numbers; the same distribution of crops, uint8 out.

    Yields:
        How many images a batch has, without an end.
    """
    from nvidia.dali import Pipeline, fn, types

    from recipes.data.augmentation import CROP_ATTEMPTS, CROP_RATIO, CROP_SCALE

    pipeline: Any = Pipeline(batch_size=batch, num_threads=threads, device_id=None)
    with pipeline:
        content, label = fn.readers.file(file_root=str(root / "train"), random_shuffle=True)
        image = fn.decoders.image_random_crop(
            content,
            random_area=CROP_SCALE,
            random_aspect_ratio=CROP_RATIO,
            num_attempts=CROP_ATTEMPTS,
            use_fast_idct=True,
        )
        size = [IMAGE_SIZE, IMAGE_SIZE]
        image = fn.resize(image, size=size, interp_type=types.INTERP_LINEAR, antialias=False)
        pipeline.set_outputs(fn.flip(image, horizontal=fn.random.coin_flip()), label)
    pipeline.build()
    while True:
        images, _ = pipeline.run()
        yield int(images.as_array().shape[0])


_SIDES: dict[str, Callable[[Path], Iterator[int]]] = {
    "cifar10": _our_cifar10,
    "cifar10 normalised": lambda data: _our_cifar10(data, normalised=True),
    "paddle.vision, cv2": lambda data: _paddle_vision(data, "cv2"),
    "paddle.vision, pil": lambda data: _paddle_vision(data, "pil"),
    "paddle.vision, cv2, arrays": lambda data: _paddle_vision(data, "cv2", tensors=False),
    "photographs": _our_photographs,
    "photographs normalised": lambda data: _our_photographs(data, normalised=True),
    "prepared": lambda data: _our_photographs(prepared_folder(data, "prepared")),
    "prepared raw": lambda data: _our_photographs(prepared_folder(data, "prepared raw")),
    "cv2 and DataLoader": _cv2_and_data_loader,
    "DALI": dali_on_cpu,
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """What all measurements of loaders can be told."""
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="that each repetition takes")
    parser.add_argument("--photographs", type=int, default=640, help="how many to make")
    parser.add_argument("--folder", type=Path, help="where the data is kept; else made anew")
    parser.add_argument("--dali", type=Path, default=DALI, help="packages with NVIDIA DALI")


@contextlib.contextmanager
def measuring_of(options: argparse.Namespace) -> Iterator[Measuring]:
    """The options of `add_options`; a folder that was made for the data goes in the end."""
    with contextlib.ExitStack() as stack:
        folder = options.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        yield Measuring(
            folder, options.photographs, options.repetitions, options.seconds, options.dali
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the rows, print the table."""
    summary = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(prog="benchmarks.loaders", description=summary)
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    add_options(parser)
    parser.add_argument("--serve", nargs=3, metavar=("SIDE", "CORES", "DATA"), help="internal")
    options = parser.parse_args(arguments)
    if options.serve:
        name, cores, data = options.serve
        _serve(name, int(cores), Path(data))
        return 0
    with told(), measuring_of(options) as measuring:
        rows = [ROWS[name](measuring) for name in options.rows]
    print(table.text(rows))
    return 0 if all(row.met for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
