"""What a training step and recognizing cost from pixels, with the trainer's own step: time and memory."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..modeling.backbone import Backbone
from ..modeling.ram import RAM
from .config import CachedConfig
from .distributed import World
from .step import WARMUP, TrainStep
from .task import RAMTask
from .trainer import seed_all

STEPS = {"cuda": 50, "cpu": 2}  # timed


def step_cost(
    backbone: Backbone,
    build: Callable[[Backbone], RAM],
    labels: Sequence[str],
    config: CachedConfig,
    batch: int,
) -> dict[str, float]:
    """Images per second and peak memory, of the model alone, in a training step (if it has one) and in recognizing.

    `build`: backbone → model. Pixels are noise: neither time nor memory depends on what they show."""
    device = backbone.device
    dtype = config.dtype(device)
    seed_all(config)
    before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    ram = build(copy.deepcopy(backbone).to(dtype)).to(device)
    ram.backbone.to(dtype)
    pixels = torch.randint(0, 256, (batch, 3, *ram.preprocess.size), dtype=torch.uint8, device=device)
    targets = (torch.rand(batch, len(labels), device=device) < 3 / len(labels)).float()
    found: dict[str, float] = {}
    if any(p.requires_grad and p.numel() for p in ram.parameters()):
        rate, memory = _train_step(ram, (pixels, targets), labels, config, before)
        found |= {"step_images_per_s": rate} | ({"step_memory_gb": memory} if memory else {})
    ram.eval()

    @torch.inference_mode()
    def recognize() -> Tensor:
        with torch.autocast(device.type, dtype=dtype, enabled=dtype != torch.float32):
            return ram.score(ram.recognize(ram.trunk(pixels), encoded, plan=False, best=False))

    with torch.no_grad(), torch.autocast(device.type, dtype=dtype, enabled=dtype != torch.float32):
        encoded = ram.encode_labels(labels)
    rate, memory = _measure(recognize, device, batch, before)
    return found | {"test_images_per_s": rate} | ({"test_memory_gb": memory} if memory else {})


def _train_step(
    ram: RAM, batch: tuple[Tensor, Tensor], labels: Sequence[str], config: CachedConfig, before: int
) -> tuple[float, float]:
    """What a step keeps (gradients, averages of the optimizer, the recording) ends with this function."""
    device = ram.backbone.device
    task = RAMTask(ram, labels, config.loss, config.dtype(device)).train()
    step = TrainStep(task, config.optim, World(device))
    return _measure(lambda: step([batch]), device, len(batch[0]), before)


def _measure(work: Callable[[], Tensor], device: torch.device, batch: int, before: int) -> tuple[float, float]:
    """Images per second, and GB taken at most beyond `before` bytes (0 where it is not known)."""
    cuda, steps = device.type == "cuda", STEPS["cuda" if device.type == "cuda" else "cpu"]
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    for _ in range(WARMUP + 2 if cuda else 1):  # eager steps and the recording
        work()
    begun = _now(cuda)
    for _ in range(steps):
        work()
    seconds = _now(cuda) - begun
    memory = (torch.cuda.max_memory_allocated(device) - before) / 1e9 if cuda else 0.0
    return batch * steps / seconds, memory


def _now(cuda: bool) -> float:
    if cuda:
        torch.cuda.synchronize()
    return time.perf_counter()
