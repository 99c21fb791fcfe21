"""Checkpoints: written whole or not at all, verified before use, and free of pickle.

``checkpoints/`` of a run folder holds one folder a checkpoint, and two pointers (relative links;
`recipes/pointers.py` has the rest)::

    step-00000230/model.safetensors      the model's state dict
                  optimizer.safetensors  accumulators and master weights, by structured names
                  state.json             everything that is not a tensor
                  manifest.json          size and SHA-256 of the other files; written last
    last -> step-00000230
    best -> step-00000115

Checkpoints that cannot be read are neither passed over nor removed nor replaced: they may be
intact, and another version or user may need them. Damaged ones are passed over, and set aside
under another name when training goes on from an older one.

Nothing here needs Paddle, so it can run in a thread, or in a process without it.
"""

from __future__ import annotations

import difflib
import errno
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from recipes import manifest, pointers, tensors
from recipes.config import UserError
from recipes.disk import sync_folder
from recipes.manifest import (
    FILES,
    MANIFEST,
    MODEL,
    OPTIMIZER,
    RANKS,
    STATE,
    Damaged,
    manifest_of,
    not_understood,
)
from recipes.pointers import LOOKS, Missing
from recipes.printable import SHOWN, listed, printable
from recipes.snapshot import Snapshot

_FINAL = re.compile(r"step-(?P<step>\d{8,})")
_REPLACED = re.compile(r"\.(step-(?P<step>\d{8,}))\.replaced-\d+")
_LEFTOVER = re.compile(r"\.(?:step-\d{8,}|last|best)\.(partial|deleted)-(\d+)")

T = TypeVar("T")

_log = logging.getLogger(__name__)


def name_of(step: int) -> str:
    """The folder name of the checkpoint after `step` optimizer steps."""
    return f"step-{step:08d}"


def save(folder: Path, snapshot: Snapshot, *, best: bool, keep: int) -> Path:
    """Write a checkpoint into `folder`; a reader sees it whole or not at all.

    One process writes at a time. The folder ``last`` points to the new checkpoint afterwards, and
    ``best`` too where `best`. The `keep` checkpoints written last stay, and those that ``last``
    and ``best`` point to; others are removed. A checkpoint of the same step is replaced.

    Returns:
        The checkpoint's folder.

    Raises:
        UserError: the disk is full, or the folder cannot be written. Older checkpoints are
            intact, and nothing of the new one remains.
        TypeError: `snapshot.state` is not JSON-able, or an array's dtype cannot be stored.
    """
    if keep < 1:
        raise ValueError(f"keep={keep}: at least one checkpoint has to stay")
    files = {
        MODEL: tensors.encode(snapshot.model),
        OPTIMIZER: tensors.encode(snapshot.optimizer),
        STATE: (json.dumps(snapshot.state, indent=1) + "\n").encode(),
    }
    if snapshot.ranks:
        files[RANKS] = tensors.encode(snapshot.ranks)
    final = folder / name_of(int(snapshot.state["step"]))
    partial = _beside(final, "partial")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _clean(folder)
        _write_folder(partial, files, _last_sequence(folder) + 1)
        _publish(partial, final)
        pointers.point(folder / "last", final.name)
        if best:
            pointers.point(folder / "best", final.name)
        sync_folder(folder)
        prune(folder, keep)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise _write_error(error, folder, final.name, sum(map(len, files.values()))) from error
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return final


def load(path: Path) -> Snapshot:
    """Read a checkpoint after checking every byte of it against its manifest.

    Args:
        path: a checkpoint's folder, or a pointer to one: its newest, where a writer moves it on
            and removes the old one meanwhile.

    Raises:
        Damaged: a file is missing, shorter or longer than recorded, or altered.
        UserError: it cannot be read, and may be intact.
    """
    return _steadily(lambda: _followed(path), _load)


def _load(path: Path) -> Snapshot:
    files = manifest.read_verified(path)
    arrays = {}
    for name in files.keys() - {STATE}:
        try:
            arrays[name] = tensors.decode(files[name])
        except ValueError as error:
            raise not_understood(path, name, printable(error, 200)) from error
    try:
        state = json.loads(files[STATE])
    except (ValueError, RecursionError) as error:
        raise not_understood(path, STATE, f"no JSON: {printable(error)}") from error
    if not isinstance(state, dict):
        raise not_understood(path, STATE, "it holds no keys")
    return Snapshot(arrays[MODEL], arrays[OPTIMIZER], state, arrays.get(RANKS, {}))


def _followed(path: Path) -> Path:
    return pointers.looked_again(lambda: pointers.follow(path))


def _steadily(find: Callable[[], Path], read: Callable[[Path], T]) -> T:
    """What `read` makes of the path that `find` gives, found again where that one is gone.

    A writer removes old checkpoints, and replaces them, while others read.
    """
    for _ in range(LOOKS - 1):
        path = find()
        identity = _identity(path)
        try:
            return read(path)
        except Damaged:
            if find() == path and _identity(path) == identity:
                break
    path = find()
    try:
        return read(path)
    except Damaged as error:
        raise Damaged(error.message, _alternatives(path)) from error


def _identity(path: Path) -> tuple[int, int] | None:
    """What tells a folder from another one that has taken its name."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def mark_best(folder: Path, step: int) -> None:
    """Let ``best`` point to the checkpoint of a step, if that is still there.

    Raises:
        UserError: the folder cannot be written.
    """
    try:
        if (folder / name_of(step)).is_dir():
            pointers.point(folder / "best", name_of(step))
            sync_folder(folder)
    except OSError as error:
        raise UserError(
            f"{folder}: best cannot be made to lead to {name_of(step)}: {error.strerror or error}",
            "make room or make the folder writable, and continue with resume=auto; the "
            "checkpoints are intact",
        ) from error


class Writer:
    """Writes checkpoints behind the training, one at a time.

    Args:
        folder: the ``checkpoints`` folder.
        keep: as for `save`.
    """

    def __init__(self, folder: Path, keep: int) -> None:
        self._folder = folder
        self._keep = keep
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._in_flight: Future[Path] | None = None

    def submit(self, snapshot: Snapshot) -> None:
        """Begin to write; waits first for the write before, if that is not done.

        Raises:
            UserError: the write before has failed.
        """
        self.wait()
        self._in_flight = self._thread.submit(
            save, self._folder, snapshot, best=False, keep=self._keep
        )

    def wait(self) -> None:
        """Return once nothing is being written any more.

        Raises:
            UserError: the last write has failed.
        """
        in_flight, self._in_flight = self._in_flight, None
        if in_flight is not None:
            in_flight.result()

    def mark_best(self, step: int) -> None:
        """Let ``best`` point to a step's checkpoint, once that is written.

        Raises:
            UserError: its write has failed.
        """
        self.wait()
        mark_best(self._folder, step)


def verify(path: Path) -> None:
    """Check a checkpoint's files against its manifest, as `load` does.

    Raises:
        UserError: naming the file and what differs.
    """
    _steadily(lambda: _followed(path), manifest.verify)


def any_in(folder: Path) -> bool:
    """Whether a folder holds a checkpoint that `newest` would look at, usable or not."""
    return bool(_by_age(folder))


def newest(folder: Path, report: Callable[[str], None] | None = None) -> Path | None:
    """The checkpoint written last into `folder` among those that are complete and unaltered.

    Args:
        folder: the ``checkpoints`` folder; it need not exist.
        report: called with one line for each damaged checkpoint that is passed over.

    Returns:
        None where `folder` holds no checkpoint at all.

    Raises:
        UserError: one written later than all that can be used cannot be read, and may be intact;
            or all are damaged.
    """
    for _ in range(LOOKS):
        listing = _by_age(folder)
        complaints, found, obstacle = [], None, None
        for path, _ in listing:
            try:
                manifest.verify(pointers.follow(path))
            except Damaged as error:
                complaints.append(error.message)
            except UserError as error:
                obstacle = UserError(error.message, error.remedy or manifest.another(path))
                break
            else:
                found = path
                break
        # What looks damaged or missing may have been removed or replaced while it was read.
        if (listing and found == listing[0][0]) or listing == _by_age(folder):
            break
    if obstacle is not None:
        raise obstacle
    if found is None and complaints:
        raise UserError(
            f"no checkpoint in {folder} can be used, all are damaged:{listed(complaints)}",
            "restore one from a copy, or start from the beginning with another hydra.run.dir=…",
        )
    for line in complaints:
        if report is not None:
            report(f"passing over a damaged checkpoint: {line}")
    return found


def set_aside_damaged(folder: Path, used: Path) -> list[Path]:
    """Rename the damaged checkpoints that `newest` passed over for `used`.

    They keep their content, and are not taken for checkpoints any more.

    Returns:
        Their new names.

    Raises:
        OSError: the folder cannot be written.
    """
    listing = [path for path, _ in _by_age(folder)]
    aside = []
    for path in listing[: listing.index(used)]:
        try:
            manifest.verify(path)
        except Damaged:
            aside.append(path.rename(pointers.free_name(path, "damaged")))
    if aside:
        pointers.point(folder / "last", used.name)
        if _where(folder / "best") is None:
            (folder / "best").unlink(missing_ok=True)
    return aside


def existing(name: str) -> Path:
    """The path that names a checkpoint or a folder that holds some, as it is given.

    Raises:
        UserError: it does not exist, leads nowhere, is one file of a checkpoint, or holds none.
    """
    return pointers.looked_again(lambda: _existing(Path(name)))


def _existing(path: Path) -> Path:
    try:
        found = path.exists() or path.is_symlink()
    except OSError as error:  # a folder on the way that may not be searched, a name too long
        raise UserError(f"checkpoint {printable(path, 300)}: {error.strerror}") from None
    if not found:
        raise Missing(f"checkpoint {path}: does not exist", _nearby(path))
    try:
        real = pointers.follow(path)
    except UserError as error:
        raise type(error)(error.message, error.remedy or _nearby(path)) from None
    if real.is_file() and path.name in (*FILES, RANKS, MANIFEST):
        raise UserError(
            f"checkpoint {path}: is one file of a checkpoint", f"name its folder: {path.parent}"
        )
    try:
        if not may_hold_some(real):
            raise _holds_none(path)
    except OSError as error:
        raise UserError(f"checkpoint {path}: cannot be read: {error.strerror}") from None
    return path


def may_hold_some(path: Path) -> bool:
    """Whether a path looks like a checkpoint, or like a folder of some; nothing is read of them."""
    if not path.is_dir():
        return False
    if (path / MANIFEST).exists() or _FINAL.fullmatch(path.name):
        return True
    holder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    return any(_FINAL.fullmatch(each.name) for each in holder.iterdir())


def _holds_none(path: Path) -> Missing:
    return Missing(
        f"checkpoint {path}: not a checkpoint (no {MANIFEST}), and no complete checkpoint is in it",
        _nearby(path),
    )


def resolve(
    resume: str, run_folder: Path, report: Callable[[str], None] | None = None
) -> Path | None:
    """Find the checkpoint that `resume` means.

    Args:
        resume: ``auto`` (the newest complete checkpoint of `run_folder`; None if there is none),
            a checkpoint, a pointer to one, a run folder or its ``checkpoints`` (their newest).
        report: called with one line for each damaged checkpoint that is passed over.

    Raises:
        UserError: the path does not exist, there is no checkpoint, or none that can be used.
    """
    if resume == "auto":
        return newest(run_folder / "checkpoints", report)
    return pointers.looked_again(lambda: _resolve(resume, report))


def _resolve(resume: str, report: Callable[[str], None] | None) -> Path:
    path = pointers.follow(_existing(Path(resume)))
    try:
        if (path / MANIFEST).exists() or _FINAL.fullmatch(path.name):
            return path
        holder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
        found = newest(holder, report) if holder.is_dir() else None
    except OSError as error:
        raise UserError(f"checkpoint {path}: cannot be read: {error.strerror}") from None
    if found is None:
        raise _holds_none(path)
    return found


def find(
    resume: str, run_folder: Path, report: Callable[[str], None]
) -> tuple[Path, Snapshot] | None:
    """The checkpoint that `resume` means, as for `resolve`, and what it holds.

    Raises:
        UserError: as for `resolve` and `load`.
    """
    told: set[str] = set()

    def once(line: str) -> None:
        if line not in told:
            told.add(line)
            report(line)

    if resolve(resume, run_folder, once) is None:
        return None

    def where() -> Path:
        found = resolve(resume, run_folder, once)
        if found is None:
            raise UserError(f"the checkpoints of {run_folder} were removed while they were read")
        return found

    return _steadily(where, lambda path: (path, _load(path)))


def _beside(path: Path, purpose: str) -> Path:
    return path.with_name(f".{path.name}.{purpose}-{os.getpid()}")


def _write_folder(partial: Path, files: Mapping[str, bytes], sequence: int) -> None:
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    for name, data in files.items():
        _write_file(partial / name, data)
    _write_file(partial / MANIFEST, manifest_of(files, sequence))
    sync_folder(partial)


def _write_file(path: Path, data: bytes) -> None:
    with path.open("wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())


def _publish(partial: Path, final: Path) -> None:
    """Give the complete folder its name; a checkpoint of the same step makes way first.

    One that cannot be read stays under another name.
    """
    replaced = None
    if final.is_symlink() or (final.exists() and not manifest.can_be_read(final)):
        final.rename(pointers.free_name(final, "unread"))
    elif final.exists():
        replaced = _beside(final, "replaced")
        shutil.rmtree(replaced, ignore_errors=True)
        final.rename(replaced)
    partial.rename(final)
    sync_folder(final.parent)
    if replaced is not None:
        _discard(replaced)


def _discard(path: Path) -> None:
    """Remove what nobody needs; what cannot be removed now is tried again after the next write.

    Over NFS a folder stays while somebody reads one of its files. The checkpoint that has just been
    written is none the worse for it.
    """
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    except OSError as error:
        _log.warning("%s cannot be removed yet: %s", path, error.strerror or error)


def _clean(folder: Path) -> None:
    """Remove what writers that were killed left behind, and finish their replacements."""
    for path in folder.iterdir():
        if (found := _LEFTOVER.fullmatch(path.name)) and not _is_other_process(int(found[2])):
            _discard(path)
        elif found := _REPLACED.fullmatch(path.name):
            if (folder / found[1]).exists():
                _discard(path)
            else:
                path.rename(folder / found[1])


def _is_other_process(pid: int) -> bool:
    if pid == os.getpid():
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def prune(folder: Path, keep: int) -> None:
    """Remove what was written before the newest `keep` and is not pointed to.

    Only what this version could read is its own to remove, and no links, which someone else made,
    nor folders of others, who may want them. What cannot be removed is told, and stays.

    Raises:
        UserError: the folder cannot be read.
    """
    pointed = {_where(folder / name) for name in pointers.NAMES}
    ours = [
        path for path, sequence in _by_age(folder) if sequence is not None and not path.is_symlink()
    ]
    for path in ours[keep:]:
        removable = os.access(path, os.W_OK | os.X_OK, effective_ids=True)
        if removable and _where(path) not in pointed and manifest.can_be_read(path):
            doomed = _beside(path, "deleted")
            try:
                path.rename(doomed)  # at once, so that no reader finds half a checkpoint
            except OSError as error:
                _log.warning("%s cannot be removed yet: %s", path, error.strerror or error)
                continue
            _discard(doomed)


def _where(path: Path) -> Path | None:
    """Where a path leads, if it leads anywhere."""
    try:
        return pointers.follow(path)
    except UserError:
        return None


def _by_age(folder: Path) -> list[tuple[Path, int | None]]:
    """Checkpoints with their places in the order of writing, the one written last first.

    The order of writing counts, not the step: a run that was continued from an earlier checkpoint
    has written its newest one at a lower step than an abandoned one. Those without a readable
    manifest (None) come before all others, by step.
    """
    found = []
    try:
        names = [path.name for path in folder.iterdir()]
    except FileNotFoundError:
        names = []
    except OSError as error:
        raise UserError(
            f"{folder} cannot be read: {error.strerror}", "make it readable for this user"
        ) from None
    for path in map(folder.joinpath, names):
        replaced = _REPLACED.fullmatch(path.name)
        if replaced and replaced[1] in names:
            continue
        # Without its successor, a replaced one still counts: its writer was killed between.
        if match := replaced or _FINAL.fullmatch(path.name):
            found.append((path, _sequence(path), int(match["step"])))
    found.sort(key=lambda item: (item[1] is None, item[1] or 0, item[2]), reverse=True)
    return [(path, sequence) for path, sequence, _ in found]


def _sequence(path: Path) -> int | None:
    try:
        return manifest.sequence_of(path)
    except UserError:
        return None


def _last_sequence(folder: Path) -> int:
    return max((sequence or 0 for _, sequence in _by_age(folder)), default=0)


def _alternatives(path: Path) -> str:
    try:
        others = [other for other in path.parent.iterdir() if other.name != path.name]
    except OSError:
        others = []
    names = sorted(other.name for other in others if _FINAL.fullmatch(other.name))
    if not names:
        return "no other checkpoint is beside it: train from the start, or restore a copy"
    return f"use another one of {path.parent}: {', '.join(names[-SHOWN:])}; resume=auto finds one"


def _nearby(path: Path) -> str:
    folder = path.parent
    if path == folder:
        return "name a checkpoint, or a run folder that holds some"
    while not folder.is_dir():
        folder = folder.parent
    try:
        names = sorted(other.name for other in folder.iterdir() if not other.name.startswith("."))
    except OSError:
        names = []
    if not names:
        return f"{folder} is empty; name a checkpoint, or a run folder that holds some"
    missing = path.relative_to(folder).parts[0]
    names = [name for name in names if _leads_to_some(folder / name)] or names
    close = difflib.get_close_matches(missing, [name for name in names if name != missing], SHOWN)
    return f"{folder} has {', '.join(close or names[:SHOWN])}"


def _leads_to_some(path: Path) -> bool:
    """Whether a path is a checkpoint, or holds some, or is a folder of runs that do."""
    try:
        return may_hold_some(path) or (path.is_dir() and any(map(may_hold_some, path.iterdir())))
    except OSError:
        return False


def _write_error(error: OSError, folder: Path, name: str, needed: int) -> UserError:
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return UserError(
            f"checkpoint {name} cannot be written to {folder}: {error.strerror or error}",
            f"make the folder writable, or go on in another one: resume={folder.parent} "
            f"hydra.run.dir=FOLDER; {_kept(folder)}",
        )
    what = "the disk is full" if error.errno == errno.ENOSPC else "the disk quota is used up"
    existing = next(path for path in (folder, *folder.absolute().parents) if path.is_dir())
    free = shutil.disk_usage(existing).free
    return UserError(
        f"checkpoint {name} cannot be written to {folder}: {what}: it needs {needed} bytes, "
        f"{free} are free",
        f"make room (save.keep=1 keeps fewer) and continue with resume=auto; {_kept(folder)}",
    )


def _kept(folder: Path) -> str:
    try:
        some = any_in(folder)
    except UserError:  # no folder, or one that cannot be read
        some = False
    return "the older checkpoints are intact" if some else "there is no older checkpoint"
