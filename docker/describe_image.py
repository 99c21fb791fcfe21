"""Write what an image is made of to a JSON file; `environment.json` of every run quotes it.

    python describe_image.py --variant V --base B --version N --revision COMMIT --created DATE PATH

Keys: `image` (variant, base, version, revision, created), `python`, `paddle` (its build: version,
commit, CUDA, cuDNN, NCCL, the GPU architectures it has kernels for), `packages` (canonical name ->
version), `debian` (release, and package -> version).
"""

from __future__ import annotations

import argparse
import json
import platform
import runpy
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

from check_installed import read_installed

PADDLE_FACTS = {
    "version": "full_version",
    "commit": "commit",
    "cuda": "cuda_version",
    "cudnn": "cudnn_version",
    "nccl": "nccl_version",
    "cuda_architectures": "compiled_cuda_archs",
}


def read_paddle_build(site_packages: Path) -> dict[str, Any]:
    """Paddle's build facts, from its generated version module.

    The module alone is run: a GPU build may not import on a machine without a driver.
    """
    facts = runpy.run_path(str(site_packages / "paddle" / "version" / "__init__.py"))
    return {key: facts.get(name) for key, name in PADDLE_FACTS.items()}


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
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    image_keys = ("variant", "base", "version", "revision", "created")
    for key in image_keys:
        parser.add_argument(f"--{key}", required=True)
    parser.add_argument("path", type=Path)
    arguments = parser.parse_args()
    description = {
        "image": {key: getattr(arguments, key) for key in image_keys},
        "python": platform.python_version(),
        "paddle": read_paddle_build(Path(sysconfig.get_paths()["purelib"])),
        "packages": dict(sorted(read_installed().items())),
        "debian": read_debian(),
    }
    arguments.path.parent.mkdir(parents=True, exist_ok=True)
    arguments.path.write_text(json.dumps(description, indent=2) + "\n", "utf-8")


if __name__ == "__main__":
    main()
