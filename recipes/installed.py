"""Whether this Python has the packages that the recipes need. Needs only the standard library."""

from __future__ import annotations

import platform
import sys
from importlib.util import find_spec

# Enough to tell an environment that was made for the recipes from any other. Paddle is not among
# them: what reads and decodes images runs without it.
NEEDED = ("hydra", "omegaconf", "numpy")


def require_packages() -> None:
    """End the program with status 2 and one message where packages are missing."""
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        print(
            f"error: this Python, {sys.executable} ({platform.python_version()}), does not have "
            f"{', '.join(missing)}\n"
            "  remedy: make setup, once, and then: source .venv/bin/activate\n"
            "          (or run in the image: see README.md)",
            file=sys.stderr,
        )
        sys.exit(2)
