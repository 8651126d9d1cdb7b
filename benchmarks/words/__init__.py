"""Does a model know the words that people use? `python -m benchmarks.words`; the words are in coco80.tsv."""

from .lists import PARTS, Word, part_of, read_words

__all__ = ["PARTS", "Word", "part_of", "read_words"]
