"""ramatch train, eval, calibrate, align, adapt."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from ._shared import add_device, add_matcher, add_model, count


def add_verbs(verbs: Any) -> None:
    parser = verbs.add_parser(
        "train",
        help="train RAM on a benchmark or your own data",
        description="Train the adapters on a frozen backbone. Start from a recipe; any field can be changed with name=value.",
        epilog="example: ramatch train --recipe coco-ov --data data/coco-ov epochs=3 optim.lr=1e-4",
    )
    parser.add_argument(
        "--recipe", default="coco-ov-smoke", metavar="R", help="a recipe's name or a YAML file; 'list' shows them"
    )
    parser.add_argument("--data", metavar="D", help="data folder or file (data.path)")
    parser.add_argument("--model", metavar="M", help="backbone (model.backbone)")
    parser.add_argument("--label-features", metavar="F", help="fixed label features (model.label_features)")
    parser.add_argument("--out", metavar="DIR", help="run folder (output)")
    add_device(parser)
    parser.add_argument("--resume", metavar="auto|F", help="go on from the newest good checkpoint, or from a file")
    parser.add_argument("overrides", nargs="*", metavar="name=value")
    parser.set_defaults(run=run_train)

    parser = verbs.add_parser(
        "eval", help="measure a model on test data", description="Print a table like the paper's."
    )
    add_model(parser)
    parser.add_argument("--data", required=True, metavar="D", help="folder, annotation file or tar shards")
    parser.add_argument("--protocol", choices=("zsl", "gzsl"), default="gzsl")
    parser.add_argument("--split", metavar="S")
    parser.add_argument("--images-root", metavar="DIR")
    parser.add_argument("--classes", metavar="F", help="labels, a text file")
    parser.add_argument("--seen", metavar="F", help="seen labels, a text file")
    parser.add_argument("--unseen", metavar="F", help="unseen labels, a text file")
    parser.add_argument("--preset", default="ramatch", help="for a plain CLIP: ramatch, paper or reference")
    add_matcher(parser)
    parser.add_argument("--precision", choices=("fp32", "bf16", "fp16"))
    parser.add_argument("--batch-size", type=count, default=64, metavar="N")
    parser.add_argument("--workers", type=int, default=2, metavar="N", help="processes that decode images; 0: none")
    parser.add_argument(
        "--all-scores", action="store_true", help="also the parts: global feature alone, regions, best region"
    )
    parser.add_argument(
        "--localise", "--localize", action="store_true", help="pointing game and IoU against the data's boxes"
    )
    parser.add_argument(
        "--map",
        choices=("similarity", "plan"),
        default="similarity",
        help="with --localise: of what (default: %(default)s)",
    )
    parser.add_argument("--json", metavar="FILE", help="write the report as JSON")
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument(
        "settings", nargs="*", metavar="name=value", help="of matching and scores, for this test, e.g. score=partial"
    )
    parser.set_defaults(run=run_eval)

    parser = verbs.add_parser("calibrate", help="turn scores into probabilities, on held-out data")
    parser.add_argument("model", metavar="MODEL", help="model folder or run folder")
    parser.add_argument("--data", required=True, metavar="D")
    parser.add_argument("--split", metavar="S", help="which part to fit on (default: held-out images)")
    parser.add_argument("--images-root", metavar="DIR")
    parser.add_argument("--label-features", metavar="F")
    parser.add_argument("--backbone", metavar="B", help="where the adapter's backbone lies, if not where it says")
    parser.add_argument("--per-label", action="store_true", help="also a bias for each label met in fitting")
    add_device(parser)
    parser.add_argument("--workers", type=int, default=2, metavar="N", help="processes that decode images; 0: none")
    parser.set_defaults(run=run_calibrate)

    parser = verbs.add_parser(
        "align",
        help="make a backbone of a vision tower and a text tower",
        description="Align a vision tower (DINOv2, ViT, or the image tower of any CLIP) with a text tower (BERT, RoBERTa, XLM-RoBERTa, DistilBERT, or the text "
        "tower of any CLIP) on image–caption data.",
    )
    parser.add_argument("--vision", required=True, metavar="V", help="folder or hub id")
    parser.add_argument("--text", required=True, metavar="T", help="folder or hub id")
    parser.add_argument("--captions", required=True, metavar="C", help="captions file or folder")
    parser.add_argument("--images-root", action="append", metavar="DIR", help="where the images lie; may be repeated")
    parser.add_argument("--out", required=True, metavar="DIR")
    parser.add_argument(
        "--test", metavar="N|F", help="hold out N images, or those a text file names, and report retrieval on them"
    )
    parser.add_argument("--exclude", metavar="F", help="text file of image keys to leave out, one per line")
    add_device(parser)
    parser.add_argument("overrides", nargs="*", metavar="name=value", help="settings of the alignment, e.g. epochs=10")
    parser.set_defaults(run=run_align)

    parser = verbs.add_parser(
        "adapt",
        help="train RAM on captions and labels together, for a broad vocabulary",
        description="Train the adapters on tags mined from captions together with labelled images, and write a model folder "
        "that stands alone. What a source does not tell about an image is left out of the loss.",
        epilog="example: ramatch adapt --backbone aligned --captions captions.json --data coco-ov --out mini epochs=4",
    )
    parser.add_argument("--backbone", required=True, metavar="B", help="folder, hub id or bundled model")
    parser.add_argument("--captions", required=True, metavar="C", help="captions file or folder")
    parser.add_argument("--images-root", action="append", metavar="DIR", help="where the images lie; may be repeated")
    parser.add_argument("--data", required=True, metavar="D", help="labelled images: folder or annotation file")
    parser.add_argument(
        "--split", default="train", metavar="S", help="where the data has several (default: %(default)s)"
    )
    parser.add_argument("--out", required=True, metavar="DIR", help="new model folder")
    parser.add_argument("--exclude", metavar="F", help="text file of image keys to leave out, one per line")
    parser.add_argument(
        "--preset", default="aligned", help="aligned, ramatch, paper or reference (default: %(default)s)"
    )
    parser.add_argument("--views", type=count, default=3, metavar="N", help="of each image (default: %(default)s)")
    parser.add_argument("--max-tags", type=count, default=1500, metavar="N")
    parser.add_argument("--min-images", type=count, default=12, metavar="N", help="a tag must occur in so many")
    parser.add_argument(
        "--omitted", type=float, default=1.0, metavar="X", help="how often captions leave a tag out for each time they have it: "
        "so many of its likeliest absences are not learned (default: %(default)s)"
    )  # fmt: skip
    parser.add_argument(
        "--background", metavar="V", help="labels that always compete in matching: a bundled vocabulary or a text file"
    )
    parser.add_argument("--seed", type=int, default=0)
    add_device(parser)
    parser.add_argument(
        "overrides", nargs="*", metavar="name=value", help="fields of the training (epochs, lr, …) and of RAM (tss, …)"
    )
    parser.set_defaults(run=run_adapt)


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
    from ..files import write_json
    from ..settings import parse_overrides
    from ..train import evaluate_all

    if arguments.localise:
        if arguments.settings:
            raise RamatchError(f"'{arguments.settings[0]}': settings are for scores; --localise takes --matcher")
        return _localise(arguments)
    reports = evaluate_all(
        arguments.model, arguments.data, arguments.protocol,
        scores=("model", "image", "region", "best") if arguments.all_scores else ("model",), split=arguments.split,
        images_root=arguments.images_root, classes=arguments.classes, seen=arguments.seen, unseen=arguments.unseen,
        matcher=arguments.matcher, settings=parse_overrides(arguments.settings, TEST_SETTINGS),
        label_features=arguments.label_features, backbone=arguments.backbone,
        preset=arguments.preset, device=arguments.device, precision=arguments.precision, batch_size=arguments.batch_size,
        workers=arguments.workers, progress=sys.stderr.isatty(),
    )  # fmt: skip
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

    report = localize(
        arguments.model, arguments.data, split=arguments.split, images_root=arguments.images_root,
        label_features=arguments.label_features, backbone=arguments.backbone, device=arguments.device,
        matcher=arguments.matcher, kind=arguments.map, batch_size=arguments.batch_size, progress=sys.stderr.isatty(),
    )  # fmt: skip
    print(report.to_table())
    if arguments.json:
        write_json(arguments.json, report.result())
    return 0


def run_calibrate(arguments: argparse.Namespace) -> int:
    from ..evaluation.calibration import CalibrationSettings
    from ..train import calibrate

    result = calibrate(
        arguments.model, arguments.data, split=arguments.split, images_root=arguments.images_root,
        label_features=arguments.label_features, backbone=arguments.backbone,
        settings=CalibrationSettings(per_label=arguments.per_label), device=arguments.device, workers=arguments.workers,
        progress=sys.stderr.isatty(),
    )  # fmt: skip
    print(result.to_table())
    return 0


def run_align(arguments: argparse.Namespace) -> int:
    from ..data import read_classes
    from ..train.align_run import align_folder

    test = arguments.test or "0"
    found = align_folder(
        arguments.vision, arguments.text, arguments.captions, arguments.out, images_roots=arguments.images_root,
        overrides=arguments.overrides, test=int(test) if test.isdigit() else read_classes(test),
        exclude=read_classes(arguments.exclude) if arguments.exclude else (), device=arguments.device,
        on_log=lambda entry: print(json.dumps(entry), file=sys.stderr),
    )  # fmt: skip
    print(json.dumps(found, indent=1, ensure_ascii=False))
    return 0


def run_adapt(arguments: argparse.Namespace) -> int:
    from ..assets import parse_labels, vocabulary, vocabulary_names
    from ..data import read_classes
    from ..train.adapt import adapt_folder, settings_from

    fit, ram = settings_from(arguments.overrides, arguments.preset)
    background: list[str] = []
    if arguments.background is not None:
        bundled = arguments.background in vocabulary_names()
        background = vocabulary(arguments.background) if bundled else parse_labels(read_classes(arguments.background))
    report = adapt_folder(
        arguments.backbone, arguments.captions, arguments.data, arguments.out, images_roots=arguments.images_root,
        split=arguments.split, exclude=read_classes(arguments.exclude) if arguments.exclude else (), ram=ram, config=fit,
        max_tags=arguments.max_tags, min_images=arguments.min_images, omitted=arguments.omitted, views=arguments.views,
        seed=arguments.seed, background=background, device=arguments.device,
    )  # fmt: skip
    shown = ("images", "captioned", "labelled", "excluded", "labels", "tags", "background", "log")
    print(json.dumps({name: report[name] for name in shown}, indent=1, ensure_ascii=False))
    print(f"ramatch: wrote {arguments.out}", file=sys.stderr)
    return 0
