"""A rank that joins its job, proves that the group works, and leaves."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from recipes import worker
from recipes.config import Config, TopologyConfig
from recipes.topology import place_from_environment

config = Config(topology=TopologyConfig(nodes=1, devices=4), device="cpu")
place = place_from_environment(os.environ)
assert place is not None
worker.die_with_parent()
worker.set_threads(config, os.environ)
worker.import_paddle()

import paddle  # noqa: E402

from recipes import distributed  # noqa: E402

distributed.start(config, place)
total = distributed.sum_over_ranks(paddle.to_tensor([1 << place.rank]))
print(f"rank {place.rank} of {place.world_size}: {int(total.item())}", flush=True)
