#!/usr/bin/env python3
"""Train a PaddleClas backbone with data parallelism. `python train.py --help` is the manual.

This file composes the configuration and runs its task; `recipes/trainer.py` holds the loop.
"""

import contextlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from recipes.console import outlive_console
from recipes.ending import FAILED, REFUSED, Interrupted, Watch, status_of

# Signals and a broken console are heeded while the imports below go on, which take a second. What a
# parent has started ends as that one decides.
WATCH = Watch()
if __name__ == "__main__":
    outlive_console()
    if "FLEET_RECIPES_PARENT" not in os.environ:
        WATCH.start()

try:
    import hydra
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode
    from omegaconf import DictConfig

    from recipes import answering, bounds, command_line, config, earlier_run, launch, runs, trials
    from recipes.printable import printable_lines
    from recipes.topology import place_from_environment
    from recipes.writable import cannot_write
except ModuleNotFoundError:
    from recipes.installed import require_packages

    require_packages()  # says what is missing, where it is one of them
    raise

CONF = Path(__file__).resolve().parent / "conf"


def main() -> int:
    """Run as the parent of a job, or as one rank that `paddle.distributed.launch` started."""
    config.register_schema()
    os.environ["HYDRA_FULL_ERROR"] = "1"  # raise to `in_one_message` instead of printing
    rank = in_one_message(run_as_rank)
    return run_as_parent() if rank is None else rank


def run_as_rank() -> int | None:
    """Run as a rank, where the environment says that this process is one."""
    try:
        place = place_from_environment(os.environ)
    except ValueError as error:
        raise config.ConfigError(
            str(error),
            "unset the variables PADDLE_…, TRAINING_ROLE and POD_IP that another program has left, "
            "or start through paddle.distributed.launch, which sets them all",
        ) from None
    if place is None:
        return None
    from recipes import worker

    return worker.run_rank(*worker.given_run(CONF, sys.argv[1:]), place)


def run_as_parent() -> int:
    """Compose the configuration, or several with `--multirun`, and run each."""
    statuses: list[int] = []
    sweep = trials.Sweep()
    titles: list[str] = []  # of a sweep's trials

    @hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")
    def run(composed: DictConfig) -> None:
        folder = Path(HydraConfig.get().runtime.output_dir)
        for problem in bounds.text_problems("hydra.run.dir", str(folder)):
            remove_if_empty(folder)
            raise config.ConfigError(problem, "hydra.run.dir=outputs/NAME")
        if folder.resolve() == Path.cwd():
            raise config.ConfigError(
                "hydra.run.dir is empty, or this very folder", "hydra.run.dir=outputs/NAME"
            )
        statuses.append(1)  # until it is known
        settings = HydraConfig.get().overrides.task

        if HydraConfig.get().mode == RunMode.MULTIRUN:
            titles.append(sweep.title(HydraConfig.get().job.num, settings))
            print(titles[-1], flush=True)

        def run_task() -> int:
            whole = earlier_run.with_its_settings(composed, settings, folder, CONF)
            checked = config.from_hydra(whole)
            if checked.task.name == "runs":
                return runs.show(checked)
            return launch.run(checked, folder, WATCH, settings)

        statuses[-1] = in_one_message(run_task) or 0
        remove_if_empty(folder)
        if WATCH.asked is not None:
            sys.exit(statuses[-1])  # no further run of a --multirun

    def compose_and_run() -> None:
        nonlocal sweep
        line = command_line.read(sys.argv[1:])
        sys.argv[1:] = line.arguments
        answering.require_run_folder(line.settings)
        sweep = trials.Sweep.of(line.settings)
        trials.name_folders(sweep)
        try:
            run()
        except config.MISTAKES:
            raise
        except config.HYDRAS_OWN as error:
            if statuses:
                raise  # not about composing
            if isinstance(error, OSError) and error.filename:
                raise cannot_write(Path(error.filename), error) from error  # the run folder
            raise config.not_composed(error, sys.argv[1:]) from error

    try:
        return max([in_one_message(compose_and_run) or 0, *statuses])
    finally:
        if titles:
            ended = trials.how_they_ended(dict(zip(titles, statuses, strict=True)), sweep.trials)
            print("\n".join(ended), flush=True)


def run_and_exit() -> NoReturn:
    """Run, and end the process in a few seconds whatever happens when Python ends."""
    status = FAILED
    try:
        status = main()
    finally:
        WATCH.leave(status)
    sys.exit(status)


def remove_if_empty(folder: Path) -> None:
    """Remove the run folder that Hydra made for a run that never began, and an empty outputs/."""
    above = folder.resolve().parent
    ours = [folder, above] if above.is_relative_to(Path.cwd()) and above != Path.cwd() else [folder]
    for each in ours:
        with contextlib.suppress(OSError):  # not empty, gone, or not ours to remove
            each.rmdir()


def in_one_message(call: Callable[[], int | None]) -> int | None:
    """Call, and turn a mistake of the user's into one message and exit status 2."""
    try:
        return call()
    except config.MISTAKES as mistake:
        print(printable_lines(f"error: {config.explain(mistake)}"), file=sys.stderr)
        return REFUSED
    except Interrupted as interrupt:
        print(f"interrupted by {interrupt}", flush=True)
        return status_of(interrupt.number)


if __name__ == "__main__":
    run_and_exit()
