"""`make train` gets there on any machine, and runs the checkout as it is.

The Docker engine here is a program that answers as one does and keeps what it was asked;
tests/container runs the real one.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE_PARTS = ("Dockerfile", ".dockerignore", "docker/requirements-cpu.lock", "docker/trim.sh")
CODE_PARTS = ("train.py", "conf/config.yaml", "recipes/__init__.py", "docker/entrypoint.sh")

# Keeps the build arguments of `docker build` as the labels of the image that it would have made.
ENGINE = """#!/bin/sh
echo "$*" >> "$STATE/asked"
case "$1 $2" in
    "info "*) cat "$STATE/security" 2>/dev/null; exit 0 ;;
    "version "*) echo 28.0.0 ;;
    "buildx "*) exit 1 ;;
    "pull "*) echo "Error: cannot reach the registry" >&2; exit 1 ;;
    "image inspect")
        last=; for word in "$@"; do last=$word; done
        case "$last" in
            fleet-recipes:cpu)
                [ -e "$STATE/image" ] || exit 1
                case "$*" in
                    *packages-digest*) sed -n 's/^PACKAGES_DIGEST=//p' "$STATE/image" ;;
                    *code-digest*) sed -n 's/^CODE_DIGEST=//p' "$STATE/image" ;;
                    *revision*) sed -n 's/^GIT_COMMIT=//p' "$STATE/image" ;;
                    *) echo 0 ;;
                esac ;;
            *) [ -e "$STATE/base" ] || exit 1 ;;
        esac ;;
    "build "*)
        [ ! -e "$STATE/build-fails" ] || { echo "no space left on device" >&2; exit 1; }
        for word in "$@"; do case "$word" in *=*) echo "$word" ;; esac; done > "$STATE/image" ;;
    "run "*)
        [ ! -e "$STATE/run-fails" ] ||
            { echo "docker: Error response from daemon: no such runtime" >&2; exit 125; }
        case "$*" in *"-c pass") ;; *) echo "container runs $*" ;; esac ;;
    *) echo "docker $*: not known here" >&2; exit 1 ;;
esac
"""
MISSING = '#!/bin/sh\necho "E: Unable to locate package debootstrap" >&2\nexit 100\n'


class Machine:
    """A checkout of the scripts, and the programs that the machine has beside the usual ones."""

    def __init__(self, folder: Path) -> None:
        self.checkout = folder / "checkout"
        self.state = folder / "state"
        self._programs = folder / "programs"
        for each in (self.checkout, self.state, self._programs):
            each.mkdir()
        shutil.copytree(ROOT / "docker", self.checkout / "docker")
        for name in ("Makefile", "Dockerfile", ".dockerignore", "pyproject.toml"):
            shutil.copy(ROOT / name, self.checkout)
        for name in ("conf/config.yaml", "recipes/__init__.py", "benchmarks/__init__.py"):
            (self.checkout / name).parent.mkdir()
            (self.checkout / name).write_text("")
        (self.checkout / "train.py").write_text(
            "import os, sys; print('local run', *sys.argv[1:])\n"
            "print('started with', os.environ['FLEET_RECIPES_STARTED_WITH'])\n"
        )
        # tests/test_setup.py has the real one.
        venv = f"mkdir -p .venv/bin; ln -sf {sys.executable} .venv/bin/python; echo .venv is made\n"
        (self.checkout / "docker/venv.sh").write_text(f"#!/bin/sh\n{venv}")
        self.program("docker", ENGINE)

    def program(self, name: str, text: str) -> None:
        """Put a program first in the path."""
        (self._programs / name).write_text(text)
        (self._programs / name).chmod(0o755)

    def train(self, runtime: str = "auto", *, wrap: tuple[str, ...] = ()) -> str:
        """What `make train` prints, both streams, and at the end its exit status."""
        (self.state / "asked").write_text("")
        environment = {
            name: value
            for name, value in os.environ.items()
            if name not in ("MAKELEVEL", "MAKEFLAGS", "MFLAGS", "IMAGE", "BASE")
        }
        environment |= {
            "PATH": f"{self._programs}:{os.environ['PATH']}",
            "STATE": str(self.state),
            "VARIANT": "cpu",
        }
        done = subprocess.run(
            [*wrap, "make", "train", f"RUNTIME={runtime}", "ARGS=epochs=1"],
            cwd=self.checkout,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=60,
            check=False,
        )
        return f"{done.stdout}status {done.returncode}"

    def asked(self, command: str) -> list[str]:
        """The calls of a command of the engine in the last training."""
        lines = (self.state / "asked").read_text().splitlines()
        return [line for line in lines if line.startswith(f"{command} ")]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def hidden(path: str) -> tuple[str, ...]:
    """How a command is started so that it does not see a program of the system's."""
    if not Path(path).exists():
        return ()
    hide = f'mount --bind /dev/null {path} && exec "$@"'
    wrap = ("unshare", *(() if os.getuid() == 0 else ("-r",)), "-m", "sh", "-c", hide, "sh")
    if subprocess.run([*wrap, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip(f"{path} cannot be hidden here: mount namespaces are not allowed")
    return wrap


def check_local(said: str, reason: str) -> None:
    """It went on in .venv, and said so in one line, with the reason."""
    (line,) = [line for line in said.splitlines() if "in the local environment .venv" in line]
    assert reason in line, said
    assert "local run recipe=digits_resnet18 topology=1x2 epochs=1" in said
    assert "started with docker/train.sh --runtime " in said
    assert said.endswith("status 0")


def test_neither_registry_nor_debootstrap(machine: Machine) -> None:
    machine.program("apt-get", MISSING)
    wrap = hidden("/usr/sbin/debootstrap")
    check_local(machine.train(wrap=wrap), "base: debootstrap is missing")
    assert machine.asked("pull")
    refused = machine.train("docker", wrap=wrap)
    assert "base: debootstrap is missing. On Debian or Ubuntu: apt-get install" in refused
    assert "local" not in refused
    assert not refused.endswith("status 0")


def test_root_installs_debootstrap_itself(machine: Machine) -> None:
    path = machine.state.parent / "programs" / "debootstrap"
    fails = 'echo "E: no mirror answers"; exit 1'
    install = f"printf '#!/bin/sh\\n{fails}\\n' > {path}; chmod +x {path}"
    # The lists of a fresh machine are empty: it is found after an update.
    updated = machine.state / "updated"
    words = f'case "$*" in *update*) touch {updated} ;; *) [ -e {updated} ] && {install} ;; esac'
    machine.program("apt-get", f"#!/bin/sh\n{words}\n")
    machine.program("id", "#!/bin/sh\necho 0\n")
    said = machine.train(wrap=hidden("/usr/sbin/debootstrap"))
    assert "base: installing debootstrap, which is missing" in said
    assert "E: no mirror answers" in said
    check_local(said, "base: debootstrap failed")


def test_who_is_not_root_and_has_no_sudo(machine: Machine) -> None:
    machine.program("id", "#!/bin/sh\necho 1000\n")
    machine.program("debootstrap", "#!/bin/sh\nexit 1\n")
    machine.program("sudo", "#!/bin/sh\necho 'sudo: a password is required' >&2; exit 1\n")
    check_local(machine.train(), "base: debootstrap failed")


@pytest.mark.parametrize(
    ("fault", "reason"),
    [("build-fails", "no space left on device"), ("run-fails", "no such runtime")],
)
def test_an_image_that_cannot_be_built_or_started(
    machine: Machine, fault: str, reason: str
) -> None:
    (machine.state / "base").touch()
    (machine.state / fault).touch()
    check_local(machine.train(), reason)
    refused = machine.train("docker")
    assert reason in refused
    assert "local run" not in refused
    assert not refused.endswith("status 0")


def test_an_image_is_made_once_and_runs_what_it_is_made_of(machine: Machine) -> None:
    (machine.state / "base").touch()
    for builds in (1, 0):
        said = machine.train()
        assert len(machine.asked("build")) == builds
        assert "train: in the image fleet-recipes:cpu, made of this checkout" in said
        (run,) = machine.asked("run")[-1:]
        assert run.endswith(
            "fleet-recipes:cpu train.py recipe=digits_resnet18 topology=1x2 epochs=1"
        )
        assert ":ro" not in run
        assert "FLEET_RECIPES_STARTED_WITH=docker/train.sh --runtime auto" in run
        assert said.endswith("status 0")


def test_without_root_the_results_are_the_caller_s_too(machine: Machine) -> None:
    (machine.state / "base").touch()
    machine.train()
    assert f"--user {os.getuid()}:{os.getgid()} " in machine.asked("run")[-1]
    (machine.state / "security").write_text("[name=seccomp,profile=default name=rootless]\n")
    machine.train()
    assert "--user 0:0 " in machine.asked("run")[-1]


@pytest.mark.parametrize("changed", CODE_PARTS)
def test_code_that_differs_from_the_image_is_mounted(machine: Machine, changed: str) -> None:
    (machine.state / "base").touch()
    machine.train()
    with (machine.checkout / changed).open("a") as file:
        file.write("# changed\n")
    said = machine.train()
    assert not machine.asked("build")
    assert "train: in the image fleet-recipes:cpu, the checkout's code mounted" in said
    for name in ("train.py", "conf", "recipes", "benchmarks", "docker/entrypoint.sh"):
        assert (
            f"--volume {machine.checkout}/{name}:/workspace/{name}:ro" in machine.asked("run")[-1]
        )


@pytest.mark.parametrize("changed", PACKAGE_PARTS)
def test_an_image_of_other_packages_is_built_anew(machine: Machine, changed: str) -> None:
    (machine.state / "base").touch()
    machine.train()
    with (machine.checkout / changed).open("a") as file:
        file.write("# changed\n")
    said = machine.train()
    assert "has other packages than this checkout: building it anew" in said
    assert len(machine.asked("build")) == 1
    assert "made of this checkout" in said


def test_the_digests_cover_all_that_the_image_is_made_of() -> None:
    """What the Dockerfile copies is code, or a part of the packages, or is not run."""
    script = (ROOT / "docker/content.sh").read_text()
    copied = (ROOT / "Dockerfile").read_text().split("COPY docker/", 1)[1].split("/build/", 1)[0]
    for word in copied.replace("\\\n", " ").split():
        name = Path(word).name
        if "*" not in name and "[" not in name:
            assert f"docker/{name}" in script, name
    for name in ("train.py", "conf", "recipes", "benchmarks", "docker/describe_image.py"):
        assert name in script
