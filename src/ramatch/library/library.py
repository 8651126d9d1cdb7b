"""A photo library on disk: update, search, tag. Features are kept, so a new vocabulary opens no image."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..data.images import load_image, natural_key
from ..errors import RamatchError
from ..prediction import Prediction
from ..recognizer import Recognizer
from .features import KEPT, encode_images, encode_words, probabilities, probe
from .search import CANDIDATES, Query, Ranking, View, parse_query, rank
from .store import connect, read_meta, transaction, writing
from .update import Here, Update, Updater
from .vectors import Labels, Vectors, checksum

SAME_MODEL = 0.999  # cosine of two probes: bf16 and fp32 copies of one model reach 0.9999, one retrained less
ORPHAN = "NOT IN (SELECT photo FROM files WHERE photo IS NOT NULL)"  # a photo that no file has any more


@dataclass(frozen=True)
class Hit:
    """A file that a search found. probability: of the whole query; labels: of each by itself; similarity: to the photo
    of `like`; date: when it was taken, else of the file, in seconds since 1970. If not `calibrated`, these are no
    probabilities: they say how far a photo stands out from the others."""

    path: Path
    probability: float
    labels: dict[str, float]
    similarity: float | None
    date: float
    size: int
    width: int
    height: int
    photo: int
    calibrated: bool = True

    def to_dict(self) -> dict[str, Any]:
        number = "probability" if self.calibrated else "relative"
        out: dict[str, Any] = {"image": str(self.path), number: round(self.probability, 4)}
        out["labels"] = [{"label": label, number: round(p, 4)} for label, p in self.labels.items()]
        if self.similarity is not None:
            out["similarity"] = round(self.similarity, 4)
        return out | {"date": self.date, "size": self.size, "width": self.width, "height": self.height}


SORTS: dict[str, Callable[[Hit], Any]] = {
    "probability": lambda hit: -hit.probability,
    "name": lambda hit: natural_key(hit.path),
    "date": lambda hit: hit.date,
    "size": lambda hit: hit.size,
}


class Library:
    """One object serves one thread; any number of processes may read while one writes.

    >>> library = Library.open("photos/.ramatch", create=True)
    >>> library.update("photos", recognizer)
    >>> library.search("dog -person", recognizer, top=20)
    """

    def __init__(self, path: Path, database: sqlite3.Connection) -> None:
        self.path, self.database = path, database
        self._view: View | None = None
        self._checked: Recognizer | None = None

    @classmethod
    def open(cls, path: str | Path, *, create: bool = False) -> Library:
        """The library in this folder; with `create`, an empty one where there is none."""
        folder = Path(os.path.abspath(Path(path).expanduser()))
        return cls(folder, connect(folder, create=create))

    def __enter__(self) -> Library:
        return self

    def __exit__(self, *_: object) -> None:
        self._view = None
        self.database.close()

    def __repr__(self) -> str:
        try:
            count = self.database.execute("SELECT COUNT(*) FROM photos").fetchone()[0]
            about = f"{count:,} photos, {read_meta(self.database).get('model', 'no model yet')}"
        except sqlite3.ProgrammingError as error:
            about = "closed" if "closed" in str(error) else "in use by another thread"
        return f"Library({self.path}: {about})"

    def update(
        self,
        folder: str | Path,
        recognizer: Recognizer,
        *,
        batch_size: int = 16,
        progress: bool = False,
        way: Here | None = None,
    ) -> Update:
        """Bring the library in line with a folder. May be stopped at any moment; the next update goes on from there.
        `way`: how files become features, by default here."""
        place = Path(os.path.abspath(Path(folder).expanduser()))
        if not place.is_dir():
            raise RamatchError(f"{folder} is not a folder")
        with writing(self.path):
            self.claim(recognizer)
            vectors = self.vectors()
            for path in [p for name in ("image", "regions", "scales") for p in self.path.glob(f"{name}.*")]:
                if path not in vectors.parts:  # left behind by a compaction that was stopped
                    path.unlink()
            preprocess = recognizer.ram.preprocess
            way = way or Here(recognizer, batch_size)
            updater = Updater(self.database, vectors, preprocess, self.path.parent, way)
            return updater.run(place, self.path, batch_size=batch_size, progress=progress)

    def claim(self, recognizer: Recognizer) -> None:
        """The first model that writes is the library's model."""
        if "model" in read_meta(self.database):
            return self._check(recognizer)
        blank = torch.zeros(1, 3, *recognizer.ram.preprocess.size, dtype=torch.uint8)
        regions = encode_images(recognizer, blank)[1]
        values = {"model": recognizer.name, "dim": regions.shape[-1], "kept": min(KEPT, regions.shape[1])}
        values["probe"] = probe(recognizer).tobytes()
        with transaction(self.database):
            self.database.executemany("INSERT INTO meta VALUES (?, ?)", values.items())

    def _check(self, recognizer: Recognizer) -> None:
        if recognizer is self._checked:
            return
        meta, found = read_meta(self.database), probe(recognizer)
        own = np.frombuffer(meta["probe"], found.dtype)
        if own.shape != found.shape or float(own @ found) < SAME_MODEL:
            raise RamatchError(
                f"{self.path} was made with the model '{meta['model']}'; '{recognizer.name}' has other features: "
                "use that model (--model), or index into another place (--library)"
            )
        self._checked = recognizer

    def remove_missing(self) -> int:
        """Forget photos that no file has any more, and give back their room. Returns how many went."""
        with writing(self.path):
            view, old = self.snapshot(), self.vectors()
            generation = read_meta(self.database)["generation"] + 1
            dead = self.status()["photos_without_file"]
            if not dead:
                return 0
            new = self.vectors(generation)
            for start in range(0, max(len(view.rows), 1), 4096):
                block = view.rows[start : start + 4096]
                new.append(start, {name: array[block] for name, array in view.arrays.items()})
            with transaction(self.database):
                self.database.execute(f"DELETE FROM thumbnails WHERE photo {ORPHAN}")
                self.database.execute(f"DELETE FROM photos WHERE id {ORPHAN}")
                places = [(place, row) for place, row in enumerate(view.rows.tolist())]
                self.database.executemany("UPDATE photos SET row = ? WHERE row = ?", places)
                self.database.execute("UPDATE meta SET value = ? WHERE key = 'generation'", (generation,))
            old.remove()
            self.database.execute("VACUUM")
            self.database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            return dead

    def verify(self) -> list[str]:
        """Read all of it back; returns problems. Photos whose features are damaged are forgotten: index again."""
        with writing(self.path):
            problems = [text for (text,) in self.database.execute("PRAGMA integrity_check") if text != "ok"]
            rows = self.database.execute("SELECT row, id, crc FROM photos ORDER BY row").fetchall()
            try:
                arrays = self.vectors().open(rows[-1][0] + 1) if rows else {}
            except (OSError, ValueError) as error:
                return [*problems, f"the vectors are cut short ({error}); remove {self.path} and index anew"]
            with transaction(self.database):
                for photo in [photo for row, photo, crc in rows if checksum(arrays, row) != crc]:
                    names = self.database.execute("SELECT path FROM files WHERE photo = ?", (photo,)).fetchall()
                    problems += [f"{self._path(name)}: its features are damaged; index it again" for (name,) in names]
                    for table, column in (("files", "photo"), ("thumbnails", "photo"), ("photos", "id")):
                        self.database.execute(f"DELETE FROM {table} WHERE {column} = ?", (photo,))
            return problems

    def status(self) -> dict[str, Any]:
        """Counts, and bytes on disk: of everything, and for each photo."""
        queries = {
            "files": "files WHERE photo IS NOT NULL",
            "photos": "photos",
            "photos_without_file": f"photos WHERE id {ORPHAN}",
            "unreadable": "files WHERE error IS NOT NULL",
        }
        counts = {k: self.database.execute(f"SELECT COUNT(*) FROM {q}").fetchone()[0] for k, q in queries.items()}
        size = sum(file.stat().st_size for file in self.path.iterdir())
        about = {"library": str(self.path), "model": read_meta(self.database).get("model"), **counts, "bytes": size}
        return about | {"bytes_per_photo": round(size / max(counts["photos"], 1))}

    def search(
        self,
        query: str | Sequence[str] | Query,
        recognizer: Recognizer,
        *,
        like: Any = None,
        top: int | None = 20,
        threshold: float | None = None,
        sort: str = "probability",
    ) -> list[Hit]:
        """The `top` most probable files for a query (see `parse_query`), or those like a photo, or both; then sorted.

        With `top` None all that reach the threshold, and nothing is left out for speed (see `rank`).
        """
        if sort not in SORTS:
            raise RamatchError(f"cannot sort by '{sort}'; known: {', '.join(SORTS)}")
        query = query if isinstance(query, Query) else parse_query(query)
        if not query.labels and like is None:
            raise RamatchError("nothing to search for: give words, or a photo to compare with (--like)")
        view, photo = self.snapshot(recognizer), None if like is None else load_image(like)
        room = None if top is None else max(CANDIDATES, 4 * top)
        ranking = rank(view, query, recognizer, like=photo, room=room, threshold=threshold or 0.0)
        return sorted(islice(self._hits(ranking, query.labels, recognizer.calibrated), top), key=SORTS[sort])

    def _hits(self, ranking: Ranking, names: tuple[str, ...], calibrated: bool) -> Iterator[Hit]:
        """Copies of one photo are a hit each."""
        columns = "path, COALESCE(taken, mtime / 1e9), size, width, height, photos.id"
        select = f"SELECT {columns} FROM photos JOIN files ON photo = photos.id WHERE row = ? ORDER BY path"
        for i, row in enumerate(ranking.rows.tolist()):
            labels = dict(zip(names, ranking.each[i].tolist(), strict=True))
            similarity = None if ranking.similarity is None else float(ranking.similarity[i])
            for path, *rest in self.database.execute(select, (row,)):
                hit = Hit(self._path(path), float(ranking.probability[i]), labels, similarity, *rest)
                yield replace(hit, calibrated=calibrated)

    def thumbnail(self, photo: int) -> bytes:
        """A small WebP picture of a hit's photo, which must still have a file."""
        select = "SELECT webp FROM thumbnails WHERE photo = ? AND photo IN (SELECT photo FROM files)"
        found = self.database.execute(select, (photo,)).fetchone()
        if found is None:
            raise RamatchError(f"{self.path} has no photo {photo}")
        return found[0]

    def tag(self, labels: Sequence[str], recognizer: Recognizer) -> Iterator[Prediction]:
        """Every file's answer for every label, much as `Recognizer.predict` would give it, without opening a file."""
        names, view, asked = tuple(labels), self.snapshot(recognizer), recognizer.sought(labels)
        directions, words = encode_words(recognizer, asked.words)
        asked, encoded, trust = recognizer.trusting(asked, words), Labels(directions), None
        known = None if words.familiarity is None else words.familiarity[: len(names)].numpy()
        files: dict[int, list[list[Any]]] = {}
        select = "SELECT row, path, width, height FROM files JOIN photos ON photos.id = photo ORDER BY path"
        for row, *file in self.database.execute(select):
            files.setdefault(row, []).append(file)
        for block, best in encoded.best(view.arrays, view.rows):
            both = probabilities(recognizer, encoded.image(view.arrays, block), best, words)
            found, scores = (asked.combine(part) for part in both)
            if recognizer.calibrator is not None:
                trust = recognizer.calibrator.trust(words)[asked.winners(both[0])]
            for i, row in enumerate(block.tolist()):
                about: dict[str, Any] = {"familiarity": known, "trust": None if trust is None else trust[i]}
                for path, *size in files.get(row, ()):
                    about |= {"source": str(self._path(path)), "size": tuple(size)}
                    yield Prediction(names, found[i], scores[i], recognizer.calibrated, (1, 1), **about)

    def _path(self, key: bytes) -> Path:
        return Path(os.path.normpath(self.path.parent / os.fsdecode(key)))

    def vectors(self, generation: int | None = None) -> Vectors:
        meta = read_meta(self.database)
        return Vectors(self.path, meta["generation"] if generation is None else generation, meta["dim"], meta["kept"])

    def snapshot(self, recognizer: Recognizer | None = None) -> View:
        """The library as it is now, for its own model; read again only when somebody has written."""
        if "model" not in read_meta(self.database):
            raise RamatchError(f"{self.path} has no photo yet; fill it: ramatch index FOLDER")
        if recognizer is not None:
            self._check(recognizer)
        others = self.database.execute("PRAGMA data_version").fetchone()[0]
        version = (others, self.database.total_changes)  # what others and what we have written
        if self._view is None or self._view.version != version:
            try:
                self._view = self._read(version)
            except FileNotFoundError:  # compacted at this very moment: the next look finds the new files
                self._view = self._read(version)
        return self._view

    def _read(self, version: tuple[int, int]) -> View:
        with transaction(self.database, write=False):
            alive = "SELECT row FROM photos WHERE id IN (SELECT photo FROM files) ORDER BY row"
            rows = np.array([row for (row,) in self.database.execute(alive)], dtype=np.int64)
            return View(version, rows, self.vectors().open(int(rows[-1]) + 1 if len(rows) else 0))
