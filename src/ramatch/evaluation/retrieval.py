"""Image–caption retrieval: how well two towers are aligned."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ..data.augment import resize_batch
from ..modeling.backbone import Backbone


@torch.inference_mode()
def retrieval(
    backbone: Backbone, pixels: Tensor, captions: Sequence[Sequence[str]], ks: Sequence[int] = (1, 5, 10)
) -> dict[str, float]:
    """Recall in percent, with global features: image → any of its captions, and caption → its image.

    pixels uint8 (n, 3, H, W). Keys: `image→text R@1`, `text→image R@1`, …
    """
    images = []
    for chunk in pixels.split(128):
        x = backbone.preprocess.normalize(resize_batch(chunk.to(backbone.device), backbone.preprocess.size))
        with torch.autocast(x.device.type, torch.bfloat16, enabled=x.device.type == "cuda"):
            images.append(F.normalize(backbone.encode_image(x)[0].float(), dim=-1))
    flat = [c for texts in captions for c in texts]
    texts = [F.normalize(backbone.encode_text(flat[i : i + 512]).float(), dim=-1) for i in range(0, len(flat), 512)]
    owner = torch.tensor([i for i, t in enumerate(captions) for _ in t], device=backbone.device)
    sim = torch.cat(images) @ torch.cat(texts).T  # (n, captions)
    right = owner[None, :] == torch.arange(len(captions), device=owner.device)[:, None]
    best = sim.masked_fill(~right, float("-inf")).amax(1, keepdim=True)
    rank_text = (sim > best).sum(1)  # captions of other images before the first right one (own ones cannot be above)
    rank_image = (sim > sim.gather(0, owner[None, :])).sum(0)
    out = {}
    for k in ks:
        out[f"image→text R@{k}"] = 100 * (rank_text < k).float().mean().item()
        out[f"text→image R@{k}"] = 100 * (rank_image < k).float().mean().item()
    return out
