"""Checkpoints: atomic, verified, and exact on resume."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from recipes import checkpoint
from recipes.checkpoint import Snapshot
from recipes.config import UserError

ROOT = Path(__file__).parent.parent
IDENTITY = {
    "model": "ResNet18",
    "num_classes": 10,
    "seed": 1,
    "global_batch_size": 64,
    "dataset": "digits",
}


def snapshot(step: int, value: float = 0.5) -> Snapshot:
    return Snapshot(
        {"a.weight": np.full((3, 2), value, np.float32), "b": np.array(2, np.int64)},
        {"a.weight/velocity": np.full((3, 2), -value, np.float64)},
        {"step": step, "epoch": 1, "identity": IDENTITY, "best": None, "loss": 1 / 3},
    )


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def same(left: dict[str, np.ndarray], right: dict[str, np.ndarray]) -> bool:
    return left.keys() == right.keys() and all(
        left[key].dtype == right[key].dtype
        and left[key].shape == right[key].shape
        and left[key].tobytes() == right[key].tobytes()
        for key in left
    )


arrays = st.dictionaries(
    st.text(min_size=1, max_size=12).filter(lambda name: name != "__metadata__"),
    st.sampled_from(
        ["float16", "float32", "float64", "uint16", "int64", "int32", "uint8", "bool"]
    ).flatmap(lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=0, min_side=0))),
    max_size=4,
)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=60, deadline=None)
@given(arrays, arrays, st.dictionaries(st.text(), json_values, max_size=3), st.integers(1, 10**9))
def test_what_is_loaded_is_what_was_saved(
    tmp_path_factory: pytest.TempPathFactory,
    model: dict[str, np.ndarray],
    optimizer: dict[str, np.ndarray],
    extra: dict[str, Any],
    step: int,
) -> None:
    folder = tmp_path_factory.mktemp("checkpoints")
    given_ = Snapshot(model, optimizer, {**extra, "step": step})
    path = checkpoint.save(folder, given_, best=False, keep=1)
    loaded = checkpoint.load(folder / "last")
    assert path.name == f"step-{step:08d}"
    assert same(loaded.model, model)
    assert same(loaded.optimizer, optimizer)
    assert loaded.state == given_.state
    assert all(array.flags.writeable for array in loaded.model.values())


def test_strided_and_big_endian_arrays_keep_their_values(tmp_path: Path) -> None:
    base = np.arange(12, dtype=np.float32).reshape(3, 4)
    model = {"t": base.T, "s": base[::2, ::2], "e": base.astype(">f4")}
    path = checkpoint.save(tmp_path, Snapshot(model, {}, {"step": 1}), best=False, keep=1)
    loaded = checkpoint.load(path).model
    assert all(np.array_equal(loaded[name], model[name]) for name in model)


def test_bfloat16_is_stored_as_bfloat16(tmp_path: Path) -> None:
    import safetensors

    bits = np.array([0x3F80, 0x4000], np.uint16)
    path = checkpoint.save(tmp_path, Snapshot({"w": bits}, {}, {"step": 1}), best=False, keep=1)
    stored = dict(safetensors.deserialize((path / checkpoint.MODEL).read_bytes()))  # type: ignore[no-untyped-call]
    assert stored["w"]["dtype"] == "BF16"


def test_the_files_hold_no_pickle_and_an_object_is_refused(tmp_path: Path) -> None:
    strange = Snapshot({"w": np.array([object()])}, {}, {"step": 1})
    with pytest.raises(TypeError, match="w: arrays of object cannot be stored"):
        checkpoint.save(tmp_path, strange, best=False, keep=1)
    with pytest.raises(TypeError, match="JSON"):
        checkpoint.save(tmp_path, Snapshot({}, {}, {"step": 1, "x": object()}), best=False, keep=1)
    assert names(tmp_path) == []


def test_keeps_the_newest_and_the_best(tmp_path: Path) -> None:
    for step in range(1, 8):
        checkpoint.save(tmp_path, snapshot(step), best=step == 2, keep=3)
    assert names(tmp_path) == [
        "best",
        "last",
        *(f"step-0000000{step}" for step in (2, 5, 6, 7)),
    ]
    assert str((tmp_path / "last").readlink()) == "step-00000007"
    assert str((tmp_path / "best").readlink()) == "step-00000002"
    assert checkpoint.load(tmp_path / "best").state["step"] == 2


def test_the_links_survive_a_move_of_the_run(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "a" / "checkpoints", snapshot(1), best=True, keep=1)
    (tmp_path / "a").rename(tmp_path / "b")
    assert checkpoint.load(tmp_path / "b/checkpoints/best").state["step"] == 1


def test_a_checkpoint_of_the_same_step_is_replaced(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, snapshot(5, 1.0), best=True, keep=1)
    checkpoint.save(tmp_path, snapshot(5, 2.0), best=False, keep=1)
    assert names(tmp_path) == ["best", "last", "step-00000005"]
    assert checkpoint.load(tmp_path / "best").model["a.weight"][0, 0] == 2.0


def test_the_newest_is_the_one_written_last_not_the_highest_step(tmp_path: Path) -> None:
    for step in (100, 200, 150):  # continued from 100 after 200 was given up
        checkpoint.save(tmp_path, snapshot(step), best=False, keep=2)
    newest = checkpoint.newest(tmp_path)
    assert newest is not None
    assert newest.name == "step-00000150"
    assert names(tmp_path) == ["last", "step-00000150", "step-00000200"]


def test_what_killed_writers_left_is_removed_at_the_next_save(tmp_path: Path) -> None:
    dead = subprocess.Popen(["true"])
    dead.wait()
    (tmp_path / f".step-00000001.partial-{dead.pid}").mkdir()
    (tmp_path / f".step-00000001.deleted-{dead.pid}").mkdir()
    (tmp_path / f".last.partial-{dead.pid}").symlink_to("step-00000001")
    alive = f".step-00000001.partial-{os.getppid()}"
    (tmp_path / alive).mkdir()
    (tmp_path / ".step-notes").mkdir()
    checkpoint.save(tmp_path, snapshot(2), best=False, keep=1)
    assert names(tmp_path) == sorted([".step-notes", alive, "last", "step-00000002"])


def test_a_replacement_that_was_cut_off_keeps_the_old_checkpoint(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, snapshot(5), best=False, keep=1)
    path.rename(tmp_path / ".step-00000005.replaced-1")
    found = checkpoint.newest(tmp_path)
    assert found is not None
    assert checkpoint.load(found).state["step"] == 5
    checkpoint.save(tmp_path, snapshot(6), best=False, keep=2)
    assert names(tmp_path) == ["last", "step-00000005", "step-00000006"]


@pytest.mark.parametrize("name", [*checkpoint.FILES, checkpoint.MANIFEST])
def test_any_changed_byte_is_detected_and_its_file_named(tmp_path: Path, name: str) -> None:
    path = checkpoint.save(tmp_path, snapshot(1), best=False, keep=1)
    whole = (path / name).read_bytes()
    randomness = random.Random(name)
    for position in range(len(whole)):
        altered = bytearray(whole)
        altered[position] ^= randomness.randrange(1, 256)
        (path / name).write_bytes(altered)
        with pytest.raises(UserError, match=f"{name}: .*altered"):
            checkpoint.load(path)
    for length in range(len(whole)):
        (path / name).write_bytes(whole[:length])
        with pytest.raises(UserError, match=f"{name}: it (has {length} bytes|was .*cut short)"):
            checkpoint.load(path)
    (path / name).write_bytes(whole + b"\n")
    with pytest.raises(UserError, match=name):
        checkpoint.load(path)
    (path / name).unlink()
    with pytest.raises(UserError, match=f"{name}: it is missing"):
        checkpoint.load(path)
    (path / name).write_bytes(whole)
    checkpoint.verify(path)


def test_a_damaged_checkpoint_names_the_others(tmp_path: Path) -> None:
    for step in (1, 2):
        path = checkpoint.save(tmp_path, snapshot(step), best=False, keep=2)
    (path / checkpoint.MODEL).unlink()
    with pytest.raises(UserError) as error:
        checkpoint.load(tmp_path / "last")
    assert "step-00000002: model.safetensors: it is missing" in error.value.message
    assert "step-00000001" in error.value.remedy
    assert "step-00000002" not in error.value.remedy


def test_a_checkpoint_of_another_format_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "FORMAT", 2)
    path = checkpoint.save(tmp_path, snapshot(1), best=False, keep=1)
    monkeypatch.undo()
    with pytest.raises(UserError, match="format 2, this version reads format 1"):
        checkpoint.load(path)


def test_auto_passes_over_a_damaged_checkpoint_with_one_line(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    assert checkpoint.resolve("auto", tmp_path) is None
    for step in (1, 2):
        path = checkpoint.save(folder, snapshot(step), best=False, keep=3)
    data = bytearray((path / checkpoint.MODEL).read_bytes())
    data[-1] ^= 1
    (path / checkpoint.MODEL).write_bytes(data)
    lines: list[str] = []
    found = checkpoint.resolve("auto", tmp_path, lines.append)
    assert found == folder / "step-00000001"
    (line,) = lines
    assert "step-00000002: model.safetensors: its content was altered" in line
    assert "\n" not in line
    (path / checkpoint.MANIFEST).write_bytes(b"")
    assert checkpoint.resolve("auto", tmp_path, lines.append) == found
    assert "step-00000002: manifest.json" in lines[-1]


@pytest.mark.parametrize("resume", ["run", "run/checkpoints", "run/checkpoints/last"])
def test_resume_takes_a_run_folder_and_links(
    tmp_path: Path, resume: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2):
        checkpoint.save(tmp_path / "run/checkpoints", snapshot(step), best=step == 1, keep=3)
    monkeypatch.chdir(tmp_path)
    elsewhere = tmp_path / "elsewhere"
    second = tmp_path / "run/checkpoints/step-00000002"
    assert checkpoint.resolve(resume, elsewhere) == second
    best = checkpoint.resolve("run/checkpoints/best", elsewhere)
    assert best == checkpoint.resolve("run/checkpoints/step-00000001", elsewhere)


def test_resume_names_what_is_wrong_and_what_is_near(tmp_path: Path) -> None:
    folder = tmp_path / "run/checkpoints"
    path = checkpoint.save(folder, snapshot(10), best=False, keep=3)
    (tmp_path / "empty").mkdir()
    (folder / "best").symlink_to("step-00000003")

    def error(resume: Path) -> UserError:
        with pytest.raises(UserError) as caught:
            checkpoint.resolve(str(resume), tmp_path)
        return caught.value

    missing = error(folder / "step-00000011")
    assert "step-00000011: does not exist" in missing.message
    assert "step-00000010" in missing.remedy
    assert "has run" in error(tmp_path / "rum" / "checkpoints" / "last").remedy
    assert "not a checkpoint" in error(tmp_path / "empty").message
    assert "a link to nothing" in error(folder / "best").message
    assert str(path) in error(path / checkpoint.MODEL).remedy


def test_another_model_or_setting_is_refused_with_its_remedy() -> None:
    checkpoint.compare_identity(IDENTITY, dict(IDENTITY))
    checkpoint.compare_identity(IDENTITY, {**IDENTITY, "new_field": 3})
    with pytest.raises(UserError) as error:
        checkpoint.compare_identity(
            IDENTITY,
            {
                **IDENTITY,
                "model": "ResNet50",
                "num_classes": 100,
                "seed": 2,
                "global_batch_size": 128,
            },
            "outputs/a",
        )
    text = str(error.value)
    for part in (
        "outputs/a",
        "model: ResNet18 in the checkpoint, ResNet50 in this run",
        "num_classes: 10 in the checkpoint, 100 in this run",
        "model.name=ResNet18",
        "model.num_classes=10",
        "seed=1",
        "global_batch_size=64 batch_size=null",
    ):
        assert part in text
    assert "dataset" not in text
    with pytest.raises(UserError, match="model: not recorded in the checkpoint"):
        checkpoint.compare_identity({}, {"model": "ResNet18"})
    with pytest.raises(UserError) as error:
        checkpoint.compare_identity(
            {"model": "ResNet18"}, {"model": "ResNet50"}, use="evaluate it", otherwise="another one"
        )
    assert error.value.remedy == "evaluate it with model.name=ResNet18, or another one"


def test_names_shapes_and_dtypes_that_differ_are_listed() -> None:
    zeros = np.zeros((2, 3), np.float32)
    saved: dict[str, Any] = {"same": zeros, "gone": zeros, "shape": zeros}
    saved["dtype"] = zeros.astype(np.uint16)
    current = {"same": zeros, "new": zeros, "shape": zeros.T, "dtype": zeros}
    with pytest.raises(UserError) as error:
        checkpoint.check_names(saved, current)
    for part in (
        "new: missing in the checkpoint",
        "gone: unknown to the model",
        "shape: float32[2, 3] in the checkpoint, float32[3, 2] in the model",
        "dtype: bfloat16[2, 3] in the checkpoint, float32[2, 3] in the model",
    ):
        assert part in error.value.message
    assert "same" not in error.value.message
    many = {f"w{index}": zeros for index in range(12)}
    with pytest.raises(UserError, match="and 4 more"):
        checkpoint.check_names({}, many)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = []

    def mount(options: str) -> Path:
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            pytest.skip(f"a tmpfs cannot be mounted here: {done.stderr.strip()}")
        mounted.append(folder)
        return folder

    try:
        yield mount
    finally:
        for path in mounted:
            subprocess.run(["umount", str(path)], check=True)


def test_a_full_disk_leaves_the_older_checkpoints(small_disk: Callable[[str], Path]) -> None:
    folder = small_disk("size=256k") / "checkpoints"
    first = checkpoint.save(folder, snapshot(1), best=True, keep=1)
    large = Snapshot({"w": np.ones(100_000, np.float32)}, {}, {"step": 2})
    with pytest.raises(UserError) as error:
        checkpoint.save(folder, large, best=True, keep=1)
    needed, free = [int(word) for word in error.value.message.split() if word.isdigit()]
    assert "the disk is full" in error.value.message
    assert str(folder) in error.value.message
    assert 400_000 < needed < 401_000
    assert 0 < free < 262_144
    assert names(folder) == ["best", "last", "step-00000001"]
    assert checkpoint.newest(folder) == first
    assert same(checkpoint.load(first).model, snapshot(1).model)
    checkpoint.save(folder, snapshot(3), best=False, keep=1)  # and the next one that fits is saved


def test_a_read_only_folder_is_named(small_disk: Callable[[str], Path]) -> None:
    folder = small_disk("size=256k,ro")
    with pytest.raises(UserError, match=f"cannot be written to {folder}: Read-only"):
        checkpoint.save(folder, snapshot(1), best=True, keep=1)
    with pytest.raises(UserError, match=r"Read-only.*\n.*hydra.run.dir"):
        checkpoint.save(folder / "checkpoints", snapshot(1), best=True, keep=1)


def test_a_file_in_place_of_the_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("")
    with pytest.raises(UserError, match="checkpoints: File exists"):
        checkpoint.save(tmp_path / "checkpoints", snapshot(1), best=True, keep=1)


WRITER = """
    import sys
    from pathlib import Path
    import numpy as np
    from recipes.checkpoint import Snapshot, save
    folder, step = Path(sys.argv[1]), int(sys.argv[2])
    print("ready", flush=True)
    while True:
        step += step % 3 != 0 or np.random.rand() < 0.5  # some steps are written twice
        model = {str(index): np.full(4000, step, np.int64) for index in range(4)}
        save(folder, Snapshot(model, {}, {"step": step}), best=step % 4 == 0, keep=1)
        print(step, flush=True)
"""


def start_writer(folder: Path, step: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", textwrap.dedent(WRITER), str(folder), str(step)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)


def test_a_writer_killed_at_any_moment_leaves_a_complete_checkpoint(tmp_path: Path) -> None:
    randomness = random.Random(0)
    step = 0
    for _ in range(12):
        writer = start_writer(tmp_path, step)
        assert writer.stdout is not None
        try:
            writer.stdout.readline()
            time.sleep(randomness.uniform(0.01, 0.15))
        finally:
            writer.send_signal(signal.SIGKILL)
            said = writer.stdout.read().split()
            writer.wait()
        reported = int(said[-1]) if said else step
        complaints: list[str] = []
        path = checkpoint.newest(tmp_path, complaints.append)
        assert complaints == []
        if path is None:
            assert reported == 0
            continue
        loaded = checkpoint.load(path)
        step = loaded.state["step"]
        assert step in (reported, reported + 1)
        assert all((array == step).all() for array in loaded.model.values())
        for link in ("last", "best"):
            if (tmp_path / link).is_symlink():
                checkpoint.verify(tmp_path / link)
    assert step > 12
    checkpoint.save(tmp_path, snapshot(step + 1), best=True, keep=1)
    assert names(tmp_path) == ["best", "last", checkpoint.name_of(step + 1)]


def test_a_reader_beside_a_writer_sees_whole_checkpoints_only(tmp_path: Path) -> None:
    writer = start_writer(tmp_path, 0)
    assert writer.stdout is not None
    try:
        while writer.stdout.readline().strip() != "1":
            assert writer.poll() is None
        drain = threading.Thread(target=writer.stdout.read)
        drain.start()
        seen = set()
        complaints: list[str] = []
        end = time.monotonic() + 2
        while time.monotonic() < end:
            path = checkpoint.newest(tmp_path, complaints.append)
            assert path is not None
            seen.add(path.name)
        assert complaints == []
        assert len(seen) > 3
    finally:
        writer.kill()
        writer.wait()
    drain.join()


# From here on with Paddle, on one process.


def build(kind: str, dtype: str = "float32") -> tuple[Any, Any, Any]:
    """A small convolutional network with its optimizer and schedule."""
    import paddle

    paddle.seed(3)
    model = paddle.nn.Sequential(
        paddle.nn.Conv2D(1, 2, 3),
        paddle.nn.BatchNorm(2),
        paddle.nn.ReLU(),
        paddle.nn.Flatten(),
        paddle.nn.Linear(72, 3),
    )
    model.to(dtype=dtype)
    cosine = paddle.optimizer.lr.CosineAnnealingDecay(0.1, T_max=10)
    schedule = paddle.optimizer.lr.LinearWarmup(cosine, 2, 0.0, 0.1)
    fused = {"use_multi_tensor": True} if kind == "fused Momentum" else {}
    optimizer = getattr(paddle.optimizer, kind.removeprefix("fused "))(
        schedule, parameters=model.parameters(), weight_decay=0.01, **fused
    )
    return model, optimizer, schedule


def train(model: Any, optimizer: Any, schedule: Any, steps: range) -> list[bytes]:
    """Each step's loss, bit by bit; a step's data depends on its number alone."""
    import paddle

    dtype = model.state_dict()["4.weight"].dtype
    losses = []
    for step in steps:
        randomness = np.random.default_rng(step)
        images = paddle.to_tensor(randomness.standard_normal((6, 1, 8, 8))).astype(dtype)
        labels = paddle.to_tensor(randomness.integers(0, 3, 6))
        loss = paddle.nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
        schedule.step()
        losses.append(loss.numpy().tobytes())
    return losses


def wrapped(optimizer: Any) -> Any:
    """As Fleet wraps it where there is more than one process."""
    from paddle.distributed import fleet
    from paddle.distributed.fleet.meta_optimizers.dygraph_optimizer import HybridParallelOptimizer

    fleet.init(is_collective=True)
    group = fleet.get_hybrid_communicate_group()
    return HybridParallelOptimizer(optimizer, group, fleet.fleet._user_defined_strategy)


@pytest.mark.parametrize("kind", ["Momentum", "AdamW", "fused Momentum"])
@pytest.mark.parametrize("fleet", [False, True])
def test_resume_continues_bit_by_bit(tmp_path: Path, kind: str, fleet: bool) -> None:
    model, optimizer, schedule = build(kind)
    handle = wrapped(optimizer) if fleet else optimizer
    train(model, handle, schedule, range(4))
    taken = checkpoint.snapshot_of(model, handle, None, {"step": 4})
    adamw = {"moment1", "moment2", "beta1_pow_acc", "beta2_pow_acc"}
    accumulators = adamw if kind == "AdamW" else {"velocity"}
    # The running statistics of `nn.BatchNorm` are parameters too, but not trained.
    parameters = {name for name, tensor in model.named_parameters() if not tensor.stop_gradient}
    assert taken.optimizer.keys() == {f"{a}/{b}" for a in parameters for b in accumulators}
    path = checkpoint.save(tmp_path, taken, best=False, keep=1)
    expected = train(model, handle, schedule, range(4, 8))
    later = checkpoint.snapshot_of(model, handle, None, {})

    # A fresh process: other layers first, so that Paddle's unique names differ.
    fresh, optimizer, schedule = build(kind)
    assert {p.name for p in fresh.parameters()}.isdisjoint(p.name for p in model.parameters())
    handle = wrapped(optimizer) if fleet else optimizer
    checkpoint.restore(checkpoint.load(path), fresh, handle, None)
    assert train(fresh, handle, schedule, range(4, 8)) == expected
    again = checkpoint.snapshot_of(fresh, handle, None, {})
    assert same(again.model, later.model)
    assert same(again.optimizer, later.optimizer)
    assert again.state == later.state

    # And back again in the same process, whose accumulators exist by now.
    checkpoint.restore(checkpoint.load(path), fresh, handle, None)
    restored = checkpoint.snapshot_of(fresh, handle, None, {"step": 4})
    assert same(restored.model, taken.model)
    assert same(restored.optimizer, taken.optimizer)
    assert restored.state == taken.state
    assert train(fresh, handle, schedule, range(4, 8)) == expected


@pytest.mark.parametrize("times", [1, 2])
def test_a_second_optimizer_of_the_same_parameters_is_restored_too(times: int) -> None:
    model, optimizer, schedule = build("AdamW")
    train(model, optimizer, schedule, range(3))
    taken = checkpoint.snapshot_of(model, optimizer, None, {})
    expected = train(model, optimizer, schedule, range(3, 6))
    import paddle

    schedule = paddle.optimizer.lr.LinearWarmup(
        paddle.optimizer.lr.CosineAnnealingDecay(0.1, T_max=10), 2, 0.0, 0.1
    )
    second = paddle.optimizer.AdamW(schedule, parameters=model.parameters(), weight_decay=0.01)
    for _ in range(times):  # before its first step, Paddle only keeps what it was given
        checkpoint.restore(taken, model, second, None)
        assert same(checkpoint.snapshot_of(model, second, None, {}).optimizer, taken.optimizer)
    assert train(model, second, schedule, range(3, 6)) == expected


def test_a_snapshot_does_not_change_while_training_goes_on() -> None:
    model, optimizer, schedule = build("Momentum")
    train(model, optimizer, schedule, range(2))
    taken = checkpoint.snapshot_of(model, optimizer, None, {})
    copies = [{k: v.copy() for k, v in part.items()} for part in (taken.model, taken.optimizer)]
    train(model, optimizer, schedule, range(2, 4))
    assert same(taken.model, copies[0])
    assert same(taken.optimizer, copies[1])
    assert not same(checkpoint.snapshot_of(model, optimizer, None, {}).model, copies[0])


def test_float64_and_a_start_before_the_first_step(tmp_path: Path) -> None:
    model, optimizer, schedule = build("Momentum", "float64")
    taken = checkpoint.snapshot_of(model, optimizer, None, {"step": 0})
    assert taken.optimizer == {}
    path = checkpoint.save(tmp_path, taken, best=False, keep=1)
    expected = train(model, optimizer, schedule, range(3))
    fresh, optimizer, schedule = build("Momentum", "float64")
    checkpoint.restore(checkpoint.load(path), fresh, optimizer, None)
    assert train(fresh, optimizer, schedule, range(3)) == expected


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("kind", ["Momentum", "AdamW"])
def test_low_precision_parameters_with_master_weights(
    tmp_path: Path, kind: str, dtype: str
) -> None:
    """Paddle has no CPU kernel for such a step, so the optimizer's tensors are made without one."""
    import paddle

    def make() -> tuple[Any, Any]:
        model = paddle.nn.Linear(2, 3)
        model.to(dtype=dtype)
        optimizer = getattr(paddle.optimizer, kind)(
            0.1, parameters=model.parameters(), multi_precision=True
        )
        return model, optimizer

    def begin(model: Any, optimizer: Any) -> None:
        block = paddle.base.framework.default_main_program().global_block()
        optimizer._create_accumulators(block, model.parameters())

    model, optimizer = make()
    begin(model, optimizer)
    for index, tensor in enumerate(
        [*optimizer.state_dict()["master_weights"].values()]
        + [v for k, v in optimizer.state_dict().items() if k != "master_weights"]
    ):
        tensor.set_value(np.full(tensor.shape, index + 1 / 3, np.float32))
    taken = checkpoint.snapshot_of(model, optimizer, None, {"step": 1})
    assert taken.model["weight"].dtype == {"bfloat16": np.uint16, "float16": np.float16}[dtype]
    assert {"weight/master_weight", "bias/master_weight"} < taken.optimizer.keys()
    path = checkpoint.save(tmp_path, taken, best=False, keep=1)

    fresh, optimizer = make()
    for _ in range(2):  # before the first step, and with tensors in use
        checkpoint.restore(checkpoint.load(path), fresh, optimizer, None)
        begin(fresh, optimizer)
        restored = checkpoint.snapshot_of(fresh, optimizer, None, {"step": 1})
        assert same(restored.model, taken.model)
        assert same(restored.optimizer, taken.optimizer)
        masters = optimizer.state_dict()["master_weights"]
        assert {m.dtype for m in masters.values()} == {paddle.float32}


def test_the_loss_scale_is_restored() -> None:
    import paddle

    model, optimizer, _ = build("Momentum")
    scaler, other = (paddle.amp.GradScaler(init_loss_scaling=scale) for scale in (1024.0, 2.0))
    fields = {
        "enable": True,
        "scale": paddle.to_tensor(np.array([2.0], np.float32)),
        "incr_ratio": 2.0,
        "decr_ratio": 0.5,
        "incr_every_n_steps": 2000,
        "decr_every_n_nan_or_inf": 1,
        "incr_count": 0,
        "decr_count": 0,
        "use_dynamic_loss_scaling": True,
    }
    assert checkpoint.snapshot_of(model, optimizer, scaler, {}).state["loss_scaler"] == {}
    # Paddle's scaler disables itself on CPU and then lacks the fields of its state.
    for each in (scaler, other):
        for name, value in fields.items():
            setattr(each, f"_{name}", value)
    scaler._scale = paddle.to_tensor(np.array([48.0], np.float32))
    scaler._incr_count = 7
    taken = checkpoint.snapshot_of(model, optimizer, scaler, {})
    checkpoint.restore(taken, model, optimizer, other)
    assert other.state_dict()["scale"].tolist() == [48.0]
    assert other.state_dict()["incr_count"] == 7
    assert checkpoint.snapshot_of(model, optimizer, other, {}).state == taken.state


def test_another_optimizer_or_model_is_refused_before_anything_changes() -> None:
    model, optimizer, schedule = build("Momentum")
    train(model, optimizer, schedule, range(2))
    taken = checkpoint.snapshot_of(model, optimizer, None, {})
    fresh, adamw, _ = build("AdamW")
    before = checkpoint.snapshot_of(fresh, adamw, None, {})
    with pytest.raises(UserError, match="with the optimizer Momentum, this run uses AdamW") as bad:
        checkpoint.restore(taken, fresh, adamw, None)
    assert "optimizer=momentum" in bad.value.remedy
    del taken.optimizer["4.bias/velocity"]
    with pytest.raises(UserError, match=r"linear_\d+\.b_0_velocity_0: missing"):
        checkpoint.restore(taken, model, optimizer, None)
    taken.optimizer["9.bias/velocity"] = np.zeros(3, np.float32)
    with pytest.raises(UserError, match=r"9\.bias/velocity: unknown to the model"):
        checkpoint.restore(taken, model, optimizer, None)
    del taken.model["4.bias"]
    with pytest.raises(UserError, match=r"4\.bias: missing in the checkpoint"):
        checkpoint.restore(taken, fresh, adamw, None)
    assert same(checkpoint.snapshot_of(fresh, adamw, None, {}).model, before.model)


def test_a_wrapped_model_has_the_same_names() -> None:
    import paddle

    model, optimizer, _ = build("Momentum")
    parallel = paddle.DataParallel(model)
    taken = checkpoint.snapshot_of(parallel, optimizer, None, {})
    assert taken.model.keys() == model.state_dict().keys()


def test_no_paddle_is_needed_to_read_a_checkpoint(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, snapshot(1), best=False, keep=1)
    code = (
        "import sys; from pathlib import Path; from recipes import checkpoint;"
        f"checkpoint.load(Path({str(path)!r})); assert 'paddle' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
    shutil.rmtree(path)
