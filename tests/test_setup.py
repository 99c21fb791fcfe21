"""`make setup` and the scripts behind the Makefile: what they do, and say when they cannot.

The environments here are made from tiny wheels built on the spot, so no index is asked.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


MAKE_OWN = ("MAKELEVEL", "MAKEFLAGS", "MFLAGS")


def run(
    *command: str | Path, cwd: Path = ROOT, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a script with the environment changed: an empty value removes a variable.

    `make test` runs these tests; what it tells a make below it is not for the one tried here.
    """
    merged = {**os.environ, "MAKELEVEL": "", "MAKEFLAGS": "", "MFLAGS": "", **environment}
    merged = {name: value for name, value in merged.items() if value or name not in MAKE_OWN}
    merged = {name: value for name, value in merged.items() if environment.get(name) != ""}
    return subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=merged,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def build_wheel(folder: Path, name: str, version: str) -> str:
    """Write a wheel of one module, and return its lock entry."""
    path = folder / f"{name}-{version}-py3-none-any.whl"
    info = f"{name}-{version}.dist-info"
    files = {
        f"{name}.py": f"version = {version!r}\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{file},,\n" for file in [*files, f"{info}/RECORD"])
    with zipfile.ZipFile(path, "w") as wheel:
        for file, text in {**files, f"{info}/RECORD": record}.items():
            wheel.writestr(zipfile.ZipInfo(file), text)  # a fixed date: the same hash each time
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return f"{name}=={version} \\\n    --hash=sha256:{digest}\n"


class Tree:
    """A copy of the scripts with locks of tiny wheels."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.wheels = folder / "wheels"
        self.wheels.mkdir()
        shutil.copytree(ROOT / "docker", folder / "docker")
        shutil.copy(ROOT / "Makefile", folder)
        self.lock("requirements-build.lock", build_wheel(self.wheels, "setuptools", "999"))

    def lock(self, name: str, *entries: str) -> None:
        (self.folder / "docker" / name).write_text("".join(entries), "utf-8")

    def setup(self, **environment: str) -> subprocess.CompletedProcess[str]:
        settings = {
            "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": str(self.wheels),
            "PYTHON": sys.executable,
            "MAKEFLAGS": "",
        }
        return run("make", "setup", cwd=self.folder, **(settings | environment))

    def installed(self) -> set[str]:
        """name-version of every package in .venv but pip."""
        found = (self.folder / ".venv").glob("lib/python3.11/site-packages/*.dist-info")
        names = {path.name.removesuffix(".dist-info") for path in found}
        return {name for name in names if not name.startswith("pip-")}


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    made = Tree(tmp_path)
    build, alpha = (
        build_wheel(made.wheels, *pair) for pair in [("setuptools", "999"), ("aa", "1")]
    )
    made.lock("requirements-dev.lock", build, alpha)
    return made


def test_setup_installs_the_lock_once_follows_it_and_repairs(tree: Tree) -> None:
    first = tree.setup()
    assert first.returncode == 0, first.stderr
    assert "making .venv" in first.stdout
    assert "setup: 2 packages, 0 MB fetched" in first.stdout
    assert len(first.stdout.splitlines()) <= 5, first.stdout
    assert tree.installed() == {"setuptools-999", "aa-1"}

    assert tree.setup().stdout == ""

    # A changed lock: one package newer, one gone, one new.
    build = build_wheel(tree.wheels, "setuptools", "999")
    tree.lock("requirements-dev.lock", build, build_wheel(tree.wheels, "bb", "2"))
    changed = tree.setup()
    assert changed.returncode == 0, changed.stderr
    assert "removing aa" in changed.stdout
    assert "making .venv" not in changed.stdout
    assert tree.installed() == {"setuptools-999", "bb-2"}

    # Its Python has gone: it is made again, for which this has none.
    (tree.folder / ".venv/bin/python").unlink()
    broken = tree.setup(PYTHON="/nowhere/python3.11")
    assert broken.returncode != 0
    assert "/nowhere/python3.11: not there" in broken.stderr


def test_setup_refuses_another_hash_and_repairs_what_that_left(tree: Tree) -> None:
    build = build_wheel(tree.wheels, "setuptools", "999")
    entry = build_wheel(tree.wheels, "cc", "1")
    tree.lock("requirements-dev.lock", build, entry.replace("sha256:", "sha256:0")[:-2] + "\n")
    failed = tree.setup()
    assert failed.returncode != 0
    assert "DO NOT MATCH THE HASHES" in failed.stderr
    assert "All that pip said is in .venv/pip.log" in failed.stderr
    assert "Processing ./wheels/cc-1" in (tree.folder / ".venv/pip.log").read_text()
    assert not (tree.folder / ".venv/.lock-sha256").exists()

    tree.lock("requirements-dev.lock", build, entry)
    again = tree.setup()
    assert again.returncode == 0, again.stderr
    assert "incomplete or broken" in again.stdout
    assert tree.installed() == {"setuptools-999", "cc-1"}


def test_python_named_but_missing() -> None:
    result = run("docker/find-python.sh", PYTHON="/nowhere/python3.11")
    assert result.returncode == 1
    assert "Python 3.11 is needed" in result.stderr
    assert "/nowhere/python3.11: not there" in result.stderr
    assert "apt-get install python3.11" in result.stderr


def test_python_of_another_version_is_named(tmp_path: Path) -> None:
    other = tmp_path / "python"
    other.write_text('#!/bin/sh\n[ "$1" = --version ] && echo "Python 3.9.1"\nexit 1\n', "utf-8")
    other.chmod(0o755)
    result = run("docker/find-python.sh", PYTHON=str(other))
    assert result.returncode == 1
    assert "Python 3.9.1" in result.stderr


def test_python_without_venv_is_named(tmp_path: Path) -> None:
    other = tmp_path / "python"
    other.write_text('#!/bin/sh\ncase "$2" in *venv*) exit 1 ;; esac\nexit 0\n', "utf-8")
    other.chmod(0o755)
    result = run("docker/find-python.sh", PYTHON=str(other))
    assert result.returncode == 1
    assert "has no venv module" in result.stderr
    assert "apt-get install python3.11-venv" in result.stderr


def test_difference_between_environment_and_lock_is_named(tmp_path: Path) -> None:
    lock = tmp_path / "some.lock"
    lock.write_text("PyTest==0.0.1 \\\n    --hash=sha256:00\nno_such-thing==7\n", "utf-8")
    result = run(sys.executable, "docker/check_installed.py", lock)
    assert result.returncode == 1
    assert f"pytest: locked 0.0.1, installed {pytest.__version__}" in result.stderr
    assert "no-such-thing: locked 7, installed not at all" in result.stderr


def test_variant_follows_the_setting() -> None:
    result = run("docker/variant.sh", VARIANT="cu129")
    assert result.stdout == "cu129\n"
    assert "VARIANT is set" in result.stderr


def test_variant_unknown() -> None:
    result = run("docker/variant.sh", VARIANT="rocm")
    assert result.returncode == 2
    assert "VARIANT=rocm is not one of cpu, cu126, cu129" in result.stderr


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="this machine has an NVIDIA GPU")
def test_variant_is_cpu_without_a_gpu() -> None:
    result = run("docker/variant.sh", VARIANT="")
    assert result.stdout == "cpu\n"
    assert "no NVIDIA GPU" in result.stderr


def test_runtime_unknown() -> None:
    result = run("make", "train", "RUNTIME=podman", MAKEFLAGS="")
    assert result.returncode != 0
    assert "RUNTIME=podman is not one of local, docker, auto" in result.stderr


def test_runtime_docker_without_an_engine(tmp_path: Path) -> None:
    nowhere = f"unix://{tmp_path}/docker.sock"
    result = run("make", "train", "RUNTIME=docker", DOCKER_HOST=nowhere, MAKEFLAGS="")
    assert result.returncode != 0
    assert "no Docker engine answers" in result.stderr
    assert "RUNTIME=local" in result.stderr


def test_image_without_an_engine(tmp_path: Path) -> None:
    result = run("make", "image", DOCKER_HOST=f"unix://{tmp_path}/docker.sock", MAKEFLAGS="")
    assert result.returncode != 0
    assert "no Docker engine answers" in result.stderr


def test_help_lists_every_target() -> None:
    listed = {line.split()[1] for line in run("make", MAKEFLAGS="").stdout.splitlines()}
    makefile = (ROOT / "Makefile").read_text("utf-8")
    phony = next(line for line in makefile.splitlines() if line.startswith(".PHONY:"))
    assert listed == set(phony.split()[1:])
