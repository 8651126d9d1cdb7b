"""Run by test_train_distributed.py, once per process: gradients of one batch, then a short run."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from torch.nn.parallel import DistributedDataParallel

from ramatch.train.assemble import build_ram, read_data
from ramatch.train.batches import make_batches
from ramatch.train.config import TrainConfig
from ramatch.train.distributed import gather, world
from ramatch.train.loop import Step, train
from ramatch.train.optim import trainable


def gradients(config: TrainConfig) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of the first global batch."""
    from ramatch.data.sampler import ResumableSampler
    from ramatch.data.transforms import Normalize

    with world("cpu") as here:
        torch.manual_seed(0)
        data = read_data(config.data)
        ram = build_ram(config.model, here.device).train()
        sampler = ResumableSampler(len(data.train), 0, config.batch_size, here.rank, here.size)
        pixels, targets = next(iter(make_batches(config, data.train, sampler, ram.preprocess, here.device)))
        parameters = trainable(ram)
        step = Step(ram, data.seen, config.loss, gather if here.size > 1 else None)
        model = DistributedDataParallel(step) if here.size > 1 else step
        loss = model(Normalize(ram.preprocess.mean, ram.preprocess.std)(pixels), targets)
        loss.backward()
        mean = float(here.mean(loss.detach()))
        return mean, {name: p.grad.clone() for name, p in parameters.items()}


if __name__ == "__main__":
    torch.set_num_threads(1)  # before any work: forked children and two processes share the cores
    values, out = json.loads(sys.argv[1]), Path(sys.argv[2])
    config = TrainConfig.from_dict(values)
    loss, grads = gradients(config)
    rank = int(__import__("os").environ.get("RANK", 0))
    torch.save({"loss": loss, "grads": grads}, out / f"grads{rank}.pt")
    result = train(config, progress=False)
    print(rank, result.best, sorted(result.reports))
