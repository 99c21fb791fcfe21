"""An SSH server of a test's own on this machine's loopback addresses, and what is left of a run."""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Two hosts on one machine: Linux takes all of 127.0.0.0/8 for its own.
HOSTS = ("127.0.0.1", "127.0.0.2")


def find_ssh_fault() -> str | None:
    """Why no SSH server can be run here, or None."""
    for program in ("sshd", "ssh", "ssh-keygen"):
        if find_program(program) is None:
            return f"there is no {program} (Debian: openssh-server, openssh-client)"
    return None


def find_program(name: str) -> str | None:
    """Where a program is, those for administrators included."""
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


def free_port() -> int:
    """A port on which nobody listens now."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@dataclass
class SshServer:
    """A running server.

    Attributes:
        folder: with its keys, and `config` for a client whose key it knows.
        port: of both `HOSTS`.
    """

    folder: Path
    port: int

    @property
    def command(self) -> str:
        """The ssh command that it lets in."""
        return f"ssh -F {self.folder / 'config'}"

    def write_client(self, name: str, *lines: str) -> str:
        """Write another client configuration, and return the ssh command that uses it."""
        path = self.folder / name
        path.write_text("\n".join(("Host *", f"  UserKnownHostsFile {self.folder}/known", *lines)))
        return f"ssh -F {path}"


@contextlib.contextmanager
def running_ssh_server(folder: Path, *options: str) -> Iterator[SshServer]:
    """Run a server with keys of its own, for this user.

    Args:
        options: more lines of its configuration, such as ``SetEnv PATH=…``.
    """
    folder.mkdir(mode=0o700)
    server = SshServer(folder, free_port())
    for name in ("host", "client", "stranger"):
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True
        )
    shutil.copy(folder / "client.pub", folder / "authorized_keys")
    (folder / "sshd_config").write_text(
        "\n".join(
            (
                f"Port {server.port}",
                *(f"ListenAddress {host}" for host in HOSTS),
                f"HostKey {folder}/host",
                f"AuthorizedKeysFile {folder}/authorized_keys",
                f"AllowUsers {getpass.getuser()}",
                "PidFile none",
                "StrictModes no",
                "UsePAM no",
                "PasswordAuthentication no",
                "KbdInteractiveAuthentication no",
                *options,
                "",
            )
        )
    )
    key = (folder / "host.pub").read_text().split()[:2]
    (folder / "known").write_text(
        "".join(f"[{host}]:{server.port} {' '.join(key)}\n" for host in HOSTS)
    )
    server.write_client(
        "config", f"  Port {server.port}", f"  IdentityFile {folder}/client", "  IdentitiesOnly yes"
    )
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # sshd asks for it when root starts it
    program = find_program("sshd")
    assert program is not None
    with (folder / "sshd.log").open("wb") as log:
        daemon = subprocess.Popen(
            [program, "-D", "-e", "-f", str(folder / "sshd_config")], stderr=log
        )
    try:
        ends = time.monotonic() + 20
        while not _answers(server.port):
            assert daemon.poll() is None, (folder / "sshd.log").read_text()
            assert time.monotonic() < ends, "sshd does not listen"
            time.sleep(0.05)
        yield server
    finally:
        daemon.terminate()
        daemon.wait(10)


def _answers(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((HOSTS[1], port), 1):
        return True
    return False


def find_processes(marker: Path) -> list[str]:
    """The processes that know of a path, by their arguments or their environment, as text."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        if int(process.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            arguments = (process / "cmdline").read_bytes()
            if str(marker).encode() in arguments + (process / "environ").read_bytes():
                found.append(f"{process.name}: {arguments.decode(errors='replace')[:200]}")
    return found


def wait_until_gone(marker: Path, seconds: float) -> None:
    """Return once no process knows of a path; fail with their list if some remain."""
    ends = time.monotonic() + seconds
    while left := find_processes(marker):
        assert time.monotonic() < ends, "\n".join(left)
        time.sleep(0.1)
