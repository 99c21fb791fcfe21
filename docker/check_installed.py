"""Compare this Python's installed packages with lock files.

    python check_installed.py LOCK...               fail where a package is missing or has another
                                                    version, and name it
    python check_installed.py --list-extra LOCK...  print installed packages that no lock names

Needs nothing but the standard library, for it runs before anything is installed.
"""

from __future__ import annotations

import re
import sys
from importlib.metadata import distributions
from pathlib import Path

# pip makes the environment and is not part of it.
INSTALLER = {"pip"}


def canonical(name: str) -> str:
    """The name under which the package index compares packages (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def read_lock(path: Path) -> dict[str, str]:
    """Canonical name -> pinned version of every entry of a lock file."""
    pins = re.findall(r"^([A-Za-z0-9._-]+)==([^\s;\\]+)", path.read_text("utf-8"), re.MULTILINE)
    return {canonical(name): version for name, version in pins}


def read_installed() -> dict[str, str]:
    """Canonical name -> version of every installed package, the installer left out."""
    found = {canonical(d.metadata["Name"]): d.version for d in distributions()}
    return {name: version for name, version in found.items() if name not in INSTALLER}


def main(arguments: list[str]) -> int:
    list_extra = arguments[:1] == ["--list-extra"]
    locked: dict[str, str] = {}
    for name in arguments[1:] if list_extra else arguments:
        locked |= read_lock(Path(name))
    installed = read_installed()
    if list_extra:
        for name in sorted(installed.keys() - locked.keys()):
            print(name)
        return 0
    wrong = [
        f"{name}: locked {version}, installed {installed.get(name, 'not at all')}"
        for name, version in sorted(locked.items())
        if installed.get(name) != version
    ]
    if wrong:
        print("The environment differs from its lock:", *wrong, sep="\n  ", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
