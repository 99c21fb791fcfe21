"""Tell Paddle's build as JSON, one object a line; started by `recipes.preflight.gather`.

The first argument is JSON: null, or the model whose parameters a second line is to count.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from recipes import telemetry, worker
from recipes.config import ModelConfig, UserError


def main() -> None:
    """Print the facts; everything else that is printed on the way goes to standard error."""
    worker.die_with_parent()
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    worker.import_paddle()
    import paddle

    facts = telemetry.environment() | {"archs": [int(arch) for arch in paddle.version.cuda_archs()]}
    print(json.dumps(facts), file=output, flush=True)
    asked = json.loads(sys.argv[1])
    if asked is not None:
        print(json.dumps({"parameters": count_parameters(asked)}), file=output, flush=True)


def count_parameters(asked: dict[str, Any]) -> int | None:
    """Numbers that a checkpoint of the model holds, without the optimizer's."""
    import paddle

    from recipes import models

    paddle.set_device("cpu")
    try:
        model = models.build(
            ModelConfig(**asked["model"]), asked["num_classes"], asked["image_size"]
        )
    except UserError:
        return None  # a rank will say what is wrong with the model
    return int(models.describe(model)["parameters"])


if __name__ == "__main__":
    main()
