"""ramatch study: several settings and seeds of RAM, and several ways of scoring, compared."""

from __future__ import annotations

import argparse
from typing import Any

from ._shared import add_device, count


def add_verbs(verbs: Any) -> None:
    study = verbs.add_parser("study", help="train several settings with several seeds and compare ways of scoring")
    study.add_argument("--model", required=True, metavar="M", help="backbone")
    study.add_argument("--label-features", metavar="F")
    study.add_argument("--data", required=True, metavar="D", help="benchmark folder with train, test_zsl and test_gzsl")
    study.add_argument("--variants", default="reference,ramatch", metavar="A,B", help="default: %(default)s")
    study.add_argument("--seeds", type=_numbers, default="0,1,2", metavar="A,B", help="default: %(default)s")
    study.add_argument("--limit", type=count, metavar="N", help="so many training images only, chosen by their names")
    study.add_argument("--test-limit", type=count, metavar="N", help="so many test images only, likewise")
    add_device(study)
    study.add_argument("--json", metavar="FILE")
    study.add_argument(
        "overrides", nargs="*", metavar="name=value", help="of the training, e.g. batch_size=64 optim.lr=1e-3"
    )
    study.set_defaults(run=run_study)


def run_study(arguments: argparse.Namespace) -> int:
    from ..files import write_json
    from ..settings import dotted_names, parse_overrides
    from ..train.config import CachedConfig
    from ..train.study import StudyData, study

    rows: list[dict[str, Any]] = []

    def show(row: dict[str, Any]) -> None:
        rows.append(row)
        if arguments.json:  # after every row: a run that is cut short leaves what it had
            write_json(arguments.json, rows)
        print(f"{row['variant']}, seed {row['seed']}, {row['seconds']} s   (ZSL mAP, F1@3 | GZSL mAP, F1@3)")
        for rule, found in row["scores"].items():
            numbers = (f"{found[p]['mAP']:5.1f} {found[p]['F1@3']:5.1f}" for p in ("zsl", "gzsl"))
            print(f"  {rule:18s}" + " | ".join(numbers), flush=True)

    data = StudyData(arguments.data, arguments.limit, arguments.test_limit)
    chosen = {"variants": arguments.variants.split(","), "seeds": arguments.seeds, "device": arguments.device}
    chosen["changes"] = parse_overrides(arguments.overrides, dotted_names(CachedConfig))
    study(arguments.model, data, label_features=arguments.label_features, report=show, **chosen)
    return 0


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' is not a list of whole numbers") from None
