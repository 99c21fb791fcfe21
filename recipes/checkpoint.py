"""Checkpoints: written whole or not at all, verified before use, and free of pickle.

``checkpoints/`` of a run folder holds one folder a checkpoint and two relative links::

    step-00000230/model.safetensors      the model's state dict
                  optimizer.safetensors  accumulators and master weights, by structured names
                  state.json             everything that is not a tensor
                  manifest.json          size and SHA-256 of the other files; written last
    last -> step-00000230
    best -> step-00000115

All but the last two functions work on NumPy arrays, so they can run in a thread or in a process
without Paddle. An array of dtype uint16 holds the bits of bfloat16 values: that is how Paddle
hands bfloat16 to NumPy (it has no uint16 of its own). Such arrays are stored as BF16.
"""

from __future__ import annotations

import difflib
import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import safetensors

from recipes.config import UserError
from recipes.disk import sync_folder

FORMAT = 1
MODEL, OPTIMIZER, STATE, MANIFEST = (
    "model.safetensors",
    "optimizer.safetensors",
    "state.json",
    "manifest.json",
)
FILES = (MODEL, OPTIMIZER, STATE)
RANKS = "ranks.safetensors"  # only where ranks differ
MASTER = "master_weight"  # the kind under which a float32 copy of a parameter is stored
SHOWN = 8  # names listed in one message
LOOKS = 20  # at a folder that changes while it is read, before it is taken as it is

DTYPES = {
    "F64": "<f8",
    "F32": "<f4",
    "F16": "<f2",
    "BF16": "<u2",
    "I64": "<i8",
    "I32": "<i4",
    "I16": "<i2",
    "I8": "i1",
    "U8": "u1",
    "BOOL": "?",
}

_FINAL = re.compile(r"step-(?P<step>\d{8,})")
_REPLACED = re.compile(r"\.(step-(?P<step>\d{8,}))\.replaced-\d+")
_LEFTOVER = re.compile(r"\.(?:step-\d{8,}|last|best)\.(partial|deleted)-(\d+)")

# What continues a run whose setting differs from the checkpoint's; others are `key=value`.
_OVERRIDES = {
    "model": "model.name={}",
    "num_classes": "model.num_classes={}",
    "global_batch_size": "global_batch_size={} batch_size=null",
    "dataset": "dataset={}",
    "optimizer": "optimizer={}",
    "schedule": "schedule={}",
    "amp": "amp={}",
}
_REQUIRED = ("model", "num_classes")


@dataclass
class Snapshot:
    """A training in memory, complete enough to continue it.

    Attributes:
        model: the model's state dict, by structured name.
        optimizer: `<structured name of a parameter>/<kind>` to its accumulator, such as
            ``conv1.weight/velocity``; ``/master_weight`` is the float32 copy AMP O2 keeps.
        state: what is not a tensor, as JSON holds it: `step`, `epoch` (completed epochs),
            `step_in_epoch`, `samples`, `best`, `metrics`, `schedule`, `loss_scaler`,
            `optimizer` (`type`), `random`, `identity`.
        ranks: what differs between ranks, one row a rank; empty where nothing does.
    """

    model: dict[str, np.ndarray]
    optimizer: dict[str, np.ndarray]
    state: dict[str, Any] = field(default_factory=dict)
    ranks: dict[str, np.ndarray] = field(default_factory=dict)


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
        MODEL: _encode(snapshot.model),
        OPTIMIZER: _encode(snapshot.optimizer),
        STATE: (json.dumps(snapshot.state, indent=1) + "\n").encode(),
    }
    if snapshot.ranks:
        files[RANKS] = _encode(snapshot.ranks)
    final = folder / name_of(int(snapshot.state["step"]))
    partial = _beside(final, "partial")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _clean(folder)
        _write_folder(partial, files, _last_sequence(folder) + 1)
        _publish(partial, final)
        _point(folder / "last", final.name)
        if best:
            _point(folder / "best", final.name)
        sync_folder(folder)
        _prune(folder, keep)
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
        path: a checkpoint's folder, or a link to one.

    Raises:
        UserError: a file is missing, shorter or longer than recorded, or altered.
    """
    files = _read_verified(Path(path).resolve())
    return Snapshot(
        _decode(files[MODEL]),
        _decode(files[OPTIMIZER]),
        json.loads(files[STATE]),
        _decode(files[RANKS]) if RANKS in files else {},
    )


def mark_best(folder: Path, step: int) -> None:
    """Let ``best`` point to the checkpoint of a step, if that is still there."""
    if (folder / name_of(step)).is_dir():
        _point(folder / "best", name_of(step))
        sync_folder(folder)


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
    _read_verified(Path(path).resolve())


def newest(folder: Path, report: Callable[[str], None] | None = None) -> Path | None:
    """The checkpoint written last into `folder` among those that are complete and unaltered.

    Args:
        folder: the ``checkpoints`` folder; it need not exist.
        report: called with one line for each damaged checkpoint that is passed over.
    """
    for _ in range(LOOKS):
        listing = _by_age(folder)
        complaints = []
        found = None
        for path, _ in listing:
            try:
                verify(path)
            except UserError as error:
                complaints.append(f"passing over a damaged checkpoint: {error.message}")
            else:
                found = path
                break
        # What looks damaged or missing may have been removed or replaced while it was read.
        if (listing and found == listing[0][0]) or listing == _by_age(folder):
            break
    if report is not None:
        for line in complaints:
            report(line)
    return found


def existing(name: str) -> Path:
    """The path that names a checkpoint or a folder that holds some, as it is given.

    Raises:
        UserError: it does not exist, or is one file of a checkpoint.
    """
    path = Path(name)
    if not path.exists():
        what = "a link to nothing" if path.is_symlink() else "does not exist"
        raise UserError(f"checkpoint {path}: {what}", _nearby(path))
    if path.is_file() and path.name in (*FILES, RANKS, MANIFEST):
        raise UserError(
            f"checkpoint {path}: is one file of a checkpoint", f"name its folder: {path.parent}"
        )
    return path


def resolve(
    resume: str, run_folder: Path, report: Callable[[str], None] | None = None
) -> Path | None:
    """Find the checkpoint that `resume` means.

    Args:
        resume: ``auto`` (the newest complete checkpoint of `run_folder`; None if there is none),
            a checkpoint, a link to one, a run folder or its ``checkpoints`` (their newest).
        report: called with one line for each damaged checkpoint that is passed over.

    Raises:
        UserError: the path does not exist, or there is no checkpoint.
    """
    if resume == "auto":
        return newest(run_folder / "checkpoints", report)
    path = existing(resume).resolve()
    if (path / MANIFEST).exists() or _FINAL.fullmatch(path.name):
        return path
    holder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    found = newest(holder, report) if holder.is_dir() else None
    if found is None:
        raise UserError(
            f"checkpoint {path}: not a checkpoint (no {MANIFEST}), and no complete checkpoint "
            "is in it",
            _nearby(path),
        )
    return found


def compare_identity(
    saved: Mapping[str, Any],
    current: Mapping[str, Any],
    source: Path | str = "the checkpoint",
    *,
    use: str = "continue it",
    otherwise: str = "leave resume out to train from the start",
) -> None:
    """Refuse to continue a checkpoint with settings that would make it another training.

    Args:
        saved: `state["identity"]` of the checkpoint.
        current: the same of this run. Fields that `saved` does not know are not compared, other
            than the model and its class count.
        use, otherwise: what a person can do with the checkpoint's settings, and without.

    Raises:
        UserError: naming each field that differs with both values, and its remedy.
    """
    absent = object()
    differing = [
        key
        for key, value in current.items()
        if (key in saved or key in _REQUIRED) and saved.get(key, absent) != value
    ]
    if not differing:
        return
    lines = [
        f"  {key}: {saved.get(key, 'not recorded')} in the checkpoint, {current[key]} in this run"
        for key in differing
    ]
    overrides = [
        _OVERRIDES.get(key, f"{key}={{}}").format(saved[key]) for key in differing if key in saved
    ]
    raise UserError(
        f"{source} is of another training:\n" + "\n".join(lines),
        f"{use} with {' '.join(overrides)}, or {otherwise}" if overrides else otherwise,
    )


def check_names(
    saved: Mapping[str, np.ndarray],
    current: Mapping[str, Any],
    source: Path | str = "the checkpoint",
) -> None:
    """Check that a saved state dict fits the current one: names, shapes, dtypes.

    Args:
        saved: name to array.
        current: name to anything with `shape` and `dtype` (an array or a Paddle tensor).

    Raises:
        UserError: naming up to eight of the missing, unexpected and differing tensors.
    """
    problems = [f"{name}: missing in the checkpoint" for name in current if name not in saved]
    problems += [f"{name}: unknown to the model" for name in saved if name not in current]
    for name in current.keys() & saved.keys():
        theirs, ours = _describe(saved[name]), _describe(current[name])
        if theirs != ours:
            problems.append(f"{name}: {theirs} in the checkpoint, {ours} in the model")
    if problems:
        raise UserError(
            f"{source} does not fit the model: {_listed(sorted(problems))}",
            "set model, model.num_classes, dtype and amp to what the checkpoint was trained with",
        )


def snapshot_of(model: Any, optimizer: Any, scaler: Any, state: Mapping[str, Any]) -> Snapshot:
    """Copy a training into host memory; the copy does not change when training goes on.

    Args:
        model: a `paddle.nn.Layer`, wrapped by Fleet or not.
        optimizer: a `paddle.optimizer.Optimizer`, wrapped by Fleet or not.
        scaler: a `paddle.amp.GradScaler`, or None.
        state: the rest; `schedule`, `loss_scaler` and `optimizer` are filled in here.
    """
    tensors = model.state_dict()
    held = dict(optimizer.state_dict())
    schedule = held.pop("LR_Scheduler", None)
    masters = held.pop("master_weights", {})
    keys = {tensor.name: key for key, tensor in tensors.items()}
    arrays = {f"{keys[name]}/{MASTER}": tensor.numpy() for name, tensor in masters.items()}
    owners = keys | {tensor.name: keys[name] for name, tensor in masters.items()}
    for name, tensor in held.items():
        owner, kind = _split_accumulator(name, owners)
        arrays[f"{owners[owner]}/{kind}"] = np.array(tensor.numpy())
    return Snapshot(
        {key: np.array(tensor.numpy()) for key, tensor in tensors.items()},
        arrays,
        {
            **state,
            "schedule": _plain(schedule),
            "loss_scaler": _plain(scaler.state_dict()) if scaler is not None else {},
            "optimizer": {"type": _optimizer_type(optimizer)},
        },
    )


def restore(
    snapshot: Snapshot,
    model: Any,
    optimizer: Any,
    scaler: Any,
    source: Path | str = "the checkpoint",
) -> None:
    """Put a snapshot into a training, fresh or not; the next step is the one that came next.

    Args:
        model, optimizer, scaler: as for `snapshot_of`, built as they were for the snapshot.

    Raises:
        UserError: a tensor's name, shape or dtype differs, or the optimizer is another one.
    """
    tensors = model.state_dict()
    check_names(snapshot.model, tensors, source)
    theirs, ours = snapshot.state["optimizer"]["type"], _optimizer_type(optimizer)
    if theirs != ours:
        raise UserError(
            f"{source} was trained with the optimizer {theirs}, this run uses {ours}",
            f"continue it with optimizer={theirs.lower()}",
        )
    optimizer_state = _optimizer_state(snapshot, tensors, optimizer, source)
    for key, tensor in tensors.items():
        tensor.set_value(snapshot.model[key])
    optimizer.set_state_dict(optimizer_state)
    saved_scale = snapshot.state["loss_scaler"]
    if scaler is not None and scaler.is_enable() and saved_scale:
        scale = np.asarray(saved_scale["scale"], np.float32).reshape(1)
        scaler.load_state_dict({**saved_scale, "scale": scale})


def _optimizer_state(
    snapshot: Snapshot, tensors: Mapping[str, Any], optimizer: Any, source: Path | str
) -> dict[str, Any]:
    """What `optimizer.set_state_dict` takes, under the names this process gives its tensors."""
    import paddle

    held = dict(optimizer.state_dict())
    held.pop("LR_Scheduler", None)
    masters: dict[str, Any] = dict(held.pop("master_weights", {}))
    by_key: dict[str, dict[str, np.ndarray]] = {}
    unknown = []
    for name, array in snapshot.optimizer.items():
        key, _, kind = name.rpartition("/")
        if key in tensors:
            by_key.setdefault(key, {})[kind] = array
        else:
            unknown.append(f"{name}: unknown to the model")
    result: dict[str, Any] = {}
    for key, kinds in by_key.items():
        owner = tensors[key].name
        if MASTER in kinds:
            # A master weight that is in use stays the same tensor: accumulators go by its name.
            master = masters.get(owner)
            if master is None:
                master = paddle.to_tensor(kinds[MASTER])
                master.name = f"{owner}_fp32_master_0"
                masters[owner] = master
            else:
                master.set_value(kinds[MASTER])
            owner = master.name
        for kind, array in kinds.items():
            if kind != MASTER:
                result[_accumulator_name(owner, kind, held)] = paddle.to_tensor(array)
    missing = [f"{name}: missing in the checkpoint" for name in held if name not in result]
    if unknown or missing:
        raise UserError(
            f"{source} does not fit the optimizer: {_listed(unknown + missing)}",
            "use the model and optimizer that the checkpoint was trained with",
        )
    if masters:
        result["master_weights"] = masters
    if snapshot.state["schedule"] is not None:
        result["LR_Scheduler"] = dict(snapshot.state["schedule"])
    return result


def _accumulator_name(owner: str, kind: str, held: Mapping[str, Any]) -> str:
    """The name an accumulator has in the optimizer, or will have once the first step makes it."""
    from paddle.utils import unique_name

    stem = f"{owner}_{kind}"
    for name in held:
        if re.fullmatch(re.escape(stem) + r"_\d+", name):
            return name
    # Paddle numbers names by its own counter; asking for one moves the counter on by one.
    number = int(unique_name.generate(stem).rpartition("_")[2])
    return f"{stem}_{number + 1}"


def _split_accumulator(name: str, owners: Mapping[str, str]) -> tuple[str, str]:
    """``conv2d_0.w_0_velocity_0`` to the tensor it belongs to and its kind, ``velocity``."""
    owner = max((own for own in owners if name.startswith(f"{own}_")), key=len, default=None)
    if owner is None:
        raise ValueError(f"optimizer tensor {name} belongs to no parameter of the model")
    return owner, name[len(owner) + 1 :].rpartition("_")[0]


def _optimizer_type(optimizer: Any) -> str:
    while hasattr(optimizer, "_inner_opt"):  # Fleet's wrappers
        optimizer = optimizer._inner_opt
    return type(optimizer).__name__


def _plain(value: Any) -> Any:
    """NumPy scalars and arrays as JSON holds them."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else value


def _encode(arrays: Mapping[str, np.ndarray]) -> bytes:
    # The library reads the arrays by address, so they are held until it is done. NumPy has no
    # bfloat16, hence no `safetensors.numpy.save`.
    held = {
        # `ascontiguousarray` would make a 0-d array 1-d.
        name: np.asarray(array, array.dtype.newbyteorder("<"), order="C")
        for name, array in arrays.items()
    }
    allowed = {np.dtype(code) for code in DTYPES.values()}
    for name, array in held.items():
        if array.dtype not in allowed:
            raise TypeError(f"{name}: arrays of {array.dtype} cannot be stored")
    specs = {
        name: safetensors.TensorSpec(
            dtype="bfloat16" if array.dtype == np.uint16 else array.dtype.name,
            shape=list(array.shape),
            data_ptr=array.ctypes.data,
            data_len=array.nbytes,
        )
        for name, array in held.items()
    }
    return bytes(safetensors.serialize(specs))


def _decode(data: bytes) -> dict[str, np.ndarray]:
    return {
        name: np.frombuffer(view["data"], DTYPES[view["dtype"]]).reshape(view["shape"]).copy()
        for name, view in safetensors.deserialize(data)  # type: ignore[no-untyped-call]
    }


def _beside(path: Path, purpose: str) -> Path:
    return path.with_name(f".{path.name}.{purpose}-{os.getpid()}")


def _write_folder(partial: Path, files: Mapping[str, bytes], sequence: int) -> None:
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    for name, data in files.items():
        _write_file(partial / name, data)
    _write_file(partial / MANIFEST, _manifest(files, sequence))
    sync_folder(partial)


def _write_file(path: Path, data: bytes) -> None:
    with path.open("wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())


def _publish(partial: Path, final: Path) -> None:
    """Give the complete folder its name; a checkpoint of the same step makes way first."""
    replaced = None
    if final.exists():
        replaced = _beside(final, "replaced")
        shutil.rmtree(replaced, ignore_errors=True)
        final.rename(replaced)
    partial.rename(final)
    sync_folder(final.parent)
    if replaced is not None:
        shutil.rmtree(replaced)


def _point(link: Path, target: str) -> None:
    fresh = _beside(link, "partial")
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(target)
    fresh.replace(link)


def _clean(folder: Path) -> None:
    """Remove what writers that were killed left behind, and finish their replacements."""
    for path in folder.iterdir():
        if (found := _LEFTOVER.fullmatch(path.name)) and not _is_other_process(int(found[2])):
            if path.is_symlink():
                path.unlink()
            else:
                shutil.rmtree(path)
        elif found := _REPLACED.fullmatch(path.name):
            if (folder / found[1]).exists():
                shutil.rmtree(path)
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


def _prune(folder: Path, keep: int) -> None:
    linked = {(folder / link).resolve() for link in ("last", "best")}
    unreadable_last = sorted(_by_age(folder), key=lambda item: item[1] is None)
    for path, _ in unreadable_last[keep:]:
        if path.resolve() not in linked:
            doomed = _beside(path, "deleted")
            path.rename(doomed)  # at once, so that no reader finds half a checkpoint
            shutil.rmtree(doomed)


def _by_age(folder: Path) -> list[tuple[Path, int | None]]:
    """Checkpoints with their places in the order of writing, the one written last first.

    The order of writing counts, not the step: a run that was continued from an earlier checkpoint
    has written its newest one at a lower step than an abandoned one. Those without a readable
    manifest (None) come before all others, by step.
    """
    found = []
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
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
        return int(_read_manifest(path)["sequence"])
    except UserError:
        return None


def _last_sequence(folder: Path) -> int:
    return max((sequence or 0 for _, sequence in _by_age(folder)), default=0)


def _canonical(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, indent=1, sort_keys=True) + "\n").encode()


def _manifest(files: Mapping[str, bytes], sequence: int) -> bytes:
    """The manifest as written: it also holds a checksum of its own content."""
    content = {
        "format": FORMAT,
        "sequence": sequence,
        "files": {
            name: {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
            for name, data in files.items()
        },
    }
    return _canonical({**content, "sha256": hashlib.sha256(_canonical(content)).hexdigest()})


def _read_manifest(path: Path) -> dict[str, Any]:
    data = _read_file(path, MANIFEST)
    try:
        content = json.loads(data)
        own = content.pop("sha256")
        intact = data == _canonical({**content, "sha256": own})
        intact = intact and own == hashlib.sha256(_canonical(content)).hexdigest()
    except (ValueError, KeyError, AttributeError, TypeError):
        intact = False
    if not intact:
        raise _damaged(path, MANIFEST, "it was altered or cut short (its own checksum differs)")
    if content["format"] != FORMAT:
        raise UserError(
            f"checkpoint {path}: format {content['format']}, this version reads format {FORMAT}",
            "use the version of the recipes that wrote it",
        )
    return dict(content)


def _read_file(path: Path, name: str) -> bytes:
    try:
        return (path / name).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise _damaged(path, name, "it is missing") from None
    except OSError as error:
        raise _damaged(path, name, f"it cannot be read: {error.strerror}") from error


def _read_verified(path: Path) -> dict[str, bytes]:
    recorded = _read_manifest(path)["files"]
    names = (*FILES, RANKS) if RANKS in recorded else FILES
    files = {name: _read_file(path, name) for name in names}
    for name, data in files.items():
        size, digest = recorded[name]["size"], recorded[name]["sha256"]
        if len(data) != size:
            raise _damaged(path, name, f"it has {len(data)} bytes, the manifest says {size}")
        if hashlib.sha256(data).hexdigest() != digest:
            raise _damaged(path, name, "its content was altered (SHA-256 differs)")
    return files


def _damaged(path: Path, name: str, difference: str) -> UserError:
    return UserError(f"checkpoint {path}: {name}: {difference}", _alternatives(path))


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
    while not folder.is_dir():
        folder = folder.parent
    try:
        names = sorted(other.name for other in folder.iterdir() if not other.name.startswith("."))
    except OSError:
        names = []
    if not names:
        return f"{folder} is empty; name a checkpoint, or a run folder that holds some"
    missing = path.relative_to(folder).parts[0]
    close = difflib.get_close_matches(missing, [name for name in names if name != missing], SHOWN)
    return f"{folder} has {', '.join(close or names[:SHOWN])}"


def _describe(tensor: Any) -> str:
    dtype = str(tensor.dtype).removeprefix("paddle.")
    return f"{'bfloat16' if dtype == 'uint16' else dtype}{[int(size) for size in tensor.shape]}"


def _listed(problems: list[str]) -> str:
    more = [f"and {len(problems) - SHOWN} more"] if len(problems) > SHOWN else []
    return "".join(f"\n  {line}" for line in problems[:SHOWN] + more)


def _write_error(error: OSError, folder: Path, name: str, needed: int) -> UserError:
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return UserError(
            f"checkpoint {name} cannot be written to {folder}: {error.strerror or error}",
            "make the folder writable, or choose another with hydra.run.dir=FOLDER; the older "
            "checkpoints are intact",
        )
    what = "the disk is full" if error.errno == errno.ENOSPC else "the disk quota is used up"
    existing = next(path for path in (folder, *folder.absolute().parents) if path.is_dir())
    free = shutil.disk_usage(existing).free
    return UserError(
        f"checkpoint {name} cannot be written to {folder}: {what}: it needs {needed} bytes, "
        f"{free} are free",
        "make room (save.keep=1 keeps fewer) and continue with resume=auto; the older "
        "checkpoints are intact",
    )
