"""What a user may have meant by a word that is no key or choice here."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

# Words of other programs, as the last part of a key, and the setting here.
_SETTINGS = {
    "lr": "optimizer.base_lr",
    "learning_rate": "optimizer.base_lr",
    "max_lr": "optimizer.base_lr",
    "wd": "optimizer.weight_decay",
    "opt": "optimizer",
    "optim": "optimizer",
    "sched": "schedule",
    "scheduler": "schedule",
    "lr_scheduler": "schedule",
    "lr_schedule": "schedule",
    "warmup": "schedule.warmup_epochs",
    "lr_steps": "schedule.milestones",
    "lr_decay": "schedule.gamma",
    "grad_clip": "optimizer.clip_norm",
    "clip_grad": "optimizer.clip_norm",
    "clip_grad_norm": "optimizer.clip_norm",
    "max_grad_norm": "optimizer.clip_norm",
    "gradient_clip_val": "optimizer.clip_norm",
    "smoothing": "label_smoothing",
    "epoch": "epochs",
    "num_epochs": "epochs",
    "max_epochs": "epochs",
    "n_epochs": "epochs",
    "steps": "max_steps",
    "num_steps": "max_steps",
    "max_iter": "max_steps",
    "max_iters": "max_steps",
    "iterations": "max_steps",
    "train_steps": "max_steps",
    "bs": "batch_size",
    "b": "batch_size",
    "batch": "batch_size",
    "batchsize": "batch_size",
    "train_batch_size": "batch_size",
    "per_device_train_batch_size": "batch_size",
    "total_batch_size": "global_batch_size",
    "val_batch_size": "eval_batch_size",
    "test_batch_size": "eval_batch_size",
    "accum": "accumulate",
    "accum_steps": "accumulate",
    "gradient_accumulation_steps": "accumulate",
    "accumulate_grad_batches": "accumulate",
    "worker": "dataset.workers",
    "workers": "dataset.workers",
    "num_workers": "dataset.workers",
    "n_workers": "dataset.workers",
    "j": "dataset.workers",
    "data": "dataset.path",
    "data_dir": "dataset.path",
    "data_path": "dataset.path",
    "data_root": "dataset.path",
    "datadir": "dataset.path",
    "dataroot": "dataset.path",
    "root": "dataset.path",
    "image_root": "dataset.path",
    "img_size": "dataset.image_size",
    "imgsz": "dataset.image_size",
    "input_size": "dataset.image_size",
    "resolution": "dataset.image_size",
    "classes": "model.num_classes",
    "class_num": "model.num_classes",
    "n_classes": "model.num_classes",
    "gpus": "topology.devices",
    "gpu": "topology.devices",
    "num_gpus": "topology.devices",
    "ngpus": "topology.devices",
    "num_devices": "topology.devices",
    "nproc": "topology.devices",
    "nproc_per_node": "topology.devices",
    "world_size": "topology.devices",
    "num_nodes": "topology.nodes",
    "nnodes": "topology.nodes",
    "node": "topology.node_rank",
    "rank": "topology.node_rank",
    "machine_rank": "topology.node_rank",
    "master_addr": "topology.master",
    "master_port": "topology.master",
    "cuda": "device",
    "accelerator": "device",
    "backbone": "model",
    "arch": "model",
    "architecture": "model",
    "net": "model",
    "network_name": "model",
    "weights": "model.pretrained",
    "init_from": "model.pretrained",
    "finetune": "model.pretrained",
    "finetune_from": "model.pretrained",
    "ckpt": "checkpoint",
    "ckpt_path": "checkpoint",
    "checkpoint_path": "checkpoint",
    "resume_from": "resume",
    "resume_from_checkpoint": "resume",
    "load_from": "resume",
    "out": "hydra.run.dir",
    "outdir": "hydra.run.dir",
    "out_dir": "hydra.run.dir",
    "output": "hydra.run.dir",
    "output_dir": "hydra.run.dir",
    "outputs": "hydra.run.dir",
    "save_dir": "hydra.run.dir",
    "work_dir": "hydra.run.dir",
    "workdir": "hydra.run.dir",
    "log_dir": "hydra.run.dir",
    "logdir": "hydra.run.dir",
    "run_dir": "hydra.run.dir",
    "experiment": "recipe",
    "config": "recipe",
    "config_file": "recipe",
    "config_name": "recipe",
    "preset": "recipe",
    "fp16": "amp",
    "bf16": "amp",
    "half": "amp",
    "mixed_precision": "amp",
    "precision": "amp",
    "use_amp": "amp",
    "random_seed": "seed",
    "manual_seed": "seed",
    "syncbn": "sync_bn",
    "sync_batchnorm": "sync_bn",
    "use_sync_bn": "sync_bn",
    "print_freq": "log.every",
    "log_interval": "log.every",
    "log_every": "log.every",
    "logging_steps": "log.every",
    "save_every": "save.every_epochs",
    "save_interval": "save.every_epochs",
    "save_freq": "save.every_epochs",
    "save_steps": "save.every_steps",
    "save_total_limit": "save.keep",
    "eval": "task=evaluate",
    "evaluate": "task=evaluate",
    "test": "task=evaluate",
    "bench": "task=benchmark",
    "prefetch_factor": "dataset.prefetch",
    "num_threads": "threads",
    "omp_num_threads": "threads",
    "torch_compile": "compile",
    "to_static": "compile",
    "layout": "model.data_format",
    "channels_last": "model.data_format",
}

# Words of other programs for choices, by group.
_CHOICES = {
    "optimizer": {"sgd": "momentum", "adam": "adamw", "nesterov": "momentum"},
    "schedule": {"multistep": "step", "piecewise": "step", "cosineannealing": "cosine"},
    "dataset": {
        **dict.fromkeys(("folder", "imagefolder", "custom", "images", "ilsvrc2012"), "imagenet"),
        **dict.fromkeys(("cifar", "cifar_10"), "cifar10"),
        **dict.fromkeys(("fake", "random", "dummy"), "synthetic"),
        "mnist": "digits",
    },
    "amp": {
        **dict.fromkeys(("fp16", "float16", "on", "bf16", "bfloat16", "true"), "o1"),
        **dict.fromkeys(("fp32", "none", "false"), "off"),
    },
    "task": {
        **dict.fromkeys(("eval", "test", "val", "validate", "evaluation"), "evaluate"),
        **dict.fromkeys(("fit", "training"), "train"),
        **dict.fromkeys(("convert", "preparation"), "prepare"),
        "check": "preflight",
        **dict.fromkeys(("list", "ls", "clean", "cleanup", "rm", "remove"), "runs"),
    },
    "network": {"ib": "infiniband", "rdma": "infiniband", "tcp": "ethernet", "eth": "ethernet"},
}


def settings_like(key: str, known: Sequence[str]) -> list[str]:
    """Settings that a key may stand for, the likeliest first.

    Args:
        key: what was written, without its value; dashes and capitals do not matter.
        known: every key of the schema, groups included.
    """
    plain = key.lower().replace("-", "_").strip("_+~")
    if plain in known:
        return [plain]
    for word in (plain, plain.rpartition(".")[2]):
        if word in _SETTINGS:
            return [_SETTINGS[word]]
    last = plain.rpartition(".")[2]
    named = [each for each in known if each.rpartition(".")[2] == last]
    if named:
        return named[:3]
    near = difflib.get_close_matches(plain, known, n=1)
    if near:
        return near
    lasts = {each.rpartition(".")[2]: each for each in known}
    return [lasts[each] for each in difflib.get_close_matches(last, [*lasts], n=1, cutoff=0.75)]


def choice_like(group: str, word: str, options: Sequence[str]) -> str | None:
    """The choice of a group that a word may stand for."""
    plain = word.lower().replace("-", "_")
    translated = _CHOICES.get(group, {}).get(plain)
    if translated is not None:
        return translated
    if plain in options:
        return plain
    begun = [each for each in options if plain and each.startswith(plain)]
    near = begun or difflib.get_close_matches(plain, options, n=1)
    return near[0] if near else None
