"""Write what an image is made of to a JSON file; `environment.json` of every run quotes it.

    python describe_image.py --variant V --base B --version N --revision COMMIT --created DATE
                             --packages FILE PATH

Keys: `image` (variant, base, version, revision, created), those of describe_packages.py (FILE is
what it wrote), and `debian` (release, and package -> version).
"""

from __future__ import annotations

import argparse
import json
import subprocess
from pathlib import Path
from typing import Any

IMAGE_FACTS = ("variant", "base", "version", "revision", "created")


def read_debian() -> dict[str, Any]:
    """Release and installed packages (name -> version) of the Debian system."""
    listing = subprocess.run(
        ["dpkg-query", "--show", "--showformat", "${Package} ${Version}\n"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    packages = dict(line.split(" ", 1) for line in listing.splitlines())
    return {"release": Path("/etc/debian_version").read_text("utf-8").strip(), "packages": packages}


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in IMAGE_FACTS:
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--packages", type=Path, required=True)
    parser.add_argument("path", type=Path)
    arguments = parser.parse_args()
    description = {
        "image": {name: getattr(arguments, name) for name in IMAGE_FACTS},
        **json.loads(arguments.packages.read_text("utf-8")),
        "debian": read_debian(),
    }
    arguments.path.parent.mkdir(parents=True, exist_ok=True)
    arguments.path.write_text(json.dumps(description, indent=2) + "\n", "utf-8")


if __name__ == "__main__":
    main()
