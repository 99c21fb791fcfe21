"""What the parent of a run can tell of model and data before it starts anything.

The ranks find the same, several seconds later.
"""

from __future__ import annotations

from recipes import data, models
from recipes.config import Config
from recipes.topology import Place

_TRAINS = ("train", "benchmark")


def check(config: Config) -> None:
    """See that the model exists and that it and the batches suit the data, as far as that is known.

    Needs neither Paddle nor PaddleClas.

    Raises:
        UserError: as the ranks would raise it.
    """
    if config.task.name not in (*_TRAINS, "evaluate"):
        return
    models.check(config.model, config.dataset.image_size)
    known = data.known(config.dataset)
    if known is None:
        return
    data.check_classes(config.dataset, known.num_classes)
    models.num_classes(config, known)
    if config.task.name in _TRAINS and known.train_images is not None:
        first = Place(rank=0, world_size=config.shape.world_size, local_rank=0, node=0)
        data.Plan.of(config, known.train_images, first)
