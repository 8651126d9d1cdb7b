"""The label set (Section 4.1): strings → features, with learnable prompts where the text tower allows them.

Layers before the first prompted one are frozen, so their output is constant per label: it is computed once, kept, and a
training step only runs the last few layers. Sequences are cut to the longest real length.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..config import RAMConfig
from ..errors import RamatchError
from .backbone import Backbone
from .towers import drawn

CHUNK = 1024  # sentences through the frozen layers at once; fewer of those that are filled up
USUAL = 8  # tokens of a sentence
KEEP = 200_000  # tokens whose prefix is kept, of some 20,000 sentences; beyond that memory matters more than time


def clean_labels(labels: Sequence[str]) -> tuple[str, ...]:
    """Labels as given, stripped; an error for none, an empty one or a repeated one."""
    if isinstance(labels, str):
        raise RamatchError(
            f"labels must be a list of strings, not one string ('{labels[:40]}' is no bundled vocabulary)"
        )
    out = tuple(label.strip() if isinstance(label, str) else label for label in labels)
    if not out:
        raise RamatchError("no labels were given; name at least one")
    seen: set[str] = set()
    for label in out:
        if not isinstance(label, str) or not label:
            raise RamatchError(f"a label must be non-empty text, got {label!r}")
        if label in seen:
            raise RamatchError(f"label '{label}' is given twice; each label must be there once")
        seen.add(label)
    return out


def _any_size(device: torch.device) -> AbstractContextManager:
    """On a GPU, attention that is ready for any number of labels: cuDNN's plans each shape anew, for some 30 ms.
    Training, where every step has the same labels, plans once."""
    if device.type != "cuda" or torch.is_grad_enabled():
        return nullcontext()
    return sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])


class LabelSet(nn.Module):
    """Encodes labels. `prompts`: none (template as it is), deep (r tokens at each of the last layers), coop (r tokens
    in place of the template's words), dualcoop (a positive and a negative set of those), dualcoop++ (an evidential one
    besides)."""

    def __init__(self, backbone: Backbone, config: RAMConfig) -> None:
        super().__init__()
        self.config = config
        self.mode = config.prompts if backbone.text is not None else "none"
        shape = None if backbone.text is None else backbone.text.config
        layers, width = (shape.layers, shape.width) if shape else (0, 0)
        if self.mode == "deep" and config.prompt_layers > layers:
            raise RamatchError(
                f"prompt_layers is {config.prompt_layers}, but '{backbone.name}' has {layers} text layers"
            )
        self.start = layers - config.prompt_layers if self.mode == "deep" else layers
        rows = {"deep": config.prompt_layers, "coop": 1, "dualcoop": 2, "dualcoop++": 3, "none": 0}[self.mode]
        self.prompts = nn.Parameter(drawn(rows, 0 if self.mode == "none" else config.prompt_tokens, width) * 0.02)
        # sentence → output of the frozen layers, padded (T, W), and how many of its rows are real
        self._kept: dict[str, tuple[Tensor, int]] = {}
        self._padded: tuple[tuple, Tensor, Tensor] | None = None  # the last list of sentences, ready for the next step
        self._teacher: tuple[tuple, Tensor] | None = None  # the last list of labels and their frozen features
        self._tokens: tuple[tuple, Tensor, Tensor] | None = None  # the last list of labels in tokens, without template

    def forward(self, backbone: Backbone, labels: Sequence[str], templates: Sequence[str] | None = None) -> Tensor:
        """Features (N, D) as the text tower gives them; (2, N, D), positive and negative, for dualcoop; (3, N, D),
        positive, negative and evidential, for dualcoop++."""
        if backbone.text is None:
            return self.frozen(backbone, labels)
        with _any_size(backbone.device):
            if self.mode in ("none", "deep"):
                return self._features(backbone, labels, tuple(templates or self.config.templates))
            found = torch.stack([self._contextual(backbone, labels, context) for context in self.prompts])
            return found[0] if self.mode == "coop" else found

    def frozen(self, backbone: Backbone, labels: Sequence[str]) -> Tensor:
        """Features (N, D) of the frozen tower without learned prompts, or the given ones of a vision tower alone; kept
        on the device for the next step."""
        key, last = (tuple(labels), backbone.device, backbone.dtype), self._teacher
        if last is not None and last[0] == key:
            return last[1]
        # kept for training steps too, which cannot use inference tensors
        with torch.inference_mode(False), torch.no_grad(), torch.autocast(backbone.device.type, enabled=False):
            if backbone.text is None:
                features = backbone.label_features(labels)
            else:
                features = self._features(backbone, labels, self.config.templates, prompted=False)
        self._teacher = (key, features)
        return features

    def _features(
        self, backbone: Backbone, labels: Sequence[str], templates: Sequence[str], prompted: bool = True
    ) -> Tensor:
        """Each label in each template; the mean of the templates' unit features, (N, D)."""
        sentences = [template.replace("{}", label) for label in labels for template in templates]
        features = backbone.project_text(self._pooled(backbone, sentences, prompted))
        if len(templates) == 1:
            return features
        return F.normalize(features, dim=-1).unflatten(0, (-1, len(templates))).mean(1)

    def forget(self) -> None:
        """Drop the kept prefixes (the backbone's weights, device or type changed)."""
        self._kept = {}
        self._padded = self._teacher = self._tokens = None

    def constants(self) -> tuple:
        """What the last step read that no step changes; whoever recorded that step must keep it alive."""
        return self._padded, self._teacher, self._tokens

    def _prefix(self, backbone: Backbone, sentences: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Output of the frozen layers for each sentence, (S, T, W), and lengths (S,); computed once per sentence."""
        text, key = backbone.require_text("encoding labels"), (tuple(sentences), backbone.device, backbone.dtype)
        last = self._padded  # read once: several threads may encode at the same time, each its own list
        if last is not None and last[0] == key:
            return last[1:]
        if last is not None and last[0][1:] != key[1:]:
            self.forget()
        kept = self._kept
        found = {s: kept[s] for s in dict.fromkeys(sentences) if s in kept}
        fresh = [s for s in dict.fromkeys(sentences) if s not in found]
        size = CHUNK if text.config.pad < 0 else max(1, CHUNK * USUAL // text.config.context)
        for chunk in (fresh[i : i + size] for i in range(0, len(fresh), size)):
            # kept for good, so in full precision even when the first caller runs under autocast
            with torch.no_grad(), torch.autocast(backbone.device.type, enabled=False):
                ids, lengths = backbone.tokenize(chunk)
                counts = lengths.tolist()  # before the layers are queued: nothing to wait for
                x = text.run(text.embed(ids), lengths, 0, self.start)
            found.update((s, (row, n)) for s, row, n in zip(chunk, x.unbind(), counts, strict=True))
        counts = [found[s][1] for s in sentences]
        size = max(counts) if text.config.pad < 0 else text.config.context
        rows = [found[s][0][:size] for s in sentences]
        alike = min(map(len, rows)) == size  # one copy for all
        padded = torch.stack(rows) if alike else nn.utils.rnn.pad_sequence(rows, batch_first=True)
        lengths = torch.tensor(counts, device=backbone.device)
        everything = kept | found
        self._kept = everything if sum(len(row) for row, _ in everything.values()) <= KEEP else {}
        self._padded = (key, padded, lengths)
        return padded, lengths

    def _pooled(self, backbone: Backbone, sentences: Sequence[str], prompted: bool) -> Tensor:
        """Last layers (Eq. 2), deep prompts put in before the words and taken out after each layer; (S, W)."""
        text = backbone.require_text("encoding labels")
        x, lengths = self._prefix(backbone, sentences)
        if self.mode != "deep" or not prompted:
            return text.pool(text.run(x, lengths, self.start), lengths)
        r, first = self.config.prompt_tokens, text.config.opening
        mask = text.mask(lengths + r, x.shape[1] + r)
        ends = text.config.pool != "mean"
        for prompt, block in zip(self.prompts, text.blocks[self.start :], strict=True):
            prompt = prompt.to(x.dtype).expand(len(x), -1, -1)
            x = torch.cat([x[:, :first], prompt, x[:, first:]], dim=1)
            if ends and block is text.blocks[-1]:  # of the last layer only the end tokens are read
                size, more = x.shape[1], lengths + r
                return text.norm(block(x, text.visible(more, size), places=text.places(more, size))[:, 0])
            x = block(x, mask, text.config.causal)
            x = torch.cat([x[:, :first], x[:, first + r :]], dim=1)
        return text.pool(x, lengths)

    def _contextual(self, backbone: Backbone, labels: Sequence[str], context: Tensor) -> Tensor:
        """CoOp: the learned context (r, W) between the first token and the label's words; (N, D)."""
        text = backbone.require_text("CoOp prompts")
        key, last = (tuple(labels), backbone.device), self._tokens
        if last is None or last[0] != key:  # kept for the next step: a recorded one cannot fetch them from the host
            with torch.inference_mode(False):
                last = self._tokens = (key, *backbone.tokenize([f"{label}." for label in labels]))
        _, ids, lengths = last
        words, first = text.tokens(ids), text.config.opening
        words = torch.cat([words[:, :first], context.to(words.dtype).expand(len(words), -1, -1), words[:, first:]], 1)
        lengths = lengths + len(context)
        if text.config.pad >= 0:  # room is made at the end, which is padding
            words, lengths = words[:, : text.config.context], lengths.clamp(max=text.config.context)
        if words.shape[1] > text.config.context:
            raise RamatchError(f"a label with {len(context)} prompt tokens exceeds {text.config.context} tokens")
        return backbone.project_text(text.pool(text.run(text.embed(ids, words), lengths), lengths))
