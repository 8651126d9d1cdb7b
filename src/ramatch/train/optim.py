"""What learns how fast: AdamW, and SGD for prompts; schedules; clipping over both; bounds on temperatures; averages."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import RamatchError
from .config import OptimConfig

Roles = Mapping[str, Sequence[nn.Parameter]]  # what learns, by role: adapters, text, vision, temperatures, prompts
Limit = tuple[nn.Parameter, float | None, float | None]  # a parameter, its least and its largest value


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters that learn. Empty ones (a part that is switched off) are frozen, because DDP waits for their
    gradient."""
    for parameter in model.parameters():
        if parameter.numel() == 0:
            parameter.requires_grad_(False)
    found = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not found:
        raise RamatchError("nothing to train: TSS, prompts and temperatures are all off or frozen")
    return found


def param_groups(roles: Roles, config: OptimConfig) -> list[dict[str, Any]]:
    """A group for each role with its rate. One number per channel (norms, biases) is not decayed, nor are temperatures
    and prompts, unless `decay_all`."""
    rates = {"adapters": config.lr, "text": config.text_lr, "vision": config.vision_lr}
    rates |= {"temperatures": config.temperature_lr, "prompts": config.prompt_lr}
    groups = []
    for role, parameters in roles.items():
        plain = {"adapters": "norms"}.get(role, f"{role}_norms")
        parts = {role: [p for p in parameters if p.ndim > 1], plain: [p for p in parameters if p.ndim <= 1]}
        if role in ("temperatures", "prompts"):
            parts = {role: list(parameters)}
        for name, chosen in parts.items():
            decay = config.weight_decay if name in ("adapters", "text", "vision") or config.decay_all else 0.0
            if role == "prompts" and not config.decay_all:
                decay = config.prompt_weight_decay
            group = {"role": name, "params": chosen, "lr": rates[role], "peak": rates[role], "weight_decay": decay}
            groups += [group] if chosen else []
    return groups


def build_optimizers(roles: Roles, config: OptimConfig) -> list[torch.optim.Optimizer]:
    """AdamW, and SGD if there are prompts. On CUDA the fused kernels, which need no host synchronization with fp16."""
    groups = param_groups(roles, config)
    fused = all(p.is_cuda for group in groups for p in group["params"])
    prompts = [group for group in groups if group["role"] == "prompts"]
    others = [group for group in groups if group["role"] != "prompts"]
    out: list[torch.optim.Optimizer] = []
    if others:
        out.append(torch.optim.AdamW(others, betas=config.betas, fused=fused))
    if prompts:
        sgd = torch.optim.SGD(prompts, lr=config.prompt_lr, momentum=config.prompt_momentum, fused=fused)
        if config.prompt_momentum:
            # The fused kernel makes these at the first step and leaves them unwritten if fp16's scaler skips that one;
            # from zeros the first step is the same.
            for parameter in prompts[0]["params"]:
                sgd.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        out.append(sgd)
    return out


def set_rates(optimizers: Iterable[torch.optim.Optimizer], factor: float) -> None:
    """Every group's rate to its peak times `factor`."""
    for group in all_groups(optimizers):
        group["lr"] = group["peak"] * factor


def rates(optimizers: Iterable[torch.optim.Optimizer]) -> dict[str, float]:
    """Current rate of each role."""
    return {group["role"]: group["lr"] for group in all_groups(optimizers)}


def all_groups(optimizers: Iterable[torch.optim.Optimizer]) -> Iterator[dict[str, Any]]:
    for optimizer in optimizers:
        yield from optimizer.param_groups


def schedule(step: int, total: int, warmup: float, final: float = 0.0) -> float:
    """Factor on every rate at `step` (from 0): linear from 1/w up to 1 over w = warmup · total steps, then a half
    cosine down to `final` at the last step."""
    w = round(warmup * total)
    if step < w:
        return (step + 1) / w
    progress = (step - w) / max(total - 1 - w, 1)
    return final + (1 - final) * 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))


def reference_schedule(epoch: int, warmup: int = 3, start: float = 0.1, period: int = 60) -> float:
    """Factor in `epoch` (from 0) in the authors' program, where rates change per epoch, one epoch ahead: linear from
    `start` over `warmup` epochs, then a cosine of `period`: 0.4, 0.7, 0.994, 0.989, 0.983, 0.976."""
    ahead = epoch + 1
    if ahead < warmup:
        return start + (1 - start) * ahead / warmup
    return 0.5 * (1 + math.cos(math.pi * ahead / period))


def clip_together(
    optimizers: Sequence[torch.optim.Optimizer],
    parameters: Iterable[nn.Parameter],
    max_norm: float | None,
    scaler: torch.amp.GradScaler | None = None,
) -> None:
    """Clip gradients to a common norm. With a scaler (fp16) they are unscaled first, and where any of them is not
    finite every optimizer skips the step: each alone would look at its own gradients only, while clipping by a norm
    that is not a number spoils those of all. The host does not wait."""
    if scaler is not None and not scaler.is_enabled():
        scaler = None
    if scaler is not None:
        for optimizer in optimizers:
            scaler.unscale_(optimizer)
    elif max_norm is None:
        return
    gradients = [p.grad for p in parameters if p.grad is not None]
    norm = nn.utils.get_total_norm(gradients)
    if max_norm is not None:
        torch._foreach_mul_(gradients, (max_norm / (norm + 1e-6)).clamp(max=1.0))
    if scaler is not None:
        flags = [flag for o in optimizers for flag in scaler._found_inf_per_device(o).values()]
        bad = torch.stack([flag.reshape(()) for flag in flags] + [(~norm.isfinite()).float()]).amax()
        for flag in flags:
            flag.fill_(bad)


@torch.no_grad()
def clamp(limits: Iterable[Limit]) -> None:
    """Keep temperatures where they mean something."""
    for parameter, low, high in limits:
        parameter.clamp_(min=low, max=high)


class EMA:
    """average ← decay · average + (1 − decay) · weights, for parameters and BatchNorm's running statistics, in one
    fused kernel; counters are copied. `live`: the tensors of the model, which are followed where they lie."""

    def __init__(self, live: Mapping[str, Tensor]) -> None:
        self.live = {name: t.detach() for name, t in live.items()}
        self.average = {name: t.clone() for name, t in self.live.items()}
        self._floating = [name for name, t in self.live.items() if t.is_floating_point() and t.numel()]
        self._counters = self.live.keys() - self._floating

    @torch.no_grad()
    def update(self, decay: float) -> None:
        averages, lives = ([of[name] for name in self._floating] for of in (self.average, self.live))
        torch._foreach_lerp_(averages, lives, 1 - decay)
        _copy(self.live, {name: self.average[name] for name in self._counters})

    def restart(self) -> None:
        """Start again from the current weights."""
        _copy(self.live, self.average)

    def apply(self) -> None:
        """The model's weights become the averaged ones."""
        _copy(self.average, self.live)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Inside, the model has the averaged weights."""
        kept = {name: t.clone() for name, t in self.live.items()}
        self.apply()
        try:
            yield
        finally:
            _copy(kept, self.live)

    def state_dict(self) -> dict[str, Tensor]:
        return dict(self.average)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        _copy(state, self.average)


@torch.no_grad()
def _copy(source: Mapping[str, Tensor], target: Mapping[str, Tensor]) -> None:
    for name, tensor in target.items():
        tensor.copy_(source[name])
