"""Arguments that several verbs share."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ..errors import RamatchError


def add_model(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("model")
    group.add_argument(
        "--model", default="ramatch-mini", metavar="M",
        help="bundled model, model folder, Hugging Face CLIP id, or state-dict file (default: %(default)s)",
    )  # fmt: skip
    group.add_argument("--backbone", metavar="B", help="where an adapter's backbone lies, if not where it says")
    group.add_argument(
        "--label-features",
        metavar="F",
        help="safetensors with fixed label features (vision towers without a text tower)",
    )
    group.add_argument("--device", metavar="D", help="cpu, cuda, … (default: cuda where there is one)")


def add_labels(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("labels (choose one)")
    one = group.add_mutually_exclusive_group()
    one.add_argument("--labels", metavar="A,B,C", help="labels separated by commas")
    one.add_argument("--labels-file", metavar="F", help="text file with one label per line")
    one.add_argument("--vocabulary", metavar="V", help="a bundled list: everyday, coco80, nus81, voc20")


def labels_of(arguments: argparse.Namespace, default: str | None = None) -> list[str]:
    """The labels the user named; a repeated one counts once."""
    from ..assets import parse_labels, vocabulary

    if arguments.labels is not None:
        found = [label.strip() for label in arguments.labels.split(",") if label.strip()]
        where = "--labels"
    elif arguments.labels_file is not None:
        path = Path(arguments.labels_file)
        try:
            found = parse_labels(path.read_text(encoding="utf-8").splitlines())
        except UnicodeDecodeError:
            raise RamatchError(f"{path}: not a UTF-8 text file; it should have one label per line") from None
        where = str(path)
    elif arguments.vocabulary is not None or default is not None:
        found, where = vocabulary(arguments.vocabulary or default), "vocabulary"
    else:
        raise RamatchError("no labels: give --labels A,B,C or --labels-file F or --vocabulary everyday")
    if not found:
        raise RamatchError(f"{where} has no label in it")
    return list(dict.fromkeys(found))


def load_recognizer(arguments: argparse.Namespace) -> Any:
    from ..recognizer import Recognizer

    return Recognizer.from_pretrained(
        arguments.model, device=arguments.device, label_features=arguments.label_features, backbone=arguments.backbone
    )
