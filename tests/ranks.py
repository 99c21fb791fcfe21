"""Real ranks for tests: processes that join a gloo group the way `distributed.start` forms it."""

from __future__ import annotations

import importlib
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent


def run_ranks(count: int, *functions: str, timeout: float = 150) -> dict[str, list[Any]]:
    """Call each ``MODULE:FUNCTION(place)`` on `count` ranks of one node.

    Returns:
        For each function what it returned, through JSON, by rank.
    """
    ports = _free_ports(count + 1)
    endpoints = [f"127.0.0.1:{port}" for port in ports[1:]]
    command = [sys.executable, str(Path(__file__)), *functions]
    processes = []
    try:
        for rank in range(count):
            environment = os.environ | {
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]),
                "PADDLE_TRAINER_ID": str(rank),
                "PADDLE_TRAINERS_NUM": str(count),
                "PADDLE_LOCAL_RANK": str(rank),
                "PADDLE_LOCAL_SIZE": str(count),
                "PADDLE_TRAINER_ENDPOINTS": ",".join(endpoints),
                "PADDLE_CURRENT_ENDPOINT": endpoints[rank],
                "PADDLE_MASTER": f"127.0.0.1:{ports[0]}",
                "PADDLE_DISTRI_BACKEND": "gloo",
            }
            processes.append(
                subprocess.Popen(
                    command,
                    env=environment,
                    cwd=ROOT,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            )
        outputs = [process.communicate(timeout=timeout)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    codes = [process.returncode for process in processes]
    assert codes == [0] * count, f"exit statuses {codes}\n" + "\n".join(outputs)
    found = [json.loads(output.splitlines()[-1]) for output in outputs]
    return {function: [each[function] for each in found] for function in functions}


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [int(each.getsockname()[1]) for each in sockets]
    for each in sockets:
        each.close()
    return ports


def _main(*functions: str) -> None:
    from recipes import worker
    from recipes.config import Config, TopologyConfig
    from recipes.topology import place_from_environment

    worker.import_paddle()
    from recipes import distributed

    place = place_from_environment(os.environ)
    assert place is not None
    config = Config(topology=TopologyConfig(1, place.world_size), device="cpu")
    distributed.start(config, place)
    results = {}
    for function in functions:
        module, name = function.split(":")
        results[function] = getattr(importlib.import_module(module), name)(place)
    print(f"\n{json.dumps(results)}", flush=True)


if __name__ == "__main__":
    _main(*sys.argv[1:])
