"""The container and the workflow that builds it, read as text: there is no Docker where the tests run."""

from __future__ import annotations

import fnmatch
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]
LOCK = ROOT / "constraints" / "container.txt"


class Step(NamedTuple):
    """An instruction of the Dockerfile: its stage, its name, the rest with continued lines joined."""

    stage: str
    name: str
    rest: str


def steps(text: str) -> list[Step]:
    joined = re.sub(r"\\\n", " ", re.sub(r"^#.*\n", "", text, flags=re.MULTILINE))
    found, stage = [], ""
    for line in filter(None, map(str.strip, joined.split("\n"))):
        name, _, rest = line.partition(" ")
        if name == "FROM":
            stage = rest.split(" AS ")[-1].strip()
        found.append(Step(stage, name, rest.strip()))
    return found


STEPS = steps((ROOT / "Dockerfile").read_text(encoding="utf-8"))
LAST = STEPS[max(i for i, step in enumerate(STEPS) if step.name == "FROM") :]


def named(name: str, among: list[Step] = STEPS) -> list[str]:
    return [step.rest for step in among if step.name == name]


def test_bases_are_pinned_to_a_patch_version() -> None:
    arguments = dict(rest.split("=", 1) for rest in named("ARG"))
    assert re.fullmatch(r"python:3\.\d+\.\d+-slim-\w+", arguments["BASE"])
    lock = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert f"--python-version {'.'.join(arguments['BASE'].split(':')[1].split('.')[:2])} " in lock
    stages = {step.stage for step in STEPS}
    for rest in named("FROM"):
        source = rest.split(" AS ")[0].replace("${DEVICE}", arguments["DEVICE"]).strip()
        assert source == "${BASE}" or source in stages, f"{source} is neither the pinned base nor a stage"
    for device in ("cpu", "cuda"):
        assert {f"packages-{device}", f"run-{device}"} <= stages


def test_it_does_not_run_as_root_and_says_whether_it_lives() -> None:
    [user] = named("USER", LAST)
    assert user.isdecimal(), "a number, which a cluster can check"
    assert int(user) > 0
    [check] = named("HEALTHCHECK", LAST)
    source = "\n".join(p.read_text(encoding="utf-8") for p in (ROOT / "src/ramatch/serve").glob("*.py"))
    [path] = re.findall(r"http://127\.0\.0\.1:8000(/\w+)", check)
    assert f'"{path}"' in source
    code = check.split('"-c", "', 1)[1].rsplit('"]', 1)[0]
    compile(code, "HEALTHCHECK", "exec")
    assert named("EXPOSE", LAST) == ["8000"]


def test_its_command_is_one_of_ours() -> None:
    import json

    from ramatch.cli import parse

    [command] = [json.loads(rest) for rest in named("CMD", LAST)]
    assert command[0] == "ramatch"
    assert parse(command[1:]).host == "0.0.0.0"


def test_packages_come_from_the_lock() -> None:
    installs = [(s.stage, s.rest) for s in STEPS if s.name == "RUN" and "pip install" in s.rest]
    assert len(installs) == 3
    for stage, rest in installs:
        for call in re.findall(r"pip install[^&]*", rest):
            assert "--no-deps" in call
            ours, other_index = "/build/source" in call, "--index-url" in call
            assert "--require-hashes" in call or ours or (other_index and stage == "packages-cpu"), call
    for rest in named("COPY"):
        for source in rest.split()[:-1]:
            assert source.startswith(("--from=", "/")) or (ROOT / source).exists(), source


@pytest.mark.skipif(not (shutil.which("awk") and shutil.which("grep")), reason="needs awk and grep")
def test_the_lock_without_cuda_is_the_lock_but_for_torch_and_cuda(tmp_path: Path) -> None:
    [run] = [step.rest for step in STEPS if step.name == "RUN" and "awk" in step.rest]
    shutil.copy(LOCK, tmp_path)
    cut = " && ".join(part for part in run.split(" && ") if "pip install" not in part)
    subprocess.run(["sh", "-c", cut], cwd=tmp_path, check=True)

    def packages(name: str) -> dict[str, list[str]]:
        """Package → its hashes."""
        text = (tmp_path / name).read_text(encoding="utf-8")
        blocks = re.findall(r"^([a-z][\w.-]*==\S+)(.*?)(?=^[a-z]|\Z)", text, flags=re.MULTILINE | re.DOTALL)
        return {name: re.findall(r"sha256:(\w+)", hashes) for name, hashes in blocks}

    whole, rest, torch = packages("container.txt"), packages("rest.txt"), packages("torch.txt")
    assert {name.split("==")[0] for name in torch} == {"torch", "torchvision"}
    left_out = whole.keys() - rest.keys() - torch.keys()
    assert all(re.match(r"(nvidia|cuda|triton)", name) for name in left_out)
    assert left_out
    assert all(rest[name] == whole[name] and rest[name] for name in rest)
    assert not [name for name in rest if re.match(r"(nvidia|cuda|triton|torch)", name)]


def test_the_context_has_what_is_copied_and_nothing_secret() -> None:
    lines = [line for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines() if line[:1] != "#"]
    assert lines[0] == "*", "everything is left out but what is named"
    taken = [line[1:] for line in lines if line.startswith("!")]
    copied = [s for rest in named("COPY") for s in rest.split()[:-1] if not s.startswith(("--", "/"))]
    assert sorted(taken) == sorted(copied)
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    assert not re.search(r"(API_KEY|TOKEN|PASSWORD|SECRET)\s*=", text, flags=re.IGNORECASE)
    assert not [name for name in taken if fnmatch.fnmatch(name, ".*")]


def test_hadolint_has_nothing_to_say() -> None:
    found = shutil.which("hadolint", path=str(Path(sys.executable).parent)) or shutil.which("hadolint")
    if not found:
        pytest.skip("hadolint is not installed")
    done = subprocess.run([found, str(ROOT / "Dockerfile")], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "")


def test_the_workflow_builds_checks_and_lints() -> None:
    yaml = pytest.importorskip("yaml")
    workflow = yaml.safe_load((ROOT / ".github/workflows/package.yml").read_text(encoding="utf-8"))
    assert workflow["env"]["MAX_WHEEL_MB"] == 55
    told = {
        name: [step.get("run", step.get("uses", "")) for step in job["steps"]] for name, job in workflow["jobs"].items()
    }
    wheel, image = "\n".join(told["wheel"]), "\n".join(told["image"])
    for word in ("python -m build", "MAX_WHEEL_MB", "venv clean", "ramatch tag"):
        assert word in wheel
    for word in ("hadolint/hadolint-action@", "docker build", "--read-only", "/readyz", "id -u"):
        assert word in image
    photo = re.search(r'p\.stem == "(\w+)"', wheel)
    assert photo
    assert (ROOT / f"src/ramatch/assets/photos/{photo[1]}.jpg").is_file()
