"""The CPU image: user, files, packages, what it says of itself, secrets, signals, size."""

import json
import os
import re
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from containers import CERTIFICATE_MARKER, PROXY_MARKER, ROOT, Containers, docker

pytest_plugins = ["container_fixtures"]

SIZE_LIMIT = 1_600_000_000  # bytes
# Whom the files of a mounted folder shall belong to. Root runs the tests in CI: any uid will do.
CALLER = (os.getuid(), os.getgid()) if os.getuid() != 0 else (54321, 54322)
AS_CALLER = ("--user", f"{CALLER[0]}:{CALLER[1]}")

IMPORTS = """
import paddle
from paddleclas.ppcls.arch.backbone import MobileNetV3_small_x1_0, ResNet50
from visualdl import LogWriter
import cv2, hydra, matplotlib.pyplot, numpy, pandas, PIL.Image, rich, safetensors.numpy
import scipy.stats, sklearn.datasets
assert sklearn.datasets.load_digits().data.shape == (1797, 64)
loss = ResNet50(class_num=10)(paddle.randn([2, 3, 64, 64])).sum()
loss.backward()
with LogWriter("/tmp/visualdl") as writer:
    writer.add_scalar("loss", float(loss), 1)
print("all imported")
"""

TWO_RANKS = """
import paddle
from pathlib import Path
paddle.distributed.init_parallel_env()
rank = paddle.distributed.get_rank()
paddle.seed(7)
model = paddle.DataParallel(paddle.nn.Linear(4, 2))
optimizer = paddle.optimizer.Momentum(0.1, parameters=model.parameters())
for step in range(3):
    (model(paddle.randn([8, 4]) + rank) ** 2).mean().backward()
    optimizer.step()
    optimizer.clear_grad()
weights = [w for p in model.parameters() for w in p.flatten().tolist()]
Path(f"/workspace/outputs/rank{rank}.txt").write_text(repr(weights))
"""

HANDLER = """
import signal, sys, time
def stop(number, frame):
    print("handled", number, flush=True)
    sys.exit(5)
signal.signal(signal.SIGTERM, stop)
print("ready", flush=True)
time.sleep(120)
"""

ORPHAN = """
import subprocess, time
from pathlib import Path
subprocess.run(["sh", "-c", "sleep 0.2 & sleep 0.2 &"])
time.sleep(1)
states = [p.read_text().rsplit(")", 1)[1].split()[0] for p in Path("/proc").glob("[0-9]*/stat")]
print("zombies", states.count("Z"))
"""


def read_locked() -> dict[str, str]:
    """Canonical name -> version of the CPU variant's locks."""
    pins: list[tuple[str, str]] = []
    for name in ("requirements.lock", "requirements-cpu.lock"):
        text = (ROOT / "docker" / name).read_text("utf-8")
        pins += re.findall(r"^([\w.-]+)==([^\s;\\]+)", text, re.MULTILINE)
    return {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in pins}


@pytest.fixture(scope="session")
def described(image: str) -> dict[str, Any]:
    """What `docker image inspect` tells."""
    answer: list[dict[str, Any]] = json.loads(docker("image", "inspect", image).stdout)
    return answer[0]


@pytest.fixture
def outputs(tmp_path: Path) -> Path:
    """A folder of the caller's, to be mounted."""
    folder = tmp_path / "outputs"
    folder.mkdir()
    os.chown(folder, *CALLER)
    return folder


def wait_for_line(name: str, line: str, seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while line not in docker("logs", name).stdout:
        assert time.monotonic() < deadline, f"{name} did not print {line!r}"
        time.sleep(0.1)


def test_user_is_not_root(containers: Containers, described: dict[str, Any]) -> None:
    assert described["Config"]["User"] == "fleet"
    assert containers.run("id", "-u").stdout == "1000\n"


def test_first_argument_is_run_by_python(containers: Containers) -> None:
    assert containers.run("-c", "import sys; print(sys.prefix)").stdout == "/opt/venv\n"
    result = containers.run("train.py", "topology=3by4")
    assert result.returncode == 2
    assert "topology" in result.stderr


def test_other_programs_run_as_they_are(containers: Containers) -> None:
    assert containers.run("bash", "-c", "echo $0").stdout == "bash\n"
    assert containers.run("python", "--version").stdout.startswith("Python 3.11.")


def test_exit_status_is_passed_on(containers: Containers) -> None:
    assert containers.run("-c", "raise SystemExit(7)").returncode == 7


def test_imports_that_the_recipes_need(containers: Containers) -> None:
    result = containers.run("-c", IMPORTS)
    assert "all imported" in result.stdout, result.stderr


@pytest.mark.parametrize("options", [(), ("--read-only", "--user", "54321:54322")])
def test_visualdl_server_answers(containers: Containers, options: tuple[str, ...]) -> None:
    command = ("visualdl", "--logdir", "/tmp", "--language", "en", "--disable-telemetry")
    name = containers.start(*command, options=options)
    fetch = "import urllib.request as r; print(r.urlopen('http://127.0.0.1:8040/app/index').status)"
    deadline = time.monotonic() + 60
    while (answer := docker("exec", name, "python", "-c", fetch)).stdout != "200\n":
        assert time.monotonic() < deadline, answer.stderr + docker("logs", name).stderr
        time.sleep(0.5)


def test_two_ranks_train_and_their_files_belong_to_the_caller(
    containers: Containers, outputs: Path
) -> None:
    result = containers.run(
        *("bash", "-c", 'echo "$1" > two.py && exec python -m paddle.distributed.launch'
          " --nproc_per_node 2 two.py", "bash", TWO_RANKS),
        options=(*AS_CALLER, "--volume", f"{outputs}:/workspace/outputs", "--shm-size", "256m",
                 "--env", "OMP_NUM_THREADS=1"),
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    files = sorted(outputs.iterdir())
    assert [file.name for file in files] == ["rank0.txt", "rank1.txt"]
    assert files[0].read_text() == files[1].read_text()
    assert {(file.stat().st_uid, file.stat().st_gid) for file in files} == {CALLER}


def test_home_and_user_name_work_under_any_uid(containers: Containers) -> None:
    write = "pathlib.Path.home().joinpath('x').write_text('')"
    code = f"import getpass, pathlib; {write}; print(getpass.getuser())"
    result = containers.run("-c", code, options=("--user", "54321:54322"))
    assert result.stdout == "fleet\n", result.stderr


TRAIN = ("recipe=digits_resnet18", "max_steps=1", "threads=1")


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (("topology=3by4",), 2, "topology"),
        (("~nothing",), 2, "nothing"),
        (("--help",), 0, "recipe="),
        (("--cfg", "job", "recipe=smoke"), 0, "recipe_name: smoke"),
        (("env", "A=b", "sh", "-c", "echo $A"), 0, "b"),
    ],
)
def test_overrides_are_for_train_py(
    containers: Containers, words: tuple[str, ...], status: int, said: str
) -> None:
    result = containers.run(*words)
    assert result.returncode == status, result.stderr
    assert said in result.stdout + result.stderr


def test_a_run_needs_nothing_that_can_be_written_but_its_outputs(
    containers: Containers, outputs: Path
) -> None:
    """No home, no /tmp, a user that nobody knows: the curves are there all the same."""
    result = containers.run(
        *(*TRAIN, "topology=1x2"),
        options=("--read-only", *AS_CALLER, "--env", "HOME=/nonexistent", "--shm-size", "256m",
                 "--volume", f"{outputs}:/workspace/outputs",
                 "--env", f"FLEET_RECIPES_HOST_OUTPUTS={outputs}"),
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    assert "warning" not in result.stdout + result.stderr
    (run,) = outputs.iterdir()
    assert f"results: {run}" in result.stdout
    assert len(list((run / "visualdl").glob("vdlrecords*"))) == 1
    assert json.loads((run / "result.json").read_text())["status"] == "completed"


def test_results_that_go_with_the_container_are_told_at_the_start(containers: Containers) -> None:
    result = containers.run(*TRAIN)
    assert result.returncode == 0, result.stderr
    (told,) = [line for line in result.stdout.splitlines() if "go with this container" in line]
    assert 'docker run --volume "$PWD/outputs:/workspace/outputs"' in told
    assert result.stdout.index(told) < result.stdout.index("epoch")


@pytest.mark.parametrize(
    ("user", "read_only", "words"),
    [
        ("54323:54323", False, "sudo chown"),
        ("1000:1000", False, "--user"),
        ("0:0", True, "mounted read-only: take :ro off"),
    ],
)
def test_outputs_that_cannot_be_written_are_told_once(
    containers: Containers, tmp_path: Path, user: str, read_only: bool, words: str
) -> None:
    tmp_path.chmod(0o755)
    os.chown(tmp_path, 0 if os.getuid() == 0 else -1, -1)
    volume = f"{tmp_path}:/workspace/outputs{':ro' if read_only else ''}"
    result = containers.run(*TRAIN, options=("--user", user, "--volume", volume))
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.count("cannot be written") == 1, result.stderr
    assert words in result.stderr
    assert "Traceback" not in result.stderr


def test_folders_that_a_program_does_not_write_are_not_mentioned(
    containers: Containers, tmp_path: Path
) -> None:
    volumes = (f"{tmp_path}:/workspace/data:ro", f"{tmp_path}:/workspace/outputs:ro")
    result = containers.run("-c", "pass", options=("--volume", volumes[0], "--volume", volumes[1]))
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def test_packages_equal_the_lock(containers: Containers) -> None:
    result = containers.run("-c", "import json, sys; sys.path.insert(0, 'docker');"
                            "from check_installed import read_installed;"
                            "print(json.dumps(read_installed()))")  # fmt: skip
    assert json.loads(result.stdout) == read_locked()
    assert containers.run("python", "-m", "pip").returncode == 1, "pip is not part of the lock"


def test_image_describes_itself(containers: Containers, described: dict[str, Any]) -> None:
    labels = described["Config"]["Labels"]
    text = containers.run("bash", "-c", "cat /etc/fleet-recipes/image.json").stdout
    inside = json.loads(text)
    locked = read_locked()
    assert inside["packages"] == locked
    assert dict(pin.split("==") for pin in labels["fleet-recipes.packages"].split()) == {**locked}
    assert labels["fleet-recipes.paddle"] == f"paddlepaddle=={locked['paddlepaddle']}"
    assert inside["paddle"]["version"] == locked["paddlepaddle"]
    assert re.fullmatch(r"[0-9a-f]{40}", inside["paddle"]["commit"])
    assert inside["python"].startswith("3.11.")
    assert inside["debian"]["release"].startswith("12.")
    assert inside["debian"]["packages"]["python3.11"].startswith(inside["python"])

    facts = inside["image"]
    assert facts["variant"] == labels["fleet-recipes.variant"] == "cpu"
    assert labels["org.opencontainers.image.base.name"] == facts["base"]
    assert labels["org.opencontainers.image.version"] == facts["version"]
    assert labels["org.opencontainers.image.created"] == facts["created"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", facts["created"])
    assert labels["org.opencontainers.image.revision"] == facts["revision"]
    assert re.fullmatch(r"[0-9a-f]{40}(-modified)?", facts["revision"])


def test_size(described: dict[str, Any]) -> None:
    assert described["Size"] < SIZE_LIMIT


def test_no_layer_holds_what_the_build_was_given(image: str) -> None:
    searched = [CERTIFICATE_MARKER.encode(), PROXY_MARKER.encode()]
    found: set[bytes] = set()
    overlap = max(map(len, searched))
    with subprocess.Popen(["docker", "save", image], stdout=subprocess.PIPE) as saved:
        assert saved.stdout is not None
        block = b""
        size = 0
        while fresh := saved.stdout.read(1 << 22):
            block = block[-overlap:] + fresh
            size += len(fresh)
            found |= {mark for mark in searched if mark in block}
    assert saved.returncode == 0
    assert size > 1e9, "an image was read"
    assert found == set()
    history = docker("history", "--no-trunc", image).stdout
    assert CERTIFICATE_MARKER not in history
    assert PROXY_MARKER not in history


def test_stop_reaches_the_program(containers: Containers) -> None:
    name = containers.start("-c", HANDLER)
    wait_for_line(name, "ready")
    begin = time.monotonic()
    docker("stop", name)
    assert time.monotonic() - begin < 8, "docker stop had to kill"
    assert "handled 15" in docker("logs", name).stdout
    assert docker("inspect", "--format", "{{.State.ExitCode}}", name).stdout == "5\n"


def test_orphans_are_reaped(containers: Containers) -> None:
    assert containers.run("-c", ORPHAN).stdout == "zombies 0\n"


def build(**settings: str) -> subprocess.CompletedProcess[str]:
    """docker/build.sh with settings that it refuses, so nothing is built."""
    return subprocess.run(
        [ROOT / "docker" / "build.sh"],
        env={**os.environ, "IMAGE": "fleet-recipes-test:refused", **settings},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_private_key_among_certificates_is_refused(tmp_path: Path) -> None:
    bundle = tmp_path / "bundle.pem"
    bundle.write_text("-----BEGIN PRIVATE KEY-----\n", "utf-8")
    result = build(VARIANT="cpu", CA_BUNDLE=str(bundle))
    assert result.returncode == 1
    assert f"{bundle} holds a private key" in result.stderr


def test_missing_certificates_are_named() -> None:
    result = build(VARIANT="cpu", CA_BUNDLE="/nowhere/bundle.pem")
    assert result.returncode == 1
    assert "/nowhere/bundle.pem is not a file" in result.stderr


def test_password_for_the_classic_builder_is_refused() -> None:
    result = build(
        VARIANT="cpu", DOCKER_BUILDKIT="0", PIP_INDEX_URL="https://me:secret@index.invalid/simple"
    )
    assert result.returncode == 1
    assert "holds a password" in result.stderr
    assert "buildx" in result.stderr
    assert "secret@" not in result.stdout + result.stderr


@pytest.mark.skipif(
    (ROOT / "docker" / "requirements-cu126.lock").exists(), reason="the GPU lock is there"
)
def test_gpu_variant_without_its_lock_is_refused() -> None:
    result = build(VARIANT="cu126")
    assert result.returncode == 1
    assert "there is no docker/requirements-cu126.lock" in result.stderr
    assert "make lock" in result.stderr
