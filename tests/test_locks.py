"""The locks under docker/ agree with their inputs and with one another."""

import hashlib
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

DOCKER = Path(__file__).resolve().parents[1] / "docker"

ENTRY = re.compile(
    r"^(?P<name>[A-Za-z0-9._-]+)==(?P<version>[^\s;\\]+)(?P<hashes>(?: \\\n +--hash=\S+)*)",
    re.MULTILINE,
)
HEADER = re.compile(r"^# input (\S+) sha256:([0-9a-f]{64})$", re.MULTILINE)
HASH = re.compile(r"--hash=sha256:[0-9a-f]{64}$")
COMMENT = re.compile(r"\s*#.*")
REMEDY = "run `make lock`"


@dataclass(frozen=True)
class Lock:
    """One lock file: what it was made from, and canonical name -> pinned version."""

    path: Path
    inputs: dict[str, str]
    pins: dict[str, str]

    @classmethod
    def read(cls, path: Path) -> "Lock":
        text = path.read_text("utf-8")
        pins = {str(canonicalize_name(m["name"])): m["version"] for m in ENTRY.finditer(text)}
        return cls(path, dict(HEADER.findall(text)), pins)


def read_requirements(path: Path) -> list[Requirement]:
    """The requirements of an input file that apply to Python 3.11 on Linux."""
    lines = (COMMENT.sub("", line).strip() for line in path.read_text("utf-8").splitlines())
    requirements = [Requirement(line) for line in lines if line]
    target = {"python_version": "3.11", "sys_platform": "linux"}
    return [r for r in requirements if r.marker is None or r.marker.evaluate(target)]


def find_disagreements(folder: Path) -> list[str]:
    """What is wrong with the locks in a folder, one sentence each."""
    locks = {path.name: Lock.read(path) for path in sorted(folder.glob("*.lock"))}
    found = [problem for lock in locks.values() for problem in _check_lock(lock, folder)]
    covered = {name for lock in locks.values() for name in lock.inputs}
    for path in sorted(folder.glob("requirements*.in")):
        # The GPU locks need Paddle's own index and may not have been made yet.
        if path.name not in covered and "cu1" not in path.name:
            found.append(f"{path.name} is in no lock: {REMEDY}")
    for small, large in [
        ("requirements.lock", "requirements-dev.lock"),
        ("requirements-cpu.lock", "requirements-dev.lock"),
        ("requirements-build.lock", "requirements.lock"),
    ]:
        found += _check_subset(locks[small], locks[large])
    dali = set(locks["requirements-bench.lock"].pins)
    for name in locks.keys() & {"requirements-cu126.lock", "requirements-cu129.lock"}:
        others = {n for n in locks[name].pins if n != "paddlepaddle-gpu" and "nvidia" not in n}
        if others - dali:
            found.append(f"{name} holds more than Paddle, CUDA and DALI: {sorted(others - dali)}")
    repeated = dali & set(locks["requirements.lock"].pins)
    if repeated:
        found.append(f"requirements-bench.lock repeats {sorted(repeated)}: {REMEDY}")
    found += _check_dali(folder)
    return found


def _check_lock(lock: Lock, folder: Path) -> list[str]:
    name, found = lock.path.name, []
    if not lock.inputs:
        found.append(f"{name} does not name its inputs: {REMEDY}")
    for source, recorded in lock.inputs.items():
        if not (folder / source).is_file():
            found.append(f"{name} was made from {source}, which is gone: {REMEDY}")
        elif hashlib.sha256((folder / source).read_bytes()).hexdigest() != recorded:
            found.append(f"{name} was made from another {source}: {REMEDY}")
    text = lock.path.read_text("utf-8")
    for entry in ENTRY.finditer(text):
        hashes = entry["hashes"].replace("\\", "").split()
        if not hashes or not all(HASH.match(h) for h in hashes):
            found.append(f"{name}: {entry['name']} has no sha256 hash: {REMEDY}")
    if re.search(r"://|^-|@ ", text, re.MULTILINE):
        found.append(f"{name} names an index, a URL or an option: {REMEDY}")
    return found + _check_requirements(lock, folder)


def _check_requirements(lock: Lock, folder: Path) -> list[str]:
    found = []
    elsewhere = set(Lock.read(folder / "requirements-cpu.lock").pins)
    for source in lock.inputs:
        if not (folder / source).is_file():
            continue
        for requirement in read_requirements(folder / source):
            name = str(canonicalize_name(requirement.name))
            pinned = lock.pins.get(name)
            if pinned is None:
                # Overrides bind only what something asks for. Paddle's CPU wheel is an input of
                # requirements.lock for its dependencies and has a lock of its own.
                if source != "overrides.txt" and name not in elsewhere:
                    found.append(f"{lock.path.name} lacks {name} of {source}: {REMEDY}")
            elif not requirement.specifier.contains(pinned, prereleases=True):
                found.append(
                    f"{lock.path.name} pins {name}=={pinned}, {source} asks for"
                    f" {requirement.specifier}: {REMEDY}"
                )
    return found


def _check_dali(folder: Path) -> list[str]:
    """All inputs that name NVIDIA DALI name the same version."""
    named = {
        path.name: str(requirement.specifier)
        for path in sorted(folder.glob("requirements*.in"))
        for requirement in read_requirements(path)
        if requirement.name.startswith("nvidia-dali")
    }
    return [f"NVIDIA DALI has several versions: {named}"] if len(set(named.values())) > 1 else []


def _check_subset(small: Lock, large: Lock) -> list[str]:
    return [
        f"{small.path.name} pins {name}=={version}, {large.path.name} {large.pins.get(name)}"
        for name, version in small.pins.items()
        if large.pins.get(name) != version
    ]


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    folder = tmp_path / "docker"
    shutil.copytree(DOCKER, folder)
    return folder


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text("utf-8")
    assert old in text
    path.write_text(text.replace(old, new, 1), "utf-8")


def test_locks_agree_with_their_inputs() -> None:
    assert find_disagreements(DOCKER) == []


def test_runtime_set_holds_every_input_of_the_recipes() -> None:
    names = {canonicalize_name(r.name) for r in read_requirements(DOCKER / "requirements.in")}
    assert names <= set(Lock.read(DOCKER / "requirements.lock").pins)


def test_desktop_opencv_is_kept_out() -> None:
    assert "opencv-python" not in Lock.read(DOCKER / "requirements-dev.lock").pins


def test_changed_input_is_found(copy: Path) -> None:
    with (copy / "requirements.in").open("a", encoding="utf-8") as file:
        file.write("polars\n")
    found = find_disagreements(copy)
    assert "requirements.lock was made from another requirements.in: run `make lock`" in found
    assert "requirements-dev.lock lacks polars of requirements.in: run `make lock`" in found


def test_version_outside_its_requirement_is_found(copy: Path) -> None:
    edit(copy / "requirements.lock", "visualdl==2.5.3", "visualdl==2.5.2")
    found = find_disagreements(copy)
    expected = "requirements.lock pins visualdl==2.5.2, requirements.in asks for ==2.5.3"
    assert f"{expected}: run `make lock`" in found
    assert any("requirements-dev.lock 2.5.3" in problem for problem in found)


def test_version_outside_an_override_is_found(copy: Path) -> None:
    pinned = Lock.read(copy / "requirements.lock").pins["numpy"]
    edit(copy / "requirements.lock", f"numpy=={pinned}", "numpy==1.24.4")
    assert any(
        p.startswith("requirements.lock pins numpy==1.24.4, overrides.txt asks for")
        for p in find_disagreements(copy)
    )


def test_missing_hash_is_found(copy: Path) -> None:
    lock = copy / "requirements-build.lock"
    lock.write_text(re.sub(r" \\\n +--hash=\S+", "", lock.read_text("utf-8")), "utf-8")
    found = find_disagreements(copy)
    assert "requirements-build.lock: setuptools has no sha256 hash: run `make lock`" in found


def test_index_url_is_found(copy: Path) -> None:
    edit(copy / "requirements-dev.lock", "\n", "\n--index-url https://index.invalid/simple\n")
    assert any("names an index" in problem for problem in find_disagreements(copy))


def test_new_input_without_lock_is_found(copy: Path) -> None:
    (copy / "requirements-docs.in").write_text("sphinx\n", "utf-8")
    assert "requirements-docs.in is in no lock: run `make lock`" in find_disagreements(copy)


def test_gpu_lock_with_another_package_is_found(copy: Path) -> None:
    text = (copy / "requirements-build.lock").read_text("utf-8")
    (copy / "requirements-cu126.lock").write_text(text, "utf-8")
    expected = "requirements-cu126.lock holds more than Paddle, CUDA and DALI: ['setuptools']"
    assert expected in find_disagreements(copy)


def test_versions_of_dali_that_differ_are_found(copy: Path) -> None:
    edit(copy / "requirements-cu129.in", "nvidia-dali-cuda120==2.4.0", "nvidia-dali-cuda120==2.5.0")
    found = find_disagreements(copy)
    assert any(problem.startswith("NVIDIA DALI has several versions") for problem in found)


def test_a_benchmark_package_that_the_environment_has_is_found(copy: Path) -> None:
    entries = ENTRY.finditer((copy / "requirements.lock").read_text("utf-8"))
    numpy = next(entry for entry in entries if entry["name"] == "numpy")
    with (copy / "requirements-bench.lock").open("a", encoding="utf-8") as file:
        file.write(numpy[0] + "\n")
    assert "requirements-bench.lock repeats ['numpy']: run `make lock`" in find_disagreements(copy)
