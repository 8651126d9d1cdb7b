"""ramatch bench: speed, measured side by side with a baseline in the same run."""

from __future__ import annotations

import argparse
from typing import Any

from ._shared import add_device, count


def add_verbs(verbs: Any) -> None:
    parser = verbs.add_parser("bench", help="measure speed beside a baseline in the same run")
    actions = parser.add_subparsers(dest="what", metavar="WHAT", required=True)
    ot = actions.add_parser("ot", help="the transport solver against POT")
    add_device(ot)
    ot.add_argument(
        "--size", action="append", type=_size, metavar="B,M,N",
        help="images, regions, labels; may be repeated (default: the paper's, and one with 20,000 labels)",
    )  # fmt: skip
    ot.add_argument(
        "--repeats", type=count, default=5, metavar="R", help="the median of so many (default: %(default)s)"
    )
    ot.add_argument("--json", metavar="FILE")
    ot.set_defaults(run=run_ot)
    serve = actions.add_parser("serve", help="the server under load, against one request at a time")
    serve.add_argument("--model", default="ramatch-mini")
    add_device(serve)
    serve.add_argument("--seconds", type=float, default=5.0, help="per line")
    serve.add_argument("--json", metavar="FILE")
    serve.set_defaults(run=run_serve)
    speed = actions.add_parser(
        "speed", help="recognising and training, against plain CLIP and the Hugging Face pipeline"
    )
    add_device(speed)
    speed.add_argument("--lines", metavar="A,B", help="some lines only (default: all that belong to the device)")
    speed.add_argument(
        "--cap", type=float, default=60.0, metavar="S", help="seconds a line may take (default: %(default)s)"
    )
    speed.add_argument("--json", metavar="FILE")
    speed.set_defaults(run=run_speed)
    study = actions.add_parser("study", help="train several settings with several seeds and compare ways of scoring")
    study.add_argument("--model", required=True, metavar="M", help="backbone")
    study.add_argument("--label-features", metavar="F")
    study.add_argument("--data", required=True, metavar="D", help="benchmark folder with train, test_zsl and test_gzsl")
    study.add_argument("--variants", default="reference,ramatch", metavar="A,B", help="default: %(default)s")
    study.add_argument("--seeds", type=_numbers, default="0,1,2", metavar="A,B", help="default: %(default)s")
    study.add_argument("--limit", type=count, metavar="N", help="so many training images only, chosen by their names")
    study.add_argument("--test-limit", type=count, metavar="N", help="so many test images only, likewise")
    add_device(study)
    study.add_argument("--json", metavar="FILE")
    study.add_argument("overrides", nargs="*", metavar="name=value", help="of the training, e.g. batch_size=64 views=2")
    study.set_defaults(run=run_study)


def run_ot(arguments: argparse.Namespace) -> int:
    import torch

    from ..bench.ot import bench_ot, format_rows
    from ..files import write_json

    device = torch.device(arguments.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    many = None if arguments.size else 20_000
    rows = bench_ot(device, arguments.size, many_labels=many, repeats=arguments.repeats)
    print(format_rows(rows))
    if arguments.json:
        write_json(arguments.json, rows)
    return 0


def run_serve(arguments: argparse.Namespace) -> int:
    from ..bench.serve import bench_serve
    from ..files import write_json

    rows = bench_serve(arguments.model, device=arguments.device, seconds=arguments.seconds)
    if arguments.json:
        write_json(arguments.json, rows)
    return 0


def run_speed(arguments: argparse.Namespace) -> int:
    from ..bench.speed import show_speed

    lines = arguments.lines.split(",") if arguments.lines else None
    show_speed(arguments.device, lines, cap=arguments.cap, json=arguments.json)
    return 0


def run_study(arguments: argparse.Namespace) -> int:
    from dataclasses import fields

    from ..bench.study import study
    from ..files import write_json
    from ..train.kept import FitConfig
    from ..train.recipes import named_values

    known = [f.name for f in fields(FitConfig)]
    rows: list[dict[str, Any]] = []

    def show(row: dict[str, Any]) -> None:
        rows.append(row)
        if arguments.json:  # after every row: a run that is cut short leaves what it had
            write_json(arguments.json, rows)
        print(f"{row['variant']}, seed {row['seed']}, {row['seconds']} s   (ZSL mAP, F1@3 | GZSL mAP, F1@3)")
        for rule, found in row["scores"].items():
            numbers = (f"{found[p]['mAP']:5.1f} {found[p]['F1@3']:5.1f}" for p in ("zsl", "gzsl"))
            print(f"  {rule:18s}" + " | ".join(numbers), flush=True)

    study(
        arguments.model, arguments.data, label_features=arguments.label_features, variants=arguments.variants.split(","),
        seeds=arguments.seeds, limit=arguments.limit, test_limit=arguments.test_limit, changes=named_values(arguments.overrides, known),
        device=arguments.device, report=show,
    )  # fmt: skip
    return 0


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' is not a list of whole numbers") from None


def _size(text: str) -> tuple[int, int, int]:
    parts = [count(part) for part in text.split(",")]
    if len(parts) != 3:
        raise argparse.ArgumentTypeError(f"'{text}' is not three numbers B,M,N")
    return parts[0], parts[1], parts[2]
