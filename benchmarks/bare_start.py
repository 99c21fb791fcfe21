"""The bare script beside which `start_time` puts ours: ResNet-18 on digits with Fleet, one step.

It is what a user writes after Paddle's manual, and is started by `paddle.distributed.launch`.
"""

from __future__ import annotations

import paddle
import paddle.nn.functional as F
from paddle.distributed import fleet
from paddle.io import DataLoader, Dataset, DistributedBatchSampler
from paddleclas.ppcls.arch.backbone import ResNet18
from sklearn.datasets import load_digits

from benchmarks.start_time import GLOBAL_BATCH, SAID


class Digits(Dataset):  # type: ignore[misc]
    """Grey images of 8x8 as float32[3, 8, 8] in [0, 1], and labels."""

    def __init__(self) -> None:
        digits = load_digits()
        images = (digits.images / 16).astype("float32")
        self.images = images[:, None].repeat(3, axis=1)
        self.labels = digits.target

    def __getitem__(self, index: int) -> tuple[object, int]:
        return self.images[index], int(self.labels[index])

    def __len__(self) -> int:
        return len(self.labels)


def main() -> None:
    """Train, until the process is ended."""
    paddle.set_device("cpu")
    fleet.init(is_collective=True)
    data = Digits()
    sampler = DistributedBatchSampler(data, GLOBAL_BATCH // fleet.worker_num(), shuffle=True)
    model = ResNet18(class_num=10, stride_list=[1, 1, 2, 2, 2], max_pool=False)
    optimizer = paddle.optimizer.Momentum(0.05, parameters=model.parameters(), weight_decay=1e-4)
    optimizer = fleet.distributed_optimizer(optimizer)
    model = fleet.distributed_model(model)
    model.train()
    for images, labels in DataLoader(data, batch_sampler=sampler):
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
        if fleet.worker_index() == 0:
            print(SAID, float(loss), flush=True)
        return


if __name__ == "__main__":
    main()
