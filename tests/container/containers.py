"""The image that the container tests run, built once, and containers that never outlive a test.

The fixtures that use them are in container_fixtures.py.
"""

import hashlib
import os
import shutil
import signal
import subprocess
import tempfile
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


class ImageBuild:
    """The CPU image of this tree, built behind other tests, as that takes minutes.

    It goes through docker/build.sh, behind a certificate and a proxy setting. An image whose
    content has not changed is taken as it is.
    """

    def __init__(self) -> None:
        self._tag = read_content_tag()
        self._scratch = tempfile.TemporaryDirectory()
        self._building: subprocess.Popen[bytes] | None = None
        if docker("image", "inspect", self._tag).returncode != 0:
            self._start()

    def finish(self) -> str:
        """Wait for the build: the image's tag."""
        if self._building is not None:
            status = self._building.wait()
            assert status == 0, self._output.read_text(errors="replace")[-6000:]
        return self._tag

    def end(self) -> None:
        """End the build if it is still going on."""
        if self._building is not None and self._building.poll() is None:
            os.killpg(self._building.pid, signal.SIGTERM)
            self._building.wait()
        self._scratch.cleanup()

    @property
    def _output(self) -> Path:
        return Path(self._scratch.name) / "output"

    def _start(self) -> None:
        settings = (os.environ.get(name) for name in ("CA_BUNDLE", "PIP_CERT", "SSL_CERT_FILE"))
        trusted = Path(next(filter(None, settings), "/etc/ssl/certs/ca-certificates.crt"))
        bundle = Path(self._scratch.name) / "bundle.pem"
        bundle.write_text(f"# {CERTIFICATE_MARKER}\n{trusted.read_text('utf-8')}", "utf-8")
        no_proxy = ",".join(filter(None, [os.environ.get("no_proxy"), PROXY_MARKER]))
        environment = os.environ | {
            "VARIANT": "cpu",
            "IMAGE": self._tag,
            "CA_BUNDLE": str(bundle),
            "no_proxy": no_proxy,
        }
        with self._output.open("wb") as output:
            self._building = subprocess.Popen(
                [ROOT / "docker" / "build.sh"],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )


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
