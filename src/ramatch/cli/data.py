"""ramatch data check, ramatch data prepare."""

from __future__ import annotations

import argparse
from typing import Any

from ..errors import RamatchError
from ..files import write_json


def add_verbs(verbs: Any) -> None:
    parser = verbs.add_parser("data", help="look at data, prepare benchmarks")
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)

    check = actions.add_parser("check", help="say what a data set holds and what is wrong with it, without training")
    check.add_argument("path", metavar="PATH")
    check.add_argument("--split", metavar="S")
    check.add_argument("--classes", metavar="F", help="labels to expect, a text file")
    check.add_argument("--images-root", action="append", metavar="DIR")
    check.add_argument("--format", metavar="F", help="instead of detecting it")
    check.add_argument("--decode", action="store_true", help="decode every image")
    check.add_argument("--all-classes", action="store_true", help="list every class, not the first twenty")
    check.add_argument("--json", metavar="FILE")
    check.set_defaults(run=run_check)

    prepare = actions.add_parser("prepare", help="turn a benchmark as its owners distribute it into our form")
    prepare.add_argument("name", nargs="?", metavar="NAME", help="leave out to list the benchmarks")
    prepare.add_argument("--root", metavar="DIR", help="where the downloaded files lie")
    prepare.add_argument("--out", metavar="DIR", help="default: the root")
    prepare.add_argument("--train-list", metavar="F")
    prepare.add_argument("--test-list", metavar="F")
    prepare.add_argument("--no-check-images", action="store_true")
    prepare.set_defaults(run=run_prepare)


def run_check(arguments: argparse.Namespace) -> int:
    from ..data import read_classes
    from ..data.check import check

    classes = read_classes(arguments.classes) if arguments.classes else None
    where = {"split": arguments.split, "images_root": arguments.images_root, "format": arguments.format}
    report = check(arguments.path, classes=classes, decode=arguments.decode, **where)
    print(report.to_text(top=None if arguments.all_classes else 20))
    if arguments.json:
        write_json(arguments.json, report.to_dict())
    return 0 if report.ok else 1


def run_prepare(arguments: argparse.Namespace) -> int:
    from ..data import BENCHMARKS, prepare

    if arguments.name is None:
        for name, benchmark in BENCHMARKS.items():
            print(f"{name:12s} {benchmark.title}\n{'':12s} {benchmark.page}")
        return 0
    if arguments.root is None:
        raise RamatchError("say where the downloaded files lie: --root DIR")
    lists = {"train_list": arguments.train_list, "test_list": arguments.test_list}
    check_images = not arguments.no_check_images
    done = prepare(arguments.name, arguments.root, arguments.out, check_images=check_images, **lists)
    print(done.to_text())
    return 0
