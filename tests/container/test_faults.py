"""Each fault of a cluster ends on every node, in time, with one message that names the cause.

`make test-faults` runs these and prints the table.
"""

from __future__ import annotations

import re
import time
from pathlib import Path

import numpy as np
import pytest
from containers import docker
from nodes import Cluster, Ended
from photographs import claiming, encoded, photo_folder, picture
from PIL import Image

pytest_plugins = ["container_fixtures", "fault_table"]
pytestmark = pytest.mark.faults

START = 40.0  # deadlines.start of these runs
SILENCE = 8.0  # deadlines.silence
GLOO = 30.0  # gloo's own timeout, after which the ranks that wait end
SLACK = 20.0  # for starting Python on a busy machine, settling and ending
STEP = r"step +3[ /]"


def check(ended: dict[str, Ended], deadline: float, *words: str, node: str = "") -> None:
    """Every node failed in time, with one error message that holds the words.

    Args:
        node: which has failed, with its rank, as its own messages are tagged; the others name it.
    """
    for label, each in ended.items():
        assert each.status not in (0, 137), (label, each.output[-2000:])
        assert each.seconds < deadline, (label, each.seconds)
        assert "Traceback" not in each.output, (label, each.output[-3000:])
        messages = each.errors or re.findall(r"^error: [^\n]*", each.output, re.MULTILINE)
        assert len(messages) == 1, (label, each.output[-3000:])
        if node:
            has_failed = node.split()[0]
            tag = node if label == has_failed else label
            assert messages[0].startswith(f"[{tag}] error: "), messages
            assert label == has_failed or has_failed.replace("node", "node ") in messages[0]
        for word in words:
            assert re.search(word, messages[0]), (label, word, messages)
        assert "remedy: " in each.output, each.output[-1000:]


def run_two(cluster: Cluster, *overrides: str, until: str = STEP, **more: object) -> None:
    """Start two nodes of one rank and let them train a few steps."""
    for number in (0, 1):
        cluster.node(number, *overrides, **more)  # type: ignore[arg-type]
    cluster.wait_for("node0", until)


def test_a_node_never_arrives(cluster: Cluster, note: dict[str, Ended]) -> None:
    cluster.node(0)
    note |= cluster.ends("node0", seconds=120)
    check(note, START + SLACK, "node 1 of 2 did not arrive", "node0", node="node1")


def test_two_nodes_with_the_same_rank(cluster: Cluster, note: dict[str, Ended]) -> None:
    cluster.node(0, topology="3x1")
    cluster.node(1, topology="3x1")
    cluster.node(1, topology="3x1", label="twin")
    note |= cluster.ends("node0", "node1", "twin", seconds=120)
    check(note, START + SLACK, "node_rank=1", "node1", "twin")


def test_a_wrong_node_count(cluster: Cluster, note: dict[str, Ended]) -> None:
    cluster.node(0)
    cluster.node(1, topology="3x1")
    note |= cluster.ends("node0", "node1", seconds=120)
    check(note, START + SLACK, "node 1 of 3", "2 nodes", "node1", node="node1")


def test_a_master_that_does_not_resolve(cluster: Cluster, note: dict[str, Ended]) -> None:
    cluster.node(1, "topology.master=nowhere.invalid")
    note |= cluster.ends("node1", seconds=120)
    check(note, START + SLACK, "nowhere.invalid does not resolve", "node 1")


def test_a_master_that_does_not_answer(cluster: Cluster, note: dict[str, Ended]) -> None:
    cluster.node(1, "topology.master=node1:7001")
    note |= cluster.ends("node1", seconds=120)
    check(note, START + SLACK, "node1:7001 did not answer", "node 1")


def test_a_port_in_use(cluster: Cluster, note: dict[str, Ended]) -> None:
    listen = "python -m http.server 6170 >/dev/null 2>&1 & sleep 2;"
    cluster.node(0, command=listen)
    note |= cluster.ends("node0", seconds=120)
    check(note, START + SLACK, "node 0", "6170", "in use")


def test_a_node_with_another_secret(cluster: Cluster, note: dict[str, Ended]) -> None:
    cluster.node(0)
    cluster.node(1, options=("--env", "FLEET_RECIPES_SECRET=another one than the other node's"))
    note |= cluster.ends("node0", "node1", seconds=120)
    check({"node0": note["node0"]}, START + SLACK, "node 1 of 2 did not arrive", "another secret")
    check({"node1": note["node1"]}, START + SLACK, "node 0 at node0:6170: .* another secret")


STRANGER = """
import socket, time
idle = [socket.create_connection(("node0", 6170)) for _ in range(500)]
hello = b'{"type": "hello", "node": %d, "nodes": 2, "host": "stranger", "session": "x"}\\n'
failed = b'{"type": "failed", "failure": {"node": 1, "message": "\\\\u001b[31mforged"}}\\n'
for words in (hello % 0, hello % 1 + failed, b"GET / HTTP/1.1\\r\\n\\r\\n", b"x" * 100_000):
    try:
        with socket.create_connection(("node0", 6170), timeout=5) as connection:
            connection.sendall(words)
            print(connection.recv(1000))
    except OSError as error:
        print(error)
print("done", flush=True)
time.sleep(300)
"""


def test_a_stranger_attacks_and_the_job_goes_on(cluster: Cluster) -> None:
    """Before the nodes have met, and while they train."""
    cluster.node(0, "max_steps=20", "deadlines.start=60")
    cluster.wait_for("node0", "waiting for node 1 at node0:6170")
    for when in ("before", "during"):
        network = ("--network", cluster.network)
        cluster.names[when] = cluster.containers.start("-c", STRANGER, options=network)
        cluster.wait_for(when, "done")
        if when == "before":
            cluster.node(1, "max_steps=20", "deadlines.start=60")
            cluster.wait_for("node0", STEP)
    ended = cluster.ends("node0", "node1", seconds=240)
    assert {each.status for each in ended.values()} == {0}, ended
    assert "dropped a connection from" in ended["node0"].output
    assert ended["node0"].output.count("dropped a connection from") < 10
    assert "forged" not in ended["node0"].output + ended["node1"].output


def test_a_rank_is_killed(cluster: Cluster, note: dict[str, Ended]) -> None:
    run_two(cluster)
    cluster.signal_rank("node1", "SIGKILL")
    note |= cluster.ends("node0", "node1", seconds=120)
    check(note, SLACK, "rank 1 was ended by SIGKILL", node="node1 rank1")


def test_a_rank_is_frozen(cluster: Cluster, note: dict[str, Ended]) -> None:
    run_two(cluster)
    cluster.signal_rank("node1", "SIGSTOP")
    note |= cluster.ends("node0", "node1", seconds=150)
    check(note, GLOO + SLACK, "rank 1 is frozen", node="node1 rank1")


def test_a_node_is_frozen(cluster: Cluster, note: dict[str, Ended]) -> None:
    run_two(cluster)
    docker("pause", cluster.names["node1"])
    began = time.monotonic()
    note |= cluster.ends("node0", seconds=120)
    check(note, SILENCE + SLACK, "node 1", "is lost: nothing was heard of it", node="node1")
    docker("unpause", cluster.names["node1"])
    note |= cluster.ends("node1", seconds=60 + time.monotonic() - began, since=began)
    assert note["node1"].status not in (0, 137)
    assert len(note["node1"].errors) == 1


def test_a_node_is_cut_from_the_network(cluster: Cluster, note: dict[str, Ended]) -> None:
    run_two(cluster)
    docker("network", "disconnect", cluster.network, cluster.names["node1"])
    note |= cluster.ends("node0", "node1", seconds=150)
    for label, words in (("node0", "node 1 .* is lost"), ("node1", "lost contact with node 0")):
        check({label: note[label]}, GLOO + SILENCE + SLACK, words, node="node1")


def image_folders(folder: Path, *, train: int = 4) -> Path:
    """Two classes of tiny images in train/ and val/."""
    rng = np.random.default_rng(0)
    for split, count in (("train", train), ("val", 2)):
        for name in ("cat", "dog"):
            (folder / split / name).mkdir(parents=True)
            for number in range(count):
                pixels = rng.integers(0, 256, (40, 40, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / split / name / f"{number}.png")
    return readable(folder)


def readable(folder: Path) -> Path:
    """The same folder, which the image's user can read whatever the umask is here."""
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    return folder


IMAGES = (
    "dataset=imagenet",
    "dataset.path=/workspace/data",
    "dataset.image_size=32",
    "dataset.workers=0",
    "global_batch_size=4",
)


def mount(folder: Path) -> tuple[str, ...]:
    return ("--volume", f"{folder}:/workspace/data:ro")


def test_a_rank_raises(cluster: Cluster, note: dict[str, Ended], tmp_path: Path) -> None:
    whole, broken = image_folders(tmp_path / "whole"), image_folders(tmp_path / "broken")
    for path in broken.glob("train/*/*.png"):
        path.write_bytes(b"not an image")
    cluster.node(0, *IMAGES, options=mount(whole))
    cluster.node(1, *IMAGES, options=mount(broken))
    note |= cluster.ends("node0", "node1", seconds=150)
    check(note, 60 + SLACK, r"/workspace/data/train/\w+/\d\.png", node="node1 rank1")


def test_a_node_with_other_data(cluster: Cluster, note: dict[str, Ended], tmp_path: Path) -> None:
    cluster.node(0, *IMAGES, options=mount(image_folders(tmp_path / "whole")))
    cluster.node(1, *IMAGES, options=mount(image_folders(tmp_path / "less", train=3)))
    note |= cluster.ends("node0", "node1", seconds=150)
    check(note, 60 + SLACK, "8", "6", "node 1|node1")


def test_a_node_with_another_paddle(cluster: Cluster, note: dict[str, Ended]) -> None:
    other = (
        "sed -i 's/3\\.3\\.1/3.3.0/' /opt/venv/lib/python3.11/site-packages/paddle/version/"
        "__init__.py /opt/venv/lib/python3.11/site-packages/paddlepaddle-*.dist-info/METADATA;"
    )
    cluster.node(0)
    cluster.node(1, command=other)
    note |= cluster.ends("node0", "node1", seconds=150)
    check(note, 60 + SLACK, r"3\.3\.1", r"3\.3\.0", "[Pp]addle")


def test_a_rank_runs_out_of_memory(cluster: Cluster, note: dict[str, Ended]) -> None:
    # Enough to start and join, not enough for a step of this batch.
    more = ("global_batch_size=1400", "dataset.image_size=48", "preflight=false")
    cluster.node(0, *more)
    cluster.node(1, *more, options=("--memory", "1200m", "--memory-swap", "1200m"))
    note |= cluster.ends("node0", "node1", seconds=200)
    check(note, 150, "rank 1 was ended by SIGKILL", "lack of memory", node="node1 rank1")


PATIENT = ("deadlines.start=120",)  # where how a machine starts is not what is tried


@pytest.mark.parametrize(("topology", "processes"), [("1x1", 16), ("1x2", 40)])
def test_too_few_processes_for_the_decoders(
    cluster: Cluster, note: dict[str, Ended], tmp_path: Path, topology: str, processes: int
) -> None:
    """Enough for the ranks, not for as many decoders as each was told to start."""
    few = ("--pids-limit", str(processes))
    more = (*IMAGES, *PATIENT, f"topology={topology}", "dataset.workers=32")
    cluster.start("node0", *more, options=(*mount(image_folders(tmp_path)), *few))
    cluster.wait_for("node0", "error: ", seconds=240)
    note |= cluster.ends("node0", seconds=120)
    words = (r"decoding process \d+ of 32 cannot be started", f"{processes} processes and threads")
    check(note, SLACK, *words)
    assert "a smaller dataset.workers" in note["node0"].output
    assert note["node0"].status == 1


@pytest.mark.parametrize(("topology", "loader"), [("1x1", "paddle"), ("1x2", "turbojpeg")])
def test_an_image_that_claims_more_pixels_than_there_is_memory(
    cluster: Cluster, note: dict[str, Ended], tmp_path: Path, topology: str, loader: str
) -> None:
    """In three gigabytes, where 60,000 x 60,000 pixels would take eleven: nothing is killed."""
    bomb = claiming(60_000, 60_000)["progressive"]
    whole = [encoded(picture(40, 40, seed)) for seed in range(4)]
    folder = readable(photo_folder(tmp_path, [*whole[:3], bomb], whole))
    options = (*mount(folder), "--memory", "3g", "--memory-swap", "3g")
    more = (*IMAGES, *PATIENT, f"topology={topology}", f"loader={loader}", "dataset.workers=1")
    cluster.start("node0", *more, options=options)
    cluster.wait_for("node0", "error: ", seconds=240)
    note |= cluster.ends("node0", seconds=120)
    words = (r"/workspace/data/train/class1/003\.jpg", "60000 x 60000 pixels", "max_pixels")
    check(note, SLACK, *words)
    assert note["node0"].status == 1

    cluster.start("skip", *more, "dataset.on_corrupt=skip", "epochs=1", options=options)
    skipped = cluster.ends("skip", seconds=240)["skip"]
    assert skipped.status == 0, skipped.output


def test_a_restart_continues_from_the_checkpoint(cluster: Cluster) -> None:
    """Not a fault that ends the run: with restarts it goes on by itself."""
    small = ("dataset=synthetic", "dataset.image_size=8", "dataset.num_classes=10")
    sizes = ("dataset.train_size=64", "dataset.eval_size=16", "epochs=5")  # 4 steps an epoch
    for number in (0, 1):
        cluster.node(number, *small, *sizes, "restarts=2")
    cluster.wait_for("node0", r"step +6/")
    cluster.signal_rank("node1", "SIGKILL")
    ended = cluster.ends("node0", "node1", seconds=240)
    assert {each.status for each in ended.values()} == {0}, ended
    assert "rank 1 was ended by SIGKILL" in ended["node0"].output
    assert re.search(r"continuing after step (4|8|12|16)\b", ended["node0"].output)
