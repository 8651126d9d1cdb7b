"""Studies: what the YAML may say; every row measured once, written at once, and the same as a training by hand."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import pytest
import torch
import yaml

from ramatch.cli import main
from ramatch.config import METHODS, PRESETS, preset
from ramatch.data import decode
from ramatch.data.decode import decode_all
from ramatch.errors import RamatchError
from ramatch.evaluation.models import collect_scores, read_test
from ramatch.evaluation.protocol import evaluate_scores
from ramatch.modeling.ram import RAM
from ramatch.train import features
from ramatch.train import study as module
from ramatch.train.assemble import load_frozen
from ramatch.train.cached import CachedTask, fit_cached, ram_stem
from ramatch.train.config import CachedConfig
from ramatch.train.features import Views, cache_features
from ramatch.train.study import Missing, Options, Place, Runner, pseudo_unseen, read_parts
from ramatch.train.study_choice import Choices, choose
from ramatch.train.study_rows import COLUMNS, RowFile
from ramatch.train.study_spec import Job, Study, list_studies, load_study
from ramatch.train.study_table import series, table

RAM_SMALL = {"prompt_layers": 1, "adapted_layers": 1, "saa_layers": 1, "max_iter": 20, "tau_region": 0.05}
TRAIN = {"epochs": 2, "batch_size": 16, "views": 2, "optim.lr": 0.01}
BASE = {"clip": {"preset": "ramatch", "ram": RAM_SMALL, "train": TRAIN}}
NAMES = "matching modules prompting loss lambda2 prompt-length start-layer lla efficiency main presets ours".split()


def spec(*variants: dict, **fields) -> Study:
    return Study.from_dict({"title": "Small", "base": BASE, "variants": list(variants), **fields})


def runner(tiny: Path, study: Study, file: Path | None = None, **options) -> Runner:
    options = {"seeds": (0,), **options}
    return Runner("small", study, Place(str(tiny / "backbone"), "cpu"), Options(**options), RowFile(file))


def rows_of(file: Path) -> list[dict[str, str]]:
    with file.open(newline="") as stream:
        return list(csv.DictReader(stream))


# ------------------------------------------------------------------------------------------------ what YAML says


@pytest.mark.parametrize("name", NAMES)
def test_studies_of_the_package_load(name: str):
    about = list_studies()[name]
    found, study = load_study(name)
    assert found == name
    assert about
    assert study.title
    for variant in study.variants:
        for kind in ("aligned", "clip"):
            job = Job(study, variant, kind)
            changed = {n for n, v in job.ram_config().to_dict().items() if v != PRESETS[job.preset].to_dict()[n]}
            assert changed <= set(job.ram), "nothing but what is named"


def test_every_study_of_the_package_is_in_the_list_and_on_its_page():
    assert set(list_studies()) >= set(NAMES)
    page = (Path(__file__).parents[2] / "docs/studies.md").read_text(encoding="utf-8").split("\n## ")[0]
    assert set(re.findall(r"^\| `([\w-]+)` \|", page, flags=re.MULTILINE)) == set(list_studies())


def test_figures_of_the_paper_are_those_of_its_tables():
    """The gain that the paper prints in brackets, or in its text, from the figures beside the variants."""
    _, matching = load_study("matching")
    printed = {v.name: v.paper for v in matching.variants}
    gains = {"Bipartite": (-2.6, -1.2), "OT": (-2.3, -0.5), "Average": (-3.0, -1.8), "Re-weight": (-4.7, -3.7)}
    for name, (zsl, gzsl) in gains.items():
        coco, best = printed[name]["COCO"], printed["KCOT"]["COCO"]
        assert coco["zsl_f1"] - best["zsl_f1"] == pytest.approx(zsl)
        assert coco["gzsl_f1"] - best["gzsl_f1"] == pytest.approx(gzsl)
    rows = load_study("main")[1].paper_rows
    others = {name: row for name, row in rows.items() if name != "RAM"}
    for benchmark, column, gain in (
        ("NUS", "zsl_map", 5.0),
        ("NUS", "gzsl_f1_5", 2.2),
        ("COCO", "gzsl_f1", 3.3),
        ("RAP", "gzsl_map", 13.7),
        ("PA100K", "gzsl_f1", 15.3),
        ("MultiScene", "gzsl_map", 7.6),
        ("MLRSNet", "gzsl_f1_5", 11.9),
    ):
        before = max(row[benchmark].get(column, 0) for row in others.values() if benchmark in row)
        assert rows["RAM"][benchmark][column] - before == pytest.approx(gain), (benchmark, column)
    modules = load_study("modules")[1].variants
    assert [len(v.name.split(" + ")) for v in modules] == [1, 1, 1, 2, 3, 4, 4, 5]


def test_the_main_table_has_every_method_by_the_papers_names(monkeypatch: pytest.MonkeyPatch):
    _, study = load_study("main")
    assert {variant.method for variant in study.variants} == set(METHODS)
    small = {"title": "t", "every_method": True, "variants": [{"name": "RAM", "method": "ram"}]}
    named = Study.from_dict({**small, "paper_rows": {"C.L.I.P.": {}}})
    assert [v.name for v in named.variants][:2] == ["RAM", "C.L.I.P."]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"colour": 1}, "unknown setting 'colour'"),
        ({"variants": []}, "needs 'variants'"),
        ({"variants": [{"ram": {}}]}, "no 'name'"),
        ({"variants": [{"name": "a"}, {"name": "a"}]}, "two variants are called 'a'"),
        ({"variants": [{"name": "a", "rams": {}}]}, "unknown setting 'variants.rams'"),
        ({"variants": [{"name": "a", "ram": {"matchr": "ot"}}]}, "variant 'a' on aligned: unknown setting 'matchr'"),
        ({"variants": [{"name": "a", "clip": {"matcher": "no"}}]}, "variant 'a' on clip: setting 'matcher'"),
        ({"variants": [{"name": "a", "train": {"optim.rate": 1}}]}, "optim.rate"),
        ({"variants": [{"name": "a", "method": "foo"}]}, "setting 'variants.method' must be one of ram, clip"),
        ({"variants": [{"name": "a", "method": "clip", "settings": {"x": 1}}]}, "unknown setting 'x'"),
        ({"variants": [{"name": "a", "also": {"b": {"tss": False}}}]}, "'tss' is not of matcher"),
        ({"variants": [{"name": "a", "paper": {"COCO": {"zsl": 3}}}]}, "unknown column 'zsl'; known: zsl_p3"),
        ({"variants": [{"name": "a", "paper": {"COCO": {"zsl_f1": "3"}}}]}, "must be a number"),
        ({"grid": {"optim.lr": 0.1}}, "'optim.lr' must be a list"),
        ({"grid": {"optim.lr": [0.1, -1]}}, "optim.lr"),
        ({"columns": ["zsl"]}, "setting 'columns' must be one of"),
        ({"figure": {"kind": "pie"}}, "'figure.kind' must be one of none, line"),
        ({"figure": {"kind": "maps", "variants": ["b"]}}, "no variant 'b'"),
        ({"base": {"other": {}}}, "unknown setting 'base.other'"),
        (
            {"variants": [{"name": "a", "grid": {"epochs": [1, 2]}}, {"name": "b", "grid": [{"epochs": 1}]}]},
            "same number of points, for a fair choice: a 2, b 1",
        ),
    ],
)
def test_what_is_wrong_with_a_file_is_said(tmp_path: Path, change: dict, words: str):
    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump({"title": "t", "base": BASE, "variants": [{"name": "a"}], **change}))
    with pytest.raises(RamatchError, match=r"^mine\.yaml: ") as error:
        load_study(file)
    assert words in str(error.value)


def test_files_that_are_no_study(tmp_path: Path):
    (tmp_path / "list.yaml").write_text("- a\n")
    with pytest.raises(RamatchError, match="a study is a set of named values"):
        load_study(tmp_path / "list.yaml")
    with pytest.raises(RamatchError, match=r"no study 'nothing': give a YAML file or one of .*matching"):
        load_study("nothing")


def test_a_variant_is_its_base_with_changes():
    study = spec(
        {"name": "a", "ram": {"matcher": "ot"}, "aligned": {"lambda1": 0.2}, "train": {"epochs": 3}},
        grid={"optim.lr": [0.1, 0.2], "ram.lambda2": [0.0]},
    )
    [variant] = study.variants
    assert study.points(variant) == [{"optim.lr": 0.1, "ram.lambda2": 0.0}, {"optim.lr": 0.2, "ram.lambda2": 0.0}]
    job = Job(study, variant, "clip", study.points(variant)[1], {"batch_size": 8})
    assert job.ram_config() == preset("ramatch", **RAM_SMALL, matcher="ot", lambda2=0.0)
    config = job.train_config(seed=5)
    assert (config.epochs, config.batch_size, config.optim.lr, config.seed) == (3, 8, 0.2, 5)
    assert Job(study, variant, "aligned").ram_config() == preset("aligned", matcher="ot", lambda1=0.2)


# ------------------------------------------------------------------------------------------------------ the runs


def test_a_row_is_what_training_by_hand_gives(tiny: Path, tmp_path: Path):
    study = spec({"name": "mine", "also": {"mine, partial": {"score": "partial"}}}, {"name": "CLIP", "method": "clip"})
    found = list(runner(tiny, study, tmp_path / "s.csv", seeds=(3,)).run(tiny / "data"))
    assert [row["variant"] for row in found] == ["mine", "mine, partial", "CLIP"]
    assert rows_of(tmp_path / "s.csv") == found
    backbone = load_frozen(str(tiny / "backbone"))
    torch.manual_seed(3)
    ram = RAM(backbone, preset("ramatch", **RAM_SMALL))
    train, _, _ = read_parts(tiny / "data", Options())
    pixels = decode_all(train.records, ram.preprocess)
    config = CachedConfig().replace(**TRAIN, seed=3)
    cache = cache_features(ram_stem(ram), pixels, Views(2))
    fit_cached(CachedTask(ram, cache, train.targets(), train.classes, config))
    for row, model in ((found[0], ram), (found[1], ram.with_config(ram.config.replace(score="partial")))):
        for protocol in ("zsl", "gzsl"):
            test = read_test(tiny / "data", protocol).annotations
            scores = collect_scores(model, test, workers=0, progress=False).scores
            report = evaluate_scores(scores, test.targets(), test.classes)
            for column, key in (("p3", "P@3"), ("r3", "R@3"), ("f1", "F1@3"), ("f1_5", "F1@5"), ("map", "mAP")):
                assert float(row[f"{protocol}_{column}"]) == pytest.approx(report[key], abs=0.006)
    assert found[0]["gzsl_map"] != found[1]["gzsl_map"]
    assert float(found[0]["seconds"]) > 0
    assert found[2]["seconds"] == "", "nothing was trained"
    assert json.loads(found[1]["settings"])["test"] == {"score": "partial"}


def test_rows_are_those_that_results_want(tiny: Path, tmp_path: Path):
    file = tmp_path / "s.csv"
    list(runner(tiny, spec({"name": "a"}), file, command="ramatch study small").run(tiny / "data"))
    [row] = rows_of(file)
    assert list(row) == list(COLUMNS)
    assert (row["table"], row["method"], row["data"], row["seed"]) == ("small", "ram", "data", "0")
    assert re.fullmatch(r"a: data, backbone, seed 0, settings [0-9a-f]{6}", row["row"])
    assert re.fullmatch(r"20\d\d-\d\d-\d\d", row["date"])
    assert row["command"] == "ramatch study small"
    assert row["device"].endswith("CPU cores")
    assert row["note"] == "96 training and 40 test images"
    assert not {"", None} & {row[name] for name in ("images_per_s", "zsl_map", "gzsl_f1_5", "settings")}
    (tmp_path / "other.csv").write_text("table,row\n")
    with pytest.raises(RamatchError, match="other columns"):
        RowFile(tmp_path / "other.csv").rows()


def test_a_study_goes_on_where_it_was(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file, study = tmp_path / "s.csv", spec({"name": "a"}, {"name": "b", "ram": {"matcher": "average"}})
    first = runner(tiny, study, file, seeds=(0, 1)).run(tiny / "data")
    next(first), next(first)
    first.close()  # as if it had been killed
    before = file.read_text()
    assert len(rows_of(file)) == 2
    trained: list[str] = []
    monkeypatch.setattr(module, "fit_cached", lambda task: trained.append(task.ram.config.matcher) or fit_cached(task))
    rest = list(runner(tiny, study, file, seeds=(0, 1)).run(tiny / "data"))
    assert trained == ["average", "average"]
    assert file.read_text().startswith(before)
    assert len(rest) == 2
    assert not list(runner(tiny, study, file, seeds=(0, 1)).run(tiny / "data")), "nothing is left to do"
    trained.clear()
    more = list(runner(tiny, study, file, seeds=(0, 1, 2), changes={"epochs": 1}).run(tiny / "data"))
    assert len(more) == 6, "other settings are other rows"
    assert len({row["row"] for row in rows_of(file)}) == 10
    again = list(runner(tiny, study, None, seeds=(1,)).run(tiny / "data"))
    figures = [name for name in COLUMNS if name.startswith(("zsl", "gzsl"))]
    there = {row["row"]: row for row in rows_of(file)}
    assert all(row[name] == there[row["row"]][name] for row in again for name in figures), "a seed decides everything"


def test_features_and_pictures_are_made_once_for_those_that_share_them(tiny: Path, monkeypatch: pytest.MonkeyPatch):
    study = spec(
        {"name": "one"},
        {"name": "other", "ram": {"adapted_layers": 2}},  # begins lower
        {"name": "two", "ram": {"matcher": "average"}},
    )
    made, decoded = [], []
    monkeypatch.setattr(features, "cache_features", lambda *a: made.append(a[2].count) or cache_features(*a))
    monkeypatch.setattr(module, "decode_all", lambda *a: decoded.append(len(a[0])) or decode.decode_all(*a))
    rows = list(runner(tiny, study, seeds=(0, 1)).run(tiny / "data"))
    assert [row["variant"] for row in rows] == ["one", "one", "two", "two", "other", "other"]
    assert made == [2, 1, 2, 1], "training images in two views and the tests, twice"
    assert decoded == [96, 40]


def test_studies_run_together_share_images_and_features(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    values = {"title": "t", "base": BASE, "variants": [{"name": "a"}]}
    for name in ("one", "two"):
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(values))
        values = {**values, "variants": [{"name": "b", "ram": {"matcher": "average"}}]}
    made = []
    monkeypatch.setattr(features, "cache_features", lambda *a: made.append(a[2].count) or cache_features(*a))
    both = f"{tmp_path / 'one.yaml'},{tmp_path / 'two.yaml'}"
    assert main(arguments(tiny, both, "--seeds", "0", "--out", str(tmp_path / "s.csv"))) == 0
    assert made == [2, 1]
    rows = rows_of(tmp_path / "s.csv")
    assert [(row["table"], row["command"].split()[2]) for row in rows] == [("one", "one.yaml"), ("two", "two.yaml")]
    assert main(arguments(tiny, both, "--figure", "x.png")) == 2


def test_what_a_backbone_cannot_do_is_said_with_the_reason(tiny: Path):
    study = spec({"name": "deep", "ram": {"adapted_layers": 7}}, {"name": "fine"}, {"name": "text", "needs_text": True})
    run = runner(tiny, study)
    run.place.backbone.text = None
    run.place.backbone.given_labels = {
        label: torch.randn(32) for label in read_test(tiny / "data", "gzsl").annotations.classes
    }
    found = list(run.run(tiny / "data"))
    missing = [one for one in found if isinstance(one, Missing)]
    assert [m.variant for m in missing] == ["deep", "text"]
    assert "adapted_layers is 7, but 'backbone' has 2 layers" in missing[0].reason
    assert "needs a text tower" in missing[1].reason
    rows = [one for one in found if not isinstance(one, Missing)]
    shown = table(study, rows, missing)
    assert re.search(r"^deep +–", shown, flags=re.MULTILINE)
    assert re.search(r"^fine +\d", shown, flags=re.MULTILINE)
    assert "– text on data: needs a text tower" in shown


def test_a_training_that_diverges_does_not_stop_the_others(tiny: Path, monkeypatch: pytest.MonkeyPatch):
    def fit(task: CachedTask):
        if task.ram.config.matcher == "ot":
            raise RamatchError("the loss is nan: training diverged")
        return fit_cached(task)

    monkeypatch.setattr(module, "fit_cached", fit)
    study = spec({"name": "a", "ram": {"matcher": "ot"}}, {"name": "b"})
    first, second = runner(tiny, study).run(tiny / "data")
    assert isinstance(first, Missing)
    assert "diverged" in first.reason
    assert second["variant"] == "b"


def test_validation_chooses_among_the_grid_and_later_runs_take_it(tiny: Path, tmp_path: Path):
    file, study = tmp_path / "s.csv", spec({"name": "a"}, grid={"optim.lr": [1e-6, 3e-2]})
    held = pseudo_unseen(tiny / "data")
    train, tests, unseen = read_parts(tiny / "data", Options(validate=True))
    assert set(unseen) == set(held) <= set(read_test(tiny / "data", "gzsl").seen)
    assert not set(train.classes) & set(held)
    assert not {r.key for r in train.records} & {r.key for r in tests["gzsl"].records}
    assert all(r.key.startswith("images/train") for r in tests["gzsl"].records), "no test image is looked at"
    run = runner(tiny, study, file, validate=True, seeds=(0, 1))
    rows = list(run.run(tiny / "data"))
    assert {row["table"] for row in rows} == {"small-validation"}
    [entry] = choose(run.plan("data"), run.rows("data"))
    means = {
        lr: sum(float(r["gzsl_map"]) + float(r["gzsl_f1"]) for r in rows if f'"optim.lr": {lr}' in r["settings"]) / 4
        for lr in ("1e-06", "0.03")
    }
    best = max(means, key=means.__getitem__)
    assert entry["settings"] == {"optim.lr": float(best)}
    assert entry["score"] == pytest.approx(means[best], abs=0.01)
    assert choose(run.plan("data"), run.rows("data")[:3]) == [], "not before all points are measured"
    chosen = Choices({("small", "data", "backbone", "a"): {"optim.lr": 0.02}})
    [planned] = runner(tiny, study, choices=chosen).plan("data")
    assert planned.job.train_config().optim.lr == 0.02
    [plain] = runner(tiny, study).plan("data")
    assert plain.job.train_config().optim.lr == TRAIN["optim.lr"]
    two = spec({"name": "a"}, {"name": "b"}, {"name": "CLIP", "method": "clip"}, grid={"optim.lr": [0.01]})
    found = list(runner(tiny, two, choices=chosen).run(tiny / "data"))
    assert found[0] == Missing("b", "data", "no settings in the choices for it; --validate chooses them")
    assert [row["variant"] for row in found[1:]] == ["a", "CLIP"], "what does not learn needs no choice"


def test_cost_is_measured_with_the_trainers_step(tiny: Path):
    study = spec({"name": "a"}, {"name": "CLIP", "method": "clip"}, cost=4)
    ours, clip = runner(tiny, study).run(tiny / "data")
    assert float(ours["step_images_per_s"]) > 0
    assert float(clip["test_images_per_s"]) > 0
    assert clip["step_images_per_s"] == "", "it has no training step"


# --------------------------------------------------------------------------------------------- tables and pictures


def test_the_table_has_means_spreads_and_the_papers_figures():
    study = spec(
        {"name": "SAA + OT", "paper": {"COCO": {"zsl_f1": 50.0}}, "x": 2},
        {"name": "OT"},
        parts=["SAA", "OT"],
        columns=["zsl_f1", "seconds"],
        paper_rows={"Other": {"COCO": {"zsl_f1": 41.25}}, "Elsewhere": {"NUS": {"zsl_f1": 3}}},
        beside={"d": ["COCO"]},
        figure={"kind": "line", "metrics": ["zsl_f1"]},
    )
    rows = [
        {**dict.fromkeys(COLUMNS, ""), "variant": "SAA + OT", "data": "d", "zsl_f1": value, "seconds": "7.4"}
        for value in ("40", "42")
    ]
    lines = table(study, rows, markdown=True).splitlines()
    assert lines[4] == "| SAA | OT | ZSL F1@3 | training, s | paper COCO ZSL F1@3 |"
    assert lines[6:] == ["| ✓ | ✓ | 41.0 ± 1.4 | 7 | 50.0 |", "|  | ✓ | – | – | – |", "|  |  | – | – | 41.2 |"]
    places, found = series(study, rows)
    assert (places, [(line.name, line.values) for line in found]) == (["2"], [("ZSL F1@3", (41.0,))])


def arguments(tiny: Path, study: Path | str, *more: str) -> list[str]:
    start = ["study", str(study), "--model", str(tiny / "backbone"), "--data", str(tiny / "data"), "--device", "cpu"]
    return [*start, *more]


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    values = {"title": "Mine", "base": BASE, "grid": {"optim.lr": [0.01, 0.02]}}
    values["variants"] = [{"name": "a"}, {"name": "b", "ram": {"matcher": "average"}}]
    values["figure"] = {"kind": "maps"}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(values))
    return tmp_path / "mine.yaml"


def test_the_verb(tiny: Path, mine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out, picture, chosen = tmp_path / "s.csv", tmp_path / "s.png", tmp_path / "chosen.json"
    options = ["--smoke", "--out", str(out)]
    assert main(arguments(tiny, mine, *options, "--validate", "--settings", str(chosen))) == 0
    assert "(" in capsys.readouterr().out
    assert len(json.loads(chosen.read_text())["choices"]) == 2
    assert main(arguments(tiny, mine, *options, "--settings", str(chosen), "--figure", str(picture))) == 0
    shown = capsys.readouterr()
    assert re.search(r"^a +\d+\.\d", shown.out, flags=re.MULTILINE)
    rows = [row for row in rows_of(out) if row["table"] == "mine"]
    assert [row["variant"] for row in rows] == ["a", "b"]
    assert rows[0]["command"].startswith("ramatch study mine.yaml --model backbone --data data --settings chosen.json")
    assert str(tmp_path) not in out.read_text()
    assert json.loads(rows[0]["settings"])["limit"] == 16
    pytest.importorskip("matplotlib")
    assert picture.stat().st_size > 1000
    assert main(arguments(tiny, mine, *options, "--settings", str(chosen), "--table", "--figure", str(picture))) == 0
    assert "no picture: maps are of models trained in this run" in capsys.readouterr().err


def test_the_verb_says_what_is_missing(tiny: Path, mine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["study", "list"]) == 0
    assert set(NAMES) <= {line.split()[0] for line in capsys.readouterr().out.splitlines()}
    for wrong, words in (
        (["study", str(mine)], "--data"),
        (arguments(tiny, mine, "--table"), "--out"),
        (arguments(tiny, mine, "--validate"), "--settings"),
        (arguments(tiny, mine, "--data", "elsewhere/data"), "same name"),
        (arguments(tiny, mine, "speed=3"), "name=value"),
        (arguments(tiny, mine, "views=0"), "'views' must be"),
        (arguments(tiny, mine, "--settings", str(mine)), "not valid JSON"),
        (arguments(tiny, Path("loss"), "--validate", "--settings", "x"), "no variant of this study has a 'grid'"),
    ):
        assert main(wrong) == 2
        assert words in capsys.readouterr().err


def test_without_matplotlib_the_table_is_still_there(
    tiny: Path, mine: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    assert main(arguments(tiny, mine, "--smoke", "--figure", "x.png")) == 0
    shown = capsys.readouterr()
    assert "Mine" in shown.out
    assert "no picture: this needs the package 'matplotlib'" in shown.err


def test_fewer_images(tiny: Path, mine: Path, tmp_path: Path):
    out = tmp_path / "s.csv"
    fewer = ["--seeds", "0", "--limit", "8", "--test-limit", "30", "--epochs", "1", "batch_size=4", "--out", str(out)]
    assert main(arguments(tiny, mine, *fewer)) == 0
    row = rows_of(out)[0]
    assert row["note"] == "8 training and 30 test images"
    settings = json.loads(row["settings"])
    assert (settings["limit"], settings["test_limit"], settings["train"]["epochs"]) == (8, 30, 1)
    assert row["command"].endswith("--limit 8 --test-limit 30 --epochs 1 --seeds 0 batch_size=4")
