"""Names, synonyms, phrasings, kinds, calibration and nonsense, as rows with the bars of each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from ramatch.data.annotations import Annotations
from ramatch.evaluation.metrics import average_precision
from ramatch.evaluation.reliability import ece

from ..measure import Row, row
from .lists import Word, apart, nonsense, phrased, rounds
from .scores import Runner

FEW = 300  # images that strings without meaning are looked for in
BARS = {"synonyms": (0.95, 0.85), "phrasings": (0.98, 0.98)}  # mAP and recall, as a share of the names'
Values = tuple[float, float]  # of one word: average precision, recall at 0.5


def values(probabilities: np.ndarray, targets: np.ndarray) -> list[Values]:
    """Average precision and recall at 0.5 of each column, zeros where nothing is to be found."""
    hits = ((probabilities >= 0.5) & targets).sum(0) / np.maximum(targets.sum(0), 1)
    return list(zip(average_precision(probabilities, targets).tolist(), hits.tolist(), strict=True))


def names_and_synonyms(runner: Runner, data: Annotations, words: Sequence[Word]) -> Iterator[Row]:
    """Names, and what becomes of them in other words: of the classes that occur, the mean over a class's words."""
    names, targets = data.classes, data.targets().numpy()
    there = targets.any(0)
    replaced, forms = rounds(names, words), phrased(names)
    plain, *others = runner.probabilities(
        data.records, [names, *replaced, *forms.values()], "names, synonyms, phrasings"
    )
    own = values(plain, targets)
    about = {"images": len(data), "words": int(there.sum())}
    for i, what in enumerate(("mAP", "recall at 0.5")):
        yield row(f"names: {what}", 100 * float(np.mean([own[c][i] for c in np.flatnonzero(there)])), "%", **about)
    yield row("names: ECE", 100 * ece(plain, targets), "%", at_most=2, **about)

    synonyms = others[: len(replaced)]
    found: dict[int, list[Values]] = {}
    pairs = []
    for vocabulary, probabilities in zip(replaced, synonyms, strict=True):
        columns = [c for c, name in enumerate(names) if there[c] and vocabulary[c] != name]
        pairs.append((probabilities[:, columns], targets[:, columns]))
        for c, value in zip(columns, values(*pairs[-1]), strict=True):
            found.setdefault(c, []).append(value)
    yield from _shares("synonyms", own, found, len(data))
    if pairs:
        flat = [np.concatenate([side.ravel() for side in sides]) for sides in zip(*pairs, strict=True)]
        yield row(
            "synonyms: ECE", 100 * ece(*flat), "%", at_most=2, images=len(data), words=sum(map(len, found.values()))
        )

    each = {}
    for how, probabilities in zip(forms, others[len(replaced) :], strict=True):
        each[how] = values(probabilities, targets)
        shares = _shares(
            f"phrasing '{forms[how][0]}'", own, {c: [each[how][c]] for c in np.flatnonzero(there)}, len(data)
        )
        yield from shares
    yield from _shares("phrasings", own, {c: [v[c] for v in each.values()] for c in np.flatnonzero(there)}, len(data))


def _shares(what: str, own: Sequence[Values], found: Mapping[int, Sequence[Values]], images: int) -> Iterator[Row]:
    """Mean over classes of the mean over a class's words, and what share of the same classes' names' that is."""
    if not found:
        return
    bars = BARS.get(what, (None, None))
    for i, (metric, bar) in enumerate(zip(("mAP", "recall at 0.5"), bars, strict=True)):
        mean = float(np.mean([np.mean([value[i] for value in each]) for each in found.values()]))
        names = float(np.mean([own[c][i] for c in found]))
        about = {"images": images, "words": sum(map(len, found.values())), "percent": 100 * mean, "names": 100 * names}
        note = f"{100 * mean:.1f} % beside {100 * names:.1f} %"
        yield row(
            f"{what}: {metric}, share of the names'", mean / max(names, 1e-9), "", at_least=bar, note=note, **about
        )


def hypernyms(runner: Runner, data: Annotations, words: Sequence[Word], where: str) -> Iterator[Row]:
    """Recall at 0.5 on images that show a member, false alarms on those that show none; unclear images are left out.
    Members that are not annotated here cannot be told from absent ones, so a row says how many they are."""
    classes = set(data.classes)
    known = [word for word in words if word.kind == "hypernym" and classes & {*word.names}]
    shown = [set(record.labels) for record in data.records]
    groups = apart(known)
    scores = runner.probabilities(data.records, [[word.word for word in group] for group in groups], "kinds")
    recalls, alarms, precisions = [], [], []
    for group, probabilities in zip(groups, scores, strict=True):
        for column, word in enumerate(group):
            there = np.array([bool(labels & {*word.names}) for labels in shown])
            clear = there | np.array([not labels & {*word.unclear} for labels in shown])
            if not there.any():
                continue
            said = probabilities[:, column] >= 0.5
            recall, alarm = said[there].mean(), said[clear & ~there].mean() if (clear & ~there).any() else 0.0
            precision = average_precision(probabilities[clear, column : column + 1], there[clear, None])[0]
            recalls.append(recall), alarms.append(alarm), precisions.append(precision)
            note = f"AP {100 * precision:.1f} %, recall {100 * recall:.1f} %, false alarms {100 * alarm:.2f} %"
            missing = len({*word.names} - classes)
            note += f"; {missing} of its {len(word.names)} names are not annotated here" if missing else ""
            yield row(f"{where}, '{word.word}': recall at 0.5", 100 * float(recall), "%", note=note, images=len(data))
    if recalls:
        about = {"images": len(data), "words": len(recalls)}
        yield row(f"{where}: mAP", 100 * float(np.mean(precisions)), "%", **about)
        yield row(f"{where}: recall at 0.5", 100 * float(np.mean(recalls)), "%", at_least=50, **about)
        yield row(f"{where}: false alarms", 100 * float(np.mean(alarms)), "%", at_most=1, **about)


def calibration(runner: Runner, what: str, data: Annotations) -> Iterator[Row]:
    """ECE of another set's own labels."""
    names = [name.replace("_", " ") for name in data.classes]
    (found,) = runner.probabilities(data.records, [names], what)
    about = {"images": len(data), "words": len(names)}
    yield row(f"{what}: ECE", 100 * ece(found, data.targets().numpy()), "%", at_most=10, **about)


def meaningless(runner: Runner, data: Annotations, part: str) -> Iterator[Row]:
    """The greatest probability that strings without meaning reach."""
    strings, some = nonsense(part), data.subset(range(min(FEW, len(data))))
    (found,) = runner.probabilities(some.records, [strings], "strings without meaning")
    image, column = np.unravel_index(found.argmax(), found.shape)
    note = f"'{strings[column]}' on {some.records[image].key}"
    about = {"images": len(some), "words": len(strings)}
    yield row("without meaning: greatest probability", float(found.max()), "", at_most=0.3, note=note, **about)
