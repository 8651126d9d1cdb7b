"""A model's probabilities for several vocabularies on the same images, as its users get them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ramatch import Prediction, Recognizer
from ramatch.data.decode import ImageCache
from ramatch.progress import Progress

BLOCK = 8  # batches whose trunks are held


@dataclass
class Runner:
    """A recognizer and how to run it. Its trunk cache holds one block: each image goes through the tower once."""

    recognizer: Recognizer
    images: ImageCache
    batch_size: int = 64
    progress: bool = False

    def probabilities(
        self, records: Sequence[Any], vocabularies: Sequence[Sequence[str]], what: str = "words"
    ) -> list[np.ndarray]:
        """(n, N) for each vocabulary."""
        found: list[list[np.ndarray]] = [[] for _ in vocabularies]
        for answers in self._answers(records, [list(names) for names in vocabularies], what):
            for out, each in zip(found, answers, strict=True):
                out += [answer.values for answer in each]
        return [np.stack(out) for out in found]

    def predictions(self, records: Sequence[Any], vocabulary: str | list[str]) -> Iterator[Prediction]:
        """Answers one by one, for vocabularies too large to hold them all."""
        for (answers,) in self._answers(records, [vocabulary], "tagging"):
            yield from answers

    def _answers(
        self, records: Sequence[Any], vocabularies: Sequence[str | list[str]], what: str
    ) -> Iterator[list[list[Prediction]]]:
        """A block's answers for each vocabulary. A vocabulary runs over a whole block before the next one comes: on a
        GPU, changing it costs more than using it."""
        pixels = self.images.stack(records, self.recognizer.ram.preprocess, progress=self.progress)
        encoded = [self.recognizer.encode_vocabulary(vocabulary) for vocabulary in vocabularies]
        line = Progress(len(pixels), what, enabled=self.progress)
        done = 0
        for block in pixels.split(BLOCK * self.batch_size):
            batches = [[(picture, None, (1, 1)) for picture in batch] for batch in block.split(self.batch_size)]
            yield [
                [answer for batch in batches for answer in self.recognizer.predict_loaded(batch, vocabulary=vocabulary)]
                for vocabulary in encoded
            ]
            done += len(block)
            line.update(done)
        line.clear()
