"""`ramatch serve` as a process of its own, and plain HTTP to it."""

from __future__ import annotations

import http.client
import json
import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from soak.process import TRACEBACK, Peak, memory, start

BOUNDARY = "soak-boundary"


class Server:
    """Started with `with`; killed at the end if it still runs."""

    def __init__(self, model: str | Path, log: Path, *options: str) -> None:
        self.log = log
        command = ["-m", "ramatch", "serve", "--model", str(model), "--port", "0", *options]
        with log.open("wb") as err:
            self.process = start(command, stdout=subprocess.DEVNULL, stderr=err)
        self._peak = Peak(self.process.pid)
        self.port = 0

    def __enter__(self) -> Server:
        self._wait(lambda: bool(self._address()), "said where it listens")
        self.port = int(self._address())
        self._wait(lambda: self.status("/readyz") == 200, "was ready")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._peak.stop()

    @property
    def rss(self) -> int:
        return memory(self.process.pid)

    @property
    def peak(self) -> int:
        return self._peak.most

    def status(self, path: str, timeout: float = 10) -> int | None:
        """Of a GET; None where no answer came."""
        return self.send("GET", path, timeout=timeout)[0]

    def send(
        self, method: str, path: str, body: bytes | None = None, kind: str = "application/json", timeout: float = 60
    ) -> tuple[int | None, bytes]:
        """Status and body, on a connection of its own; (None, reason) where no answer came."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        try:
            connection.request(method, path, body, {"Content-Type": kind} if body is not None else {})
            answer = connection.getresponse()
            return answer.status, answer.read()
        except (OSError, http.client.HTTPException) as error:
            return None, repr(error).encode()
        finally:
            connection.close()

    def tag(self, picture: bytes, timeout: float = 60, **fields: str) -> tuple[int | None, bytes]:
        return self.send("POST", "/v1/tag", form(picture, **fields), FORM, timeout)

    def ready_within(self, seconds: float) -> str:
        """Empty when /readyz is 200 within so many seconds, else what is wrong."""
        end = time.monotonic() + seconds
        while (status := self.status("/readyz", timeout=seconds)) != 200:
            if time.monotonic() > end:
                return f"/readyz gave {status} {seconds:g} s afterwards"
            time.sleep(0.1)
        return ""

    def terminate(self, seconds: float = 40) -> int | None:
        """Exit code after SIGTERM; None where it did not end in time."""
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def faults(self) -> list[str]:
        """Whether it died or wrote a traceback."""
        found = []
        if self.process.poll() is not None:
            found.append(f"the server ended by itself with code {self.process.returncode}")
        if count := self.log.read_bytes().count(TRACEBACK):
            errors = re.findall(
                rb"^(?:\w+\.)*\w*(?:Error|Exception|Interrupt)\b.*$", self.log.read_bytes(), re.MULTILINE
            )
            found.append(
                f"{count} tracebacks in its log, e.g. {errors[-1].decode('utf-8', 'replace')[:150] if errors else ''}"
            )
        return found

    def _address(self) -> str:
        found = re.findall(rb"http://[^ ]+:(\d+)/", self.log.read_bytes())
        return found[-1].decode() if found else ""

    def _wait(self, condition: Callable[[], bool], what: str, seconds: float = 60) -> None:
        end = time.monotonic() + seconds
        while not condition():
            if self.process.poll() is not None or time.monotonic() > end:
                self.process.kill()
                raise RuntimeError(f"no server that {what}: {self.log.read_text(errors='replace')[-400:]}")
            time.sleep(0.05)


FORM = f"multipart/form-data; boundary={BOUNDARY}"


def form(picture: bytes, **fields: str) -> bytes:
    """A multipart body with one picture."""
    parts = [f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{k}"\r\n\r\n{v}\r\n' for k, v in fields.items()]
    head = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="image"; filename="p.jpg"\r\n\r\n'
    return ("".join(parts) + head).encode() + picture + f"\r\n--{BOUNDARY}--\r\n".encode()


def error_code(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["code"])
    except (ValueError, KeyError, TypeError):
        return ""
