"""ramatch study: the paper's tables, and experiments of one's own."""

from __future__ import annotations

import argparse
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import RamatchError
from ..settings import dotted_names, parse_overrides
from ._shared import add_device, count, given, pick, split

if TYPE_CHECKING:
    from ..train.study import Runner

CHANGES = "name=value"
SEEDS = [0, 1, 2]


def add_verbs(verbs: Any) -> None:
    parser = verbs.add_parser(
        "study",
        help="an ablation of the paper, the main table, or an experiment of your own",
        description="Train and test the variants of a study with several seeds, from cached features, and print their "
        "table beside the paper's. Started again, it goes on with what is not in --out yet. name=value changes the "
        "training of all variants.",
        epilog="examples: ramatch study list; ramatch study matching --data coco-ov --out results/matching.csv",
    )
    add = parser.add_argument
    add("study", metavar="NAME", help="a study's name or a YAML file, or several with commas; 'list' shows them")
    add("--model", default="ramatch-mini", metavar="M", help="backbone (default: %(default)s)")
    add("--label-features", metavar="F", help="fixed label features, for a backbone without a text tower")
    add("--base", choices=("aligned", "clip"), help="of the study's bases, that one (default: by the backbone)")
    what = "benchmark folder with train, test_zsl and test_gzsl; may be repeated"
    add("--data", action="append", default=[], metavar="D", help=what)
    add("--seeds", type=_numbers, default=SEEDS, metavar="A,B", help="default: 0,1,2")
    add("--limit", type=count, metavar="N", help="so many training images only, chosen by their names")
    add("--test-limit", type=count, metavar="N", help="so many test images only, likewise")
    add("--epochs", type=count, metavar="N", help="of every variant")
    add("--smoke", action="store_true", help="a few images, one epoch, one seed: does it work?")
    add("--validate", action="store_true", help="choose settings on training images kept aside, into --settings")
    add("--settings", metavar="F", help="JSON of the settings that --validate chose")
    add("--out", metavar="CSV", help="rows go here, each as soon as it is known")
    add("--table", action="store_true", help="run nothing: the table (and picture) of the rows in --out")
    add("--markdown", action="store_true", help="the table as Markdown")
    add("--figure", metavar="F", help="the study's picture, PNG, SVG or PDF")
    add_device(parser)
    add("overrides", nargs="*", metavar=CHANGES, help="of the training, e.g. batch_size=64 optim.lr=1e-3")
    parser.set_defaults(run=run)


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' is not a list of whole numbers") from None


def run(arguments: argparse.Namespace) -> int:
    from ..train.study import Missing, Place, Runner
    from ..train.study_rows import RowFile
    from ..train.study_spec import list_studies, load_study
    from ..train.study_table import table

    if arguments.study == "list":
        for name, line in list_studies().items():
            print(f"{name:15s} {line}")
        return 0
    studies = [load_study(name) for name in split(arguments.study)]
    for _, study in studies:
        _check(arguments, study)
    options = [_options(arguments, f, s) for f, (_, s) in zip(split(arguments.study), studies, strict=True)]
    place = Place(arguments.model, arguments.device, arguments.label_features)
    file, missing = RowFile(arguments.out), dict[str, list[Missing]]()
    pairs = zip(studies, options, strict=True)
    runners = [Runner(name, study, place, chosen, file, arguments.base) for (name, study), chosen in pairs]
    for data in [] if arguments.table else arguments.data:  # data outside: studies share its images and features
        for runner in runners:
            for found in runner.run(data):
                if isinstance(found, Missing):
                    missing.setdefault(runner.table, []).append(found)
                    told = f"{found.data}: {found.variant}: {found.reason}"
                else:
                    told = _line(found)
                print(told, file=sys.stderr, flush=True)
    if arguments.validate:
        return _choose(arguments, runners)
    for runner in runners:
        rows = [row for data in arguments.data for row in runner.rows(Path(data).name)]
        print(table(runner.study, rows, missing.get(runner.table, ()), markdown=arguments.markdown), end="\n\n")
        if arguments.figure:
            _draw(arguments.figure, runner, rows)
    return 0


def _check(arguments: argparse.Namespace, study: Any) -> None:
    if not arguments.data:
        raise RamatchError("study what? Give --data, a benchmark folder; it may be given several times")
    if arguments.figure and len(split(arguments.study)) > 1:
        raise RamatchError("--figure is one study's picture; name one, with --table it need not run again")
    if arguments.table and not (arguments.out and Path(arguments.out).exists()):
        raise RamatchError("--table shows the rows of a file; name it with --out")
    if arguments.validate and not arguments.settings:
        raise RamatchError("--validate writes the chosen settings; say where with --settings F.json")
    if arguments.validate and not any(study.points(variant) for variant in study.variants):
        raise RamatchError("no variant of this study has a 'grid' of settings to choose from")
    names = [Path(data).name for data in arguments.data]
    if len(set(names)) < len(names):
        raise RamatchError("two --data have the same name, by which rows are told apart")


def _options(arguments: argparse.Namespace, name: str, study: Any) -> Any:
    from ..train.config import CachedConfig
    from ..train.study import Options
    from ..train.study_choice import Choices

    changes = parse_overrides(arguments.overrides, dotted_names(CachedConfig)) | given(arguments, "epochs")
    CachedConfig().replace(**changes)  # says what is wrong with them before anything is loaded
    choices = Choices.read(arguments.settings) if arguments.settings and not arguments.validate else None
    options = Options(**pick(arguments, "seeds", "limit", "test_limit", "validate"), changes=changes, choices=choices)
    picture = bool(arguments.figure) and study.figure.kind == "maps"
    return replace(options.smoke() if arguments.smoke else options, picture=picture, command=_command(arguments, name))


def _command(arguments: argparse.Namespace, name: str) -> str:
    """What makes the rows again; folders by their names."""
    words = ["ramatch", "study", _name(name), "--model", _name(arguments.model)]
    for option in ("label_features", "base", "data", "limit", "test_limit", "epochs", "settings"):
        value = getattr(arguments, option)
        for one in value if isinstance(value, list) else [value]:
            words += [] if one is None else [f"--{option.replace('_', '-')}", _name(str(one))]
    words += [] if arguments.seeds == SEEDS else ["--seeds", ",".join(map(str, arguments.seeds))]
    words += [f"--{option}" for option in ("smoke", "validate") if getattr(arguments, option)]
    return shlex.join([*words, *arguments.overrides])


def _name(path: str) -> str:
    return Path(path).name


def _line(row: dict[str, str]) -> str:
    figures = (f"{p.upper()} {float(row[f'{p}_f1']):5.1f} {float(row[f'{p}_map']):5.1f}" for p in ("zsl", "gzsl"))
    return f"{row['data']}: {row['variant']}, seed {row['seed']}: F1@3, mAP: {', '.join(figures)}"


def _choose(arguments: argparse.Namespace, runners: list[Runner]) -> int:
    from ..train.study_choice import RULE, choose, write_choices

    pairs = [(runner, Path(data).name) for runner in runners for data in arguments.data]
    entries = [entry for runner, name in pairs for entry in choose(runner.plan(name), runner.rows(name))]
    write_choices(arguments.settings, entries)
    for entry in entries:
        chosen = " ".join(f"{name}={value}" for name, value in entry["settings"].items())
        print(f"{entry['data']}: {entry['variant']}: {chosen} ({entry['score']:.1f}, best of {len(entry['among'])})")
    print(f"{arguments.settings}: {RULE}")
    return 0


def _draw(path: str, runner: Runner, rows: list[dict[str, str]]) -> None:
    """The study's picture; without matplotlib, or with nothing to show, a line says so: the figures are there."""
    from ..train.study_table import series
    from ..viz import chart, compare_matchers, save

    figure = runner.study.figure
    try:
        if figure.kind == "none":
            raise RamatchError("this study has no 'figure'")
        if figure.kind == "maps":
            if runner.pictured is None:
                raise RamatchError(
                    "maps are of models trained in this run, and all rows were there: give another --out"
                )
            found = runner.predictions
            ordered = {name: found[name] for name in figure.variants or found if name in found}
            shown = compare_matchers(ordered, runner.pictured.load(), runner.pictured.labels)
        else:
            places, lines = series(runner.study, rows)
            shown = chart(figure.kind, places, {line.name: line.values for line in lines}, runner.study.title, figure.x)
        print(save(shown, path))
    except RamatchError as error:
        print(f"ramatch: note: no picture: {error}", file=sys.stderr)
