"""Every loader: the same samples, errors that arrive as themselves, clean ends."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from photographs import claiming, encoded, kinds, photo_folder, picture

from recipes.config import Config, DatasetConfig, DeadlinesConfig, UserError
from recipes.data import Plan, build
from recipes.data.base import ImageDataset, Sample, stack
from recipes.data.decoding import UnreadableImage
from recipes.data.decoding_processes import DecodingProcesses
from recipes.data.decoding_threads import DecodingThreads
from recipes.data.in_hand import read_seconds
from recipes.data.loader import (
    Batch,
    EvaluationBatch,
    SkipCounter,
    evaluation_loader,
    start_decoders,
    train_loader,
)
from recipes.data.photographs import Content, PhotoDataset
from recipes.data.sampler import SampleKey
from recipes.data.worker_processes import WorkerProcesses, check_shared_memory

ROOT = Path(__file__).parents[2]


def config(loader: str = "auto", **changes: Any) -> Config:
    base: dict[str, Any] = {"name": "synthetic", "image_size": 4, "num_classes": 3}
    dataset = DatasetConfig(**(base | {"train_size": 40, "eval_size": 11} | changes))
    return Config(dataset=dataset, loader=loader)


class Place(NamedTuple):
    """A loader, and how many threads or processes it has."""

    loader: str
    workers: int

    def __str__(self) -> str:
        return f"{self.loader}-{self.workers}"


PADDLE = [Place("paddle", 0), Place("paddle", 2)]
THREAD, PROCESSES = Place("turbojpeg", 1), Place("turbojpeg", 3)
EVERY = [*PADDLE, Place("memory", 0), THREAD, PROCESSES]


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """40 photographs for training and 11 held out, of many kinds."""
    contents = [
        list(kinds(picture(20 + seed, 80 - seed, seed)).values())[seed % 22] for seed in range(51)
    ]
    return photo_folder(tmp_path_factory.mktemp("photos"), contents[:40], contents[40:])


def of(place: Place, photos: Path, **changes: Any) -> Config:
    """Data that this loader is for."""
    if place.loader == "memory":
        return config(name="digits", image_size=8, num_classes=None, **changes)
    if place.loader == "paddle":
        return config(loader="paddle", workers=place.workers, **changes)
    kept: dict[str, Any] = {"name": "imagenet", "path": str(photos), "num_classes": None}
    return config(loader="turbojpeg", workers=place.workers, **(kept | {"image_size": 8} | changes))


class TrickyPhotos(PhotoDataset):
    """Fails at chosen samples, in the ways photographs can."""

    def __init__(self, bad: dict[int, str], skip: bool = False, train: bool = True) -> None:
        self.bad = bad
        settings_ = DatasetConfig(
            name="imagenet", image_size=4, on_corrupt="skip" if skip else "fail"
        )
        labels = np.arange(40, dtype=np.int64) % 2
        super().__init__(settings_, "train" if train else "eval", 0, labels, ["a", "b"])

    def path(self, index: int) -> str:
        return f"/pictures/{index}.jpg"

    def content(self, index: int) -> Content:
        match self.bad.get(index):
            case "user":
                raise UnreadableImage(f"{self.path(index)}: broken")
            case "late":
                time.sleep(0.2)
                raise UnreadableImage(f"{self.path(index)}: broken late")
            case "bug":
                raise KeyError("oops")
        return np.full((4, 4, 3), index, np.uint8)


class Tricky(ImageDataset):
    """Fails at chosen samples, in the ways a dataset can."""

    name = "tricky"
    image_size = 4

    def __init__(self, bad: dict[int, str]) -> None:
        self.classes = ["a", "b"]
        self.bad = bad

    def __len__(self) -> int:
        return 40

    def path(self, index: int) -> str:
        return f"/pictures/{index}.jpg"

    def __getitem__(self, key: SampleKey) -> Sample:
        _, index = key
        image = np.full((4, 4, 3), index, np.uint8)
        match self.bad.get(index):
            case "user":
                raise UserError(f"{self.path(index)}: broken", "mend it")
            case "bug":
                raise KeyError("oops")
            case "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            case "replaced":
                return Sample(image, 0, index, index + 1)
            case "skipped":
                return Sample(image, -1, index, index)
        return Sample(image, index % 2, index, index)


def children() -> list[psutil.Process]:
    return [p for p in psutil.Process().children() if p.status() != psutil.STATUS_ZOMBIE]


def shared_files(*pids: int) -> list[Path]:
    """What these worker processes have in shared memory."""
    return [file for pid in pids for file in Path("/dev/shm").glob(f"paddle_{pid}_*")]


@pytest.fixture(autouse=True)
def _nothing_left_behind() -> Iterator[None]:
    before = {process.pid for process in children()}
    yield
    end = time.monotonic() + 5  # killed processes that nobody waits for, see `Patience`
    while (left := {process.pid for process in children()} - before) and time.monotonic() < end:
        time.sleep(0.01)
    assert not left


def plan(**changes: Any) -> Plan:
    base: dict[str, Any] = {"size": 40, "global_batch": 12, "seed": 5, "rank": 0, "world_size": 1}
    return Plan(**(base | changes))


def same(a: Batch | EvaluationBatch, b: Batch | EvaluationBatch) -> bool:
    for x, y in (
        (a.images, b.images),
        (a.labels, b.labels),
        (a.indices, b.indices),
        (a.sources, b.sources),
    ):
        if x.dtype != y.dtype or x.shape != y.shape or x.tobytes() != y.tobytes():
            return False
    return a[4:] == b[4:]


@pytest.mark.parametrize("place", EVERY, ids=str)
def test_a_batch_holds_the_plans_samples(place: Place, photos: Path) -> None:
    run = of(place, photos)
    dataset = build(run.dataset, "train", 5)
    chosen = plan(size=len(dataset), global_batch=13, rank=1, world_size=2, accumulate=2)
    first_step = len(dataset) // 13 - 2
    batches = list(train_loader(dataset, chosen, 3, first_step, run))
    micro = list(chosen.micro_batches(3, first_step))
    assert len(batches) == len(micro) >= 6
    for batch, expected in zip(batches, micro, strict=True):
        size = dataset.image_size
        assert batch.images.dtype == np.uint8
        assert batch.images.shape == (len(expected.keys), size, size, 3)
        assert batch.indices.tolist() == [index for _, index in expected.keys]
        assert (batch.step, batch.part, batch.global_count) == expected[1:]
        for row, key in enumerate(expected.keys):
            sample = dataset[key]
            apart = np.abs(batch.images[row].astype(int) - sample.image).mean()
            assert apart <= (4 if place.loader == "turbojpeg" else 0)
            assert batch.labels[row] == sample.label
            assert batch.sources[row] == sample.source
        assert batch.labels.dtype == batch.indices.dtype == batch.sources.dtype == np.int64


@settings(deadline=None, max_examples=15, suppress_health_check=list(HealthCheck))
@given(
    st.sampled_from([DecodingThreads, DecodingProcesses]),
    st.integers(1, 7),
    st.integers(1, 4),
    st.integers(0, 9),
    st.integers(0, 2),
)
def test_threads_and_processes_change_nothing(
    photos: Path,
    kind: type[DecodingThreads | DecodingProcesses],
    decoders: int,
    prefetch: int,
    epoch: int,
    first_step: int,
) -> None:
    run = of(THREAD, photos, prefetch=1)
    dataset = build(run.dataset, "train", 5)
    assert isinstance(dataset, PhotoDataset)
    keys = [micro.keys for micro in plan().micro_batches(epoch, first_step)]
    alone = list(train_loader(dataset, plan(), epoch, first_step, run))
    helped = list(kind(dataset, keys, decoders, prefetch))
    assert len(alone) == len(helped) > 0
    for one, other in zip(alone, helped, strict=True):
        for field in other._fields:
            assert (getattr(one, field) == getattr(other, field)).all()


@pytest.mark.parametrize("place", [THREAD, PROCESSES], ids=str)
@pytest.mark.parametrize("split", ["train", "eval"])
def test_the_bytes_are_those_of_pillow_where_nothing_is_random(
    photos: Path, place: Place, split: str
) -> None:
    run = of(place, photos, augment=False)
    dataset = build(run.dataset, split, 5)
    for batch in evaluation_loader(dataset, 6, 0, 1, run):
        for image, index in zip(batch.images, batch.indices.tolist(), strict=True):
            assert (image == dataset[0, index].image).all()


@settings(deadline=None, max_examples=6, suppress_health_check=list(HealthCheck))
@given(
    st.sampled_from(["digits", "synthetic"]),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(0, 9),
    st.integers(0, 2),
)
def test_worker_processes_change_nothing(
    name: str, workers: int, prefetch: int, epoch: int, first_step: int
) -> None:
    settings_: dict[str, Any] = {"name": name, "image_size": 8}
    settings_["num_classes"] = None if name == "digits" else 3
    dataset = build(config(**settings_).dataset, "train", 5)
    chosen = plan(size=len(dataset), global_batch=max(12, len(dataset) // 5), world_size=2)
    alone, helped = (
        list(train_loader(dataset, chosen, epoch, first_step, run))
        for run in (
            config(**settings_),
            config(loader="paddle", workers=workers, prefetch=prefetch, **settings_),
        )
    )
    assert len(alone) == len(helped) > 0
    assert all(same(a, b) for a, b in zip(alone, helped, strict=True))


@pytest.mark.parametrize("place", EVERY, ids=str)
def test_batches_stay_valid_after_the_loader_has_ended(place: Place, photos: Path) -> None:
    run = of(place, photos)
    dataset = build(run.dataset, "train", 5)
    kept = list(train_loader(dataset, plan(), 0, 0, run))
    copies = [
        batch._replace(images=batch.images.copy())
        for batch in train_loader(dataset, plan(), 0, 0, run)
    ]
    assert all(same(a, b) for a, b in zip(kept, copies, strict=True))


@pytest.mark.parametrize("place", EVERY, ids=str)
def test_evaluation_covers_each_sample_once(place: Place, photos: Path) -> None:
    run = of(place, photos)
    dataset = build(run.dataset, "eval", 5)
    size = -(-len(dataset) // 4)
    seen: dict[int, list[int]] = {}
    for rank in range(4):
        for batch in evaluation_loader(dataset, size, rank, 4, run):
            seen[batch.batch_number] = batch.indices.tolist()
            assert batch.sources.tolist() == batch.indices.tolist()
            assert batch.labels.tolist() == [dataset[0, index].label for index in batch.indices]
    assert [index for number in range(4) for index in seen[number]] == list(range(len(dataset)))
    assert list(evaluation_loader(dataset, len(dataset), 2, 3, run)) == []


@pytest.mark.parametrize("place", [*PADDLE, THREAD, PROCESSES], ids=str)
def test_a_users_mistake_arrives_as_itself(
    place: Place, photos: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    tricky = Tricky if place.loader == "paddle" else TrickyPhotos
    loader = train_loader(tricky({17: "user"}), plan(), 0, 0, of(place, photos))
    with pytest.raises(UserError) as error:
        list(loader)
    assert error.value.message == "/pictures/17.jpg: broken"
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize("place", [THREAD, PROCESSES], ids=str)
def test_the_first_of_several_errors_arrives(photos: Path, place: Place) -> None:
    dataset = TrickyPhotos({3: "late", 4: "user", 20: "user"})
    ordered = plan(shuffle=False)
    loader = train_loader(dataset, ordered, 0, 0, of(place, photos, prefetch=4))
    with pytest.raises(UserError, match=r"/pictures/3\.jpg: broken late"):
        next(loader)
    assert threads() == []


@pytest.mark.parametrize("place", [THREAD, PROCESSES], ids=str)
def test_batches_before_an_error_arrive(photos: Path, place: Place) -> None:
    dataset = TrickyPhotos({15: "user"})
    loader = train_loader(dataset, plan(shuffle=False), 0, 0, of(place, photos))
    assert next(loader).indices.tolist() == list(range(12))
    with pytest.raises(UserError, match=r"/pictures/15\.jpg: broken"):
        next(loader)


def test_a_bug_in_a_thread_keeps_its_traceback(photos: Path) -> None:
    dataset = TrickyPhotos({17: "bug"})
    with pytest.raises(KeyError, match="oops") as error:
        list(train_loader(dataset, plan(), 0, 0, of(THREAD, photos)))
    assert error.traceback[-1].name == "content"


def test_a_bug_in_a_process_keeps_its_traceback(photos: Path) -> None:
    dataset = TrickyPhotos({17: "bug"})
    with pytest.raises(KeyError, match="oops") as error:
        list(train_loader(dataset, plan(), 0, 0, of(PROCESSES, photos)))
    assert 'raise KeyError("oops")' in str(error.value.__cause__)


def test_a_killed_process_is_reported(photos: Path) -> None:
    class Killed(TrickyPhotos):
        def content(self, index: int) -> Content:
            if index == 17:
                os.kill(os.getpid(), signal.SIGKILL)
            return super().content(index)

    start = time.monotonic()
    died = r"a decoding process died \(SIGKILL\) at /pictures/17\.jpg\n"
    with pytest.raises(UserError, match=died) as error:
        list(train_loader(Killed({}), plan(), 0, 0, of(PROCESSES, photos)))
    assert "dataset.workers" in error.value.remedy
    assert error.value.may_pass
    assert time.monotonic() - start < 20


class Stalled(TrickyPhotos):
    """One of its images is on a disk that does not answer."""

    answers = False

    def content(self, index: int) -> Content:
        while index == 17 and not self.answers:
            time.sleep(0.05)
        return super().content(index)


@pytest.mark.parametrize("place", [*PADDLE, THREAD, PROCESSES], ids=str)
def test_a_read_that_does_not_return_ends_with_the_path(place: Place, photos: Path) -> None:
    run = of(place, photos)
    run.deadlines.read = 0.5
    start, dataset = time.monotonic(), Stalled({})
    with pytest.raises(UserError, match=r"/pictures/17\.jpg: not read within 0\.5 s") as error:
        list(train_loader(dataset, plan(), 0, 0, run))
    dataset.answers = True  # a thread that was left behind ends
    assert "deadlines.read" in error.value.remedy
    assert error.value.may_pass
    assert time.monotonic() - start < 20


BOMBS = claiming(60_000, 60_000)


@pytest.mark.parametrize("kind", BOMBS)
@pytest.mark.parametrize("place", [Place("paddle", 0), THREAD, PROCESSES], ids=str)
def test_a_file_that_claims_too_many_pixels_is_refused_by_every_loader(
    place: Place, kind: str, tmp_path: Path
) -> None:
    """Where nothing refused it, decoding would take 11 GB."""
    contents = [encoded(picture(20, 30, seed)) for seed in range(4)]
    root = photo_folder(tmp_path, [*contents[:2], BOMBS[kind], *contents[2:]], contents)
    run = of(THREAD, root)
    run.loader, run.dataset.workers = place
    chosen = plan(size=5, global_batch=5, shuffle=False)
    with pytest.raises(UserError, match=r"train/.*: it says that it has 60000 x 60000 pixels"):
        list(train_loader(build(run.dataset, "train", 5), chosen, 0, 0, run))
    run.dataset.on_corrupt = "skip"
    (batch,) = train_loader(build(run.dataset, "train", 5), chosen, 0, 0, run)
    assert (batch.sources != batch.indices).sum() == 1


@pytest.mark.parametrize("place", [Place("paddle", 0), THREAD, PROCESSES], ids=str)
def test_the_largest_image_that_is_read_is_a_setting(place: Place, tmp_path: Path) -> None:
    contents = [encoded(picture(20, 30, seed)) for seed in range(4)]
    run = of(THREAD, photo_folder(tmp_path, contents, contents))
    run.loader, run.dataset.workers = place
    for most, fits in ((600, True), (599, False)):
        run.dataset.max_pixels = most
        chosen = plan(size=4, global_batch=4)
        loader = train_loader(build(run.dataset, "train", 5), chosen, 0, 0, run)
        if fits:
            assert len(list(loader)) == 1
        else:
            message = r"30 x 20 pixels, more than dataset.max_pixels"
            with pytest.raises(UserError, match=message) as error:
                list(loader)
            assert "raise dataset.max_pixels" in error.value.remedy


def test_a_read_is_given_up_before_its_step_is() -> None:
    assert read_seconds(DeadlinesConfig(step=20, read=60)) == 15
    assert read_seconds(DeadlinesConfig(step=120, read=60)) == 60


def test_slow_images_are_waited_for(photos: Path) -> None:
    run = of(THREAD, photos)
    run.deadlines.read = 0.5
    late = TrickyPhotos(dict.fromkeys(range(8), "late"), skip=True)
    assert len(list(train_loader(late, plan(), 0, 0, run))) == 4


def test_a_bug_in_a_worker_keeps_its_traceback() -> None:
    loader = train_loader(Tricky({17: "bug"}), plan(), 0, 0, config(workers=2))
    with pytest.raises(RuntimeError, match="reading sample 17 of epoch 0 failed") as error:
        list(loader)
    assert 'raise KeyError("oops")' in str(error.value)


def test_a_killed_worker_is_reported() -> None:
    loader = train_loader(Tricky({17: "killed"}), plan(), 0, 0, config(workers=2))
    start = time.monotonic()
    with pytest.raises(UserError, match="a loader process died") as error:
        list(loader)
    assert "--shm-size" in error.value.remedy
    assert time.monotonic() - start < 20


class Collecting(Tricky):
    """Collects garbage in the process that reads."""

    def __getitem__(self, key: SampleKey) -> Sample:
        gc.collect()
        return super().__getitem__(key)


def test_a_worker_does_not_collect_the_ranks_garbage() -> None:
    """Destroyed in a forked process, a reader joins a C++ thread that is not there, and aborts."""
    gc.disable()
    try:
        earlier = WorkerProcesses(Tricky({}), [[(0, 0)], [(0, 1)]], workers=1, prefetch=2)
        next(earlier)
        garbage: list[object] = [earlier._iterator]
        garbage.append(garbage)
        earlier.close()
        del earlier, garbage
        time.sleep(0.2)
        loader = train_loader(Collecting({}), plan(), 0, 0, config(workers=2))
        assert sum(len(batch.labels) for batch in loader) == 40
    finally:
        gc.enable()


@pytest.mark.parametrize("place", [Place("paddle", 2), THREAD, PROCESSES], ids=str)
@pytest.mark.parametrize("how", ["break", "close", "exception"])
def test_an_early_end_leaves_nothing(place: Place, photos: Path, how: str) -> None:
    run = of(place, photos)
    dataset = build(run.dataset, "train", 5)
    before = len(children())
    loader = train_loader(dataset, plan(global_batch=2), 0, 0, run)
    next(loader)
    workers = [process.pid for process in children()]
    started = (len(workers) - before, len(threads()))
    assert started == ((0, 1) if place == THREAD else (place.workers, 0))
    start = time.monotonic()
    if how == "close":
        loader.close()
    elif how == "break":
        for _ in loader:
            break
        del loader
    else:
        with pytest.raises(ValueError, match="mine"):
            loader.throw(ValueError("mine"))
    assert time.monotonic() - start < 5
    assert len(children()) == before
    assert threads() == []
    assert shared_files(*workers) == []


def test_decoders_serve_one_epoch_after_the_other(photos: Path) -> None:
    run = of(PROCESSES, photos)
    run.global_batch_size, run.eval_batch_size = 12, 5
    training, held_out = (build(run.dataset, split, 5) for split in ("train", "eval"))
    before = {process.pid for process in children()}
    decoders = start_decoders(run, training, held_out)
    assert decoders is not None
    started = {process.pid for process in children()} - before
    assert len(started) == PROCESSES.workers
    thread = of(THREAD, photos)
    for epoch, taken in enumerate((4, 1, 2, 0, 4)):  # of 4 batches, with others read ahead
        loader = train_loader(training, plan(), epoch, 0, run, decoders)
        kept = list(islice(loader, taken))
        loader.close()
        ours = evaluation_loader(held_out, 5, 0, 1, run, decoders)
        for one, other in zip(ours, evaluation_loader(held_out, 5, 0, 1, thread), strict=True):
            assert same(one, other)
        again = islice(train_loader(training, plan(), epoch, 0, thread), taken)
        assert all(same(a, b) for a, b in zip(kept, again, strict=True))
        assert {process.pid for process in children()} - before == started
    decoders.close()
    assert {process.pid for process in children()} == before


@pytest.mark.parametrize("which", range(PROCESSES.workers))
def test_a_process_that_died_between_two_epochs_is_reported(photos: Path, which: int) -> None:
    run = of(PROCESSES, photos)
    run.global_batch_size = 12
    training = build(run.dataset, "train", 5)
    before = {process.pid for process in children()}
    decoders = start_decoders(run, training)
    assert decoders is not None
    list(train_loader(training, plan(), 0, 0, run, decoders))
    workers = sorted(process.pid for process in children() if process.pid not in before)
    os.kill(workers[which], signal.SIGKILL)
    start = time.monotonic()
    time.sleep(0.5)
    with pytest.raises(UserError, match="a decoding process died"):
        list(train_loader(training, plan(), 1, 0, run, decoders))
    decoders.close()
    assert time.monotonic() - start < 5
    assert {process.pid for process in children()} == before


def test_decoders_end_when_nothing_refers_to_them(photos: Path) -> None:
    run = of(PROCESSES, photos)
    run.global_batch_size = 12
    before = len(children())
    decoders = start_decoders(run, build(run.dataset, "train", 5))
    assert len(children()) == before + PROCESSES.workers
    del decoders
    deadline = time.monotonic() + 5
    while len(children()) > before and time.monotonic() < deadline:
        time.sleep(0.02)
    assert len(children()) == before


def test_only_several_decoders_of_photographs_are_processes(photos: Path) -> None:
    for place in EVERY:
        run = of(place, photos)
        run.global_batch_size = 12
        decoders = start_decoders(run, build(run.dataset, "train", 5))
        assert (decoders is not None) == (place == PROCESSES)
        if decoders is not None:
            decoders.close()


def test_dali_leaves_evaluation_to_the_decoders(photos: Path) -> None:
    run = of(PROCESSES, photos)
    run.loader, run.global_batch_size = "dali", 12
    training, held_out = (build(run.dataset, split, 5) for split in ("train", "eval"))
    decoders = start_decoders(run, training, held_out)
    assert decoders is not None
    assert held_out in decoders
    assert training not in decoders
    decoders.close()


def threads() -> list[str]:
    """The loaders' threads."""
    return [thread.name for thread in threading.enumerate() if "decoding" in thread.name]


@pytest.mark.parametrize("place", [THREAD, PROCESSES], ids=str)
def test_memory_is_used_again_once_nothing_refers_to_it(photos: Path, place: Place) -> None:
    run = of(place, photos)
    dataset = build(run.dataset, "train", 5)
    many = plan(global_batch=4)  # ten batches
    places = set()
    for batch in train_loader(dataset, many, 0, 0, run):
        places.add(batch.images.ctypes.data)
    assert len(places) <= run.dataset.prefetch + 2
    views = [batch.images[1:, ::-1] for batch in train_loader(dataset, many, 0, 0, run)]
    fresh = [batch.images[1:, ::-1].copy() for batch in train_loader(dataset, many, 0, 0, run)]
    assert all((a == b).all() for a, b in zip(views, fresh, strict=True))


def test_no_more_is_read_ahead_than_asked_for(photos: Path) -> None:
    class Counting(TrickyPhotos):
        read_so_far = 0

        def content(self, index: int) -> Content:
            self.read_so_far += 1
            return super().content(index)

    dataset = Counting({})
    run = of(Place("turbojpeg", 1), photos, prefetch=3)
    loader = train_loader(dataset, plan(global_batch=4), 0, 0, run)
    for taken in (1, 2):
        next(loader)
        deadline = time.monotonic() + 5
        while dataset.read_so_far < 4 * (taken + 3) and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.05)
        assert dataset.read_so_far == 4 * (taken + 3)
    loader.close()


RANK = """
import sys, time
from recipes.config import Config, DatasetConfig
from recipes.data import Plan, build
from recipes.data.loader import train_loader
import psutil
config = Config(dataset=DatasetConfig(name="synthetic", image_size=4, num_classes=3, train_size=40,
                                      eval_size=8, workers=2))
if sys.argv[2]:
    config.dataset = DatasetConfig(name="imagenet", image_size=4, path=sys.argv[2], workers=6)
loader = train_loader(build(config.dataset, "train", 0), Plan(40, 2, 0, 0, 1), 0, 0, config)
next(loader)
print(*[p.pid for p in psutil.Process().children()], flush=True)
if sys.argv[1] == "wait":
    time.sleep(60)
if sys.argv[1] == "fail":
    raise SystemExit(3)
"""


@pytest.mark.parametrize("loader", ["paddle", "turbojpeg"])
@pytest.mark.parametrize("end", ["wait", "fail", "return"])
def test_workers_end_with_their_rank(photos: Path, loader: str, end: str) -> None:
    rank = subprocess.Popen(
        [sys.executable, "-c", RANK, end, str(photos) if loader == "turbojpeg" else ""],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert rank.stdout is not None
    workers = [int(pid) for pid in rank.stdout.readline().split()]
    assert len(workers) == (6 if loader == "turbojpeg" else 2)
    for signum in (signal.SIGINT, signal.SIGTERM) if end == "wait" else ():
        os.kill(workers[0], signum)  # as a terminal or a cluster sends it to the whole group
    if end == "wait":
        time.sleep(0.5)
        assert rank.poll() is None
        assert all(psutil.pid_exists(pid) for pid in workers)
        rank.kill()
    assert rank.wait(20) == {"wait": -signal.SIGKILL, "fail": 3, "return": 0}[end]
    rank.stdout.close()
    deadline = time.monotonic() + 5
    while any(alive(pid) for pid in workers) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(alive(pid) for pid in workers)
    assert shared_files(*workers) == []


def alive(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize("loader", ["paddle", "turbojpeg"])
def test_only_workers_of_paddle_need_paddle(photos: Path, loader: str) -> None:
    code = RANK.replace("workers=2", "workers=0") + "\nassert 'paddle' not in sys.modules"
    path = str(photos) if loader == "turbojpeg" else ""
    subprocess.run([sys.executable, "-c", code, "return", path], check=True, cwd=ROOT)


@pytest.mark.parametrize("place", [*PADDLE, THREAD, PROCESSES], ids=str)
def test_skipped_images_are_counted_once_and_named(place: Place, photos: Path) -> None:
    dataset: ImageDataset = Tricky({3: "replaced", 20: "replaced", 7: "skipped"})
    if place.loader == "turbojpeg":
        dataset = TrickyPhotos(dict.fromkeys((3, 20, 7), "user"), skip=True)
    counter = SkipCounter(dataset, limit=3)
    for epoch in range(2):
        loader = train_loader(dataset, plan(), epoch, 0, of(place, photos))
        named = sorted(path for batch in loader for path in counter.update(batch))
        expected = ["/pictures/20.jpg", "/pictures/3.jpg", "/pictures/7.jpg"]
        assert named == ([] if epoch else expected)
    assert counter.count == 3


@pytest.mark.parametrize("place", [THREAD, PROCESSES], ids=str)
def test_images_are_replaced_in_training_and_marked_in_evaluation(
    photos: Path, place: Place
) -> None:
    bad = dict.fromkeys((5, 6, 39), "user")
    run = of(place, photos, image_size=4)
    for train in (True, False):
        dataset = TrickyPhotos(bad, skip=True, train=train)
        for batch in evaluation_loader(dataset, 7, 0, 1, run):
            expected = stack([dataset[0, index] for index in batch.indices.tolist()])
            for field in expected._fields:
                assert (getattr(batch, field) == getattr(expected, field)).all()
    assert (TrickyPhotos(bad, skip=True)[0, 5].source, dataset[0, 39].label) == (7, -1)


@pytest.mark.parametrize("place", [Place("paddle", 0), THREAD, PROCESSES], ids=str)
def test_names_of_any_bytes_can_be_told(place: Place, tmp_path: Path) -> None:
    content = [encoded(picture(20, 30))] * 4
    root = photo_folder(tmp_path, content, content)
    names = (b"caf\xe9.jpg", b"\x1b[31m.jpg", b"two\nlines.jpg", "süß.jpg".encode())
    for name in names:
        (root / "train/class0" / os.fsdecode(name)).write_bytes(b"no image")
    run = of(THREAD, root)
    run.loader, run.dataset.workers = place
    chosen = plan(size=8, global_batch=8)
    with pytest.raises(UserError) as error:
        list(train_loader(build(run.dataset, "train", 5), chosen, 0, 0, run))
    assert error.value.message.isprintable()
    run.dataset.on_corrupt = "skip"
    dataset = build(run.dataset, "train", 5)
    (batch,) = train_loader(dataset, chosen, 0, 0, run)
    told = SkipCounter(dataset, 9).update(batch)
    assert {path.rpartition("/")[2] for path in told} == {
        *("caf\\udce9.jpg", "\\x1b[31m.jpg", "two\\nlines.jpg", "süß.jpg")
    }


def test_too_many_skipped_images_end_the_run() -> None:
    dataset = Tricky({3: "replaced", 20: "replaced", 7: "skipped"})
    counter = SkipCounter(dataset, limit=2)
    first, second, third, *_ = evaluation_loader(dataset, 8, 0, 1, config())
    assert counter.update(first) == ["/pictures/3.jpg", "/pictures/7.jpg"]
    assert counter.update(second) == []
    with pytest.raises(UserError, match=r"3 images could .*max_skipped=2; .*/pictures/20\.jpg"):
        counter.update(third)


def test_shared_memory_that_is_too_small_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = 64 << 20
    usage = type("Usage", (), {"free": free})
    monkeypatch.setattr("shutil.disk_usage", lambda folder: usage if folder == tmp_path else None)
    need = 4 * (8 * 2 + 2) * 128 * (224 * 224 * 3 + 24) / (1 << 20)
    with pytest.raises(UserError) as error:
        check_shared_memory(run_of(4, 128, image_size=224, workers=8, prefetch=2), tmp_path)
    assert f"need about {need:.0f} MiB in {tmp_path}" in error.value.message
    assert "64 MiB are free" in error.value.message
    assert "--shm-size=" in error.value.remedy
    assert "dataset.workers=0" in error.value.remedy
    check_shared_memory(run_of(4, 128, image_size=224, workers=0), tmp_path)
    check_shared_memory(run_of(4, 128, image_size=32, workers=2), tmp_path)


@pytest.mark.parametrize("name", ["digits", "cifar10", "imagenet"])
def test_only_worker_processes_need_shared_memory(tmp_path: Path, name: str) -> None:
    large: dict[str, Any] = {"name": name, "image_size": 10**6, "workers": 8}
    check_shared_memory(run_of(8, 1000, **large), tmp_path)
    with pytest.raises(UserError, match="MiB are free"):
        check_shared_memory(run_of(8, 1000, loader="paddle", **large), tmp_path)


def test_shared_memory_of_this_machine_is_read(tmp_path: Path) -> None:
    check_shared_memory(run_of(1, 2, image_size=4, workers=1), tmp_path)
    with pytest.raises(UserError, match="MiB are free"):
        check_shared_memory(run_of(8, 1000, image_size=10**6, workers=8), tmp_path)


def run_of(devices: int, batch_size: int, **changes: Any) -> Config:
    run = config(**changes)
    run.topology.devices, run.batch_size = devices, batch_size
    return run


def test_the_need_is_not_under_what_workers_use() -> None:
    """The most that lies in shared memory at once, against the estimate."""
    size = 160
    settings_ = config(image_size=size, workers=2, prefetch=2, train_size=160)
    dataset, most = build(settings_.dataset, "train", 0), 0
    for _ in train_loader(dataset, plan(size=160, global_batch=8), 0, 0, settings_):
        time.sleep(0.03)
        files = shared_files(*(process.pid for process in children()))
        most = max(most, sum(size_of(file) for file in files))
    batch = 8 * (size * size * 3 + 24)
    assert 2 * batch <= most <= (2 * 2 + 2) * batch * 1.1


def size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:  # freed meanwhile
        return 0
