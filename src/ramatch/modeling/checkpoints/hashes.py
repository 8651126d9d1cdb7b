"""SHA-256 of a model folder's files, written when it is saved and checked when it is loaded: a flipped bit in weights
changes answers without a word. The form is that of `sha256sum`. It guards against damage, not against somebody who can
write into the folder and so to this list too."""

from __future__ import annotations

import hashlib
from pathlib import Path

from ...errors import RamatchError
from ...files import read_lines, write_text

LIST = "SHA256SUMS.txt"


def digest(path: Path) -> str:
    found = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            found.update(chunk)
    return found.hexdigest()


def write_hashes(folder: str | Path) -> None:
    """List the settings and weights of a folder; whoever changes one of them afterwards calls this again."""
    folder = Path(folder)
    names = sorted(p for p in folder.rglob("*") if p.suffix in (".json", ".safetensors") and p.is_file())
    write_text(folder / LIST, "".join(f"{digest(p)}  {p.relative_to(folder).as_posix()}\n" for p in names))


def check_hashes(folder: Path) -> None:
    """Refuse a folder whose files are not those of its list. A folder without a list is taken as it is."""
    if not (folder / LIST).is_file():
        return
    for line in read_lines(folder / LIST):
        wanted, _, name = line.partition("  ")
        path = folder / name
        if not name or ".." in Path(name).parts or Path(name).is_absolute():
            raise RamatchError(f"{folder / LIST}: '{line[:80]}' is no line of a list of hashes")
        if path.is_file() and digest(path) != wanted:  # what is missed is said where it is needed
            raise RamatchError(
                f"{path} is not the file that was saved (its SHA-256 is not the one in {LIST}): it is damaged, so copy "
                f"the folder again; if you changed it on purpose, delete {LIST}"
            )
