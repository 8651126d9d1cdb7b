"""Features of long lists of labels, kept between runs: encoding 4,000 words takes a CPU several seconds, reading them
back a fraction of one.

They lie in the user's cache folder, one file for each model and list; the name is a hash of everything that they depend
on. Where nothing can be written there, nothing is kept; what cannot be read is made again.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from .. import __version__
from ..errors import RamatchError
from ..files import write_atomic
from .ram import RAM
from .types import Labels

REMEMBERED = 1000  # labels that make a list long
FORM = 1  # of what a file holds
KEPT = 16  # files; those used last stay


def cache_folder() -> Path:
    """$RAMATCH_CACHE, or `ramatch` in the user's cache folder."""
    if own := os.environ.get("RAMATCH_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "ramatch"


@torch.no_grad()
def remembered(ram: RAM, names: Sequence[str], templates: Sequence[str] | None = None) -> Labels:
    """`RAM.encode_labels` for long lists, from the cache if these labels were encoded before with this model.

    Selection of regions (TSS) looks at the model's background alone, where it has one: looking at 4,000 labels takes
    half as long as the whole image tower and finds the same (docs/words.md)."""
    file = cache_folder() / f"labels-{_fingerprint(ram, names, templates)}.safetensors"
    found = _read(file, ram.backbone.device)
    if found is None or not {"unit", "tss"} <= set(found):
        labels = ram.encode_labels(names, templates)
        found = {name: value for name, value in vars(labels).items() if isinstance(value, Tensor)}
        if labels.familiarity is not None:
            found["familiarity"] = torch.from_numpy(labels.familiarity)
        if labels.learned is not None:
            found["learned"] = torch.from_numpy(labels.learned)
        if ram.background:
            found["tss"] = ram.encode_labels(ram.background, templates).tss
        _write(file, found)
    familiarity, learned = (found[k].cpu().numpy() if k in found else None for k in ("familiarity", "learned"))
    negative, evidence = found.get("negative"), found.get("evidence")
    return Labels(tuple(names), found["unit"], found["tss"], negative, familiarity, learned, evidence)


def _read(file: Path, device: torch.device) -> dict[str, Tensor] | None:
    try:
        found = load_file(file, device=str(device))
        with contextlib.suppress(OSError):
            os.utime(file)  # used now
        return found
    except (OSError, SafetensorError):
        return None


def _write(file: Path, tensors: dict[str, Tensor]) -> None:
    """What cannot be kept is made again next time; that is no reason to fail."""
    content = {name: value.detach().cpu().clone().contiguous() for name, value in tensors.items()}
    with contextlib.suppress(OSError, RamatchError, SafetensorError):
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(file, lambda path: save_file(content, path))
        files = sorted(file.parent.glob("labels-*.safetensors"), key=lambda path: path.stat().st_mtime, reverse=True)
        for old in files[KEPT:]:
            old.unlink(missing_ok=True)


def _fingerprint(ram: RAM, names: Sequence[str], templates: Sequence[str] | None) -> str:
    """Of all that features of labels depend on: weights and number format of the text side, settings, words."""
    digest = hashlib.blake2b(digest_size=16)
    backbone, config = ram.backbone, ram.config
    settings = (config.prompts, config.prompt_tokens, config.prompt_layers, config.tss_labels, str(backbone.dtype))
    about = (FORM, __version__, tuple(templates or config.templates), settings, ram.background, tuple(names))
    digest.update(repr(about).encode())
    weights = {k: v for k, v in backbone.state_dict().items() if not k.startswith("vision.")}
    weights |= {f"labels {k}": v for k, v in ram.label_set.state_dict().items()}
    if ram.known is not None:
        weights |= {f"known {k}": v for k, v in vars(ram.known).items()}
    if ram.learned is not None:
        weights["learned"] = ram.learned.unit
        digest.update(repr(ram.learned.names).encode())
    for name in sorted(weights):
        digest.update(name.encode())
        digest.update(weights[name].detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
