"""Install hash-locked packages and nothing else, and show how far it is.

    python pip_install.py [--name NAME] [--log FILE] [--target FOLDER] LOCK...

Installs into the environment of the Python that runs it, or into a folder. pip's own output goes to
the log: on a terminal one line says how many of the packages are there and how much was fetched,
elsewhere such a line comes every few seconds. When pip fails, what it said of the error is printed
with the log's name, and the exit status is pip's.

Index, proxy and certificates are pip's own settings (pip.conf, PIP_INDEX_URL, PIP_CERT, ...). Needs
nothing but the standard library, for it runs before anything is installed.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from check_installed import read_lock

# Packages that exist as source only are built with the locked setuptools, so it is there first.
BUILD_LOCK = Path(__file__).with_name("requirements-build.lock")
# ... without isolation, which would fetch an unlocked one.
OPTIONS = (
    *("--disable-pip-version-check", "--progress-bar", "off", "--no-deps", "--require-hashes"),
    *("--no-build-isolation", "--use-pep517"),
)
# `Downloading aa-1.whl (12.3 MB)`: a package's file is at hand, or about to be; newer pips fetch a
# small file that describes it first.
AT_HAND = re.compile(
    r"\s*(?P<how>Downloading|Using cached|Processing) (?:\S*/)?(?P<file>[^/\s]+)"
    r"(?: \((?P<size>[\d.]+) (?P<unit>bytes|kB|MB|GB)\))?"
)
THERE = re.compile(r"Requirement already satisfied: (?P<name>[A-Za-z0-9._-]+)")
UNITS = {"bytes": 1e-6, "kB": 1e-3, "MB": 1.0, "GB": 1e3}  # in MB
SECONDS_BETWEEN_LINES = 10.0
ERROR_LINES = 30


class Progress:
    """The line that says how far pip is.

    Args:
        name: what each line begins with.
        total: packages that will be there at the end.
    """

    def __init__(self, name: str, total: int) -> None:
        self.name = name
        self.total = total
        self.megabytes = 0.0
        self._there: set[str] = set()
        self._doing = ""
        self._started = self._shown = time.monotonic()
        self._rewrite = sys.stdout.isatty()

    def read(self, line: str) -> None:
        """Take in one line of pip's, and show what has changed."""
        if found := THERE.match(line):
            self._there.add(found["name"])
        elif found := AT_HAND.match(line):
            if found["how"] == "Downloading" and found["size"]:
                self.megabytes += float(found["size"]) * UNITS[found["unit"]]
            if not found["file"].endswith(".metadata"):
                self._there.add(found["file"])
                size = f" ({found['size']} {found['unit']})" if found["size"] else ""
                self._doing = found["file"].split("-")[0] + size
        elif line.startswith("Building wheel for"):
            self._doing = f"building {line.split()[3]}"
        elif line.startswith("Installing collected packages"):
            self._doing = "unpacking"
        else:
            return
        self._show()

    def end(self, *, completed: bool) -> None:
        """Replace the line by the last one, or by nothing."""
        if self._rewrite:
            print("\r\033[K", end="", flush=True)
        if completed:
            minutes, seconds = divmod(round(time.monotonic() - self._started), 60)
            print(
                f"{self.name}: {self.total} packages, {self.megabytes:.0f} MB fetched,"
                f" {minutes}:{seconds:02} min",
                flush=True,
            )

    def _show(self) -> None:
        count = min(len(self._there), self.total)
        line = f"{self.name}: {count} of {self.total} packages, {self.megabytes:.0f} MB"
        line += f": {self._doing}" if self._doing else ""
        if self._rewrite:
            width = shutil.get_terminal_size().columns - 1
            print(f"\r\033[K{line[:width]}", end="", flush=True)
        elif time.monotonic() - self._shown >= SECONDS_BETWEEN_LINES:
            self._shown = time.monotonic()
            print(line, flush=True)


def install(arguments: list[str], progress: Progress | None, log: Path) -> int:
    """Run pip, appending what it says to the log; returns its exit status."""
    command = [sys.executable, "-m", "pip", "install", *OPTIONS, *arguments]
    with (
        log.open("a", encoding="utf-8") as kept,
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        ) as pip,
    ):
        assert pip.stdout is not None
        for line in pip.stdout:
            kept.write(line)
            if progress is not None:
                progress.read(line)
    return pip.returncode


def explain(log: Path) -> str:
    """What pip said of the error: from its first such line on, and where all the rest is."""
    lines = log.read_text("utf-8").splitlines()
    first = next((at for at, line in enumerate(lines) if line.startswith("ERROR:")), len(lines))
    told = lines[first : first + ERROR_LINES] or lines[-ERROR_LINES:]
    return "\n".join([*told, f"All that pip said is in {log}."])


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--name", default="pip")
    parser.add_argument("--log", type=Path)
    parser.add_argument("--target")
    parser.add_argument("locks", type=Path, nargs="+")
    options = parser.parse_args()
    log = options.log or Path(tempfile.mkdtemp(prefix="pip-")) / "pip.log"
    log.write_text("", "utf-8")

    names = {name for lock in options.locks for name in read_lock(lock)}
    progress = Progress(options.name, len(names))
    target = ["--target", options.target] if options.target else []
    wanted = [word for lock in options.locks for word in ("-r", str(lock))]
    status = 0 if target else install(["-r", str(BUILD_LOCK)], None, log)
    try:
        status = status or install([*target, *wanted], progress, log)
    except KeyboardInterrupt:
        progress.end(completed=False)
        return 130
    progress.end(completed=status == 0)
    if status:
        print(explain(log), file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
