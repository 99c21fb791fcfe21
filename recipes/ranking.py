"""Which of two evaluations is the better one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


def is_better(scores: Mapping[str, Any], than: Mapping[str, Any] | None) -> bool:
    """Whether an evaluation is better than an earlier one: by top-1, then by the lower loss.

    A loss that is no number is worse than any.
    """
    return than is None or _rank(scores) > _rank(than)


def _rank(scores: Mapping[str, Any]) -> tuple[float, float]:
    loss = math.nan if scores.get("loss") is None else float(scores["loss"])
    return float(scores["top1"]), -math.inf if math.isnan(loss) else -loss
