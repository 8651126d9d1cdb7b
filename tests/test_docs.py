"""The documentation is true: links, commands, code, tables, examples and requests."""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from PIL import Image

from ramatch.assets import photo_paths
from ramatch.cli import parse
from ramatch.config import PRESETS, RAMConfig
from ramatch.data import BENCHMARKS, read_annotations
from ramatch.evaluation import evaluate_scores

ROOT = Path(__file__).parents[1]
CARD = ROOT / "src/ramatch/models/ramatch-mini/README.md"
PAGES = {
    page.relative_to(ROOT).as_posix(): page
    for page in [*ROOT.glob("*.md"), CARD, *sorted((ROOT / "docs").rglob("*.md"))]
}
TRUTH = {"beach.jpg": {"dog", "kite"}, "street.jpg": {"car"}}  # what every annotation example of data.md says


class Block(NamedTuple):
    """A fenced block: page, line, language, file name after it, text."""

    page: str
    line: int
    language: str
    name: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def fenced(page: str) -> Iterator[Block]:
    lines = PAGES[page].read_text(encoding="utf-8").split("\n")
    start = None
    for number, line in enumerate(lines):
        if not line.startswith("```"):
            continue
        if start is None:
            start = number
            continue
        language, _, name = lines[start][3:].strip().partition(" ")
        yield Block(page, start + 1, language, name, "\n".join(lines[start + 1 : number]) + "\n")
        start = None
    assert start is None, f"{page}:{start}: a fenced block does not end"


BLOCKS = [block for page in PAGES for block in fenced(page)]


def blocks(language: str) -> list[Block]:
    return [block for block in BLOCKS if block.language == language]


def prose(page: str) -> str:
    """The page without its fenced blocks and code spans."""
    text = re.sub(r"^```.*?^```", "", PAGES[page].read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"`[^`\n]*`", "", text)


def table(page: str, marker: str) -> list[list[str]]:
    """Cells of the first table after a comment that begins with `marker`, without its head."""
    text = PAGES[page].read_text(encoding="utf-8")
    assert f"<!-- {marker}:" in text, f"{page} has no comment <!-- {marker}: ... -->"
    rows: list[list[str]] = []
    for line in text.split(f"<!-- {marker}:", 1)[1].split("\n")[1:]:
        if line.startswith("|"):
            rows.append([cell.strip() for cell in line.strip("|").split("|")])
        elif rows:
            break
    return rows[2:]


# ---------------------------------------------------------------------------------------------------- links


def anchors(page: Path) -> set[str]:
    """GitHub's anchors of a page's headings."""
    heads = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES)
def test_relative_links_resolve(page: str) -> None:
    wrong = []
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (PAGES[page].parent / path).resolve() if path else PAGES[page]
        if not target.is_relative_to(ROOT) or not target.exists():
            wrong.append(f"{link}: no such file in the repository")
        elif anchor and anchor not in anchors(target):
            wrong.append(f"{link}: no such heading")
    assert not wrong, f"{page}: " + "; ".join(wrong)


@pytest.mark.parametrize("page", [page for page in PAGES if page != "CHANGELOG.md"])
def test_modules_that_are_named_exist(page: str) -> None:
    named = re.findall(r"`((?:\w+/)+\w+\.py)`", PAGES[page].read_text(encoding="utf-8"))
    assert [name for name in named if not any((root / name).is_file() for root in (ROOT, ROOT / "src/ramatch"))] == []


# ------------------------------------------------------------------------------------------- commands and code


def commands(text: str) -> Iterator[list[str]]:
    """The `ramatch` calls of a shell block, as argument lists."""
    for line in text.replace("\\\n", " ").split("\n"):
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.whitespace_split, lexer.commenters = True, "#"
        call: list[str] = []
        for word in [*lexer, ";"]:
            if not set(word) <= set("();<>|&"):
                call.append(word)
                continue
            while call and re.match(r"[A-Z_]+=", call[0]):  # NAME=value before a command
                call.pop(0)
            if call[:1] == ["ramatch"]:
                yield call[1:]
            call = []


CALLS = [
    pytest.param(call, id=f"{block}-{' '.join(call)[:40]}") for block in blocks("bash") for call in commands(block.text)
]


@pytest.mark.parametrize("call", CALLS)
def test_commands_parse(call: list[str]) -> None:
    assert callable(parse(call).run)  # a wrong verb or flag exits


def test_commands_that_do_not_exist_are_noticed() -> None:
    text = 'KEY=1 ramatch tag a.jpg --labels "a, b" | head  # comment\n'
    text += "ls; ramatch \\\n  serve --no-such-flag && ramatch eval\n"
    found = list(commands(text))
    assert found == [["tag", "a.jpg", "--labels", "a, b"], ["serve", "--no-such-flag"], ["eval"]]
    for call in found[1:]:
        with pytest.raises(SystemExit):
            parse(call)


@pytest.mark.parametrize("block", blocks("python"), ids=str)
def test_python_compiles(block: Block) -> None:
    compile(block.text, str(block), "exec")


# --------------------------------------------------------------------------------------------------- tables


def shown(value: object) -> str:
    """A setting as the tables write it, which is how YAML would."""
    if value is None:
        return "`null`"
    if isinstance(value, bool):
        return f"`{value}`".lower()
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`"


def test_the_table_of_presets_is_the_code() -> None:
    head = ("paper", "reference", "ramatch")
    assert {*head, "aligned", "aligned-best"} == set(PRESETS)
    rows = [[f"`{f.name}`", *(shown(getattr(PRESETS[p], f.name)) for p in head)] for f in dataclasses.fields(RAMConfig)]
    differing = [row for row in rows if len(set(row[1:])) > 1]
    found = table("docs/method.md", "presets")
    assert [row[:4] for row in found] == differing
    assert all(len(row) == 5 and row[4] for row in found), "every setting wants a word on what it means"


def test_what_the_aligned_preset_changes_is_said() -> None:
    import yaml

    text = (ROOT / "docs/method.md").read_text(encoding="utf-8")
    _, *said = text.split("with these changes:")
    for before, after, part in zip(("ramatch", "aligned-best"), ("aligned-best", "aligned"), said, strict=True):
        old, new = PRESETS[before].to_dict(), PRESETS[after].to_dict()
        items = re.findall(r"`([^`]*)`", part.split("\n\n")[0].split(". DINOv2")[0])
        found = {k: v for item in items for k, v in yaml.safe_load(item).items()}
        assert found == {name: new[name] for name in old if old[name] != new[name]}


def test_the_table_of_serve_settings_is_the_code() -> None:
    from ramatch.serve.settings import ServeSettings

    wanted = [[f"`{f.name}`", f"`{f.default}`"] for f in dataclasses.fields(ServeSettings)]
    assert [row[:2] for row in table("docs/serving.md", "settings")] == wanted


def test_the_metrics_are_the_keys_of_a_report() -> None:
    scores = [[0.9, 0.1, 0.4], [0.2, 0.8, 0.3], [0.5, 0.6, 0.7]]
    targets = [[1, 0, 0], [0, 1, 0], [0, 0, 1]]
    report = evaluate_scores(scores, targets, ["a", "b", "c"], ["a", "b"], ["c"], threshold=0.5)
    named = [name for row in table("docs/data.md", "metrics") for name in re.findall(r"`([^`]+)`", row[0])]
    keys = [name.replace("@k", f"@{k}") for name in named for k in ((3, 5) if "@k" in name else ("",))]
    assert len(keys) == len(set(keys))
    assert set(keys) == set(report.values)
    text = PAGES["docs/data.md"].read_text(encoding="utf-8")
    assert [key for key in report.to_dict() if key not in keys and f"`{key}`" not in text] == []


def test_every_benchmark_is_described() -> None:
    text = PAGES["docs/data.md"].read_text(encoding="utf-8")
    for name, benchmark in BENCHMARKS.items():
        row = re.search(rf"^\| `{name}` \| (\d+) / (\d+) \|.*<(.+)> \|$", text, flags=re.MULTILINE)
        assert row, f"docs/data.md has no row for {name}"
        assert row.groups() == (str(benchmark.seen), str(benchmark.unseen), benchmark.page)


def test_error_codes_of_the_server_are_listed() -> None:
    from ramatch.serve.errors import ERRORS

    source = "\n".join(p.read_text(encoding="utf-8") for p in (ROOT / "src/ramatch/serve").glob("*.py"))
    assert [code for code in ERRORS if source.count(f'"{code}"') < 2] == []  # each is raised somewhere
    text = PAGES["docs/serving.md"].read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d{3}[\d, ]*) \| (.*) \|$", text, flags=re.MULTILINE)
    wrong = [
        code for code, (status, _) in ERRORS.items() if not any(str(status) in s and f"`{code}`" in t for s, t in rows)
    ]
    assert wrong == []


# ---------------------------------------------------------------------------------------- annotation examples


def example_groups() -> dict[str, list[Block]]:
    """Blocks of data.md with a file name, by what is to be read: the file, or the folder it lies in."""
    groups: dict[str, list[Block]] = {}
    for block in fenced("docs/data.md"):
        if block.name:
            groups.setdefault(block.name.split("/")[0], []).append(block)
    return groups


@pytest.mark.parametrize("group", example_groups())
def test_annotation_examples_say_what_the_page_says(group: str, tmp_path: Path) -> None:
    for block in example_groups()[group]:
        file = tmp_path / block.name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(block.text, encoding="utf-8")
    for name in TRUTH:
        folder = tmp_path / group if (tmp_path / group).is_dir() else tmp_path
        Image.new("RGB", (640, 480)).save(folder / name)
    data = read_annotations(tmp_path / group)
    found = {record.key: set(record.labels) for record in data.records}
    assert found["beach.jpg"] == TRUTH["beach.jpg"]
    assert found.items() <= TRUTH.items()
    assert set(data.summary.issues) <= {"image without sidecar", "empty row"}  # a file's last line may end


def test_the_parquet_example_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pyarrow")
    monkeypatch.chdir(tmp_path)
    for name in TRUTH:
        Image.new("RGB", (8, 8)).save(name)
    (tmp_path / "parquet").mkdir()
    [block] = [b for b in blocks("python") if "pyarrow.parquet" in b.text]
    exec(compile(block.text, str(block), "exec"), {})
    data = read_annotations(tmp_path / "parquet", split="train")
    assert [set(record.labels) for record in data.records] == list(TRUTH.values())
    assert [record.load().size for record in data.records] == [(8, 8), (8, 8)]


# ----------------------------------------------------------------------------------------------- requests


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """`ramatch serve` with a tiny random model, as a process; its address."""
    httpx = pytest.importorskip("httpx")
    pytest.importorskip("uvicorn")
    sys.path.append(str(ROOT / "tests" / "modeling"))
    from tiny_models import tiny_ram

    from ramatch.library import Library
    from ramatch.modeling.checkpoints.folder import save_ram
    from ramatch.recognizer import Recognizer

    folder, photos = tmp_path_factory.mktemp("model"), tmp_path_factory.mktemp("photos")
    save_ram(tiny_ram(kind="dual"), folder, with_backbone=True)
    shutil.copy(photo_paths()[0], photos)
    with Library.open(photos / ".ramatch", create=True) as library:
        library.update(photos, Recognizer.from_pretrained(folder, device="cpu"))
    environment = {k: v for k, v in os.environ.items() if k != "RAMATCH_API_KEY"}
    environment["PYTHONPATH"] = os.pathsep.join(p for p in (str(ROOT / "src"), *sys.path) if p)
    command = [sys.executable, "-m", "ramatch", "serve", "--model", str(folder), "--device", "cpu", "--port", "0"]
    command += ["--index", str(photos)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        assert process.stderr is not None
        line = process.stderr.readline()
        found = re.search(r"http://127\.0\.0\.1:\d+", line)
        assert found, line + process.stderr.read()
        until = time.monotonic() + 60
        while httpx.get(f"{found.group()}/readyz").status_code != 200:
            assert time.monotonic() < until, "the server does not become ready"
            time.sleep(0.1)
        yield found.group()
    finally:
        process.terminate()
        process.wait(timeout=60)


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files that the examples name."""
    for name, photo in zip(("photo.jpg", "street.jpg"), photo_paths(), strict=False):
        shutil.copy(photo, tmp_path / name)
    (tmp_path / "garden.txt").write_text("rake\nhose\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


CURL = [block for block in blocks("bash") if "curl " in block.text]


@pytest.mark.skipif(not shutil.which("curl") or not shutil.which("bash"), reason="needs bash and curl")
def test_curl_examples_are_answered(server: str, desk: Path) -> None:
    assert len(CURL) >= 5
    options = '--silent --show-error --fail --write-out "\\n%{http_code}\\n"'
    wrapper = f'set -eo pipefail\ncurl() {{ command curl {options} "$@"; }}\n'
    for block in CURL:
        script = wrapper + block.text.replace("http://127.0.0.1:8000", server)
        environment = {**os.environ, "RAMATCH_API_KEY": "not-asked-for"}
        done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, env=environment, timeout=60)
        assert done.returncode == 0, f"{block}: {done.stdout}\n{done.stderr}"
        calls = block.text.count("curl http") + block.text.count("curl -X")
        assert len(re.findall(r"^20\d$", done.stdout, flags=re.MULTILINE)) == calls


def test_the_python_client_works(server: str, desk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    [block] = [b for b in blocks("python") if "httpx.Client" in b.text]
    exec(compile(block.text.replace("http://127.0.0.1:8000", server), str(block), "exec"), {})
    assert sorted(line.split()[0] for line in capsys.readouterr().out.splitlines()) == ["dog", "kite", "umbrella"]
