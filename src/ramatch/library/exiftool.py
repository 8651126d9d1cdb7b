"""ExifTool as a process that stays open: starting Perl for every image would cost more than the work."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import RamatchError

MISSING = (
    "writing into images needs exiftool: apt install libimage-exiftool-perl, brew install exiftool, or "
    "https://exiftool.org; sidecars (xmp, txt) need nothing"
)

# it waits for ever at the end of its input, so that one that was left behind by a kill would stay
UNTIL_WE_END = """{ cat; printf '%s\\n' -stay_open False; } | "$0" "$@" """


def find_program() -> str:
    program = shutil.which("exiftool")
    if program is None:
        raise RamatchError(MISSING)
    return program


class ExifTool:
    """A process to be closed in the end. Names of files travel as the disk has them, all text as UTF-8."""

    def __init__(self) -> None:
        command = [find_program(), "-stay_open", "True", "-@", "-"]
        if os.name == "posix":
            command = ["sh", "-c", UNTIL_WE_END, *command]
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the process)
        self._count = 0
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            start_new_session=True,  # Ctrl-C is for us; what it is writing is finished
        )

    def close(self) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(b"-stay_open\nFalse\n")
            self._process.stdin.close()
        except OSError:  # it is gone
            pass
        self._process.wait()
        self._errors.close()

    def run(self, *arguments: str | Path) -> tuple[bytes, str]:
        """What it prints and what it complains of."""
        lines = [os.fsencode(argument) for argument in arguments]
        if any(b"\n" in line or b"\r" in line for line in lines):
            raise RamatchError("a line break in a name, which exiftool cannot be told")
        self._count += 1
        ready = b"{ready%d}" % self._count
        self._errors.seek(0)
        self._errors.truncate()
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        out = bytearray()
        try:
            stdin.write(b"\n".join([*lines, b"-execute%d\n" % self._count]))
            stdin.flush()
            while not out.rstrip().endswith(ready):
                part = os.read(stdout.fileno(), 1 << 16)
                if not part:
                    raise RamatchError(f"exiftool ended: {self._complaints()}")
                out += part
        except BrokenPipeError:
            raise RamatchError(f"exiftool ended: {self._complaints()}") from None
        return bytes(out.rstrip()[: -len(ready)]), self._complaints()

    def _complaints(self) -> str:
        self._errors.seek(0)
        return " ".join(self._errors.read().decode("utf-8", "replace").split())

    def read(self, path: Path, *tags: str) -> dict[str, Any]:
        """Tags of a file by their names, values as text."""
        out, complaints = self.run("-j", *(f"-{tag}" for tag in tags), path)
        try:
            return json.loads(out, parse_int=str, parse_float=str)[0]
        except (ValueError, IndexError):
            raise RamatchError(complaints or "exiftool cannot read it") from None

    def block(self, path: Path) -> bytes:
        """The XMP packet of a file, as it is; empty if there is none."""
        return self.run("-b", "-XMP", path)[0]

    def write(self, path: Path, changes: Sequence[str], packet: bytes) -> None:
        """Put a packet (none at all if empty) and other changes into a file; it is replaced once all is written."""
        with tempfile.NamedTemporaryFile(suffix=".xmp") as file:
            file.write(packet)
            file.flush()
            xmp = f"-XMP<={file.name}" if packet else "-XMP:all="
            out, complaints = self.run("-overwrite_original", *changes, xmp, path)
        if b"1 image files updated" not in out:
            raise RamatchError(f"exiftool did not write it: {complaints or out.decode('utf-8', 'replace').strip()}")
