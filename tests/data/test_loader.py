"""Loading in the rank and in worker processes: the same bytes, errors, clean ends."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from recipes.config import DatasetConfig, UserError
from recipes.data import Plan, build
from recipes.data.base import ImageDataset, Sample
from recipes.data.loader import (
    Batch,
    EvaluationBatch,
    SkipCounter,
    _InWorkers,
    check_shared_memory,
    evaluation_loader,
    train_loader,
)
from recipes.data.sampler import SampleKey

ROOT = Path(__file__).parents[2]


def config(**changes: Any) -> DatasetConfig:
    base: dict[str, Any] = {"name": "synthetic", "image_size": 4, "num_classes": 3}
    return DatasetConfig(**(base | {"train_size": 40, "eval_size": 11} | changes))


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
    assert {process.pid for process in children()} <= before


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


def test_a_batch_holds_the_plans_samples() -> None:
    dataset, chosen = build(config(), "train", 5), plan(rank=1, world_size=2, accumulate=2)
    batches = list(train_loader(dataset, chosen, 3, 1, config()))
    micro = list(chosen.micro_batches(3, 1))
    assert len(batches) == len(micro) == 6
    for batch, expected in zip(batches, micro, strict=True):
        assert batch.images.dtype == np.uint8
        assert batch.images.shape == (len(expected.keys), 4, 4, 3)
        assert batch.indices.tolist() == [index for _, index in expected.keys]
        assert (batch.step, batch.part, batch.global_count) == expected[1:]
        for row, key in enumerate(expected.keys):
            sample = dataset[key]
            assert (batch.images[row] == sample.image).all()
            assert batch.labels[row] == sample.label
            assert batch.sources[row] == sample.source
        assert batch.labels.dtype == batch.indices.dtype == batch.sources.dtype == np.int64


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
    settings_ = {"name": name, "image_size": 8, "num_classes": None if name == "digits" else 3}
    dataset = build(config(**settings_), "train", 5)
    chosen = plan(size=len(dataset), global_batch=max(12, len(dataset) // 5), world_size=2)
    alone, helped = (
        list(train_loader(dataset, chosen, epoch, first_step, config(workers=n, prefetch=prefetch)))
        for n in (0, workers)
    )
    assert len(alone) == len(helped) > 0
    assert all(same(a, b) for a, b in zip(alone, helped, strict=True))


def test_batches_from_workers_stay_valid_after_the_loader_has_ended() -> None:
    dataset = build(config(), "train", 5)
    kept = list(train_loader(dataset, plan(), 0, 0, config(workers=2)))
    fresh = train_loader(dataset, plan(), 0, 0, config())
    assert all(same(a, b) for a, b in zip(kept, fresh, strict=True))


@pytest.mark.parametrize("workers", [0, 2])
def test_evaluation_covers_each_sample_once(workers: int) -> None:
    dataset = build(config(), "eval", 5)
    seen: dict[int, list[int]] = {}
    for rank in range(4):
        for batch in evaluation_loader(dataset, 3, rank, 4, config(workers=workers)):
            seen[batch.batch_number] = batch.indices.tolist()
            assert batch.labels.tolist() == [index % 3 for index in batch.indices]
    assert [seen[number] for number in range(4)] == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10]]
    assert list(evaluation_loader(dataset, 6, 2, 3, config(workers=workers))) == []


@pytest.mark.parametrize("workers", [0, 2])
def test_a_users_mistake_arrives_as_itself(workers: int, capfd: pytest.CaptureFixture[str]) -> None:
    loader = train_loader(Tricky({17: "user"}), plan(), 0, 0, config(workers=workers))
    with pytest.raises(UserError) as error:
        list(loader)
    assert str(error.value) == "/pictures/17.jpg: broken\n  remedy: mend it"
    assert "Traceback" not in capfd.readouterr().err


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
        earlier = _InWorkers(Tricky({}), [[(0, 0)], [(0, 1)]], config(workers=1))
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


@pytest.mark.parametrize("how", ["break", "close", "exception"])
def test_an_early_end_leaves_no_process(how: str) -> None:
    dataset = build(config(), "train", 5)
    before = len(children())
    loader = train_loader(dataset, plan(global_batch=2), 0, 0, config(workers=2))
    next(loader)
    workers = [process.pid for process in children()]
    assert len(workers) == before + 2
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
    assert shared_files(*workers) == []


RANK = """
import sys, time
from recipes.config import DatasetConfig
from recipes.data import Plan, build
from recipes.data.loader import train_loader
import psutil
config = DatasetConfig(name="synthetic", image_size=4, num_classes=3, train_size=40, eval_size=8,
                       workers=2)
loader = train_loader(build(config, "train", 0), Plan(40, 2, 0, 0, 1), 0, 0, config)
next(loader)
print(*[p.pid for p in psutil.Process().children()], flush=True)
if sys.argv[1] == "wait":
    time.sleep(60)
if sys.argv[1] == "fail":
    raise SystemExit(3)
"""


@pytest.mark.parametrize("end", ["wait", "fail", "return"])
def test_workers_end_with_their_rank(end: str) -> None:
    rank = subprocess.Popen(
        [sys.executable, "-c", RANK, end],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert rank.stdout is not None
    workers = [int(pid) for pid in rank.stdout.readline().split()]
    assert len(workers) == 2
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


def test_reading_in_the_rank_needs_no_paddle() -> None:
    code = RANK.replace("workers=2", "workers=0") + "\nassert 'paddle' not in sys.modules"
    subprocess.run([sys.executable, "-c", code, "return"], check=True, cwd=ROOT)


@pytest.mark.parametrize("workers", [0, 2])
def test_skipped_images_are_counted_once_and_named(workers: int) -> None:
    dataset = Tricky({3: "replaced", 20: "replaced", 7: "skipped"})
    counter = SkipCounter(dataset, limit=3)
    for epoch in range(2):
        loader = train_loader(dataset, plan(), epoch, 0, config(workers=workers))
        named = sorted(path for batch in loader for path in counter.update(batch))
        expected = ["/pictures/20.jpg", "/pictures/3.jpg", "/pictures/7.jpg"]
        assert named == ([] if epoch else expected)
    assert counter.count == 3


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
    large = config(image_size=224, workers=8, prefetch=2)
    need = 4 * (8 * 2 + 2) * 128 * (224 * 224 * 3 + 24) / (1 << 20)
    with pytest.raises(UserError) as error:
        check_shared_memory(large, 128, 4, tmp_path)
    assert f"need about {need:.0f} MiB in {tmp_path}" in error.value.message
    assert "64 MiB are free" in error.value.message
    assert "--shm-size=" in error.value.remedy
    assert "dataset.workers=0" in error.value.remedy
    check_shared_memory(config(image_size=224, workers=0), 128, 4, tmp_path)
    check_shared_memory(config(image_size=32, workers=2), 128, 4, tmp_path)


def test_shared_memory_of_this_machine_is_read(tmp_path: Path) -> None:
    check_shared_memory(config(image_size=4, workers=1), 2, 1, tmp_path)
    with pytest.raises(UserError, match="MiB are free"):
        check_shared_memory(config(image_size=10**6, workers=8), 1000, 8, tmp_path)


def test_the_need_is_not_under_what_workers_use() -> None:
    """The most that lies in shared memory at once, against the estimate."""
    size = 160
    settings_ = config(image_size=size, workers=2, prefetch=2, train_size=160)
    dataset, most = build(settings_, "train", 0), 0
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
