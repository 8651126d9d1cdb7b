"""ramatch train, methods, eval, calibrate, align, adapt, import-authors, convert: models made and measured."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..assets import vocabulary, vocabulary_names
from ..config import MAPS, PARTS, PRECISIONS, PRESETS, PROTOCOLS, TEST_SETTINGS, WEIGHTS
from ..errors import RamatchError
from ..files import new_folder, write_json
from ..labels import read_labels
from ..settings import parse_overrides
from ._shared import (
    add_device,
    add_engine,
    add_matcher,
    add_method,
    add_model,
    add_parts,
    count,
    given,
    model_options,
    pick,
)

CHANGES = "name=value"
OWN, COMPARED = "own-data", "compared"


def add_verbs(verbs: Any) -> None:
    for add_verb in (_add_train, _add_methods, _add_eval, _add_calibrate, _add_align, _add_adapt, _add_folders):
        add_verb(verbs)


def _add_train(verbs: Any) -> None:
    parser = verbs.add_parser(
        "train",
        help="train RAM on your own data or a benchmark",
        description="Teach a trained model the labels of your images; or, by a recipe, train the adapters on a frozen "
        "backbone; or, by its name, a system that RAM is compared with. name=value changes any field.",
        epilog="examples: ramatch train --data mine.csv; ramatch train --recipe coco-ov --data data/coco-ov epochs=3",
    )
    add = parser.add_argument
    add("--recipe", metavar="R", help=f"a recipe's name or a YAML file; 'list' shows them (default: {OWN})")
    add("--data", metavar="D", help="data folder or file (data.path)")
    add("--model", metavar="M", help=f"backbone; with {OWN}: the model to start from (model.backbone)")
    add("--label-features", metavar="F", help="fixed label features (model.label_features)")
    add("--out", metavar="DIR", help="run folder (output)")
    add_method(parser, f"by the recipe {COMPARED} unless told (model.method)")
    add_device(parser)
    what = "go on with --out, or else the last run in runs/, as it began; or from a file"
    add("--resume", metavar="auto|F", help=what)
    add("overrides", nargs="*", metavar=CHANGES)
    parser.set_defaults(run=run_train)


def _add_methods(verbs: Any) -> None:
    what = "list RAM and the systems it is compared with, and what each needs"
    parser = verbs.add_parser("methods", help=what)
    parser.add_argument(
        "--json", nargs="?", const="-", metavar="FILE", help="as JSON instead, to a file if one is named"
    )
    parser.set_defaults(run=run_methods)


def _add_eval(verbs: Any) -> None:
    about = "Print a table like the paper's."
    parser = verbs.add_parser("eval", help="measure a model on test data", description=about)
    add_model(parser)
    add_method(parser)
    _add_data(parser)
    add = parser.add_argument
    add("--protocol", choices=PROTOCOLS, default="gzsl")
    add("--classes", metavar="F", help="labels, a text file")
    add("--seen", metavar="F", help="seen labels, a text file")
    add("--unseen", metavar="F", help="unseen labels, a text file")
    add("--preset", default="ramatch", help="for a plain CLIP: ramatch, paper or reference")
    add_matcher(parser)
    add("--precision", choices=PRECISIONS)
    add("--batch-size", type=count, default=64, metavar="N")
    add("--all-scores", action="store_true", help="also the parts: global feature alone, regions, best region")
    boxes = "pointing game and IoU against the data's boxes"
    add("--localise", "--localize", action="store_true", help=boxes)
    add("--segment", action="store_true", help="mean IoU of masks against the data's masks")
    what = "with --segment: of the images, halves by their names (default: %(default)s)"
    add("--part", choices=PARTS, default="all", help=what)
    add("--map", choices=MAPS, help="of what (default: similarity with --localise, fine with --segment)")
    add_engine(parser, "ray: decode and score on a Ray cluster (extra 'scale'), not with --localise or --segment")
    add("--json", metavar="FILE", help="write the report as JSON")
    add("--markdown", action="store_true")
    add("settings", nargs="*", metavar=CHANGES, help="of matching and scores, for this test, e.g. score=partial")
    parser.set_defaults(run=run_eval, runtime="torch")  # what is measured must not depend on what is installed


def _add_calibrate(verbs: Any) -> None:
    parser = verbs.add_parser("calibrate", help="turn scores into probabilities, on held-out data")
    what = "bundled model, model folder, run folder, or a plain CLIP"
    parser.add_argument("model", metavar="MODEL", help=what)
    _add_data(parser, split="which part to fit on (default: held-out images)")
    parser.add_argument(
        "--out", metavar="DIR", help="write a calibrated copy here (default: into the model's own folder)"
    )
    add_parts(parser)
    add = parser.add_argument_group("labels unlike those of the data").add_argument
    what = "words that the model learned with (one per line): labels far from them are marked, and called improbable"
    add("--known", metavar="F", help=what)
    what = "other labelled data (its split train): probabilities of words that are off there are drawn to even odds"
    add("--also", action="append", metavar="D", default=[], help=what)
    add("--captions", action="append", metavar="C", default=[], help="the same, of tags of captions")
    what = "names of images (one per line): of data that has any of these, use nothing else"
    add("--only", action="append", metavar="F", default=[], help=what)
    parser.set_defaults(run=run_calibrate)


def _add_align(verbs: Any) -> None:
    parser = verbs.add_parser(
        "align",
        help="make a backbone of a vision tower and a text tower",
        description="Align a vision tower (DINOv2, DINOv3, ViT, or that of any CLIP or SigLIP) with a text tower "
        "(BERT, RoBERTa, XLM-RoBERTa, DistilBERT, or that of any CLIP) on image–caption data.",
    )
    add = parser.add_argument
    add("--vision", required=True, metavar="V", help="folder or hub id")
    add("--text", required=True, metavar="T", help="folder or hub id")
    _add_captions(parser)
    add("--data", metavar="D", help="also learn from labelled images: folder or annotation file")
    add("--test", metavar="N|F", help="hold out N images, or those a text file names, and report retrieval on them")
    settings = "settings of the alignment, e.g. epochs=10 optim.text_lr=1e-4"
    add("overrides", nargs="*", metavar=CHANGES, help=settings)
    parser.set_defaults(run=run_align)


def _add_adapt(verbs: Any) -> None:
    parser = verbs.add_parser(
        "adapt",
        help="train RAM on captions and labels together, for a broad vocabulary",
        description="Train the adapters on tags mined from captions together with labelled images, and write a model "
        "folder that stands alone. What a source does not tell about an image is left out of the loss.",
        epilog="example: ramatch adapt --backbone aligned --captions captions.json --data coco-ov --out mini epochs=4",
    )
    add = parser.add_argument
    add("--backbone", required=True, metavar="B", help="folder, hub id or bundled model")
    _add_captions(parser)
    add("--data", required=True, metavar="D", help="labelled images: folder or annotation file")
    add("--split", default="train", metavar="S", help="where the data has several (default: %(default)s)")
    add("--preset", default="aligned-best", choices=tuple(PRESETS), help="default: %(default)s")
    add("--views", type=count, metavar="N", help="of each image (default: 3)")
    add("--max-tags", type=count, metavar="N", help="default: 1500")
    add("--min-images", type=count, metavar="N", help="a tag must occur in so many (default: 12)")
    omitted = "how often captions leave a tag out for each time they have it: its likeliest absences are not learned"
    add("--omitted", type=float, metavar="X", help=f"{omitted} (default: 1)")
    background = "labels that always compete in matching: a bundled vocabulary or a text file"
    add("--background", metavar="V", help=background)
    add("--seed", type=int)
    add("overrides", nargs="*", metavar=CHANGES, help="of the training (epochs, optim.lr, …) and of RAM (tss, …)")
    parser.set_defaults(run=run_adapt)


def _add_folders(verbs: Any) -> None:
    parser = verbs.add_parser(
        "import-authors",
        help="turn a checkpoint of the authors' program into a ramatch model",
        description="Read a checkpoint of the authors' program and write a model folder with the `reference` preset.",
    )
    parser.add_argument("checkpoint", metavar="CKPT")
    parser.add_argument("out", metavar="OUT", help="new model folder")
    parser.set_defaults(run=run_import)
    parser = verbs.add_parser(
        "convert",
        help="store a model's weights in fewer bits, or in more",
        description="Copy a model folder with its weights in another precision on disk; all else is copied as it is.",
        epilog="example: ramatch convert runs/coco/model models/coco-small --weights int8",
    )
    parser.add_argument("model", metavar="MODEL", help="bundled model, model folder or run folder")
    parser.add_argument("out", metavar="OUT", help="new model folder")
    parser.add_argument("--weights", required=True, choices=WEIGHTS, help="int8: one scale per output channel")
    parser.set_defaults(run=run_convert)


def _add_data(parser: argparse.ArgumentParser, split: str | None = None) -> None:
    """Labelled images that a model is run on; `split` says what the option of that name is for."""
    add = parser.add_argument
    add("--data", required=True, metavar="D", help="folder, annotation file or tar shards")
    add("--split", metavar="S", help=split)
    add("--images-root", metavar="DIR")
    add("--workers", type=int, default=2, metavar="N", help="processes that decode images; 0: none")


def _add_captions(parser: argparse.ArgumentParser) -> None:
    """What `align` and `adapt` take alike."""
    captions = "captions file or folder; may be repeated"
    parser.add_argument("--captions", required=True, action="append", metavar="C", help=captions)
    hints = "sentences that are no captions (questions, notes): only what they speak of is learned; may be repeated"
    parser.add_argument("--hints", action="append", metavar="F", help=hints)
    parser.add_argument("--images-root", action="append", metavar="DIR", help="where the images lie; may be repeated")
    parser.add_argument("--exclude", metavar="F", help="text file of image keys to leave out, one per line")
    parser.add_argument("--out", required=True, metavar="DIR", help="new folder")
    add_device(parser)


def run_train(arguments: argparse.Namespace) -> int:
    from ..train import list_recipes, load_recipe, train, train_own, unfinished
    from ..train.config import OwnConfig

    if arguments.recipe == "list":
        for name, line in list_recipes().items():
            print(f"{name:15s} {line}")
        return 0
    names = {"data": "data.path", "model": "model.backbone", "label_features": "model.label_features", "out": "output"}
    names |= {"method": "model.method"}
    changes = given(arguments, *names, "device").items()
    overrides = [*(f"{names.get(name, name)}={value}" for name, value in changes), *arguments.overrides]
    recipe = arguments.recipe
    if recipe is None and arguments.resume == "auto":
        recipe = unfinished(arguments.out)
    if recipe is None and not any(change.startswith("data.path=") for change in overrides):
        raise RamatchError("train on what? Give --data, your labelled images; or a --recipe ('list' shows them)")
    compared = any(change.startswith("model.method=") for change in overrides)
    config = load_recipe(recipe or (COMPARED if compared else OWN), overrides)
    if isinstance(config, OwnConfig):
        print(train_own(config, resume=arguments.resume or False).to_table())
        print(f"\n{config.output}: ramatch tag photo.jpg --model {config.output}")
        return 0
    result = train(config, resume=arguments.resume or False)
    for name, report in result.reports.items():
        print(report.to_table(name=name))
    print(f"{result.folder}: {result.steps} steps in {result.seconds:.0f} s, {result.images_per_s:.0f} images/s")
    return 0


def run_methods(arguments: argparse.Namespace) -> int:
    from ..methods import describe

    rows = describe()
    if arguments.json not in (None, "-"):
        write_json(arguments.json, rows)
    elif arguments.json:
        print(json.dumps(rows, indent=1, ensure_ascii=False))
    else:
        print(f"{'method':12s} {'trained':8s} {'looks at':16s} {'text tower':11s} what it is")
        for row in rows:
            trained, text = ("yes" if row[name] else "no" for name in ("training", "text_tower"))
            print(f"{row['name']:12s} {trained:8s} {row['needs']:16s} {text:11s} {row['citation']}")
        print("\ntext tower: no — given label features (--label-features) are enough")
    return 0


def run_eval(arguments: argparse.Namespace) -> int:
    from ..evaluation.models import RANKINGS, evaluate_all

    if arguments.localise or arguments.segment:
        if arguments.engine == "ray":
            raise RamatchError("--engine ray goes with scores only, not with --localise or --segment")
        if arguments.settings:
            raise RamatchError(f"'{arguments.settings[0]}': settings are for scores; --localise takes --matcher")
        return _localise(arguments) if arguments.localise else _segment(arguments)
    chosen = pick(arguments, "split", "images_root", "classes", "seen", "unseen", "preset", "matcher", "precision")
    run: Callable[..., Any] = evaluate_all
    spread = pick(arguments, "workers")
    if arguments.engine == "ray":
        from ..scale.evaluate import evaluate_on_ray

        run, spread = evaluate_on_ray, pick(arguments, "actors")
    chosen |= pick(arguments, "batch_size") | spread | model_options(arguments)
    chosen["settings"] = parse_overrides(arguments.settings, TEST_SETTINGS)
    chosen |= {"scores": tuple(RANKINGS) if arguments.all_scores else ("model",), "progress": sys.stderr.isatty()}
    reports = run(arguments.model, arguments.data, arguments.protocol, **chosen)
    for name, report in reports.items():
        title = f"{arguments.protocol.upper()} {'' if name == 'model' else name}".strip()
        print(report.to_table(name=title, markdown=arguments.markdown))
    if arguments.json:
        found = reports["model"].to_dict()
        if arguments.all_scores:
            found["scores"] = {name: report.values for name, report in reports.items()}
        write_json(arguments.json, found)
    return 0


def _localise(arguments: argparse.Namespace) -> int:
    from ..evaluation.localization import localize

    options = pick(arguments, "split", "images_root", "matcher", "batch_size") | model_options(arguments)
    options |= {"kind": arguments.map or "similarity", "progress": sys.stderr.isatty()}
    report = localize(arguments.model, arguments.data, **options)
    return _show(arguments, report.to_table(), report.result())


def _segment(arguments: argparse.Namespace) -> int:
    from ..evaluation.segmentation import segment

    options = pick(arguments, "part", "batch_size") | model_options(arguments)
    options |= {"kind": arguments.map or "fine", "progress": sys.stderr.isatty()}
    report = segment(arguments.model, arguments.data, **options)
    return _show(arguments, report.to_table(), report.to_dict())


def _show(arguments: argparse.Namespace, table: str, report: dict[str, Any]) -> int:
    print(table)
    if arguments.json:
        write_json(arguments.json, report)
    return 0


def run_calibrate(arguments: argparse.Namespace) -> int:
    from ..data import read_classes
    from ..evaluation.calibrate import Further, calibrate

    options = pick(arguments, "out", "split", "images_root", "workers") | model_options(arguments)
    only = [name for file in arguments.only for name in read_classes(file)]
    further = Further(arguments.known, arguments.also, arguments.captions, only)
    options |= {"further": further, "progress": sys.stderr.isatty()}
    print(calibrate(arguments.model, arguments.data, **options).to_table())
    return 0


def _gathered(arguments: argparse.Namespace) -> dict[str, Any]:
    """What `align` and `adapt` take alike."""
    from ..data import read_classes

    excluded = read_classes(arguments.exclude) if arguments.exclude else []
    return {"hints": arguments.hints or (), "images_roots": arguments.images_root or (), "exclude": excluded}


def run_align(arguments: argparse.Namespace) -> int:
    from ..data import read_classes
    from ..train.align import AlignConfig, align_folder
    from ..train.targets import Sources

    test = arguments.test or "0"
    held = int(test) if test.isdigit() else read_classes(test)
    data = Sources(arguments.captions, arguments.data, **_gathered(arguments), test=held)
    options = {"config": AlignConfig().with_overrides(arguments.overrides), "device": arguments.device}
    options |= {"on_log": lambda entry: print(json.dumps(entry), file=sys.stderr), "progress": sys.stderr.isatty()}
    found = align_folder(arguments.vision, arguments.text, data, arguments.out, **options)
    print(json.dumps(found, indent=1, ensure_ascii=False))
    return 0


def run_adapt(arguments: argparse.Namespace) -> int:
    from ..train.adapt import adapt_folder, settings_from
    from ..train.targets import Sources

    config, ram = settings_from(arguments.overrides, arguments.preset)
    config = config.replace(**given(arguments, "views", "max_tags", "min_images", "omitted", "seed"))
    background: list[str] = []
    if arguments.background is not None:
        bundled = arguments.background in vocabulary_names()
        background = vocabulary(arguments.background) if bundled else list(read_labels(arguments.background).names)
    data = Sources(arguments.captions, arguments.data, **_gathered(arguments), split=arguments.split)
    options = {"config": config, "ram": ram, "background": background, "device": arguments.device}
    report = adapt_folder(arguments.backbone, data, arguments.out, progress=sys.stderr.isatty(), **options)
    shown = ("images", "captioned", "labelled", "excluded", "labels", "tags", "background", "log")
    print(json.dumps({name: report[name] for name in shown}, indent=1, ensure_ascii=False))
    print(f"ramatch: wrote {arguments.out}", file=sys.stderr)
    return 0


def run_import(arguments: argparse.Namespace) -> int:
    from ..modeling.checkpoints.authors import import_authors

    out = new_folder(arguments.out)
    for note in import_authors(Path(arguments.checkpoint), out):
        print(f"ramatch: note: {note}", file=sys.stderr)
    print(out)
    return 0


def run_convert(arguments: argparse.Namespace) -> int:
    from ..modeling.checkpoints.folder import convert

    print(convert(arguments.model, arguments.out, arguments.weights))
    return 0
