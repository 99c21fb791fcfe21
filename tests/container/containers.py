"""The image that the container tests run, built once, and containers that never outlive a test.

The fixtures that use them are in container_fixtures.py.
"""

import hashlib
import os
import shutil
import subprocess
import uuid
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# Planted where a build passes certificates and proxy settings; no layer may hold them.
CERTIFICATE_MARKER = "certificate-marker-7f41c9"
PROXY_MARKER = "proxy-marker-7f41c9.invalid"

# What an image is made of, as docker/build.sh takes it.
SOURCES = (
    *("Dockerfile", ".dockerignore", "train.py", "pyproject.toml", "README.md", "LICENSE"),
    *("conf", "recipes", "benchmarks", "docker"),
)


def find_engine_fault() -> str | None:
    """Why containers cannot be run here, or None."""
    if shutil.which("docker") is None:
        return "there is no docker client"
    answer = subprocess.run(["docker", "info"], capture_output=True, timeout=60, check=False)
    return None if answer.returncode == 0 else "no Docker engine answers"


def read_content_tag() -> str:
    """A tag that changes with anything the image is made of."""
    digest = hashlib.sha256()
    for name in SOURCES:
        path = ROOT / name
        files = [path] if path.is_file() else sorted(f for f in path.rglob("*") if f.is_file())
        for file in files:
            if "__pycache__" not in file.parts:
                digest.update(str(file.relative_to(ROOT)).encode() + b"\0" + file.read_bytes())
    return f"fleet-recipes-test:{digest.hexdigest()[:16]}"


def build_image(tag: str, certificates: Path) -> None:
    """Build the CPU image through docker/build.sh, behind a certificate and a proxy setting."""
    no_proxy = ",".join(filter(None, [os.environ.get("no_proxy"), PROXY_MARKER]))
    settings = {
        "VARIANT": "cpu",
        "IMAGE": tag,
        "CA_BUNDLE": str(certificates),
        "no_proxy": no_proxy,
    }
    built = subprocess.run(
        [ROOT / "docker" / "build.sh"],
        env={**os.environ, **settings},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stdout[-6000:]


def docker(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the docker client to its end."""
    return subprocess.run(
        ["docker", *arguments], capture_output=True, text=True, timeout=300, check=False
    )


class Containers:
    """Starts containers of one image under names of its own, and removes exactly those."""

    def __init__(self, image: str) -> None:
        self.image = image
        self._names: list[str] = []

    def run(self, *command: str, options: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
        """`docker run` to the end: exit status, stdout and stderr are the container's."""
        return docker("run", "--name", self._name(), *options, self.image, *command)

    def start(self, *command: str, options: tuple[str, ...] = ()) -> str:
        """`docker run --detach`; returns the container's name."""
        name = self._name()
        started = docker("run", "--detach", "--name", name, *options, self.image, *command)
        assert started.returncode == 0, started.stderr
        return name

    def remove(self) -> None:
        for name in self._names:
            docker("rm", "--force", name)

    def _name(self) -> str:
        self._names.append(f"fleet-recipes-test-{uuid.uuid4().hex[:12]}")
        return self._names[-1]
