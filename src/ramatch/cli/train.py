"""ramatch train, eval, calibrate, align."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from ._shared import add_model


def add_verbs(verbs: Any) -> None:
    parser = verbs.add_parser(
        "train",
        help="train RAM on a benchmark or your own data",
        description="Train the adapters on a frozen backbone. Start from a recipe; any field can be changed with name=value.",
        epilog="example: ramatch train --recipe coco-ov --data ../shared/data/coco-ov epochs=3 optim.lr=1e-4",
    )
    parser.add_argument(
        "--recipe", default="coco-ov-smoke", metavar="R", help="a recipe's name or a YAML file; 'list' shows them"
    )
    parser.add_argument("--data", metavar="D", help="data folder or file (data.path)")
    parser.add_argument("--model", metavar="M", help="backbone (model.backbone)")
    parser.add_argument("--label-features", metavar="F", help="fixed label features (model.label_features)")
    parser.add_argument("--out", metavar="DIR", help="run folder (output)")
    parser.add_argument("--device", metavar="D")
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
    parser.add_argument("--matcher", choices=("kcot", "ot", "bipartite", "average", "reweight"))
    parser.add_argument("--precision", choices=("fp32", "bf16", "fp16"))
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument(
        "--all-scores", action="store_true", help="also the parts: global feature alone, regions, best region"
    )
    parser.add_argument("--localise", action="store_true", help="pointing game and IoU against the data's boxes")
    parser.add_argument("--json", metavar="FILE", help="write the report as JSON")
    parser.add_argument("--markdown", action="store_true")
    parser.set_defaults(run=run_eval)

    parser = verbs.add_parser("calibrate", help="turn scores into probabilities, on held-out data")
    parser.add_argument("model", metavar="MODEL", help="model folder or run folder")
    parser.add_argument("--data", required=True, metavar="D")
    parser.add_argument("--split", metavar="S", help="which part to fit on (default: held-out images)")
    parser.add_argument("--label-features", metavar="F")
    parser.add_argument("--per-label", action="store_true", help="also a bias for each label met in fitting")
    parser.add_argument("--device", metavar="D")
    parser.add_argument("--workers", type=int, default=2)
    parser.set_defaults(run=run_calibrate)

    parser = verbs.add_parser(
        "align",
        help="make a backbone of a vision tower and a text tower",
        description="Align a DINOv2 vision tower with a BERT-type sentence encoder on image–caption data.",
    )
    parser.add_argument("--vision", required=True, metavar="V", help="DINOv2 folder or hub id")
    parser.add_argument("--text", required=True, metavar="T", help="BERT-type folder or hub id")
    parser.add_argument("--captions", required=True, metavar="C", help="captions file or folder")
    parser.add_argument("--images-root", action="append", metavar="DIR", help="where the images lie; may be repeated")
    parser.add_argument("--out", required=True, metavar="DIR")
    parser.add_argument(
        "--test", type=int, default=0, metavar="N", help="hold out N images and report retrieval on them"
    )
    parser.add_argument("--device", metavar="D")
    parser.add_argument("overrides", nargs="*", metavar="name=value", help="settings of the alignment, e.g. epochs=10")
    parser.set_defaults(run=run_align)


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
    from ..files import write_json
    from ..train import evaluate_all

    if arguments.localise:
        return _localise(arguments)
    reports = evaluate_all(
        arguments.model, arguments.data, arguments.protocol,
        scores=("model", "image", "region", "best") if arguments.all_scores else ("model",), split=arguments.split,
        images_root=arguments.images_root, classes=arguments.classes, seen=arguments.seen, unseen=arguments.unseen,
        matcher=arguments.matcher, label_features=arguments.label_features, backbone=arguments.backbone,
        preset=arguments.preset, device=arguments.device, precision=arguments.precision, batch_size=arguments.batch_size,
        workers=arguments.workers, progress=sys.stderr.isatty(),
    )  # fmt: skip
    for name, report in reports.items():
        title = f"{arguments.protocol.upper()} {'' if name == 'model' else name}".strip()
        print(report.to_table(name=title, markdown=arguments.markdown))
    if arguments.json:
        write_json(arguments.json, reports["model"].to_dict())
    return 0


def _localise(arguments: argparse.Namespace) -> int:
    from ..files import write_json
    from ..localise import localise

    report = localise(
        arguments.model, arguments.data, split=arguments.split, images_root=arguments.images_root,
        label_features=arguments.label_features, backbone=arguments.backbone, device=arguments.device,
        matcher=arguments.matcher, batch_size=arguments.batch_size, progress=sys.stderr.isatty(),
    )  # fmt: skip
    print(report.to_table())
    if arguments.json:
        write_json(arguments.json, report.result())
    return 0


def run_calibrate(arguments: argparse.Namespace) -> int:
    from ..evaluate.calibration import CalibrationSettings
    from ..train import calibrate

    result = calibrate(
        arguments.model, arguments.data, split=arguments.split, label_features=arguments.label_features,
        settings=CalibrationSettings(per_label=arguments.per_label), device=arguments.device, workers=arguments.workers,
        progress=sys.stderr.isatty(),
    )  # fmt: skip
    print(result.to_table())
    return 0


def run_align(arguments: argparse.Namespace) -> int:
    from ..align.run import align_folder

    found = align_folder(
        arguments.vision, arguments.text, arguments.captions, arguments.out, images_roots=arguments.images_root,
        overrides=arguments.overrides, test=arguments.test, device=arguments.device,
        on_log=lambda entry: print(json.dumps(entry), file=sys.stderr),
    )  # fmt: skip
    print(json.dumps(found, indent=1, ensure_ascii=False))
    return 0
