"""Damaged and hostile files: annotations, vocabularies, recipes, models, checkpoints; a case is a call to read one."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import random
import shutil
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from soak.annotation_cases import FORMS
from soak.mutate import damaged, text_damaged
from soak.pictures import encode, noise


@dataclass(frozen=True)
class World:
    """What cases are made of: a sound model and checkpoint, a place nobody may read, a file that code would leave."""

    model: Path
    recipe: Path
    checkpoint: Path
    secret: Path
    marker: Path


Call = Callable[[], object]
PICTURE = encode(noise(size=(8, 6)), "PNG")


class ReadOutside(Exception):
    """Labels came from a file outside the folder."""


class Payload:
    """A pickle of this runs a command when it is loaded."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (f"touch '{self.marker}'",)


def command(*words: object) -> int:
    """The command line in this process; 2 also where argparse leaves."""
    from ramatch.cli import main

    try:
        return main([str(word) for word in words])
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 1


def annotation_file(rng: random.Random, folder: Path, world: World) -> tuple[str, Call]:
    form = rng.choice(list(FORMS))
    for name in ("beach.png", "street.png"):
        (folder / name).write_bytes(PICTURE)
    target = FORMS[form](folder, rng.choice((None, None, world.secret / "canary.png")))
    files = sorted(p for p in folder.rglob("*") if p.is_file() and p.suffix != ".png")
    what = "whole"
    if files and rng.random() < 0.85:
        what = spoil(rng, rng.choice(files))

    def read() -> None:
        from ramatch import RamatchError, read_annotations

        if rng.random() < 0.3:
            code = command("data", "check", target, "--decode")
            assert code in (0, 1, 2), f"exit code {code}"
            return
        found = read_annotations(target)
        if "canary" in found.classes:  # pyarrow opens files without telling anyone
            raise ReadOutside
        for record in list(found)[:20]:
            with contextlib.suppress(RamatchError):
                record.load()

    return f"{form}, {what}", read


def spoil(rng: random.Random, path: Path) -> str:
    """Damage a file in place: as text where it is text, as bytes elsewhere."""
    content = path.read_bytes()
    try:
        text = content.decode() if rng.random() < 0.6 else None
    except UnicodeDecodeError:
        text = None
    if text is not None:
        path.write_text(text_damaged(rng, text), encoding="utf-8", errors="surrogatepass")
        return f"{path.name} text"
    how, content = damaged(rng, content)
    path.write_bytes(content)
    return f"{path.name} {how}"


def vocabulary(rng: random.Random, folder: Path, world: World) -> tuple[str, Call]:
    (folder / "p.png").write_bytes(PICTURE)
    lines = rng.choice(
        (["cat", "dog", "red kite"], ["cat"] * 50, ["x" * 5000], ["\x00", "\x1b[31m", "é漢"], [], ["{}", "{0}"])
    )
    path = folder / "labels.txt"
    path.write_text("\n".join(lines), encoding="utf-8")
    what = spoil(rng, path)
    verb = rng.choice((("tag", folder / "p.png", "--labels-file", path), ("data", "check", folder, "--classes", path)))
    options = ("--model", world.model) if verb[0] == "tag" else ()
    return f"{verb[0]} {what}", lambda: command(*verb, *options)


def recipe(rng: random.Random, folder: Path, world: World) -> tuple[str, Call]:
    path = folder / "recipe.yaml"
    text = world.recipe.read_text(encoding="utf-8")
    payloads = (
        f"!!python/object/apply:os.system [\"touch '{world.marker}'\"]",
        f"!!python/object/new:os.system ['touch {world.marker}']",
        "&a [*a]",
        "*nothing",
        "!!binary x",
        "1" * 5000,
        "{" * 3000,
        "&a [x,x,x,x]\nb: &b [*a,*a,*a,*a]\nc: [*b,*b,*b,*b]",
    )
    if rng.random() < 0.3:
        at = rng.choice([i for i, c in enumerate(text) if c == "\n"])
        key = rng.choice(("output", "epochs", "model", "data", "seed", "nonsense"))
        path.write_text(f"{text[:at]}\n{key}: {rng.choice(payloads)}\n", encoding="utf-8")
        what = f"payload in {key}"
    else:
        path.write_text(text, encoding="utf-8")
        what = spoil(rng, path)
    data = folder / "no-data"  # a recipe that is still good stops here, and does not train
    return what, lambda: command("train", "--recipe", path, "--out", folder / "run", "--data", data)


def model_folder(rng: random.Random, folder: Path, world: World) -> tuple[str, Call]:
    shutil.copytree(world.model, folder / "model")
    files = sorted(p for p in (folder / "model").rglob("*") if p.is_file())
    (folder / "p.png").write_bytes(PICTURE)
    what = spoil(rng, rng.choice(files))
    if rng.random() < 0.8:  # with its list of hashes hardly any damage would get as far as a parser
        (folder / "model" / "SHA256SUMS.txt").unlink()
        what += ", no hashes"
    return what, lambda: command("tag", folder / "p.png", "--labels", "cat,dog", "--model", folder / "model")


def foreign_model(rng: random.Random, folder: Path, world: World) -> tuple[str, Call]:
    """Hugging Face folders and bare files: pickles with code in them, and weights that lie elsewhere."""
    (folder / "p.png").write_bytes(PICTURE)
    evil = pickle.dumps({"weight": Payload(world.marker)}, protocol=2)
    config = {"model_type": "clip", "projection_dim": 8, "vision_config": {}, "text_config": {}}
    (folder / "config.json").write_text(json.dumps(config))
    kind, target = rng.choice(("bin", "index", "absolute", "file", "authors", "tar")), folder
    if kind == "bin":
        (folder / "pytorch_model.bin").write_bytes(evil)
    elif kind in ("index", "absolute"):
        away = world.secret / "canary.bin"
        part = str(away) if kind == "absolute" else os.path.relpath(away, folder)
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": {"weight": part}}))
    else:
        target = folder / "weights.pt"
        target.write_bytes(_in_zip(evil) if kind == "tar" else evil)
        if rng.random() < 0.5:
            kind += " " + spoil(rng, target)
    if kind.startswith("authors"):
        return kind, lambda: command("import-authors", target, folder / "out")
    return kind, lambda: command("tag", folder / "p.png", "--labels", "cat,dog", "--model", target)


def _in_zip(content: bytes) -> bytes:
    """torch's old format was a tar archive with pickles in it."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name in ("storages", "tensors", "pickle"):
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def checkpoint(rng: random.Random, folder: Path, world: World) -> tuple[str, Call]:
    path = folder / "step-00000001.pt"
    if rng.random() < 0.3:
        path.write_bytes(pickle.dumps({"format": 1, "config": Payload(world.marker)}, protocol=2))
        what = "payload"
    else:
        shutil.copy(world.checkpoint, path)
        what = spoil(rng, path)
    # another seed than the run's own: one that can still be read is refused, and does not train
    return what, lambda: command("train", "--recipe", world.recipe, "--out", folder, "--resume", path, "seed=77")


FAMILIES: dict[str, tuple[Callable[[random.Random, Path, World], tuple[str, Call]], int]] = {
    "annotations": (annotation_file, 10),
    "vocabulary": (vocabulary, 2),
    "recipe": (recipe, 3),
    "model": (model_folder, 3),
    "foreign model": (foreign_model, 2),
    "checkpoint": (checkpoint, 2),
}
