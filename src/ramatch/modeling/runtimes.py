"""Other programs that run the trunk on a CPU, faster than torch does: OpenVINO and onnxruntime.

What they run is made from the model's `ImagePart` at the first use and kept in the user's cache folder, named by a hash
of everything that it depends on. Labels and matching stay with torch: they take a tenth of the time.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Lock

import numpy as np
import torch
from torch import Tensor

from .. import __version__
from ..config import RUNTIMES
from ..errors import RamatchError, require
from ..files import whole_folder
from .exported import ImagePart, in_int8, trunk_of, write_image_part
from .ram import RAM
from .remembered import cache_folder
from .types import Runtime, Trunk

FORM = 1  # of what is kept
KEPT = 8  # models; those used last stay
PACKAGES = {"openvino": "openvino", "openvino-int8": "openvino", "onnx": "onnxruntime"}
AT_ONCE = 4  # images that one stream takes: what flows between layers then stays in its caches


def choose(name: str, ram: RAM) -> str:
    """The runtime that `auto` stands for, or the one named if it can run here. `auto` is $RAMATCH_RUNTIME, or torch:
    OpenVINO in 8 bits is twice as fast, but a Python process that it ran in has crashed later on (see
    docs/performance.md), so it wants to be asked for."""
    if name == "auto":
        name = os.environ.get("RAMATCH_RUNTIME") or "torch"
    if name not in RUNTIMES:
        raise RamatchError(f"unknown runtime '{name}'; known: {', '.join(RUNTIMES)}")
    if name in ("auto", "torch"):
        return "torch"
    if ram.backbone.device.type != "cpu":
        raise RamatchError(f"runtime '{name}' runs on a CPU; the model is on {ram.backbone.device}: use torch there")
    if type(ram) is not RAM:
        raise RamatchError(f"runtime '{name}' runs RAM, and the model is {type(ram).__name__}: use torch")
    require(PACKAGES[name], "onnx" if name == "onnx" else "openvino")
    return name


def make_runtime(name: str, ram: RAM, photos: Callable[[], Tensor]) -> Runtime | None:
    """The runtime of this name (not auto), compiled; None for torch. `photos`: uint8 (B, 3, H, W), to find the range of
    numbers on, asked for where that is not known yet."""
    if name == "torch":
        return None
    kind = _ONNX if name == "onnx" else _OpenVINO
    folder = cache_folder() / f"runtime-{_fingerprint(ram, name)}"
    if (folder / kind.FILE).is_file():
        with contextlib.suppress(Exception):  # damaged, or of another release, each says it in its own way: made again
            found = kind(name, ram, folder / kind.FILE)
            os.utime(folder)  # used now
            return found
        shutil.rmtree(folder, ignore_errors=True)
    part = (in_int8(ram, photos()) if name.endswith("-int8") else ImagePart(ram)).eval()
    try:
        with whole_folder(folder) as new:
            kind.write(part, new / kind.FILE)
        _drop_oldest(folder.parent)
        return kind(name, ram, folder / kind.FILE)
    except (OSError, RamatchError):  # nothing can be written there, or somebody else did just now
        with TemporaryDirectory() as place:
            kind.write(part, Path(place) / kind.FILE)
            return kind(name, ram, Path(place) / kind.FILE)


def _drop_oldest(place: Path) -> None:
    folders = sorted(place.glob("runtime-*"), key=lambda path: path.stat().st_mtime, reverse=True)
    for old in folders[KEPT:]:
        shutil.rmtree(old, ignore_errors=True)


class _OpenVINO:
    """Threads may share one: a call takes the infer requests of all streams."""

    FILE = "model.xml"

    def __init__(self, name: str, ram: RAM, file: Path) -> None:
        openvino = require("openvino", "openvino")
        self.name, self.size, self._form = name, _size(ram), _form(ram)
        threads = torch.get_num_threads()
        # on a few cores each takes images of its own, on many a few take one together
        streams = 1 if threads == 1 else max(2, threads // 4)
        options = {
            "INFERENCE_NUM_THREADS": threads,
            "NUM_STREAMS": str(streams),
            "INFERENCE_PRECISION_HINT": "bf16" if ram.backbone.dtype == torch.bfloat16 else "f32",
        }
        self._compiled = openvino.Core().compile_model(file, "CPU", options)
        self._requests = [self._compiled.create_infer_request() for _ in range(streams)]
        self._lock = Lock()

    @staticmethod
    def write(part: ImagePart, file: Path) -> None:
        """In a process of its own, whose memory goes back."""
        require("openvino", "openvino")
        given = file.with_suffix(".pt")
        torch.save(part, given)
        code = "import sys; from ramatch.modeling.runtimes import write_openvino; write_openvino(*sys.argv[1:])"
        command = [sys.executable, "-c", code, str(given), str(file)]
        env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        run = subprocess.run(command, env=env, capture_output=True, text=True)
        given.unlink()
        if run.returncode:
            raise RamatchError(f"OpenVINO could not read the model: {run.stderr.strip()[-300:]}; use --runtime torch")

    def __call__(self, images: Tensor) -> Trunk:
        rows, many = images.contiguous().numpy(), len(self._requests)
        each = max(1, min(AT_ONCE, -(-len(rows) // many)))
        parts = [rows[i : i + each] for i in range(0, len(rows), each)]
        found: list[Trunk] = []
        with self._lock:
            for first in range(0, len(parts), many):
                busy = parts[first : first + many]
                for request, part in zip(self._requests, busy, strict=False):
                    request.start_async([part])
                for request, _ in zip(self._requests, busy, strict=False):
                    request.wait()
                    found.append(self._form([request.get_tensor(output).data for output in self._compiled.outputs]))
        return Trunk.cat(found)


def write_openvino(given: str, file: str) -> None:
    """OpenVINO's form of an `ImagePart` that `torch.save` wrote, a moment ago in this program."""
    openvino = require("openvino", "openvino")
    frontends = require("openvino.frontend", "openvino").FrontEndManager()
    decoder = require("openvino.frontend.pytorch.ts_decoder", "openvino").TorchScriptPythonDecoder
    part = torch.load(given, weights_only=False)
    shape = [-1, 3, *_size(part.ram)]
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of tracing: what depends on the size of the image, which is fixed here
        example = torch.zeros(1, *shape[1:], dtype=torch.uint8)
        # not by `openvino.convert_model`, which reports each use to its makers over the network
        frontend = frontends.load_by_framework("pytorch")
        traced = decoder(part, example_input=(example,))  # which the frontend asks until the end
        model = frontend.convert(frontend.load(traced))
    pixels = model.get_parameters()[0]
    pixels.set_element_type(openvino.Type.u8)
    pixels.set_partial_shape(openvino.PartialShape(shape))
    model.validate_nodes_and_infer_types()
    openvino.save_model(model, file, compress_to_fp16=False)


class _ONNX:
    """The exported image part in onnxruntime. Threads may share one."""

    FILE = "image.onnx"

    def __init__(self, name: str, ram: RAM, file: Path) -> None:
        runtime = require("onnxruntime", "onnx")
        self.name, self.size, self._form = name, _size(ram), _form(ram)
        options = runtime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        self._session = runtime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])

    @staticmethod
    def write(part: ImagePart, file: Path) -> None:
        write_image_part(part, file)

    def __call__(self, images: Tensor) -> Trunk:
        parts = images.contiguous().split(AT_ONCE)
        return Trunk.cat([self._form(self._session.run(None, {"pixels": part.numpy()})) for part in parts])


def _size(ram: RAM) -> tuple[int, int]:
    height, width = ram.preprocess.size
    return height, width


def _form(ram: RAM) -> Callable[[Sequence[np.ndarray]], Trunk]:
    """What makes a trunk of outputs: copies in the types that `RAM.recognize` takes; the global feature in float32."""
    grid, dtype = ram.backbone.vision.grid(*_size(ram)), ram.region_set.region_dtype or ram.backbone.dtype

    def form(outputs: Sequence[np.ndarray]) -> Trunk:
        image, *rest = map(torch.from_numpy, outputs)
        return trunk_of([image.to(torch.float32, copy=True), *(x.to(dtype, copy=True) for x in rest)], grid)

    return form


def _fingerprint(ram: RAM, name: str) -> str:
    """Of all that a kept model depends on: weights, settings, sizes, how it is made."""
    digest = hashlib.blake2b(digest_size=16)
    digest.update(repr((FORM, __version__, name, ram.config, ram.preprocess, ram.backbone.vision.config)).encode())
    state = ram.state_dict()
    for key in sorted(k for k in state if k.startswith(("backbone.vis", "region_set."))):
        digest.update(key.encode())
        digest.update(state[key].detach().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()
