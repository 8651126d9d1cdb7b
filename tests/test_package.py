"""The package's own data: one version, and the oldest dependencies that CI tests."""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path

import pytest

import ramatch

tomllib = pytest.importorskip("tomllib")  # Python 3.11
ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_the_version_has_one_place() -> None:
    assert PROJECT["project"]["dynamic"] == ["version"]
    assert PROJECT["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "ramatch.__version__"}
    written = [p for p in (ROOT / "src").rglob("*.py") if ramatch.__version__ in p.read_text(encoding="utf-8")]
    assert [p.name for p in written] == ["__init__.py"]
    assert f"## [{ramatch.__version__}]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_the_installed_version_is_the_written_one() -> None:
    try:
        installed = metadata.version("ramatch")
    except metadata.PackageNotFoundError:
        pytest.skip("ramatch is not installed, only on the path")
    assert installed == ramatch.__version__


def test_the_oldest_dependencies_are_the_lower_bounds() -> None:
    extras = {k: v for k, v in PROJECT["project"]["optional-dependencies"].items() if k not in ("dev", "docs")}
    wanted = {line for extra in extras.values() for line in extra if not line.startswith("ramatch[")}
    bounds = {re.sub(r"\[.*?\]", "", line) for line in wanted | set(PROJECT["project"]["dependencies"])}
    lines = (ROOT / "constraints" / "oldest.txt").read_text(encoding="utf-8").splitlines()
    assert [line.replace(">=", "==") for line in sorted(bounds)] == [x for x in lines if not x.startswith("#")]


def test_ci_runs_the_python_versions_that_are_promised() -> None:
    yaml = pytest.importorskip("yaml")
    jobs = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8"))["jobs"]
    tested = jobs["test"]["strategy"]["matrix"]["python"]
    named = [c.rsplit(" ", 1)[1] for c in PROJECT["project"]["classifiers"] if re.search(r":: 3\.\d+$", c)]
    assert tested == named
    lowest = PROJECT["project"]["requires-python"].removeprefix(">=")
    assert lowest == tested[0] == jobs["oldest"]["steps"][1]["with"]["python-version"]


def test_extras_that_errors_name_exist() -> None:
    extras = set(PROJECT["project"]["optional-dependencies"])
    named = {
        name
        for file in (ROOT / "src").rglob("*.py")
        for name in re.findall(r"ramatch\[(\w+)\]", file.read_text(encoding="utf-8"))
    }
    assert named <= extras
