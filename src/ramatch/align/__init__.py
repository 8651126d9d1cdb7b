"""Aligning any vision tower with any text tower on image–caption data: how ramatch's own backbones are made."""

from .config import AlignConfig
from .loop import AlignResult, align
from .tags import Tags, mine_tags

__all__ = ["AlignConfig", "AlignResult", "Tags", "align", "mine_tags"]
