"""ramatch train, eval, calibrate, align, adapt."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from ..config import MAPS, PRECISIONS, PROTOCOLS
from ._shared import add_device, add_matcher, add_model, count

EVAL_OPTIONS = (
    *("split", "images_root", "classes", "seen", "unseen"),
    *("matcher", "label_features", "backbone", "preset", "device", "precision", "batch_size", "workers"),
)


def add_verbs(verbs: Any) -> None:
    _add_train(verbs)
    _add_eval(verbs)
    _add_calibrate(verbs)
    _add_align(verbs)
    _add_adapt(verbs)


def _add_train(verbs: Any) -> None:
    parser = verbs.add_parser(
        "train",
        help="train RAM on a benchmark or your own data",
        description="Train the adapters on a frozen backbone. Start from a recipe; name=value changes any field.",
        epilog="example: ramatch train --recipe coco-ov --data data/coco-ov epochs=3 optim.lr=1e-4",
    )
    recipe = "a recipe's name or a YAML file; 'list' shows them"
    parser.add_argument("--recipe", default="coco-ov-smoke", metavar="R", help=recipe)
    parser.add_argument("--data", metavar="D", help="data folder or file (data.path)")
    parser.add_argument("--model", metavar="M", help="backbone (model.backbone)")
    parser.add_argument("--label-features", metavar="F", help="fixed label features (model.label_features)")
    parser.add_argument("--out", metavar="DIR", help="run folder (output)")
    add_device(parser)
    parser.add_argument("--resume", metavar="auto|F", help="go on from the newest good checkpoint, or from a file")
    parser.add_argument("overrides", nargs="*", metavar="name=value")
    parser.set_defaults(run=run_train)


def _add_eval(verbs: Any) -> None:
    parser = verbs.add_parser(
        "eval", help="measure a model on test data", description="Print a table like the paper's."
    )
    add_model(parser)
    parser.add_argument("--data", required=True, metavar="D", help="folder, annotation file or tar shards")
    parser.add_argument("--protocol", choices=PROTOCOLS, default="gzsl")
    parser.add_argument("--split", metavar="S")
    parser.add_argument("--images-root", metavar="DIR")
    parser.add_argument("--classes", metavar="F", help="labels, a text file")
    parser.add_argument("--seen", metavar="F", help="seen labels, a text file")
    parser.add_argument("--unseen", metavar="F", help="unseen labels, a text file")
    parser.add_argument("--preset", default="ramatch", help="for a plain CLIP: ramatch, paper or reference")
    add_matcher(parser)
    parser.add_argument("--precision", choices=PRECISIONS)
    parser.add_argument("--batch-size", type=count, default=64, metavar="N")
    _add_workers(parser)
    parts = "also the parts: global feature alone, regions, best region"
    parser.add_argument("--all-scores", action="store_true", help=parts)
    boxes = "pointing game and IoU against the data's boxes"
    parser.add_argument("--localise", "--localize", action="store_true", help=boxes)
    maps = "with --localise: of what (default: %(default)s)"
    parser.add_argument("--map", choices=MAPS, default="similarity", help=maps)
    parser.add_argument("--json", metavar="FILE", help="write the report as JSON")
    parser.add_argument("--markdown", action="store_true")
    settings = "of matching and scores, for this test, e.g. score=partial"
    parser.add_argument("settings", nargs="*", metavar="name=value", help=settings)
    parser.set_defaults(run=run_eval)


def _add_calibrate(verbs: Any) -> None:
    parser = verbs.add_parser("calibrate", help="turn scores into probabilities, on held-out data")
    parser.add_argument("model", metavar="MODEL", help="model folder or run folder")
    parser.add_argument("--data", required=True, metavar="D")
    parser.add_argument("--split", metavar="S", help="which part to fit on (default: held-out images)")
    parser.add_argument("--images-root", metavar="DIR")
    parser.add_argument("--label-features", metavar="F")
    parser.add_argument("--backbone", metavar="B", help="where the adapter's backbone lies, if not where it says")
    parser.add_argument("--per-label", action="store_true", help="also a bias for each label met in fitting")
    add_device(parser)
    _add_workers(parser)
    parser.set_defaults(run=run_calibrate)


def _add_align(verbs: Any) -> None:
    parser = verbs.add_parser(
        "align",
        help="make a backbone of a vision tower and a text tower",
        description="Align a vision tower (DINOv2, ViT, or that of any CLIP) with a text tower (BERT, RoBERTa, "
        "XLM-RoBERTa, DistilBERT, or that of any CLIP) on image–caption data.",
    )
    parser.add_argument("--vision", required=True, metavar="V", help="folder or hub id")
    parser.add_argument("--text", required=True, metavar="T", help="folder or hub id")
    _add_captions(parser)
    parser.add_argument("--out", required=True, metavar="DIR")
    test = "hold out N images, or those a text file names, and report retrieval on them"
    parser.add_argument("--test", metavar="N|F", help=test)
    add_device(parser)
    settings = "settings of the alignment, e.g. epochs=10 optim.text_lr=1e-4"
    parser.add_argument("overrides", nargs="*", metavar="name=value", help=settings)
    parser.set_defaults(run=run_align)


def _add_adapt(verbs: Any) -> None:
    parser = verbs.add_parser(
        "adapt",
        help="train RAM on captions and labels together, for a broad vocabulary",
        description="Train the adapters on tags mined from captions together with labelled images, and write a model "
        "folder that stands alone. What a source does not tell about an image is left out of the loss.",
        epilog="example: ramatch adapt --backbone aligned --captions captions.json --data coco-ov --out mini epochs=4",
    )
    parser.add_argument("--backbone", required=True, metavar="B", help="folder, hub id or bundled model")
    _add_captions(parser)
    parser.add_argument("--data", required=True, metavar="D", help="labelled images: folder or annotation file")
    split = "where the data has several (default: %(default)s)"
    parser.add_argument("--split", default="train", metavar="S", help=split)
    parser.add_argument("--out", required=True, metavar="DIR", help="new model folder")
    preset = "aligned, ramatch, paper or reference (default: %(default)s)"
    parser.add_argument("--preset", default="aligned", help=preset)
    parser.add_argument("--views", type=count, metavar="N", help="of each image (default: 3)")
    parser.add_argument("--max-tags", type=count, metavar="N", help="default: 1500")
    parser.add_argument("--min-images", type=count, metavar="N", help="a tag must occur in so many (default: 12)")
    omitted = "how often captions leave a tag out for each time they have it: its likeliest absences are not learned"
    parser.add_argument("--omitted", type=float, metavar="X", help=f"{omitted} (default: 1)")
    background = "labels that always compete in matching: a bundled vocabulary or a text file"
    parser.add_argument("--background", metavar="V", help=background)
    parser.add_argument("--seed", type=int)
    add_device(parser)
    settings = "of the training (epochs, optim.lr, …) and of RAM (tss, …)"
    parser.add_argument("overrides", nargs="*", metavar="name=value", help=settings)
    parser.set_defaults(run=run_adapt)


def _add_workers(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workers", type=int, default=2, metavar="N", help="processes that decode images; 0: none")


def _add_captions(parser: argparse.ArgumentParser) -> None:
    captions = "captions file or folder; may be repeated"
    parser.add_argument("--captions", required=True, action="append", metavar="C", help=captions)
    parser.add_argument("--images-root", action="append", metavar="DIR", help="where the images lie; may be repeated")
    parser.add_argument("--exclude", metavar="F", help="text file of image keys to leave out, one per line")


def run_train(arguments: argparse.Namespace) -> int:
    from ..train import list_recipes, load_recipe, train

    if arguments.recipe == "list":
        for name, line in list_recipes().items():
            print(f"{name:15s} {line}")
        return 0
    named = {
        "data.path": arguments.data,
        "model.backbone": arguments.model,
        "model.label_features": arguments.label_features,
        "output": arguments.out,
        "device": arguments.device,
    }
    overrides = [f"{key}={value}" for key, value in named.items() if value is not None]
    result = train(load_recipe(arguments.recipe, [*overrides, *arguments.overrides]), resume=arguments.resume or False)
    for name, report in result.reports.items():
        print(report.to_table(name=name))
    print(f"{result.folder}: {result.steps} steps in {result.seconds:.0f} s, {result.images_per_s:.0f} images/s")
    return 0


def run_eval(arguments: argparse.Namespace) -> int:
    from ..config import TEST_SETTINGS
    from ..errors import RamatchError
    from ..evaluation.models import RANKINGS, evaluate_all
    from ..files import write_json
    from ..settings import parse_overrides

    if arguments.localise:
        if arguments.settings:
            raise RamatchError(f"'{arguments.settings[0]}': settings are for scores; --localise takes --matcher")
        return _localise(arguments)
    chosen = {name: getattr(arguments, name) for name in EVAL_OPTIONS}
    chosen["settings"] = parse_overrides(arguments.settings, TEST_SETTINGS)
    chosen |= {"scores": tuple(RANKINGS) if arguments.all_scores else ("model",), "progress": sys.stderr.isatty()}
    reports = evaluate_all(arguments.model, arguments.data, arguments.protocol, **chosen)
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
    from ..files import write_json

    names = ("split", "images_root", "label_features", "backbone", "device", "matcher", "batch_size")
    options = {name: getattr(arguments, name) for name in names}
    report = localize(arguments.model, arguments.data, kind=arguments.map, progress=sys.stderr.isatty(), **options)
    print(report.to_table())
    if arguments.json:
        write_json(arguments.json, report.result())
    return 0


def run_calibrate(arguments: argparse.Namespace) -> int:
    from ..evaluation.calibrate import calibrate
    from ..evaluation.calibration import CalibrationSettings

    names = ("split", "images_root", "label_features", "backbone", "device", "workers")
    options = {name: getattr(arguments, name) for name in names}
    options |= {"settings": CalibrationSettings(per_label=arguments.per_label), "progress": sys.stderr.isatty()}
    print(calibrate(arguments.model, arguments.data, **options).to_table())
    return 0


def _excluded(arguments: argparse.Namespace) -> list[str]:
    from ..data import read_classes

    return read_classes(arguments.exclude) if arguments.exclude else []


def run_align(arguments: argparse.Namespace) -> int:
    from ..data import read_classes
    from ..train.align import AlignConfig, CaptionData, align_folder

    test = arguments.test or "0"
    held = int(test) if test.isdigit() else read_classes(test)
    data = CaptionData(arguments.captions, arguments.images_root, held, _excluded(arguments))
    options = {"config": AlignConfig().with_overrides(arguments.overrides), "device": arguments.device}
    options |= {"on_log": lambda entry: print(json.dumps(entry), file=sys.stderr), "progress": sys.stderr.isatty()}
    found = align_folder(arguments.vision, arguments.text, data, arguments.out, **options)
    print(json.dumps(found, indent=1, ensure_ascii=False))
    return 0


def run_adapt(arguments: argparse.Namespace) -> int:
    from ..assets import vocabulary, vocabulary_names
    from ..labels import read_labels
    from ..train.adapt import BroadData, adapt_folder, settings_from

    config, ram = settings_from(arguments.overrides, arguments.preset)
    named = {name: getattr(arguments, name) for name in ("views", "max_tags", "min_images", "omitted", "seed")}
    config = config.replace(**{name: value for name, value in named.items() if value is not None})
    background: list[str] = []
    if arguments.background is not None:
        bundled = arguments.background in vocabulary_names()
        background = vocabulary(arguments.background) if bundled else list(read_labels(arguments.background).names)
    roots, excluded = arguments.images_root or (), _excluded(arguments)
    data = BroadData(arguments.captions, arguments.data, roots, arguments.split, excluded)
    options = {"config": config, "ram": ram, "background": background, "device": arguments.device}
    report = adapt_folder(arguments.backbone, data, arguments.out, progress=sys.stderr.isatty(), **options)
    shown = ("images", "captioned", "labelled", "excluded", "labels", "tags", "background", "log")
    print(json.dumps({name: report[name] for name in shown}, indent=1, ensure_ascii=False))
    print(f"ramatch: wrote {arguments.out}", file=sys.stderr)
    return 0
