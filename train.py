#!/usr/bin/env python3
"""Train a PaddleClas backbone with data parallelism. `python train.py --help` is the manual.

This file composes the configuration and runs its task; `recipes/trainer.py` holds the loop.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from recipes import config, launch
from recipes.topology import place_from_environment

CONF = Path(__file__).resolve().parent / "conf"


def main() -> int:
    """Run as the parent of a job, or as one rank that `paddle.distributed.launch` started."""
    config.register_schema()
    os.environ["HYDRA_FULL_ERROR"] = "1"  # raise to `in_one_message` instead of printing
    place = place_from_environment(os.environ)
    if place is not None:
        from recipes import worker

        return in_one_message(lambda: worker.run_rank(*worker.given_run(CONF, sys.argv[1:]), place))

    statuses: list[int] = []  # of each run: `--multirun` makes several

    @hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")
    def run(composed: DictConfig) -> None:
        folder = Path(HydraConfig.get().runtime.output_dir)
        statuses.append(in_one_message(lambda: launch.run(config.from_hydra(composed), folder)))
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()  # Hydra made it, and the run never began

    return max([in_one_message(run), *statuses])


def in_one_message(call: Callable[[], int | None]) -> int:
    """Call, and turn a mistake of the user's into one message and exit status 2."""
    try:
        return call() or 0
    except config.MISTAKES as mistake:
        print(f"error: {config.explain(mistake)}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
