"""Checkpoints: atomic, verified, and exact on resume."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
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
from small_disk import tmpfs
from snapshots import same

from recipes import checkpoint, manifest
from recipes.config import UserError
from recipes.snapshot import Snapshot

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
    stored = dict(safetensors.deserialize((path / manifest.MODEL).read_bytes()))  # type: ignore[no-untyped-call]
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


def test_a_finished_run_keeps_the_last_and_the_best(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        checkpoint.save(tmp_path, snapshot(step), best=step == 2, keep=3)
    checkpoint.prune(tmp_path, 1)
    assert names(tmp_path) == ["best", "last", "step-00000002", "step-00000004"]
    checkpoint.prune(tmp_path / "none", 1)


def test_what_cannot_be_removed_yet_is_removed_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As over NFS, where a folder stays while one of its files is open."""
    with pytest.MonkeyPatch.context() as patch:

        def rmtree(path: Path, ignore_errors: bool = False) -> None:
            if not ignore_errors:
                raise OSError(errno.ENOTEMPTY, "Directory not empty", str(path))

        patch.setattr(shutil, "rmtree", rmtree)
        for step in (1, 2, 2, 3):
            checkpoint.save(tmp_path, snapshot(step), best=False, keep=1)
        assert checkpoint.load(tmp_path / "last").state["step"] == 3
        assert checkpoint.newest(tmp_path) == tmp_path / "step-00000003"
    assert "cannot be removed yet: Directory not empty" in caplog.text
    checkpoint.save(tmp_path, snapshot(4), best=False, keep=1)
    assert names(tmp_path) == ["last", "step-00000004"]
    assert not list(tmp_path.glob(".*"))


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


@pytest.mark.parametrize("name", [*manifest.FILES, manifest.MANIFEST])
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
    (path / manifest.MODEL).unlink()
    with pytest.raises(UserError) as error:
        checkpoint.load(tmp_path / "last")
    assert "step-00000002: model.safetensors: it is missing" in error.value.message
    assert "step-00000001" in error.value.remedy
    assert "step-00000002" not in error.value.remedy


def save_in_format(folder: Path, step: int, version: int, **options: Any) -> Path:
    """A checkpoint as another version of this program would write it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manifest, "FORMAT", version)
        options = {"best": False, "keep": 9, **options}
        return checkpoint.save(folder, snapshot(step), **options)


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.fixture
def another_user() -> Iterator[int]:
    """Be a user who is not root, which may read everything."""
    if os.geteuid() != 0:
        yield os.geteuid()
        return
    os.seteuid(65534)
    try:
        yield 65534
    finally:
        os.seteuid(0)


@pytest.fixture
def shared_folder() -> Iterator[Path]:
    """A folder that every user can search, as pytest's own are not."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o777)
    yield folder / "run"
    shutil.rmtree(folder)


def test_auto_stops_at_a_newer_checkpoint_of_another_format_and_keeps_it(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    checkpoint.save(folder, snapshot(1), best=False, keep=3)
    newer = save_in_format(folder, 2, 2)
    before = contents(newer)
    with pytest.raises(UserError, match="format 2, this version reads format 1") as error:
        checkpoint.resolve("auto", tmp_path)
    assert "damaged" not in str(error.value)
    assert str(newer) in error.value.remedy
    # Whoever trains there all the same, from another checkpoint, neither removes nor replaces it.
    for step in (2, 3, 4, 5):
        checkpoint.save(folder, snapshot(step), best=False, keep=1)
    assert names(folder) == ["last", "step-00000002.unread-1", "step-00000005"]
    assert contents(folder / "step-00000002.unread-1") == before


def test_older_checkpoints_of_another_format_are_kept_and_in_nobodys_way(tmp_path: Path) -> None:
    older = save_in_format(tmp_path, 1, 2)
    (older / manifest.MANIFEST).rename(tmp_path / "aside")
    shutil.copy(tmp_path / "aside", older / manifest.MANIFEST)
    before = contents(older)
    for step in (5, 6, 7):
        checkpoint.save(tmp_path, snapshot(step), best=False, keep=1)
    assert contents(older) == before
    assert [name for name in names(tmp_path) if name != "aside"] == [
        *("last", "step-00000001", "step-00000007"),
    ]


@pytest.mark.parametrize("hidden", [manifest.MANIFEST, manifest.MODEL, "the folder", "all"])
def test_auto_stops_at_checkpoints_of_another_user_and_keeps_them(
    shared_folder: Path, hidden: str, request: pytest.FixtureRequest
) -> None:
    folder = shared_folder / "checkpoints"
    checkpoint.save(folder, snapshot(1), best=False, keep=3)
    path = checkpoint.save(folder, snapshot(2), best=False, keep=3)
    before = contents(folder)
    hidden_path = {"the folder": path, "all": folder}.get(hidden, path / hidden)
    hidden_path.chmod(0)
    if hidden != "all":
        folder.chmod(0o777)
    uid = request.getfixturevalue("another_user")
    with pytest.raises(UserError) as error:
        checkpoint.resolve("auto", shared_folder)
    assert "damaged" not in str(error.value)
    if hidden == "all":
        assert f"{folder} cannot be read: Permission denied" in error.value.message
    else:
        assert f"uid {uid} may not read it" in error.value.message
        for step in (3, 4):
            checkpoint.save(folder, snapshot(step), best=False, keep=1)
    os.seteuid(0)
    hidden_path.chmod(0o755)
    assert {name: data for name, data in contents(folder).items() if "00002/" in name} == {
        name: data for name, data in before.items() if "00002/" in name
    }


def test_auto_refuses_to_begin_anew_beside_checkpoints(tmp_path: Path) -> None:
    """Two models whose weights were swapped: every checkpoint is damaged, and none is lost."""
    folder = tmp_path / "checkpoints"
    paths = [checkpoint.save(folder, snapshot(step), best=False, keep=3) for step in (1, 2)]
    for path in paths:
        (path / manifest.MODEL).write_bytes(b"of another model")
    before = contents(folder)
    lines: list[str] = []
    with pytest.raises(UserError, match="can be used, all are damaged") as error:
        checkpoint.resolve("auto", tmp_path, lines.append)
    assert lines == []
    for path in paths:
        assert str(path / manifest.MODEL) in error.value.message.replace(": model", "/model")
    assert "hydra.run.dir" in error.value.remedy
    assert contents(folder) == before


def test_damaged_checkpoints_that_were_passed_over_are_set_aside(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    for step in (1, 2, 3):
        checkpoint.save(folder, snapshot(step), best=step == 3, keep=9)
    for step in (2, 3):
        (folder / checkpoint.name_of(step) / manifest.MODEL).write_bytes(b"")
    used = checkpoint.resolve("auto", tmp_path)
    assert used == folder / "step-00000001"
    aside = checkpoint.set_aside_damaged(folder, used)
    assert sorted(path.name for path in aside) == [
        *("step-00000002.damaged-1", "step-00000003.damaged-1"),
    ]
    assert checkpoint.load(folder / "last").state["step"] == 1
    with pytest.raises(UserError, match="best: does not exist"):
        checkpoint.existing(str(folder / "best"))
    for step in (2, 3, 4, 5):
        checkpoint.save(folder, snapshot(step), best=False, keep=1)
    assert names(folder) == [
        *("last", "step-00000002.damaged-1", "step-00000003.damaged-1", "step-00000005"),
    ]


STRANGE: dict[str, Callable[[Path], None]] = {
    "a link to itself": lambda path: path.symlink_to(path.name),
    "a link to nothing": lambda path: path.symlink_to("elsewhere"),
    "an empty folder": lambda path: path.mkdir(),
    "a file": lambda path: path.touch(),
    "a pipe": lambda path: os.mkfifo(path),
}


@pytest.mark.timeout(30)
@pytest.mark.parametrize("kind", STRANGE)
def test_what_is_no_checkpoint_but_called_so_is_told_and_left_alone(
    tmp_path: Path, kind: str
) -> None:
    folder = tmp_path / "checkpoints"
    checkpoint.save(folder, snapshot(1), best=False, keep=3)
    strange = folder / "step-00000099"
    STRANGE[kind](strange)
    lines: list[str] = []
    if "link" in kind:
        with pytest.raises(UserError, match=f"step-00000099: {kind}") as error:
            checkpoint.resolve("auto", tmp_path)
        assert f"moving {strange} away" in error.value.remedy
    else:
        found = checkpoint.resolve("auto", tmp_path, lines.append)
        assert found == folder / "step-00000001"
        assert len(lines) == 1
        assert "step-00000099" in lines[0]
    with pytest.raises(UserError, match="step-00000099"):
        checkpoint.find(str(strange), tmp_path, print)
    for step in (2, 3, 99, 100, 101):
        checkpoint.save(folder, snapshot(step), best=False, keep=1)
    left = [name for name in names(folder) if "99" in name]
    assert left == ["step-00000099.unread-1"]
    assert checkpoint.load(folder / "last").state["step"] == 101


def test_a_checkpoint_of_another_folder_that_is_linked_in_is_read_and_not_removed(
    tmp_path: Path,
) -> None:
    elsewhere = checkpoint.save(tmp_path / "other", snapshot(7), best=False, keep=1)
    folder = tmp_path / "run" / "checkpoints"
    folder.mkdir(parents=True)
    (folder / elsewhere.name).symlink_to(elsewhere)
    found = checkpoint.find("auto", tmp_path / "run", print)
    assert found is not None
    assert found[1].state["step"] == 7
    for step in (8, 9):
        checkpoint.save(folder, snapshot(step), best=False, keep=1)
    assert checkpoint.load(elsewhere).state["step"] == 7


@pytest.mark.parametrize("name", ["/", "//", ".", "", "\0", "x" * 300, "a/" * 3000, "/dev/zero"])
def test_odd_names_are_told(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="checkpoint ") as error:
        checkpoint.resolve(name, tmp_path)
    assert len(error.value.message) < 500


def test_auto_passes_over_a_damaged_checkpoint_with_one_line(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    assert checkpoint.resolve("auto", tmp_path) is None
    for step in (1, 2):
        path = checkpoint.save(folder, snapshot(step), best=False, keep=3)
    data = bytearray((path / manifest.MODEL).read_bytes())
    data[-1] ^= 1
    (path / manifest.MODEL).write_bytes(data)
    lines: list[str] = []
    found = checkpoint.resolve("auto", tmp_path, lines.append)
    assert found == folder / "step-00000001"
    (line,) = lines
    assert "step-00000002: model.safetensors: its content was altered" in line
    assert "\n" not in line
    (path / manifest.MANIFEST).write_bytes(b"")
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
    # What has no checkpoint is not proposed: no start that failed, no other file.
    (tmp_path / "rum-custom").mkdir()
    assert error(tmp_path / "rum").remedy == f"{tmp_path} has run"
    assert "a link to nothing" in error(folder / "best").message
    assert str(path) in error(path / manifest.MODEL).remedy


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    with contextlib.ExitStack() as mounted:
        yield lambda options: mounted.enter_context(tmpfs(tmp_path / "disk", options))


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


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOSYS, errno.EBADF, errno.EIO])
def test_folders_need_no_fsync_where_there_is_none(
    tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = os.fsync

    def fsync(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(number, os.strerror(number))
        whole(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    if number == errno.EIO:  # a disk that fails is another matter
        with pytest.raises(UserError, match=r"cannot be written.*Input/output error"):
            checkpoint.save(tmp_path, snapshot(1), best=True, keep=1)
        assert names(tmp_path) == []
    else:
        checkpoint.save(tmp_path, snapshot(1), best=True, keep=1)
        assert checkpoint.load(tmp_path / "best").state["step"] == 1


def test_a_file_in_place_of_the_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("")
    with pytest.raises(UserError, match="checkpoints: File exists"):
        checkpoint.save(tmp_path / "checkpoints", snapshot(1), best=True, keep=1)


WRITER = """
    import os, sys
    from pathlib import Path
    import numpy as np
    from recipes.checkpoint import Snapshot, save
    folder, step = Path(sys.argv[1]), int(sys.argv[2])
    if "fast" in sys.argv:
        os.fsync = lambda descriptor: None
    print("ready", flush=True)
    while True:
        step += step % 3 != 0 or np.random.rand() < 0.5  # some steps are written twice
        model = {str(index): np.full(4000, step, np.int64) for index in range(4)}
        save(folder, Snapshot(model, {}, {"step": step}), best=step % 4 == 0, keep=1)
        print(step, flush=True)
"""


def start_writer(folder: Path, step: int, *words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", textwrap.dedent(WRITER), str(folder), str(step), *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)


def test_a_writer_killed_at_any_moment_leaves_a_complete_checkpoint(tmp_path: Path) -> None:
    randomness = random.Random(0)
    step = 0
    for kill in range(100):
        if kill >= 12 and step > 12:  # a busy machine writes less between two
            break
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
            # Each of these reads several files, of which the writer removes the first meanwhile.
            loaded = checkpoint.load(tmp_path / "last")
            step = loaded.state["step"]
            assert all((array == step).all() for array in loaded.model.values())
            found = checkpoint.find(str(tmp_path / "last"), tmp_path, complaints.append)
            assert found is not None
            assert found[1].state["step"] >= step
            seen.add(found[0].name)
        assert complaints == []
        assert len(seen) > 3
    finally:
        writer.kill()
        writer.wait()
    drain.join()


def test_nothing_is_missing_beside_a_fast_writer(tmp_path: Path) -> None:
    run, folder, elsewhere = tmp_path, tmp_path / "checkpoints", tmp_path / "elsewhere"
    writer = start_writer(folder, 0, "fast")
    assert writer.stdout is not None
    try:
        while writer.stdout.readline().strip() != "4":  # the first best one
            assert writer.poll() is None
        drain = threading.Thread(target=writer.stdout.read)
        drain.start()
        complaints: list[str] = []
        end = time.monotonic() + 4
        while time.monotonic() < end:
            for path in (folder / "last", folder / "best", folder, run):
                assert checkpoint.existing(str(path)) == path
                assert checkpoint.resolve(str(path), elsewhere, complaints.append) is not None
                assert checkpoint.find(str(path), elsewhere, complaints.append) is not None
            for pointer in (folder / "last", folder / "best"):
                checkpoint.load(pointer)
                checkpoint.verify(pointer)
            assert checkpoint.find("auto", run, complaints.append) is not None
            assert checkpoint.any_in(folder)
        assert complaints == []
    finally:
        writer.kill()
        writer.wait()
    drain.join()


@pytest.mark.timeout(30)
def test_what_stays_missing_is_told_soon(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, snapshot(1), best=False, keep=1)
    (tmp_path / "best").symlink_to("step-00000002")
    for name in ("best", "step-00000002", "none/at/all"):
        for read in (checkpoint.existing, lambda path: checkpoint.resolve(path, tmp_path)):
            began = time.monotonic()
            with pytest.raises(UserError, match=r"a link to nothing|does not exist"):
                read(str(tmp_path / name))
            assert time.monotonic() - began < 5


def test_no_paddle_is_needed_to_read_a_checkpoint(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, snapshot(1), best=False, keep=1)
    code = (
        "import sys; from pathlib import Path; from recipes import checkpoint;"
        f"checkpoint.load(Path({str(path)!r})); assert 'paddle' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
    shutil.rmtree(path)


@pytest.mark.parametrize("name", ["/", "empty", "full", "empty/..", "file"])
def test_a_path_that_holds_no_checkpoint_is_told_without_reading(name: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "full" / "checkpoints" / "other").mkdir(parents=True)
    with pytest.raises(UserError, match="not a checkpoint") as caught:
        checkpoint.existing(str(tmp_path / name))
    assert caught.value.remedy
