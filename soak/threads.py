"""One Recognizer in eight threads, with changing matchers and vocabularies: the answers of one thread."""

from __future__ import annotations

import random
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from ramatch import Prediction, Recognizer
from soak.pictures import noise
from soak.report import Soak
from soak.worlds import tiny_model

WORKERS = 8
MATCHERS = (None, "kcot", "ot", "bipartite", "average", "reweight")
LISTS = (["cat", "dog"], ["red kite", "blue", "person", "bicycle"], ["traffic light"], ["old", "small", "large cat"])


def run(soak: Soak) -> None:
    folder = tiny_model(soak.folder("model"))
    for cache in (64, 0):
        recognizer = Recognizer.from_pretrained(folder, device="cpu", cache=cache)
        _predict(soak, recognizer, f"cache {cache}")
    _encode(soak, Recognizer.from_pretrained(folder, device="cpu"))


def same(one: Prediction, other: Prediction) -> bool:
    pairs: list[tuple[Any, Any]] = [(one.scores, other.scores), (one.values, other.values)]
    return one.labels == other.labels and all(np.allclose(a, b, atol=1e-5, rtol=1e-4) for a, b in pairs)


def _predict(soak: Soak, recognizer: Recognizer, name: str) -> None:
    start, count, rng = time.monotonic(), soak.size(4_000, 300), random.Random(soak.seed)
    pictures = [noise(seed=i) for i in range(6)]
    vocabularies = [recognizer.encode_vocabulary(labels) for labels in LISTS]
    keys = [(p, v, m) for p in range(len(pictures)) for v in range(len(LISTS)) for m in MATCHERS]

    def ask(key: tuple[int, int, str | None], maps: bool = False) -> Prediction:
        picture, vocabulary, matcher = key
        return recognizer.predict(pictures[picture], vocabulary=vocabularies[vocabulary], matcher=matcher, maps=maps)

    alone = {key: ask(key) for key in keys}
    jobs = [(rng.choice(keys), rng.random() < 0.2) for _ in range(count)]
    faults: Counter[str] = Counter()

    def work(job: tuple[tuple[int, int, str | None], bool]) -> None:
        try:
            if not same(alone[job[0]], ask(*job)):
                faults[f"another answer with matcher={job[0][2]}"] += 1
        except Exception as error:
            faults[f"{type(error).__name__}: {error}"] += 1

    with ThreadPoolExecutor(WORKERS) as pool:
        list(pool.map(work, jobs))
    misses = [f"{n} of {count}: {what}" for what, n in faults.most_common()]
    soak.check(f"predict, {name}", "eight threads answer as one does", misses, cases=count, since=start)


def _encode(soak: Soak, recognizer: Recognizer) -> None:
    """Vocabularies encoded in all threads at once, with templates of their own or without, and used at once."""
    start, count, rng = time.monotonic(), soak.size(800, 150), random.Random(soak.seed)
    templates = (None, ("a photo of a {}.",), ("the small {}", "the large {}"))
    picture = noise()
    keys = [(v, t) for v in range(len(LISTS)) for t in range(len(templates))]

    def ask(key: tuple[int, int]) -> Prediction:
        vocabulary = recognizer.encode_vocabulary(LISTS[key[0]], templates=templates[key[1]])
        return recognizer.predict(picture, vocabulary=vocabulary)

    alone = {key: ask(key) for key in keys}
    faults: Counter[str] = Counter()

    def work(key: tuple[int, int]) -> None:
        try:
            if not same(alone[key], ask(key)):
                faults[f"another answer with templates {templates[key[1]]}"] += 1
        except Exception as error:
            faults[f"{type(error).__name__}: {error}"] += 1

    with ThreadPoolExecutor(WORKERS) as pool:
        list(pool.map(work, [rng.choice(keys) for _ in range(count)]))
    misses = [f"{n} of {count}: {what}" for what, n in faults.most_common()]
    soak.check("encode_vocabulary", "eight threads answer as one does", misses, cases=count, since=start)
