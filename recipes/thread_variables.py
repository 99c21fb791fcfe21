"""Variables that tell OpenMP and the math libraries how many threads a process has."""

from __future__ import annotations

import re
from collections.abc import Mapping

from recipes import bounds
from recipes.config import Config, UserError

NAMES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def check(config: Config, environment: Mapping[str, str]) -> None:
    """See that those the user has set can be had: a library that cannot start so many aborts.

    Raises:
        UserError: one asks for none or too many, and no ``threads`` replaces it.
    """
    if config.threads is not None:
        return
    most = int(bounds.POSITIVE["threads"])
    for name in NAMES:
        text = environment.get(name, "").strip()
        # OpenMP takes a number for each level of nesting.
        if text and not all(_is_within(part, most) for part in text.split(",")):
            raise UserError(
                f"{name}={bounds.short(text)} in the environment must be a number from 1 to {most}",
                f"unset {name}, which shares the cores out; or threads=NUMBER, which replaces it",
            )


def _is_within(text: str, most: int) -> bool:
    number = re.fullmatch(r"\s*(\d{1,9})\s*", text, re.ASCII)
    return number is not None and 1 <= int(number[1]) <= most
