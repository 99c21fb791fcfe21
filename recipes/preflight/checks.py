"""The checks: small functions over all nodes' facts, each of which yields what it finds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from recipes.config import Config
from recipes.preflight.facts import FORM, Facts, checkpoint_bytes
from recipes.preflight.ports import View

ERROR, WARNING = "error", "warning"

# Packages that have no part in what is computed.
SECONDARY_PACKAGES = frozenset({"visualdl", "rich", "nvidia-ml-py", "nvidia-ml-py3"})
# Seconds. The moments at which two nodes read their clocks differ by milliseconds, by up to about
# a second on busy machines.
CLOCK_TOLERANCE = 2.0
# A rank of a small model on the CPU, with Paddle and PaddleClas, takes about 0.6 GiB.
MEMORY_PER_RANK = 1 << 30
_GIB = 1 << 30


@dataclass(frozen=True)
class Finding:
    """Something that is wrong, or may be.

    Attributes:
        level: "error", which stops the run, or "warning".
        node: the one that has it, or that differs from node 0.
        fact: what it is about, in a word or two.
        message: the node, the fact and the values.
        remedy: what to do about it.
    """

    level: str
    node: int
    fact: str
    message: str
    remedy: str


@dataclass(frozen=True)
class Cluster:
    """All nodes of a job, in order, as they described themselves and saw each other."""

    facts: Sequence[Facts]
    views: Sequence[View]
    config: Config

    def name(self, node: int) -> str:
        """How messages name a node."""
        return f"node {node} ({self.facts[node]['host']})"


Check = Callable[[Cluster], Iterator[Finding]]


def compare(facts: Sequence[Facts], views: Sequence[View], config: Config) -> list[Finding]:
    """All findings, errors first; the same on every node, as it looks at the same facts.

    Args:
        facts: what each node's `gather` returned, in order.
        views: what each node's `look` returned, in order.
        config: this node's, checked.
    """
    cluster = Cluster(facts, views, config)
    findings = list(same_form(cluster))
    if not findings:  # else the facts cannot be read
        findings = [finding for check in CHECKS for finding in check(cluster)]
    return sorted(findings, key=lambda finding: finding.level != ERROR)


def same_form(cluster: Cluster) -> Iterator[Finding]:
    """The nodes describe themselves in the way that this version of the program reads."""
    for node, facts in enumerate(cluster.facts):
        if facts.get("form") != FORM:
            yield Finding(
                ERROR,
                node,
                "program",
                f"{cluster.name(node)} runs another version of this program than this node "
                f"(its facts have the form {facts.get('form')}, here it is {FORM})",
                "put the same commit, or the same image, on every node",
            )


def program(cluster: Cluster) -> Iterator[Finding]:
    """The program is the same: git commit, and the text of its files."""
    remedy = "put the same commit, or the same image, on every node"
    different = list(_differing(cluster, "git commit", _commit, remedy, unknown_differs=False))
    yield from different
    named = {finding.node for finding in different}
    for finding in _differing(cluster, "program", _source, remedy):
        if finding.node not in named:
            yield finding


def uncommitted(cluster: Cluster) -> Iterator[Finding]:
    """No node's tracked files differ from their commit."""
    for node, facts in enumerate(cluster.facts):
        git = (facts["build"] or {}).get("git")
        if git and git["dirty"]:
            yield Finding(
                WARNING,
                node,
                "git commit",
                f"{cluster.name(node)} has changes that are not committed on {git['commit'][:12]}",
                "commit them, so that the run can be repeated",
            )


def same_config(cluster: Cluster) -> Iterator[Finding]:
    """The configuration is the same, but for what nodes may set differently."""
    first = cluster.facts[0]["config"]
    for node, facts in enumerate(cluster.facts):
        own = facts["config"]
        keys = [key for key in {**first, **own} if first.get(key) != own.get(key)]
        if keys:
            shown = [f"{key}={own.get(key)} (node 0: {first.get(key)})" for key in keys[:5]]
            more = f" and {len(keys) - 5} more" if len(keys) > 5 else ""
            yield Finding(
                ERROR,
                node,
                "configuration",
                f"{cluster.name(node)} has another configuration than {cluster.name(0)}: "
                + ", ".join(shown)
                + more,
                "give every node the same command, but for topology.node_rank",
            )


def same_dataset_path(cluster: Cluster) -> Iterator[Finding]:
    """The data lies in the same folder."""
    yield from _differing(
        cluster,
        "dataset.path",
        lambda facts: facts["dataset"]["path"],
        "see that both folders hold the same data",
        level=WARNING,
    )


def build_known(cluster: Cluster) -> Iterator[Finding]:
    """Paddle can be imported."""
    for node, facts in enumerate(cluster.facts):
        if facts["build"] is None:
            yield Finding(
                ERROR,
                node,
                "Paddle",
                f"{cluster.name(node)}: {facts['build_problem']}",
                'run `python -c "import paddle"` there; `make setup` or the image installs it',
            )


def same_paddle(cluster: Cluster) -> Iterator[Finding]:
    """Paddle's version and build, and the CUDA libraries it was built with, are the same."""
    labels = {
        "version": "Paddle",
        "commit": "Paddle's commit",
        "cuda": "CUDA",
        "cudnn": "cuDNN",
        "nccl": "NCCL",
    }
    for key, label in labels.items():
        yield from _differing(
            cluster,
            label,
            _of_build("paddle", key),
            "use the same image, or install from the same lock, on every node",
        )


def same_packages(cluster: Cluster) -> Iterator[Finding]:
    """The packages that compute have the same versions."""
    builds = [facts["build"] for facts in cluster.facts if facts["build"] is not None]
    names = {name for build in builds for name in build["packages"]}
    for name in sorted(names - SECONDARY_PACKAGES):
        yield from _differing(
            cluster,
            name,
            _of_build("packages", name),
            "use the same image, or install from the same lock, on every node",
        )
    yield from _differing(
        cluster,
        "Python",
        lambda facts: facts["python"],
        "use the same image on every node",
        level=WARNING,
    )


def same_driver(cluster: Cluster) -> Iterator[Finding]:
    """The NVIDIA driver is the same."""
    yield from _differing(
        cluster,
        "NVIDIA driver",
        lambda facts: facts["driver"],
        "install the same driver on every node",
        level=WARNING,
        unknown_differs=False,
    )


def devices(cluster: Cluster) -> Iterator[Finding]:
    """Each node has enough devices, of one model."""
    wanted = cluster.config.topology.devices
    yield from _differing(
        cluster,
        "device",
        lambda facts: facts["device"],
        "device=cpu or device=gpu on every node; a GPU needs its driver and a GPU build of Paddle",
    )
    for node, facts in enumerate(cluster.facts):
        count = facts["device_count"]
        if count is not None and count < wanted:
            yield Finding(
                ERROR,
                node,
                "devices",
                f"{cluster.name(node)} has {count} visible devices, but topology "
                f"{cluster.config.shape} needs {wanted} on each node",
                "make more devices visible (CUDA_VISIBLE_DEVICES, docker run --gpus), or choose a "
                "smaller topology",
            )
    models = [
        (node, device["name"])
        for node, facts in enumerate(cluster.facts)
        for device in facts["devices"][:wanted]
    ]
    for node, model in dict.fromkeys(models):
        if model != models[0][1]:
            yield Finding(
                ERROR,
                node,
                "device model",
                f"{cluster.name(node)} has {model}, but {cluster.name(models[0][0])} has "
                f"{models[0][1]}: every step would wait for the slowest",
                "choose devices of one model with CUDA_VISIBLE_DEVICES, or other nodes",
            )


def idle_devices(cluster: Cluster) -> Iterator[Finding]:
    """No other process is on a device that the run will use."""
    for node, facts in enumerate(cluster.facts):
        for device in facts["devices"][: cluster.config.topology.devices]:
            if device["processes"]:
                pids = ", ".join(str(pid) for pid in device["processes"])
                yield Finding(
                    WARNING,
                    node,
                    "device in use",
                    f"{cluster.name(node)}: process {pids} is on device {device['index']} "
                    f"({device['name']})",
                    "end it, or choose other devices with CUDA_VISIBLE_DEVICES",
                )


def kernels(cluster: Cluster) -> Iterator[Finding]:
    """Paddle's build has kernels for the devices.

    CUDA code for architecture X.y runs on devices X.z with z >= y, and on no other X (CUDA C++
    Programming Guide, "Binary Compatibility").
    """
    for node, facts in enumerate(cluster.facts):
        archs = (facts["build"] or {}).get("archs") or []
        used = facts["devices"][: cluster.config.topology.devices]
        lacking = {
            (device["name"], *device["capability"])
            for device in used
            if archs and not _has_kernels(archs, device["capability"])
        }
        for name, major, minor in sorted(lacking):
            has = ", ".join(f"sm_{arch}" for arch in archs)
            yield Finding(
                ERROR,
                node,
                "kernels",
                f"{cluster.name(node)} has {name} (sm_{major}{minor}), but its Paddle "
                f"{facts['build']['paddle']['version']} has kernels for {has} only",
                "use the image variant for this GPU (cu129 for Blackwell), see the README",
            )


def shared_memory(cluster: Cluster) -> Iterator[Finding]:
    """The loader processes have room in /dev/shm."""
    for node, facts in enumerate(cluster.facts):
        problem = facts["shared_memory"]["problem"]
        if problem:
            yield Finding(
                ERROR,
                node,
                "shared memory",
                f"{cluster.name(node)}: {problem}",
                facts["shared_memory"]["remedy"],
            )


def memory(cluster: Cluster) -> Iterator[Finding]:
    """There is memory for the ranks."""
    need = cluster.config.topology.devices * MEMORY_PER_RANK
    for node, facts in enumerate(cluster.facts):
        if facts["memory_free"] < need:
            yield Finding(
                WARNING,
                node,
                "memory",
                f"{cluster.name(node)} has {facts['memory_free'] / _GIB:.1f} GiB of free memory, "
                f"and {cluster.config.topology.devices} ranks are likely to need "
                f"{need / _GIB:.0f} GiB or more",
                "end other programs, raise the container's limit, or use fewer devices a node",
            )


def clocks(cluster: Cluster) -> Iterator[Finding]:
    """The clocks agree, as far as a message between the nodes can show."""
    first = cluster.views[0]["clock"]
    for node, view in enumerate(cluster.views):
        ahead = view["clock"] - first
        if abs(ahead) > CLOCK_TOLERANCE:
            yield Finding(
                WARNING,
                node,
                "clock",
                f"the clock of {cluster.name(node)} is {abs(ahead):.1f} s "
                f"{'ahead of' if ahead > 0 else 'behind'} that of {cluster.name(0)}: the times in "
                "their logs cannot be compared",
                "let a time service (chrony, systemd-timesyncd) set the clocks",
            )


def addresses(cluster: Cluster) -> Iterator[Finding]:
    """Each node's address is one that others can mean."""
    loopback = [str(facts["address"]).startswith("127.") for facts in cluster.facts]
    for node, is_loopback in enumerate(loopback):
        if is_loopback and not all(loopback):
            yield Finding(
                ERROR,
                node,
                "address",
                f"{cluster.name(node)} takes {cluster.facts[node]['address']} for its address, "
                "which means another machine to the others: there, topology.master resolves to it",
                "give topology.master as an address of node 0 on the network between the nodes",
            )


def ports(cluster: Cluster) -> Iterator[Finding]:
    """Each node reaches each other's ports."""
    for node, view in enumerate(cluster.views):
        for other, error in enumerate(view["unreached"]):
            if error is not None:
                yield Finding(
                    ERROR,
                    node,
                    "ports",
                    f"{cluster.name(node)} cannot reach port {cluster.facts[other]['port']} of "
                    f"{cluster.name(other)} at {cluster.facts[other]['address']}: {error}",
                    "open all TCP ports between the nodes (firewall, security group); containers "
                    "need the host's network or a network of their own",
                )


def interfaces(cluster: Cluster) -> Iterator[Finding]:
    """The interface in use is the one on the route to node 0."""
    for node, facts in enumerate(cluster.facts):
        routed = facts["interface"]
        for name, value in facts["interfaces"].items():
            if routed is not None and not names_interface(value, routed):
                yield Finding(
                    WARNING,
                    node,
                    "interface",
                    f"{cluster.name(node)} has {name}={value}, but its route to node 0 goes "
                    f"through {routed} ({facts['address']})",
                    f"network.interface={routed} or unset {name}, unless the other is meant",
                )


def dataset(cluster: Cluster) -> Iterator[Finding]:
    """Each node has the data, and as many files as the others."""
    for node, facts in enumerate(cluster.facts):
        problem = facts["dataset"]["problem"]
        if problem:
            yield Finding(
                ERROR,
                node,
                "dataset",
                f"{cluster.name(node)}: {problem}",
                "copy or mount the data there; dataset.path says where it is",
            )
    counted = [node for node, facts in enumerate(cluster.facts) if not facts["dataset"]["problem"]]
    for split in ("train", "eval"):
        for node in counted:
            files, first = (cluster.facts[each]["dataset"]["files"] for each in (node, counted[0]))
            if split in files and split in first and None not in (files[split], first[split]):
                if files[split] != first[split]:
                    yield Finding(
                        ERROR,
                        node,
                        "dataset",
                        f"{cluster.name(node)} has {files[split]} files for {split} in "
                        f"{cluster.facts[node]['dataset']['path']}, but "
                        f"{cluster.name(counted[0])} has {first[split]}",
                        "copy the whole data to both, or mount one folder on both",
                    )
            elif split in files and files[split] is None:
                yield Finding(
                    WARNING,
                    node,
                    "dataset",
                    f"{cluster.name(node)}: counting the files for {split} took too long",
                    "a list file (train_list.txt, val_list.txt) spares looking into every folder",
                )


def same_prepared_dataset(cluster: Cluster) -> Iterator[Finding]:
    """Prepared datasets are the same one, and no node reads the original images instead."""
    present = [n for n, facts in enumerate(cluster.facts) if not facts["dataset"]["problem"]]
    for node in present:
        own, first = (cluster.facts[each]["dataset"] for each in (node, present[0]))
        if own["checksum"] != first["checksum"]:
            yield Finding(
                ERROR,
                node,
                "prepared dataset",
                f"{cluster.name(node)} has {_kind(own)}, but {cluster.name(present[0])} has "
                f"{_kind(first)}",
                "copy one prepared dataset to all nodes, or mount one folder on all",
            )


def disk(cluster: Cluster) -> Iterator[Finding]:
    """Node 0 has room for the checkpoints."""
    facts = cluster.facts[0]
    parameters = (facts["build"] or {}).get("parameters")
    if parameters is None or cluster.config.task.name == "evaluate":
        return
    need = checkpoint_bytes(parameters, cluster.config.save.keep)
    if facts["disk_free"] < need:
        yield Finding(
            ERROR,
            0,
            "disk space",
            f"{cluster.name(0)} has {facts['disk_free'] / _GIB:.2f} GiB free for the run folder, "
            f"but its checkpoints of {parameters:,} parameters need up to {need / _GIB:.2f} GiB "
            f"(save.keep={cluster.config.save.keep})",
            "make room, choose another disk with hydra.run.dir=FOLDER, or lower save.keep",
        )


CHECKS: tuple[Check, ...] = (
    program,
    same_config,
    build_known,
    same_paddle,
    same_packages,
    devices,
    kernels,
    addresses,
    ports,
    dataset,
    same_prepared_dataset,
    shared_memory,
    disk,
    uncommitted,
    same_driver,
    idle_devices,
    memory,
    clocks,
    interfaces,
    same_dataset_path,
)


def names_interface(value: str, interface: str) -> bool:
    """Whether a value of NCCL_SOCKET_IFNAME, or gloo's single name, takes in an interface.

    NCCL's form (NCCL User Guide, "Environment Variables"): names or beginnings of names between
    commas; "=" before them asks for whole names, "^" for all others.
    """
    excluded, exact = value.startswith("^"), value.lstrip("^").startswith("=")
    names = value.lstrip("^").lstrip("=").split(",")
    listed = any(interface == name if exact else interface.startswith(name) for name in names)
    return listed != excluded


def _kind(dataset: Mapping[str, Any]) -> str:
    checksum = dataset["checksum"]
    what = "original images" if checksum is None else f"a prepared dataset ({checksum[:12]})"
    return f"{what} in {dataset['path']}"


def _differing(
    cluster: Cluster,
    fact: str,
    value_of: Callable[[Facts], Any],
    remedy: str,
    *,
    level: str = ERROR,
    unknown_differs: bool = True,
) -> Iterator[Finding]:
    """The nodes whose value is not node 0's; nodes whose Paddle does not start are left out.

    Args:
        unknown_differs: whether None differs from any other value.
    """
    known = [node for node, facts in enumerate(cluster.facts) if facts["build"] is not None]
    for node in known:
        own, first = value_of(cluster.facts[node]), value_of(cluster.facts[known[0]])
        if own == first or (not unknown_differs and None in (own, first)):
            continue
        yield Finding(
            level,
            node,
            fact,
            f"{fact}: {cluster.name(node)} has {_shown(own)}, "
            f"{cluster.name(known[0])} has {_shown(first)}",
            remedy,
        )


def _shown(value: Any) -> str:
    return "none" if value is None else str(value)


def _of_build(group: str, key: str) -> Callable[[Facts], Any]:
    return lambda facts: facts["build"][group].get(key)


def _commit(facts: Facts) -> Any:
    git = facts["build"]["git"]
    return git["commit"] if git else None


def _source(facts: Facts) -> Any:
    return f"files with the digest {facts['source']}"


def _has_kernels(archs: Sequence[int], capability: Sequence[int]) -> bool:
    major, minor = capability
    return any(arch // 10 == major and arch % 10 <= minor for arch in archs)
