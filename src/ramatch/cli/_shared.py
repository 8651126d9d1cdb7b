"""Arguments that several verbs share."""

from __future__ import annotations

import argparse
import contextlib
import math
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from ..assets import GENERAL, vocabulary, vocabulary_names
from ..config import ENGINES, MATCHERS, METHODS, RUNTIMES
from ..errors import RamatchError, printable
from ..labels import parse_labels, read_labels

if TYPE_CHECKING:
    from ..recognizer import Recognizer


def add_model(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("model")
    what = "bundled model, model folder, Hugging Face CLIP id, or state-dict file (default: %(default)s)"
    group.add_argument("--model", default="ramatch-mini", metavar="M", help=what)
    add_parts(group)
    what = "what runs the image part on a CPU (default: %(default)s; see docs/performance.md)"
    group.add_argument("--runtime", choices=RUNTIMES, default="auto", help=what)


def add_parts(parser: Any) -> None:
    """Where a model's parts lie, and where it runs (see `model_options`)."""
    parser.add_argument("--backbone", metavar="B", help="where an adapter's backbone lies, if not where it says")
    what = "safetensors with fixed label features (vision towers without a text tower)"
    parser.add_argument("--label-features", metavar="F", help=what)
    add_device(parser)


def add_method(parser: Any, what: str = "on a plain CLIP, or the backbone in a model folder") -> None:
    about = f"a system that RAM is compared with, {what}; `ramatch methods` lists them"
    parser.add_argument("--method", choices=tuple(METHODS), metavar="NAME", help=about)


def add_device(parser: Any) -> None:
    what = "cpu, cuda, cuda:1, … (default: cuda where there is one)"
    parser.add_argument("--device", type=_device, metavar="D", help=what)


def add_matcher(parser: Any) -> None:
    parser.add_argument("--matcher", choices=tuple(MATCHERS), help="instead of the model's own")


def add_kinds(parser: Any) -> None:
    what = "look for each label as itself alone, not as its kinds (animal: dog, …) and usual name (sofa: couch) too"
    parser.add_argument("--no-kinds", action="store_true", help=what)


def add_labels(parser: argparse.ArgumentParser, default: str = "") -> None:
    group = parser.add_argument_group(f"labels (choose one{default})")
    one = group.add_mutually_exclusive_group()
    one.add_argument("--labels", metavar="A,B,C", help="labels separated by commas, or a file of them")
    one.add_argument("--labels-file", metavar="F", help="file with one label per line, or a CSV")
    one.add_argument("--vocabulary", metavar="V", help=f"a bundled list: {', '.join(vocabulary_names())}")
    add_kinds(group)


def add_engine(group: Any, what: str) -> None:
    group.add_argument("--engine", choices=ENGINES, help=what)
    told = "ray: processes with a model (default: one for each GPU, or for two cores)"
    group.add_argument("--actors", type=count, metavar="N", help=told)


def labels_of(arguments: argparse.Namespace) -> list[str] | None:
    """The labels the user named, None if it was none or the general vocabulary; what was merged is said on stderr."""
    if arguments.labels is not None:
        found, where = parse_labels(arguments.labels), "--labels"
    elif arguments.labels_file is not None:
        found, where = read_labels(arguments.labels_file), arguments.labels_file
    elif arguments.vocabulary not in (None, GENERAL):
        return vocabulary(arguments.vocabulary)
    else:
        return None
    if not found.names:
        raise RamatchError(f"{where} has no label in it")
    for note in found.notes:
        print(f"ramatch: note: {note}", file=sys.stderr)
    return list(found.names)


def split(text: str) -> list[str]:
    """Names separated by commas."""
    return [name for name in (part.strip() for part in text.split(",")) if name]


def load_recognizer(arguments: argparse.Namespace, **options: Any) -> Recognizer:
    from ..recognizer import Recognizer

    kinds = not getattr(arguments, "no_kinds", False)
    return Recognizer.from_pretrained(arguments.model, **model_options(arguments), kinds=kinds, **options)


def model_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """What `add_model`, `add_parts` and `add_method` asked for, as `Recognizer.from_pretrained` takes it."""
    more = [name for name in ("method", "runtime") if name in arguments]
    return pick(arguments, "device", "label_features", "backbone", *more)


def pick(arguments: argparse.Namespace, *names: str) -> dict[str, Any]:
    return {name: getattr(arguments, name) for name in names}


def given(arguments: argparse.Namespace, *names: str) -> dict[str, Any]:
    """Those of the options that the user has named."""
    return {name: value for name, value in pick(arguments, *names).items() if value is not None}


def cell(text: str) -> str:
    """Text of a CSV that a spreadsheet does not run: what begins like a formula is quoted."""
    text = printable(text)
    return f"'{text}" if text.lstrip().startswith(("=", "+", "-", "@")) else text


@contextlib.contextmanager
def cleaning_up() -> Iterator[None]:
    """SIGTERM and SIGHUP as an exception, like Ctrl-C: files that were not finished are removed on the way out."""

    def leave(number: int, frame: Any) -> None:
        raise SystemExit(128 + number)

    before = {}
    if threading.current_thread() is threading.main_thread():  # Python sets handlers nowhere else
        signals = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
        before = {number: signal.signal(number, leave) for number in signals}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def number(kind: type[int] | type[float], low: int, high: float = math.inf) -> Callable[[str], Any]:
    """A type of argparse: a number from `low` to `high`."""
    name = "a whole number" if kind is int else "a number"
    bounds = f"be at least {low}" if high == math.inf else f"lie between {low} and {high}"

    def parse(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"'{text}' is not {name}") from None
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"must {bounds}, got {text}")
        return value

    return parse


count, share = number(int, 1), number(float, 0, 1)


def seconds(text: str) -> float:
    """A type of argparse: a time like 2, 2s, 500ms or 1m."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(ms|s|m|min|h)?", text.strip())
    value = float(found[1]) * {"ms": 0.001, "m": 60, "min": 60, "h": 3600}.get(found[2], 1) if found else 0
    if not value:
        raise argparse.ArgumentTypeError(f"'{text}' is no time like 2s, 500ms or 1m")
    return value


def _device(text: str) -> str:
    if not re.fullmatch(r"(cpu|cuda|mps|xpu)(:\d+)?", text):
        raise argparse.ArgumentTypeError(f"'{text}' is none of cpu, cuda, cuda:1, mps, xpu")
    return text
