"""The same two pictures in every annotation form; with `extra`, a third one that lies outside the folder."""

from __future__ import annotations

import io
import json
import os
import tarfile
from collections.abc import Callable
from pathlib import Path

Plant = Callable[[Path, "Path | None"], Path]
ROWS = {"beach.png": ["dog", "kite"], "street.png": ["car"]}


def rows(folder: Path, extra: Path | None) -> dict[str, list[str]]:
    if extra is None:
        return ROWS
    return {**ROWS, str(extra): ["dog"], os.path.relpath(extra, folder): ["dog"]}


def lists(folder: Path, extra: Path | None) -> Path:
    images: list[object] = [[k, v] for k, v in rows(folder, extra).items()]
    content: dict[str, object] = {"classes": ["dog", "kite", "car"], "images": images}
    if extra is not None:
        content["root"] = os.path.relpath(extra.parent, folder)
        images.append([extra.name, ["dog"]])
    return _json(folder / "lists.json", content)


def coco(folder: Path, extra: Path | None) -> Path:
    images = [{"id": i, "file_name": name} for i, name in enumerate(rows(folder, extra))]
    notes = [{"id": i, "image_id": i, "category_id": 1, "bbox": [1, 1, 3, 3]} for i in range(len(images))]
    content = {"categories": [{"id": 1, "name": "dog"}], "images": images, "annotations": notes}
    return _json(folder / "instances.json", content)


def mapping(folder: Path, extra: Path | None) -> Path:
    return _json(folder / "mapping.json", rows(folder, extra))


def jsonl(folder: Path, extra: Path | None) -> Path:
    lines = [json.dumps({"image": k, "labels": v}) for k, v in rows(folder, extra).items()]
    return _text(folder / "labels.jsonl", "\n".join(lines))


def table(folder: Path, extra: Path | None) -> Path:
    lines = [f"{k},{';'.join(v)}" for k, v in rows(folder, extra).items()]
    return _text(folder / "labels.csv", "\n".join(["image,labels", *lines]))


def onehot(folder: Path, extra: Path | None) -> Path:
    lines = [f"{k}\t{int('dog' in v)}\t{int('car' in v)}" for k, v in rows(folder, extra).items()]
    return _text(folder / "onehot.tsv", "\n".join(["file_name\tdog\tcar", *lines]))


def voc(folder: Path, extra: Path | None) -> Path:
    (folder / "Annotations").mkdir()
    (folder / "JPEGImages").mkdir()
    for i, (name, labels) in enumerate(rows(folder, extra).items()):
        objects = "".join(f"<object><name>{label}</name></object>" for label in labels)
        text = f"<annotation><filename>{name}</filename>{objects}</annotation>"
        _text(folder / "Annotations" / f"{i}.xml", text)
    if extra is not None:
        entity = f'<!DOCTYPE a [<!ENTITY x SYSTEM "file://{extra.with_suffix(".txt")}">]>'
        _text(folder / "Annotations" / "entity.xml", entity + "<annotation><filename>&x;</filename></annotation>")
    return folder


def sidecars(folder: Path, extra: Path | None) -> Path:
    for name, labels in ROWS.items():
        _text((folder / name).with_suffix(".txt"), "\n".join(labels))
    return folder


def yolo(folder: Path, extra: Path | None) -> Path:
    _text(folder / "classes.txt", "dog\nkite\ncar")
    for name in ROWS:
        _text((folder / name).with_suffix(".txt"), "0 0.30 0.40 0.31 0.31\n1 0.52 0.07 0.09 0.12")
    return folder


def webdataset(folder: Path, extra: Path | None) -> Path:
    picture = (folder / "beach.png").read_bytes()
    members = {"beach.png": picture, "beach.json": b'["dog"]', "street.png": picture, "street.txt": b"car"}
    with tarfile.open(folder / "shard-000.tar", "w") as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
        if extra is not None:
            for kind, to in ((tarfile.SYMTYPE, str(extra)), (tarfile.LNKTYPE, os.path.relpath(extra, folder))):
                info = tarfile.TarInfo("away.png")
                info.type, info.linkname = kind, to
                archive.addfile(info)
            info = tarfile.TarInfo("away.txt")
            info.size = 3
            archive.addfile(info, io.BytesIO(b"dog"))
    for name in ROWS:
        (folder / name).unlink()
    return folder


def parquet(folder: Path, extra: Path | None) -> Path:
    import pyarrow
    import pyarrow.parquet

    found = rows(folder, extra)
    columns = pyarrow.table({"path": list(found), "labels": list(found.values())})
    pyarrow.parquet.write_table(columns, folder / "train.parquet")
    return folder / "train.parquet"


def write_arrow(path: Path, found: dict[str, list[str]]) -> None:
    import pyarrow

    columns = pyarrow.table({"path": list(found), "labels": list(found.values())})
    with pyarrow.OSFile(str(path), "wb") as file, pyarrow.ipc.new_stream(file, columns.schema) as out:
        out.write_table(columns)


def saved(folder: Path, extra: Path | None) -> Path:
    """As `save_to_disk` of Hugging Face datasets writes it."""
    write_arrow(folder / "data-00000.arrow", rows(folder, extra))
    away = str(extra.with_suffix(".arrow")) if extra is not None else "data-00000.arrow"
    _json(folder / "state.json", {"_data_files": [{"filename": away}, {"filename": "data-00000.arrow"}]})
    _json(folder / "dataset_info.json", {"features": {}})
    return folder


def captions(folder: Path, extra: Path | None) -> Path:
    return _json(folder / "captions.json", {"images": [[k, ["A dog."]] for k in rows(folder, extra)]})


def _json(path: Path, content: object) -> Path:
    return _text(path, json.dumps(content))


def _text(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


FORMS: dict[str, Plant] = {
    each.__name__: each
    for each in (lists, coco, mapping, jsonl, table, onehot, voc, sidecars, yolo, webdataset, parquet, saved, captions)
}
