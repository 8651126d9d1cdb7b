"""Arguments that several verbs share."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import RamatchError

if TYPE_CHECKING:
    from ..recognizer import Recognizer

MATCHERS = ("kcot", "ot", "bipartite", "average", "reweight")  # of model/matching.py, known before torch is loaded


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
    add_device(group)


def add_device(parser: Any) -> None:
    parser.add_argument(
        "--device", type=_device, metavar="D", help="cpu, cuda, cuda:1, … (default: cuda where there is one)"
    )


def add_labels(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("labels (choose one)")
    one = group.add_mutually_exclusive_group()
    one.add_argument("--labels", metavar="A,B,C", help="labels separated by commas")
    one.add_argument("--labels-file", metavar="F", help="text file with one label per line")
    one.add_argument("--vocabulary", metavar="V", help="a bundled list: everyday, coco80, nus81, voc20")


def labels_of(arguments: argparse.Namespace, default: str | None = None) -> list[str]:
    """The labels the user named. Typed twice is a slip worth saying; in a file a repeated line counts once."""
    from ..assets import parse_labels, vocabulary

    if arguments.labels is not None:
        found = split(arguments.labels)
        where = "--labels"
        for label in found:
            if found.count(label) > 1:
                raise RamatchError(f"{where} has '{label}' twice; each label must be there once")
    elif arguments.labels_file is not None:
        path = Path(arguments.labels_file)
        try:
            found = parse_labels(path.read_text(encoding="utf-8").splitlines())
        except UnicodeDecodeError:
            raise RamatchError(f"{path}: not a UTF-8 text file; it should have one label per line") from None
        where = str(path)
    elif name := arguments.vocabulary or default:
        found, where = vocabulary(name), f"vocabulary {name}"
    else:
        raise RamatchError("no labels: give --labels A,B,C or --labels-file F or --vocabulary everyday")
    if not found:
        raise RamatchError(f"{where} has no label in it")
    return found


def split(text: str) -> list[str]:
    """Names separated by commas."""
    return [name for name in (part.strip() for part in text.split(",")) if name]


def load_recognizer(arguments: argparse.Namespace, **options: Any) -> Recognizer:
    from ..recognizer import Recognizer

    return Recognizer.from_pretrained(
        arguments.model, device=arguments.device, label_features=arguments.label_features, backbone=arguments.backbone,
        **options,
    )  # fmt: skip


def count(text: str) -> int:
    """A whole number of at least 1."""
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number") from None
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return value


def share(text: str) -> float:
    """A number from 0 to 1."""
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' is not a number") from None
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"must lie between 0 and 1, got {text}")
    return value


def _device(text: str) -> str:
    if not re.fullmatch(r"(cpu|cuda|mps|xpu)(:\d+)?", text):
        raise argparse.ArgumentTypeError(f"'{text}' is none of cpu, cuda, cuda:1, mps, xpu")
    return text
