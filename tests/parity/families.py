"""Folders of tiny random models of every family, written by the library that is the reference for it.

A family gives: its folder, and what the reference makes of pixels: global feature (B, D), and the feature of each patch
in the joint space (B, M, D), from the reference's own modules.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import transformers
from hf_models import lively, word_tokenizer
from torch import Tensor, nn

WORDS = "a photo of cat dog red traffic light person riding bicycle"
LABELS = ["cat", "red traffic light", "person riding a bicycle", "dog"]
SIZES = {"hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 3, "intermediate_size": 80}
OPEN_CLIP = ("eva02", "eva02-l", "pe", "pe-g", "mobileclip", "mobileclip2-l", "timm-siglip", "timm-siglip-i18n")
OPEN_CLIP += ("timm-clip", "xlm-roberta")
SIGLIP = ("siglip", "siglip2", "naflex", "timm-siglip", "timm-siglip-i18n")


@dataclass
class Family:
    folder: Path
    model: nn.Module
    see: Callable[[Tensor], tuple[Tensor, Tensor]]  # pixels → global and patch features
    read: Callable[[Tensor], Tensor]  # token ids, filled up as the model wants it → text features
    size: tuple[int, int]
    other: tuple[int, int]  # a size whose positions are interpolated
    kind: str = ""

    @contextmanager
    def at(self, size: tuple[int, int]) -> Iterator[None]:
        """The reference ready for images of this size; timm's towers must be told."""
        tower = getattr(getattr(self.model, "visual", None), "trunk", None)
        if tower is None or size == self.size:
            yield
            return
        before = tower.pos_embed
        tower.set_input_size(size)
        yield
        tower.set_input_size(self.size)
        tower.pos_embed = before


def make(kind: str, folder: Path) -> Family:
    folder.mkdir(parents=True)
    torch.manual_seed(0)
    found = open_clip_family(kind, folder) if kind in OPEN_CLIP else siglip_family(kind, folder)
    found.kind = kind
    return found


def put_siglip_tokenizer(folder: Path, vocab: int, pad: str) -> None:
    """Texts end with </s>; there is nothing before them."""
    inner = word_tokenizer(WORDS, "<s>", "</s>", vocab)
    inner.add_special_tokens(["</s>", "[PAD]"])
    from tokenizers.processors import TemplateProcessing

    inner.post_processor = TemplateProcessing(single="$A </s>", special_tokens=[("</s>", vocab - 1)])
    inner.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"pad_token": pad}))


# ------------------------------------------------------------------------------------------------ Hugging Face's SigLIP


def siglip_family(kind: str, folder: Path) -> Family:
    """SigLIP; SigLIP 2, whose text tower is of another width and whose patches have 14 pixels; NaFlex."""
    patch = 14 if kind == "siglip2" else 16
    words = SIZES | {"vocab_size": 60, "max_position_embeddings": 16, "projection_size": 48}
    words |= {"bos_token_id": 58, "eos_token_id": 59}
    if kind == "siglip2":
        words |= {"hidden_size": 32, "num_attention_heads": 2}
    sight: dict[str, Any] = SIZES | {"patch_size": patch}
    if kind == "naflex":
        config = transformers.Siglip2Config(vision_config=sight | {"num_patches": 16}, text_config=words)
        model = transformers.Siglip2Model(config)
    else:
        config = transformers.SiglipConfig(vision_config=sight | {"image_size": 4 * patch}, text_config=words)
        model = transformers.SiglipModel(config)
    lively(model)
    model.logit_scale.data.fill_(2.0)
    model.logit_bias.data.fill_(-3.0)
    model.save_pretrained(folder)
    put_siglip_tokenizer(folder, 60, "[PAD]" if kind == "siglip2" else "</s>")
    tower = model.vision_model

    def see(pixels: Tensor) -> tuple[Tensor, Tensor]:
        if kind == "naflex":
            seen = tower(**as_patches(pixels, patch))
        else:
            seen = tower(pixels, interpolate_pos_encoding=True)
        hidden = seen.last_hidden_state
        alone = [hidden.flatten(0, 1)[:, None]]  # a picture of one token
        alone += [torch.ones(len(alone[0]), 1)] if kind == "naflex" else []
        return seen.pooler_output, tower.head(*alone).unflatten(0, hidden.shape[:2])

    side = 4 * patch
    read = lambda ids: model.text_model(input_ids=ids).pooler_output  # noqa: E731
    return Family(folder, model, see, read, (side, side), (6 * patch, 3 * patch))


def as_patches(pixels: Tensor, patch: int) -> dict[str, Tensor]:
    """What NaFlex's image processor makes of normalized pixels."""
    b, _, height, width = pixels.shape
    h, w = height // patch, width // patch
    rows = pixels.reshape(b, 3, h, patch, w, patch).permute(0, 2, 4, 3, 5, 1).reshape(b, h * w, -1)
    return {
        "pixel_values": rows,
        "pixel_attention_mask": torch.ones(b, h * w, dtype=torch.long),
        "spatial_shapes": torch.tensor([[h, w]] * b),
    }


# --------------------------------------------------------------------------------------- open_clip, with timm's towers


def trunk(kind: str, **options: Any) -> nn.Module:
    """A tiny tower of timm's. Its heads are 64 wide, as in all sizes there are: names on disk do not tell."""
    from timm.layers import LayerNorm
    from timm.models.eva import Eva
    from timm.models.vision_transformer import VisionTransformer
    from timm.models.vision_transformer_hybrid import ConvStem, HybridEmbed

    tiny = {"img_size": 64, "patch_size": 16, "embed_dim": 128, "depth": 3, "num_heads": 2} | options
    if kind.startswith("eva02"):
        own = {"qkv_fused": False, "mlp_ratio": 4 * 2 / 3, "swiglu_mlp": True, "scale_mlp": True}
        own |= {"scale_attn_inner": True, "use_rot_pos_emb": True, "ref_feat_shape": (16, 16)}
        return Eva(**tiny | own | ({"patch_size": 14, "img_size": 70} if kind == "eva02-l" else {}))
    if kind.startswith("pe"):
        own = {"attn_type": "rope", "use_pre_transformer_norm": True, "use_rot_pos_emb": True, "ref_feat_shape": (4, 4)}
        own |= {"rope_grid_indexing": "xy", "attn_pool_num_heads": 8, "attn_pool_mlp_ratio": 4.0}
        own |= {"norm_layer": partial(LayerNorm, eps=1e-5)}
        own |= {"class_token": False, "mlp_ratio": 3.0} if kind == "pe-g" else {"rope_grid_offset": 1.0}
        return Eva(**tiny | own)
    if kind == "mobileclip":
        stem = ConvStem(channels=(32, 32, 128), stride=(4, 2, 2), kernel_size=(4, 2, 2), padding=0, act_layer=nn.GELU)
        embed = partial(HybridEmbed, backbone=stem, proj=False)
        return VisionTransformer(**tiny | {"embed_layer": embed, "no_embed_class": True, "patch_size": 1})
    if kind.startswith("timm-siglip"):
        return VisionTransformer(**tiny | {"class_token": False, "act_layer": "gelu_tanh"})
    return VisionTransformer(**tiny | {"pre_norm": True, "norm_layer": partial(LayerNorm, eps=1e-5)})


@cache
def register(kind: str) -> str:
    """The name under which timm, and so open_clip, makes `trunk(kind)`."""
    from timm.models import register_model

    # of newer SigLIPs, the name tells the activation
    name = f"tiny_{kind}".replace("-", "_").replace("tiny_timm_siglip", "vit_so400m_patch16_siglip_tiny")

    def entry(pretrained: bool = False, **options: Any) -> nn.Module:
        return trunk(kind, **{k: v for k, v in options.items() if k in ("num_classes", "global_pool")})

    entry.__name__, entry.__module__ = name, __name__
    setattr(sys.modules[__name__], name, entry)
    register_model(entry)
    return name


def config_of(kind: str) -> dict[str, Any]:
    """open_clip's config of a whole model, as it is in its folder."""
    if kind == "xlm-roberta":
        sees: dict[str, Any] = {"image_size": 64, "patch_size": 16, "width": 128, "layers": 3, "head_width": 64}
        reads = {"hf_model_name": "xlm-roberta-base", "hf_pooler_type": "mean_pooler", "context_length": 16}
        return {"embed_dim": 48, "vision_cfg": sees, "text_cfg": reads}
    pool = "map" if kind.startswith(("pe", "timm-siglip")) else "token"
    side = 70 if kind == "eva02-l" else 64
    sees = {"timm_model_name": register(kind), "timm_pool": pool, "timm_proj": None, "image_size": side}
    reads = {"context_length": 16, "vocab_size": 60, "width": 64, "heads": 2, "layers": 2}
    if kind.startswith("timm-siglip"):
        sees["timm_proj"] = "none"
        reads |= {"no_causal_mask": True, "proj_bias": True, "pool_type": "last", "norm_kwargs": {"eps": 1e-6}}
        reads |= {"act_kwargs": {"approximate": "tanh"}, "hf_tokenizer_name": "somebody/tokenizer"}
        if kind.endswith("i18n"):
            reads |= {"width": 128, "proj_type": "none"}
        return {"embed_dim": 128, "init_logit_bias": -3.0, "vision_cfg": sees, "text_cfg": reads}
    if kind == "mobileclip2-l":  # CLIP's ViT, and a text tower that reads padding
        reads["no_causal_mask"] = True
    return {"embed_dim": 48, "vision_cfg": sees, "text_cfg": reads}


def open_clip_model(kind: str, config: dict[str, Any]) -> nn.Module:
    import open_clip
    from open_clip.hf_model import HFTextEncoder

    if kind != "xlm-roberta":
        return open_clip.CustomTextCLIP(**config)
    # a tiny one in place of the one that its name would fetch
    plain = open_clip.model.CLIPTextCfg(context_length=16, vocab_size=60, width=64, heads=2, layers=1)
    model = open_clip.CustomTextCLIP(config["embed_dim"], config["vision_cfg"], plain)
    words = transformers.XLMRobertaConfig(
        **SIZES | {"hidden_size": 128, "num_attention_heads": 2}, vocab_size=60, max_position_embeddings=18
    )
    words.layer_norm_eps = 1e-5
    model.text = HFTextEncoder("", 48, words, "mean_pooler", "mlp")
    return model


def open_clip_family(kind: str, folder: Path) -> Family:
    config = config_of(kind)
    model = lively(open_clip_model(kind, config), 0.05)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(0, 0.3)
            module.running_var.uniform_(0.5, 1.5)
    model.logit_scale.data.fill_(2.0)
    torch.save(model.state_dict(), folder / "open_clip_pytorch_model.bin")
    pixels = {"mean": [0.1, 0.2, 0.3], "std": [0.5, 0.6, 0.7]}
    (folder / "open_clip_config.json").write_text(json.dumps({"model_cfg": config, "preprocess_cfg": pixels}))
    if kind.startswith("timm-siglip"):
        put_siglip_tokenizer(folder, 60, "</s>")
    else:
        word_tokenizer(WORDS, "<s>", "</s>", 60).save(str(folder / "tokenizer.json"))
    visual, side = model.visual, 70 if kind == "eva02-l" else 64
    if kind == "xlm-roberta":
        see = partial(see_clip, visual)
        return Family(folder, model, see, model.encode_text, (side, side), (side, side))
    other = (84, 42) if kind == "eva02-l" else (96, 48)
    see = partial(see_timm, visual.trunk)
    return Family(folder, model, see, model.encode_text, (side, side), other)


def see_timm(tower: Any, pixels: Tensor) -> tuple[Tensor, Tensor]:
    tokens = tower.forward_features(pixels)
    patches = tokens[:, tower.num_prefix_tokens :]
    if tower.attn_pool is not None:  # a picture of one token
        patches = tower.attn_pool(patches.flatten(0, 1)[:, None]).unflatten(0, patches.shape[:2])
    return tower(pixels), tower.head(patches)


def see_clip(tower: Any, pixels: Tensor) -> tuple[Tensor, Tensor]:
    out = tower.forward_intermediates(pixels, indices=1, normalize_intermediates=True, output_fmt="NLC")
    return tower(pixels), out["image_intermediates"][0] @ tower.proj
