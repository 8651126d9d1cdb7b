"""What learns how fast: AdamW for adapters and temperatures, SGD for prompts, one schedule for all."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import RamatchError
from .config import OptimConfig

TEMPERATURES = ("tau_global", "tau_region")
PROMPTS = ("label_set.prompts", "region_set.visual_prompts")


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters that learn. Empty ones (a part that is switched off) are frozen, because DDP waits for their gradient."""
    for parameter in model.parameters():
        if parameter.numel() == 0:
            parameter.requires_grad_(False)
    found = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not found:
        raise RamatchError("nothing to train: TSS, prompts and temperatures are all off or frozen")
    return found


def param_groups(parameters: dict[str, nn.Parameter], config: OptimConfig) -> dict[str, dict[str, Any]]:
    """Groups by role: adapters (decayed), norms (not decayed: one number per channel), temperatures, prompts."""
    groups: dict[str, dict[str, Any]] = {
        "adapters": {"params": [], "lr": config.lr, "weight_decay": config.weight_decay},
        "norms": {"params": [], "lr": config.lr, "weight_decay": 0.0},
        "temperatures": {"params": [], "lr": config.temperature_lr, "weight_decay": 0.0},
        "prompts": {"params": [], "lr": config.prompt_lr, "weight_decay": config.prompt_weight_decay},
    }
    for name, parameter in parameters.items():
        if name in TEMPERATURES:
            role = "temperatures"
        elif name in PROMPTS or name.split(".")[-1] == "prompts":
            role = "prompts"
        else:
            role = "adapters" if parameter.ndim > 1 else "norms"
        groups[role]["params"].append(parameter)
    return {role: {**group, "role": role, "peak": group["lr"]} for role, group in groups.items() if group["params"]}


def build_optimizers(parameters: dict[str, nn.Parameter], config: OptimConfig) -> list[torch.optim.Optimizer]:
    """AdamW, and SGD if there are prompts. On CUDA the fused kernels, which need no host synchronisation with fp16."""
    groups = param_groups(parameters, config)
    fused = all(p.is_cuda for p in parameters.values())
    prompts = groups.pop("prompts", None)
    out: list[torch.optim.Optimizer] = []
    if groups:
        out.append(torch.optim.AdamW(list(groups.values()), betas=config.betas, fused=fused))
    if prompts:
        sgd = torch.optim.SGD([prompts], lr=config.prompt_lr, momentum=config.prompt_momentum, fused=fused)
        if config.prompt_momentum:
            # The fused kernel makes these at the first step and leaves them unwritten if fp16's scaler skips that one; from
            # zeros the first step is the same.
            for parameter in prompts["params"]:
                sgd.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        out.append(sgd)
    return out


def schedule(step: int, total: int, warmup: float, final: float = 0.0) -> float:
    """Factor on every learning rate at `step` (from 0): linear from 1/w up to 1 over w = warmup · total steps, then
    a half cosine down to `final` at the last step."""
    w = round(warmup * total)
    if step < w:
        return (step + 1) / w
    progress = (step - w) / max(total - 1 - w, 1)
    return final + (1 - final) * 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))


def set_rates(optimizers: Iterable[torch.optim.Optimizer], factor: float) -> None:
    """Every group's rate to its peak times `factor`. The schedule has no state of its own: it follows the step."""
    for group in _groups(optimizers):
        group["lr"] = group["peak"] * factor


def rates(optimizers: Iterable[torch.optim.Optimizer]) -> dict[str, float]:
    """Current rate of each role."""
    return {group["role"]: group["lr"] for group in _groups(optimizers)}


def clip_together(
    optimizers: Sequence[torch.optim.Optimizer],
    parameters: Iterable[nn.Parameter],
    max_norm: float | None,
    scaler: torch.amp.GradScaler | None = None,
) -> None:
    """Clip gradients to a common norm. With a scaler (fp16) they are unscaled first, and where any of them is not finite every
    optimiser skips the step: each alone would look at its own gradients only, while clipping by a norm that is not a
    number spoils those of all. The host does not wait."""
    scaled = scaler is not None and scaler.is_enabled()
    if scaler is not None and scaled:
        for optimizer in optimizers:
            scaler.unscale_(optimizer)
    gradients = [p.grad for p in parameters if p.grad is not None]
    norm = nn.utils.get_total_norm(gradients)
    if max_norm is not None:
        torch._foreach_mul_(gradients, (max_norm / (norm + 1e-6)).clamp(max=1.0))
    if scaler is not None and scaled:
        flags = [flag for o in optimizers for flag in scaler._found_inf_per_device(o).values()]
        bad = torch.stack([flag.reshape(()) for flag in flags] + [(~norm.isfinite()).float()]).amax()
        for flag in flags:
            flag.fill_(bad)


class Temperatures:
    """Keeps the temperatures positive: each at least `floor` times where it started."""

    def __init__(self, parameters: dict[str, nn.Parameter], floor: float) -> None:
        self.pairs: list[tuple[Tensor, float]] = []
        for name, parameter in parameters.items():
            if name in TEMPERATURES:
                self.pairs.append((parameter, floor * abs(float(parameter.detach()))))

    @torch.no_grad()
    def clamp(self) -> None:
        for parameter, low in self.pairs:
            parameter.clamp_(min=low)


def _groups(optimizers: Iterable[torch.optim.Optimizer]) -> Iterator[dict[str, Any]]:
    for optimizer in optimizers:
        yield from optimizer.param_groups
