"""The two stems of a ResNet, told apart by the shape of its first convolution's weights."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

from recipes.config import UserError

FIRST = "stem.0.conv.weight"
_BY_KERNEL = {7: "imagenet", 3: "cifar"}


def refuse_another(
    source: Path | str, differing: Collection[str], theirs: Sequence[int], ours: Sequence[int]
) -> None:
    """Refuse weights that fit the model but for its stem, and say so.

    Args:
        source: of the weights.
        differing: the names of all weights that do not fit.
        theirs, ours: the shapes of `FIRST`, which may be empty.

    Raises:
        UserError: nothing but the stem differs.
    """
    saved, built = (_BY_KERNEL.get(shape[-1]) if shape else None for shape in (theirs, ours))
    if set(differing) == {FIRST} and saved and built and saved != built:
        raise UserError(
            f"{source} is of a model with the {saved} stem, and this one has the {built} stem "
            "(model.stem=auto goes by dataset.image_size)",
            f"model.stem={saved}",
        )
