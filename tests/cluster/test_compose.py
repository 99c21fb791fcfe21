"""`docker/compose.2x4.yaml` as Compose reads it. tests/container/test_clusters.py brings it up."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from recipes.config import compose, register_schema

ROOT = Path(__file__).resolve().parents[2]


def find_compose() -> list[str] | None:
    """The command of this machine's Compose: the plugin, or the older program; None without."""
    for command in (["docker", "compose"], ["docker-compose"]):
        if shutil.which(command[0]) and not _status([*command, "version"]):
            return command
    return None


def _status(command: list[str]) -> int:
    return subprocess.run(command, capture_output=True, timeout=60, check=False).returncode


COMPOSE = find_compose()


def services(**settings: str) -> dict[str, Any]:
    """What Compose makes of the file."""
    assert COMPOSE is not None
    known = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    done = subprocess.run(
        [*COMPOSE, "-f", str(ROOT / "docker" / "compose.2x4.yaml"), "config"],
        env=known | settings,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = yaml.safe_load(done.stdout)["services"]
    assert isinstance(found, dict)
    return found


def command(service: dict[str, Any]) -> list[str]:
    """A service's command, in the words the container gets."""
    given = service["command"]
    words = shlex.split(given) if isinstance(given, str) else list(map(str, given))
    # `config` writes $ so that it could be read again.
    return [word.replace("$$", "$") for word in words]


@pytest.mark.skipif(COMPOSE is None, reason="there is no Docker Compose")
class TestTheFile:
    def test_it_is_two_nodes_of_four(self) -> None:
        found = services()
        assert set(found) == {"node0", "node1"}
        register_schema()
        for number, service in enumerate(found.values()):
            words = command(service)
            overrides = words[words.index("train.py") + 1 :]
            config, _ = compose(ROOT / "conf", overrides)
            assert (config.topology.nodes, config.topology.devices) == (2, 4)
            assert (config.topology.master, config.topology.node_rank) == ("node0", number)
            assert (config.max_steps, config.threads, config.device) == (20, 1, "cpu")
            assert service["image"] == "fleet-recipes:cpu"
            assert service["user"] == "1000:1000"
            # One file for both, in the folder that both see.
            secret = service["environment"]["FLEET_RECIPES_SECRET_FILE"]
            assert secret == "/checkout/outputs/.compose-secret"

    def test_settings_come_from_the_environment(self) -> None:
        found = services(ARGS="epochs=3 sync_bn=true", IMAGE="other:tag", RUN_AS="7:8")
        for service in found.values():
            words = command(service)
            assert words[-2:] == ["epochs=3", "sync_bn=true"]
            assert "max_steps=20" not in words
            assert service["image"] == "other:tag"
            assert service["user"] == "7:8"

    def test_the_shell_around_node_1_gives_its_exit_status(self) -> None:
        words = command(services()["node1"])
        assert words[:2] == ["bash", "-c"]
        script = words[2].replace("python", "sh -c").replace("sleep 3", ":")
        done = subprocess.run(["bash", "-c", script, "node1", "exit 5"], check=False)
        assert done.returncode == 5
