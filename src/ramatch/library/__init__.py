"""An index of a photo collection on disk: update it, search it, tag it with any vocabulary. See docs/library.md."""

from .keywords import Keyword, keywords_of
from .library import Hit, Library
from .update import Update
from .write import Change, made_by, open_writer

__all__ = ["Change", "Hit", "Keyword", "Library", "Update", "keywords_of", "made_by", "open_writer"]
