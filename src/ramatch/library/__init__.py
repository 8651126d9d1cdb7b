"""An index of a photo collection on disk: update it, search it, tag it with any vocabulary. See docs/library.md."""

from .library import Hit, Library
from .update import Update

__all__ = ["Hit", "Library", "Update"]
