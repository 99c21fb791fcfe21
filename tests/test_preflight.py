"""Facts, ports and checks of nodes: each check on facts that differ, and on facts that agree."""

import copy
import json
import socket
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import PIL.Image
import pytest

from recipes import preflight, telemetry
from recipes.config import Config, DatasetConfig, ModelConfig, TaskConfig, TopologyConfig, UserError
from recipes.data.conversion import Conversion
from recipes.data.preparation import Preparation, prepare_shards
from recipes.preflight import Facts, Finding, View, facts, ports
from recipes.preflight.checks import CHECKS, names_interface
from recipes.progress import NoDisplay

GIB = 1 << 30
A100 = {
    "index": 0,
    "uuid": "GPU-1111",
    "name": "NVIDIA A100",
    "capability": [8, 0],
    "driver": "550.1",
    "processes": [],
}


def config(**changes: Any) -> Config:
    whole = Config(
        task=TaskConfig("train"),
        model=ModelConfig("ResNet18"),
        dataset=DatasetConfig("digits", image_size=8, num_classes=10),
        topology=TopologyConfig(2, 4),
        batch_size=8,
        global_batch_size=64,
        device="cpu",
    )
    for key, value in changes.items():
        target: Any = whole
        *groups, name = key.split("__")
        for group in groups:
            target = getattr(target, group)
        setattr(target, name, value)
    return whole


def node_facts(node: int) -> Facts:
    """What `gather` would return on a GPU machine."""
    return {
        "form": facts.FORM,
        "node": node,
        "host": f"host{node}",
        "address": f"10.0.0.{node + 1}",
        "port": 40000 + node,
        "interface": "eth0",
        "interfaces": {"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "eth0"},
        "python": "3.11.2",
        "source": "0123456789ab",
        "config": facts.flat_config(config()),
        "config_digest": "ab",
        "device": "gpu",
        "device_count": 4,
        "devices": [{**A100, "index": number, "uuid": f"GPU-{number}"} for number in range(4)],
        "driver": "550.1",
        "memory_free": 64 * GIB,
        "shared_memory": {"free": 8 * GIB, "problem": None, "remedy": None},
        "dataset": {
            "path": "/data",
            "problem": None,
            "files": {"train": 100, "eval": 10},
            "checksum": None,
        },
        "disk_free": 100 * GIB if node == 0 else None,
        "build": {
            "packages": {"paddlepaddle-gpu": "3.3.1", "numpy": "2.4.6", "rich": "15.0"},
            "paddle": {
                "version": "3.3.1",
                "commit": "c0ffee",
                "cuda": "12.6",
                "cudnn": "9.5",
                "nccl": "2.25",
            },
            "git": {"commit": "a" * 40, "dirty": False},
            "archs": [70, 80, 90],
            "parameters": 25_000_000,
        },
        "build_problem": None,
    }


def compared(
    change: Callable[[list[Facts], list[View]], Any] = lambda *_: None,
    nodes: int = 2,
    configuration: Config | None = None,
) -> list[Finding]:
    """The findings after a change to what the nodes say, which has to survive JSON."""
    all_facts = [copy.deepcopy(node_facts(node)) for node in range(nodes)]
    views: list[View] = [
        {"clock": 1000.0 + node / 10, "unreached": [None] * nodes} for node in range(nodes)
    ]
    change(all_facts, views)
    all_facts, views = json.loads(json.dumps([all_facts, views]))
    return preflight.compare(all_facts, views, configuration or config())


def put(node: int, *path: Any, value: Any) -> Callable[[list[Facts], list[View]], None]:
    """A change of one node's fact."""

    def change(all_facts: list[Facts], _: list[View]) -> None:
        target: Any = all_facts[node]
        for key in path[:-1]:
            target = target[key]
        target[path[-1]] = value

    return change


# --- the checks ---------------------------------------------------------------------------------


@pytest.mark.parametrize("nodes", [1, 2, 5])
def test_nodes_that_agree_give_no_finding(nodes: int) -> None:
    assert compared(nodes=nodes) == []


def test_cpu_nodes_that_agree_give_no_finding() -> None:
    def on_cpu(all_facts: list[Facts], _: list[View]) -> None:
        for own in all_facts:
            own |= {"device": "cpu", "device_count": None, "devices": [], "driver": None}
            own["build"] |= {"archs": [], "git": None, "parameters": None}
            own["build"]["paddle"] |= {"cuda": None, "cudnn": None, "nccl": None}
            own["dataset"] = {"path": None, "problem": None, "files": {}, "checksum": None}

    assert compared(on_cpu) == []


CHANGES = [
    # change, level, fact, parts of the message
    (put(1, "build", "paddle", "version", value="3.3.0"), "error", "Paddle", ["3.3.0", "3.3.1"]),
    (put(1, "build", "paddle", "commit", value="bad"), "error", "Paddle's commit", ["bad", "c0ff"]),
    (put(1, "build", "paddle", "cuda", value="12.9"), "error", "CUDA", ["12.9", "12.6"]),
    (put(1, "build", "paddle", "cudnn", value=None), "error", "cuDNN", ["none", "9.5"]),
    (put(1, "build", "paddle", "nccl", value="2.27"), "error", "NCCL", ["2.27", "2.25"]),
    (put(1, "build", "packages", "numpy", value="1.26"), "error", "numpy", ["1.26", "2.4.6"]),
    (put(1, "build", "packages", "paddleclas", value="2.6"), "error", "paddleclas", ["none"]),
    (put(1, "python", value="3.11.9"), "warning", "Python", ["3.11.9", "3.11.2"]),
    (put(1, "driver", value="535.0"), "warning", "NVIDIA driver", ["535.0", "550.1"]),
    (put(1, "build", "git", "commit", value="b" * 40), "error", "git commit", ["bbb", "aaa"]),
    (put(1, "build", "git", "dirty", value=True), "warning", "git commit", ["not committed"]),
    (put(1, "source", value="feed"), "error", "program", ["feed", "0123456789ab"]),
    (put(1, "config", "seed", value=7), "error", "configuration", ["seed=7 (node 0: 0)"]),
    (put(1, "config", "new.key", value=7), "error", "configuration", ["new.key=7 (node 0: None)"]),
    (put(1, "dataset", "path", value="/mnt"), "warning", "dataset.path", ["/mnt", "/data"]),
    (put(1, "device", value="cpu"), "error", "device", ["cpu", "gpu"]),
    (put(1, "device_count", value=2), "error", "devices", ["2 visible", "2x4 needs 4"]),
    (
        put(1, "devices", 3, "name", value="NVIDIA L4"),
        "error",
        "device model",
        ["L4", "host0", "A100"],
    ),
    (put(1, "devices", 2, "processes", value=[99]), "warning", "device in use", ["99", "device 2"]),
    (
        put(1, "devices", 0, "capability", value=[10, 0]),
        "error",
        "kernels",
        ["NVIDIA A100 (sm_100)", "sm_70, sm_80, sm_90 only"],
    ),
    (put(1, "memory_free", value=3 * GIB), "warning", "memory", ["3.0 GiB", "4 ranks"]),
    (
        put(1, "shared_memory", value={"free": 1, "problem": "too small", "remedy": "--shm-size"}),
        "error",
        "shared memory",
        ["too small"],
    ),
    (
        put(1, "interfaces", "GLOO_SOCKET_IFNAME", value="ib0"),
        "warning",
        "interface",
        ["ib0", "eth0"],
    ),
    (put(1, "address", value="127.0.0.1"), "error", "address", ["127.0.0.1", "topology.master"]),
    (
        put(1, "dataset", "problem", value="/data is not a folder"),
        "error",
        "dataset",
        ["/data is not"],
    ),
    (put(1, "dataset", "files", "train", value=99), "error", "dataset", ["99 files", "has 100"]),
    (
        put(1, "dataset", "checksum", value="ab" * 32),
        "error",
        "prepared dataset",
        ["a prepared dataset (abababababab) in /data", "host0) has original images in /data"],
    ),
    (put(1, "dataset", "files", "eval", value=None), "warning", "dataset", ["eval", "too long"]),
]


@pytest.mark.parametrize(("change", "level", "fact", "parts"), CHANGES)
def test_a_difference_is_found_and_named(
    change: Callable[..., None], level: str, fact: str, parts: list[str]
) -> None:
    (finding,) = compared(change)
    assert (finding.level, finding.node, finding.fact) == (level, 1, fact)
    assert "node 1 (host1)" in finding.message
    for part in parts:
        assert part in finding.message
    assert finding.remedy


def test_every_check_is_tried_by_a_difference() -> None:
    views: list[View] = [{"clock": 0.0, "unreached": [None, None]}] * 2
    tried = set()
    for change, *_ in CHANGES:
        all_facts = [node_facts(0), node_facts(1)]
        change(all_facts, views)
        cluster = preflight.Cluster(all_facts, views, config())
        tried |= {check.__name__ for check in CHECKS if list(check(cluster))}
    below = {"build_known", "ports", "clocks", "disk"}
    assert tried | below == {check.__name__ for check in CHECKS}


def test_unknown_values_are_no_difference_where_they_may_be_unknown() -> None:
    assert compared(put(1, "build", "git", value=None)) == []
    assert compared(put(0, "driver", value=None)) == []
    assert compared(put(1, "build", "packages", "rich", value="14.0")) == []


def test_devices_that_the_run_does_not_use_do_not_matter() -> None:
    def more(all_facts: list[Facts], _: list[View]) -> None:
        other = {**A100, "name": "NVIDIA T4", "capability": [7, 5], "processes": [1], "index": 4}
        all_facts[1]["devices"].append(other)
        all_facts[1]["device_count"] = 5

    assert compared(more) == []


@pytest.mark.parametrize(
    ("capability", "enough"),
    [([8, 0], True), ([8, 6], True), ([7, 0], True), ([7, 5], True), ([9, 0], True),
     ([6, 1], False), ([12, 0], False)],
)  # fmt: skip
def test_kernels_run_on_later_devices_of_their_generation(
    capability: list[int], enough: bool
) -> None:
    def change(all_facts: list[Facts], _: list[View]) -> None:
        for own in all_facts:
            for device in own["devices"]:
                device["capability"] = capability

    assert (compared(change) == []) == enough


def test_a_paddle_that_does_not_start_is_one_finding() -> None:
    def change(all_facts: list[Facts], _: list[View]) -> None:
        all_facts[1] |= {"build": None, "build_problem": "Paddle cannot be imported: no libcuda"}

    (finding,) = compared(change)
    assert finding.message == "node 1 (host1): Paddle cannot be imported: no libcuda"
    assert "import paddle" in finding.remedy


@pytest.mark.parametrize(("ahead", "word"), [(3.5, "ahead of"), (-9.0, "behind")])
def test_clocks_that_differ(ahead: float, word: str) -> None:
    def change(_: list[Facts], views: list[View]) -> None:
        views[1]["clock"] = views[0]["clock"] + ahead

    (finding,) = compared(change)
    assert finding.level == "warning"
    assert f"node 1 (host1) is {abs(ahead):.1f} s {word} that of node 0 (host0)" in finding.message


def test_a_port_that_is_not_reached_names_both_nodes() -> None:
    def change(_: list[Facts], views: list[View]) -> None:
        views[2]["unreached"][1] = "timed out"

    (finding,) = compared(change, nodes=3)
    assert finding.node == 2
    assert finding.message == (
        "node 2 (host2) cannot reach port 40001 of node 1 (host1) at 10.0.0.2: timed out"
    )
    assert "firewall" in finding.remedy


def test_a_disk_without_room_for_the_checkpoints() -> None:
    need = 25_000_000 * 3 * 4 * (3 + 2)
    (finding,) = compared(put(0, "disk_free", value=need - 1))
    assert (finding.level, finding.node) == ("error", 0)
    assert "25,000,000 parameters need up to 1.40 GiB (save.keep=3)" in finding.message
    assert "hydra.run.dir" in finding.remedy
    assert compared(put(0, "disk_free", value=need)) == []
    evaluation = config(task__name="evaluate")
    assert compared(put(0, "disk_free", value=0), configuration=evaluation) == []


def test_another_version_of_the_program_is_all_that_is_said() -> None:
    (finding,) = compared(lambda all_facts, _: all_facts.__setitem__(1, {"host": "old"}))
    assert "node 1 (old) runs another version of this program" in finding.message
    assert "same image" in finding.remedy


def test_each_differing_node_is_named_and_errors_come_first() -> None:
    def change(all_facts: list[Facts], _: list[View]) -> None:
        all_facts[1]["driver"] = "1"
        for node in (1, 2):
            all_facts[node]["build"]["packages"]["numpy"] = "1.26"

    found = [(finding.level, finding.node) for finding in compared(change, nodes=3)]
    assert found == [("error", 1), ("error", 2), ("warning", 1)]


@pytest.mark.parametrize(
    ("value", "wanted"),
    [("eth0", True), ("eth", True), ("ib,eth", True), ("=eth0", True), ("=eth", False),
     ("^docker,lo", True), ("^eth", False), ("^=eth", True), ("ib0", False), ("eth01", False)],
)  # fmt: skip
def test_nccl_s_way_of_naming_interfaces(value: str, wanted: bool) -> None:
    assert names_interface(value, "eth0") == wanted


# --- what is said -------------------------------------------------------------------------------

FINDINGS = [
    Finding("error", 1, "numpy", "node 1 has [1.26]", "use the image"),
    Finding("error", 1, "CUDA", "node 1 has 12.9", "use the image"),
    Finding("warning", 0, "clock", "node 0 is late", "chrony"),
]


def test_errors_stop_the_run_in_one_message() -> None:
    preflight.refuse_errors([])
    preflight.refuse_errors(FINDINGS[2:])
    with pytest.raises(UserError) as caught:
        preflight.refuse_errors(FINDINGS)
    assert caught.value.message.splitlines() == [
        "preflight found 2 errors:",
        "  node 1 has [1.26]",
        "  node 1 has 12.9",
    ]
    assert caught.value.remedy == "use the image"


@pytest.mark.parametrize("whole", [True, False])
def test_the_result_is_shown_and_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], whole: bool
) -> None:
    telemetry.setup_logging("[node0]")
    nodes = [node_facts(node) for node in range(6)]
    preflight.show(FINDINGS, nodes, telemetry.RunFolder(tmp_path), whole=whole)
    shown = capsys.readouterr().out
    assert "error: node 1 has [1.26]\n  remedy: use the image\n" in shown
    assert "warning: node 0 is late" in shown
    assert ("node 5" in shown) == whole
    assert ("NVIDIA A100" in shown) == whole
    written = json.loads((tmp_path / "preflight.json").read_text())
    assert written["findings"][0]["message"] == "node 1 has [1.26]"
    assert written["nodes"] == nodes


def test_warnings_alone_and_nothing_are_one_line_each(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    telemetry.setup_logging("[node0]")
    run = telemetry.RunFolder(tmp_path)
    preflight.show(FINDINGS[2:], [node_facts(0)], run, whole=False)
    assert "warning: preflight: node 0 is late (chrony)\n" in capsys.readouterr().out
    preflight.show([], [node_facts(0), node_facts(1)], run, whole=False)
    assert capsys.readouterr().out.endswith("preflight: 2 nodes checked, nothing found\n")


def test_a_node_without_paddle_can_be_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = node_facts(0) | {"build": None, "build_problem": "Paddle cannot be imported"}
    preflight.show([], [broken], telemetry.RunFolder(tmp_path), whole=True)
    assert "cannot be" in capsys.readouterr().out


# --- the facts ----------------------------------------------------------------------------------


def test_this_machine_s_facts(tmp_path: Path) -> None:
    run = telemetry.RunFolder(tmp_path / "not" / "made")
    with preflight.listening(0) as port:
        own = preflight.gather(config(save__keep=10**6), run, 0, "127.0.0.1", port)
    assert json.loads(json.dumps(own)) == own
    assert own["build_problem"] is None
    assert own["build"]["packages"]["paddleclas"] == "2.6.0"
    assert own["build"]["parameters"] > 11_000_000  # ResNet-18
    assert own["host"] == socket.gethostname()
    assert own["port"] == port
    assert own["interface"] == "lo"
    assert own["memory_free"] > GIB / 4
    assert own["disk_free"] > 0
    assert own["dataset"] == {"path": None, "problem": None, "files": {}, "checksum": None}
    assert set(own) == set(node_facts(0))  # the facts that the checks above are tried on
    view = preflight.look([own], 0)
    assert abs(view["clock"] - time.time()) < 5
    errors = [
        finding.fact
        for finding in preflight.compare([own], [view], config(topology__nodes=1))
        if finding.level == "error"
    ]
    assert errors == []


def test_a_paddle_that_cannot_be_imported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "paddle.py").write_text("raise ImportError('libcudart.so.12: cannot open')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    process = facts._BuildProcess(None, 60)
    told = process.result()
    process.end()
    assert told["build"] is None
    assert "Paddle cannot be imported" in told["build_problem"]


def test_a_paddle_that_does_not_answer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import time\ntime.sleep(60)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    process = facts._BuildProcess(None, 0.5)
    assert process.result() == {
        "build": None,
        "build_problem": "Paddle did not tell its build within 0.5 s (deadlines.start)",
    }
    process.end()
    assert process._process.returncode != 0


def test_the_configuration_s_facts_leave_out_what_is_a_node_s_own() -> None:
    one = config(topology__node_rank=0, topology__master="a", dataset__path="/x")
    two = config(topology__node_rank=1, topology__master="b", network__interface="ib0")
    assert facts.flat_config(one) == facts.flat_config(two)
    assert facts.flat_config(one)["topology.devices"] == 4
    assert facts.flat_config(config(seed=1)) != facts.flat_config(one)


def test_the_program_s_digest_depends_on_names_and_contents(tmp_path: Path) -> None:
    package = tmp_path / "recipes" / "data"
    package.mkdir(parents=True)
    (tmp_path / "train.py").write_text("x = 1\n")
    (package / "a.py").write_text("y = 1\n")
    first = facts.source_digest(tmp_path)
    (package / "notes.txt").write_text("not a program\n")
    assert facts.source_digest(tmp_path) == first
    (package / "a.py").write_text("y = 2\n")
    second = facts.source_digest(tmp_path)
    (package / "a.py").rename(package / "b.py")
    assert len({first, second, facts.source_digest(tmp_path)}) == 3


def test_nvidia_smi_is_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(
        "#!/bin/sh\n"
        'case "$1" in\n'
        "--query-gpu=*) echo '0, GPU-aa, NVIDIA H100 80GB HBM3, 9.0, 550.54';"
        " echo '1, GPU-bb, NVIDIA H100 80GB HBM3, 9.0, 550.54';;\n"
        "--query-compute-apps=*) echo 'GPU-bb, 4711';;\n"
        "esac\n"
    )
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    first, second = facts.query_devices()
    assert first == {
        "index": 0,
        "uuid": "GPU-aa",
        "name": "NVIDIA H100 80GB HBM3",
        "capability": [9, 0],
        "driver": "550.54",
        "processes": [],
    }
    assert (second["index"], second["processes"]) == (1, [4711])
    program.write_text("#!/bin/sh\nexit 9\n")
    assert facts.query_devices() == []
    program.unlink()
    assert facts.query_devices() == []


def test_visible_devices_by_index_and_uuid() -> None:
    devices = [{"index": number, "uuid": f"GPU-{number}{number}"} for number in range(12)]

    def indices(visible: tuple[str, ...] | None) -> list[int]:
        return [device["index"] for device in facts.visible_devices(devices, visible)]

    assert indices(None) == list(range(12))
    assert indices(()) == []
    assert indices(("3", "1")) == [3, 1]
    assert indices(("GPU-22", "11")) == [2, 11]
    assert indices(("MIG-1",)) == []


@pytest.mark.parametrize("version", [1, 2])
def test_free_memory_heeds_the_container_s_limit(tmp_path: Path, version: int) -> None:
    folder, limit, used, cache = (
        (tmp_path, "memory.max", "memory.current", "inactive_file")
        if version == 2
        else (
            tmp_path / "memory",
            "memory.limit_in_bytes",
            "memory.usage_in_bytes",
            "total_inactive_file",
        )
    )
    folder.mkdir(exist_ok=True)
    (folder / limit).write_text("1000000\n")
    (folder / used).write_text("800000\n")
    (folder / "memory.stat").write_text(f"anon 5\n{cache} 300000\n")
    assert facts.memory_free(tmp_path) == 500_000
    (folder / used).write_text("1400000\n")
    assert facts.memory_free(tmp_path) == 0
    (folder / limit).write_text("max\n" if version == 2 else f"{2**63 - 4096}\n")
    assert facts.memory_free(tmp_path) > 10**7
    assert facts.memory_free(tmp_path / "nothing") > 10**7


def test_shared_memory_says_what_the_loader_would() -> None:
    assert facts.shared_memory(config())["problem"] is None
    greedy = config(dataset__workers=10**6, dataset__image_size=1000)
    assert facts.shared_memory(greedy)["problem"] is None  # data in memory needs no processes
    greedy.loader = "paddle"
    told = facts.shared_memory(greedy)
    assert "MiB in /dev/shm" in told["problem"]
    assert "--shm-size" in told["remedy"]
    assert told["free"] > 0


def photos(root: Path, counts: dict[str, int]) -> None:
    for folder, count in counts.items():
        (root / folder).mkdir(parents=True, exist_ok=True)
        for number in range(count):
            (root / folder / f"{number}.JPEG").touch()


def dataset(name: str, **changes: Any) -> dict[str, Any]:
    return facts.dataset_facts(DatasetConfig(name, image_size=8, **changes))


def test_images_in_folders_are_counted(tmp_path: Path) -> None:
    photos(tmp_path, {"train/a": 3, "train/b/deep": 2, "val/a": 1, "train/.hidden": 4})
    (tmp_path / "train" / "a" / "notes.txt").touch()
    (tmp_path / "train" / "a" / ".5.jpg").touch()
    told = dataset("imagenet", path=str(tmp_path))
    files = {"train": 5, "eval": 1}
    assert told == {"path": str(tmp_path), "problem": None, "files": files, "checksum": None}
    assert facts.count_images(tmp_path, time.monotonic() - 1) is None
    (tmp_path / "one").symlink_to("other")
    (tmp_path / "other").symlink_to("one")
    assert facts.count_images(tmp_path, time.monotonic() + 60) is None


def test_lists_are_counted(tmp_path: Path) -> None:
    (tmp_path / "train_list.txt").write_text("a.jpg 0\n\nb.jpg 1\n")
    told = dataset("imagenet", path=str(tmp_path))
    assert told["problem"] == f"{tmp_path / 'val_list.txt'} is missing"
    (tmp_path / "val_list.txt").write_text("c.jpg 0")
    assert dataset("imagenet", path=str(tmp_path))["files"] == {"train": 2, "eval": 1}


def test_a_prepared_dataset_is_known_by_its_checksum(tmp_path: Path) -> None:
    for split in ("train", "val"):
        (tmp_path / "images" / split / "a").mkdir(parents=True)
        PIL.Image.new("RGB", (20, 20)).save(tmp_path / "images" / split / "a" / "0.png")
    checksums = set()
    for quality in (50, 51):
        output = tmp_path / f"prepared-{quality}"
        conversion = Conversion(16, "jpeg", quality, "source")
        order = Preparation(tmp_path / "images", output, conversion, 1000, 1, None)
        prepare_shards(order, NoDisplay(), lambda _: None)
        told = dataset("imagenet", path=str(output))
        assert told["files"] == {"train": 1, "eval": 1}
        checksums.add(told["checksum"])
        (output / "train-00000.shard").unlink()
        assert "train-00000.shard" in dataset("imagenet", path=str(output))["problem"]
    assert len(checksums - {None}) == 2


def test_absent_data_is_a_problem(tmp_path: Path) -> None:
    absent = str(tmp_path / "absent")
    assert absent in dataset("imagenet", path=absent)["problem"]
    photos(tmp_path, {"train/a": 1})
    assert dataset("imagenet", path=str(tmp_path))["problem"] == f"{tmp_path / 'val'} is missing"
    assert absent in dataset("cifar10", path=absent, download=False)["problem"]
    assert dataset("cifar10", path=absent, download=True)["problem"] is None


def test_cifar10_as_archive_and_as_folder(tmp_path: Path) -> None:
    (tmp_path / "cifar-10-python.tar.gz").touch()
    assert dataset("cifar10", path=str(tmp_path))["files"] == {"archive": 1}
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    for name in ("batches.meta", "data_batch_1", "data_batch_2", "test_batch"):
        (folder / name).touch()
    assert dataset("cifar10", path=str(tmp_path))["files"] == {"train": 2, "eval": 1}


# --- ports --------------------------------------------------------------------------------------


def test_nodes_reach_each_other_on_loopback() -> None:
    with preflight.listening(0) as zero, preflight.listening(1) as one:
        all_facts = [
            {"node": node, "address": "127.0.0.1", "port": port}
            for node, port in enumerate((zero, one))
        ]
        for node in (0, 1, 0):  # a port answers more than once
            assert preflight.look(all_facts, node)["unreached"] == [None, None]


def test_a_closed_port_is_named() -> None:
    with preflight.listening(1) as port:
        pass
    others = [
        {"node": 0, "address": "127.0.0.1", "port": port},
        {"node": 1, "address": "127.0.0.1", "port": port},
    ]
    assert ports.reach(others, 0) == [None, "Connection refused"]


def test_another_program_on_the_port_is_no_node() -> None:
    with preflight.listening(5) as port:
        others = [{"node": node, "address": "127.0.0.1", "port": port} for node in range(2)]
        assert ports.reach(others, 0) == [None, "something else answers there"]


def test_a_port_that_never_answers_takes_a_short_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports, "CONNECT_SECONDS", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        others = [{"node": node, "address": "127.0.0.1", "port": port} for node in range(20)]
        started = time.monotonic()
        assert ports.reach(others, 0) == [None] + ["timed out"] * 19
        assert time.monotonic() - started < 3  # all at the same time
