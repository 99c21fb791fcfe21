"""Write which packages this environment holds, and which build of Paddle, to a JSON file.

    python describe_packages.py PATH

Keys: `python` (version), `paddle` (its build: version, commit, CUDA, cuDNN, NCCL, the GPU
architectures it has kernels for), `packages` (canonical name -> version). Runs in the image build;
describe_image.py completes the file.
"""

from __future__ import annotations

import json
import platform
import runpy
import sys
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


def main(path: str) -> None:
    description = {
        "python": platform.python_version(),
        "paddle": read_paddle_build(Path(sysconfig.get_paths()["purelib"])),
        "packages": dict(sorted(read_installed().items())),
    }
    Path(path).write_text(json.dumps(description, indent=2) + "\n", "utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
