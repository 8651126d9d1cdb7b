"""Text → token ids, with the tokenizer that belongs to the checkpoint (the `tokenizers` library does the work)."""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...errors import RamatchError, require
from ...files import read_json

STRAIGHT = {"'": "‘’‚‛", '"': "“”„‟"}
PUNCTUATION = "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^`{|}~]"  # ASCII's, but for the underline, which is a space
SPECIAL = ("special_tokens_map.json", "tokenizer_config.json")  # where a folder says what its padding is


class Tokenizer:
    """Texts → ids (N, T), cut to the longest real length, and lengths (N,). Texts longer than `context` tokens are cut
    with their end token kept. With a token `pad` (not -1), texts are filled with it up to `context`, T."""

    def __init__(self, inner: Any, context: int, pad: int = -1) -> None:
        self.inner, self.context, self.pad = inner, context, pad
        self._limit()

    def fill(self, pad: int) -> Tokenizer:
        """This one, filling texts with another token (-1: none)."""
        self.pad = pad
        self._limit()
        return self

    def _limit(self) -> None:
        self.inner.enable_truncation(max_length=self.context)
        if self.pad < 0:
            self.inner.enable_padding()
        else:
            token = self.inner.id_to_token(self.pad) or "[PAD]"
            self.inner.enable_padding(length=self.context, pad_id=self.pad, pad_token=token)

    @classmethod
    def from_folder(cls, folder: Path, context: int, pad: int = -1) -> Tokenizer | None:
        """From tokenizer.json, or through `transformers` from older files; None if the folder has neither."""
        if (folder / "tokenizer.json").is_file():
            from tokenizers import Tokenizer as Fast

            try:
                made = cls(Fast.from_file(str(folder / "tokenizer.json")), context, pad)
                made(["a label"])
                return made
            except (KeyboardInterrupt, SystemExit):
                raise
            except BaseException as error:  # the library's own are plain Exceptions, and panics that are not even that
                raise RamatchError(f"{folder / 'tokenizer.json'}: not a readable tokenizer ({error})") from None
        if not ((folder / "vocab.json").is_file() or (folder / "vocab.txt").is_file()):
            return None
        from transformers import AutoTokenizer  # slow to import, so only for folders without tokenizer.json

        return cls(AutoTokenizer.from_pretrained(str(folder)).backend_tokenizer, context, pad)

    @classmethod
    def clip(cls, context: int = 77) -> Tokenizer:
        """CLIP's BPE for bare state dicts, built from the vocabulary inside the open_clip package."""
        require("open_clip", "openclip")
        from open_clip.tokenizer import SimpleTokenizer
        from tokenizers import normalizers
        from transformers import CLIPTokenizerFast  # type: ignore[attr-defined]

        theirs = SimpleTokenizer()
        vocab = {w: i for i, w in enumerate([*list(theirs.encoder)[:-2], "<|startoftext|>", "<|endoftext|>"])}
        inner = CLIPTokenizerFast(vocab=vocab, merges=list(theirs.bpe_ranks)).backend_tokenizer
        # CLIP's own tokenizer straightens typographic quotes first ("dog’s" and "dog's" are one label)
        straight = [normalizers.Replace(curly, plain) for plain, pair in STRAIGHT.items() for curly in pair]
        inner.normalizer = normalizers.Sequence([*straight, inner.normalizer])
        return cls(inner, context)

    def for_siglip(self, folder: Path, otherwise: int) -> Tokenizer:
        """This one, as SigLIP reads texts: lowercase, without punctuation (big_vision's `canonicalize`), filled up with
        the padding token that the folder names, or `otherwise`."""
        from tokenizers import Regex, normalizers

        steps: list[Any] = [normalizers.Replace("_", " "), normalizers.Replace(Regex(PUNCTUATION), "")]
        steps += [normalizers.Lowercase(), normalizers.Replace(Regex(r"\s+"), " "), normalizers.Strip()]
        own = self.inner.normalizer
        self.inner.normalizer = normalizers.Sequence([*steps, *([] if own is None else [own])])
        named = [read_json(folder / file).get("pad_token") for file in SPECIAL if (folder / file).is_file()]
        names = [name.get("content") if isinstance(name, dict) else name for name in named]
        found = (self.inner.token_to_id(name) for name in names if isinstance(name, str))
        return self.fill(next((number for number in found if number is not None), otherwise))

    def __call__(self, texts: Sequence[str]) -> tuple[Tensor, Tensor]:
        for text in texts:
            if not isinstance(text, str):
                raise RamatchError(f"a label must be text, got {text!r}")
        if not texts:
            return torch.zeros(0, 1, dtype=torch.long), torch.zeros(0, dtype=torch.long)
        batch = self.inner.encode_batch([html.unescape(html.unescape(t)) for t in texts])  # twice, as CLIP's own does
        # through NumPy: torch takes nested lists one number at a time
        ids, mask = (np.array([getattr(e, name) for e in batch], dtype=np.int64) for name in ("ids", "attention_mask"))
        return torch.from_numpy(ids), torch.from_numpy(mask.sum(-1))

    def save(self, folder: Path) -> None:
        self.inner.no_padding()
        self.inner.no_truncation()
        self.inner.save(str(folder / "tokenizer.json"))
        self._limit()
