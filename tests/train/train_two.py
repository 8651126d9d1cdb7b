"""Run by test_train_distributed.py, once per process: gradients of one batch, then a short run."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
from torch.nn.parallel import DistributedDataParallel

from ramatch.train.config import TrainConfig
from ramatch.train.distributed import world
from ramatch.train.optim import trainable
from ramatch.train.run import LabelledTask, train


def gradients(config: TrainConfig) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of the first global batch."""
    with world("cpu") as here:
        torch.manual_seed(0)
        task = LabelledTask(config, here).train()
        pixels, targets = next(iter(task.batches()))
        parameters = trainable(task.ram)
        model = DistributedDataParallel(task) if here.size > 1 else task
        loss = model(pixels, targets)
        loss.backward()
        mean = float(here.mean(loss.detach()))
        return mean, {name: p.grad.clone() for name, p in parameters.items()}


if __name__ == "__main__":
    torch.set_num_threads(1)  # before any work: forked children and two processes share the cores
    values, out = json.loads(sys.argv[1]), Path(sys.argv[2])
    config, rank = TrainConfig.from_dict(values), int(os.environ.get("RANK", 0))
    # one group for both: a process that has left could meet the old group's store when it enters again
    with world("cpu"):
        loss, grads = gradients(config)
        torch.save({"loss": loss, "grads": grads}, out / f"grads{rank}.pt")
        result = train(config, progress=False)
    print(rank, result.best, sorted(result.reports))
