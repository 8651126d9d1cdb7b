"""Recognizer: set a vocabulary once, predict many images. What most users touch."""

from __future__ import annotations

import hashlib
import os
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from threading import Lock
from typing import Any, overload

import numpy as np
import torch
from torch import Tensor

from .config import RAMConfig
from .config import preset as named_preset
from .data.images import ImageError, load_image
from .errors import RamatchError
from .evaluation.calibration import Calibrator
from .files import write_json
from .modeling.backbone import Backbone
from .modeling.checkpoints.folder import is_model_folder, load_ram, save_ram
from .modeling.checkpoints.loading import BUNDLED, bundled_model, read_json
from .modeling.fast import FastOutput, FastRAM, FastTrunk, suits
from .modeling.matching import MATCHERS
from .modeling.ram import RAM, Labels, Output
from .modeling.region_set import Trunk
from .modeling.text import clean_labels
from .prediction import Prediction

Vocabulary = Labels
Loaded = tuple[Tensor, "str | None", tuple[int, int]]  # uint8 pixels (3, H, W), source, original (width, height)
PATIENCE = 4  # batches of one size before it gets a CUDA graph: one photo is tagged before that would be recorded
SINGLE = (str, os.PathLike, bytes, bytearray, memoryview)


class Recognizer:
    """Open-vocabulary multi-label recognition. One object serves one thread at a time.

    >>> recognizer = Recognizer.from_pretrained("ramatch-mini")
    >>> recognizer.set_vocabulary(["dog", "umbrella", "kite"])
    >>> recognizer.predict("photo.jpg").top(3)
    """

    def __init__(
        self, ram: RAM, *, calibrator: Calibrator | None = None, name: str = "model", cache: int = 64, fast: bool | None = None
    ) -> None:  # fmt: skip
        """`cache`: how many images' trunks are kept, so that a new vocabulary does not run the image tower again.

        `fast`: predict with `FastRAM`, which holds a rearranged copy of the weights, where it computes the same and nobody asks for
        maps or another matcher; by default on a GPU.
        """
        self.ram, self.calibrator, self.name = ram.eval(), calibrator, name
        self.vocabulary: Vocabulary | None = None
        self.fast = fast
        self._engine: FastRAM | None = None
        self._engine_labels: Vocabulary | None = None
        self._busy = Lock()
        self._trunks: OrderedDict[str, Trunk | FastTrunk] = OrderedDict()
        self._cache = cache

    @classmethod
    def from_pretrained(
        cls,
        name: str | Path = "ramatch-mini",
        *,
        device: str | torch.device | None = None,
        dtype: torch.dtype | None = None,
        label_features: str | Path | None = None,
        backbone: str | None = None,
        preset: str | RAMConfig = "ramatch",
        image_size: int | tuple[int, int] | None = None,
        cache: int = 64,
        fast: bool | None = None,
    ) -> Recognizer:
        """From a bundled model's name, a folder written by `save_pretrained` (or the run folder around it), or any CLIP
        (hub id, folder, state dict).

        A plain CLIP is used zero-shot: frozen, with self-aware attention, without learned parts; `preset` and `image_size`
        set how. `dtype` of the frozen part: by default bfloat16 on a GPU, and on CPUs that compute in it for models that say
        it is fine (`cpu_dtype` in their config.json, as ramatch-mini does); float32 elsewhere.
        """
        device = _device(device)
        folder = bundled_model(str(name)) or Path(name).expanduser()
        if is_model_folder(folder / "model"):  # a training run
            folder = folder / "model"
        calibrator, half = None, device.type == "cuda"
        if is_model_folder(folder):
            # a model may say that bf16 is fine for it; on CPUs that compute in it, it is twice as fast
            half = half or (read_json(folder / "config.json").get("cpu_dtype") == "bfloat16" and cpu_has_bfloat16())
            ram = load_ram(folder, backbone=backbone, label_features=label_features)
            if (folder / "calibration.json").is_file():
                calibrator = Calibrator.from_dict(read_json(folder / "calibration.json"))
        elif str(name) in BUNDLED:
            raise RamatchError(f"the model '{name}' is missing from this installation; reinstall ramatch")
        else:
            where = str(folder) if folder.exists() else str(name)
            own = Backbone.from_pretrained(where, image_size=image_size, label_features=label_features)
            ram = RAM(own, zero_shot(named_preset(preset) if isinstance(preset, str) else preset, own))
        dtype = dtype or (torch.bfloat16 if half else torch.float32)
        ram.to(device)
        ram.backbone.to(dtype)
        ram.region_set.to(dtype)
        return cls(ram, calibrator=calibrator, name=str(name), cache=cache, fast=fast)

    def save_pretrained(self, folder: str | Path, *, with_backbone: bool = False, half: bool = False) -> None:
        """Write adapters (a few MB), settings and calibration; the backbone too if the folder shall stand alone."""
        save_ram(self.ram, folder, with_backbone=with_backbone, half=half)
        if self.calibrator is not None:
            write_json(Path(folder) / "calibration.json", self.calibrator.to_dict())

    @property
    def device(self) -> torch.device:
        return self.ram.backbone.device

    @property
    def labels(self) -> tuple[str, ...]:
        return self.vocabulary.names if self.vocabulary is not None else ()

    @property
    def calibrated(self) -> bool:
        """Whether probabilities are calibrated: each label's own. Otherwise they are relative to the vocabulary."""
        return self.calibrator is not None

    def set_vocabulary(self, labels: Sequence[str], *, templates: Sequence[str] | None = None) -> None:
        """Encode the labels once; every later `predict` uses them."""
        self.vocabulary = self.encode_vocabulary(labels, templates=templates)

    @torch.inference_mode()
    def encode_vocabulary(self, labels: Sequence[str], *, templates: Sequence[str] | None = None) -> Vocabulary:
        """An encoded vocabulary for `predict(vocabulary=…)`, when several are in use."""
        names = clean_labels(labels)
        if templates is None:
            return self.ram.encode_labels(names)
        label_set = self.ram.label_set
        kept = label_set.config
        label_set.config = kept.replace(templates=tuple(templates))
        try:
            return self.ram.encode_labels(names)
        finally:
            label_set.config = kept

    @overload
    def predict(
        self, images: list | tuple, *, vocabulary: Vocabulary | None = ..., matcher: str | None = ..., maps: bool = ...,
        plan: bool = ..., batch_size: int = ...,
    ) -> list[Prediction]: ...  # fmt: skip
    @overload
    def predict(
        self, images: Any, *, vocabulary: Vocabulary | None = ..., matcher: str | None = ..., maps: bool = ...,
        plan: bool = ..., batch_size: int = ...,
    ) -> Any: ...  # fmt: skip

    @torch.inference_mode()
    def predict(
        self,
        images: Any,
        *,
        vocabulary: Vocabulary | None = None,
        matcher: str | None = None,
        maps: bool = False,
        plan: bool = False,
        batch_size: int = 32,
    ) -> Any:
        """One image → one `Prediction`; a list or other iterable → a list of them.

        Images may be paths, PIL images, arrays, tensors, bytes or file objects. `matcher` overrides the model's own;
        `maps` (or `plan`) keeps what heat maps and pictures need.

        `Prediction.calibrated` says which kind of probabilities one has. Calibrated: one number per label, whatever else
        was asked for; 0.5 means even odds. Not calibrated: the paper's score, the mean of two softmaxes over the
        vocabulary; it sums to 1, so it only compares the labels of this vocabulary (a single label always gets 1).
        """
        vocabulary = vocabulary or self.vocabulary
        if vocabulary is None:
            raise RamatchError("no vocabulary is set; call set_vocabulary([...]) first")
        if matcher is not None and matcher not in MATCHERS:
            raise RamatchError(f"unknown matcher '{matcher}'; known: {', '.join(MATCHERS)}")
        if batch_size < 1:
            raise RamatchError(f"batch_size must be at least 1, got {batch_size}")
        if is_single(images):
            return self.predict([images], vocabulary=vocabulary, matcher=matcher, maps=maps, plan=plan)[0]
        out: list[Prediction] = []
        for chunk in _chunks(images, batch_size):
            loaded = [self._load(image) for image in chunk]
            out += self.predict_loaded(loaded, vocabulary=vocabulary, matcher=matcher, maps=maps or plan)
        return out

    @torch.inference_mode()
    def predict_loaded(
        self,
        loaded: list[Loaded],
        *,
        vocabulary: Vocabulary | None = None,
        matcher: str | None = None,
        maps: bool = False,
    ) -> list[Prediction]:
        """Predictions of one batch of images that are decoded and resized already."""
        vocabulary = vocabulary or self.vocabulary
        if vocabulary is None:
            raise RamatchError("no vocabulary is set; call set_vocabulary([...]) first")
        pixels = [pixels for pixels, _, _ in loaded]
        if loaded and not maps and matcher in (None, self.ram.config.matcher) and suits(self.ram, self.fast):
            with self._busy:  # the engine has one place for a vocabulary and one for a batch
                engine = self._engine_for(vocabulary, len(loaded))
                kept = self._trunk(pixels, "fast", lambda fresh: engine.trunk(torch.stack(fresh)))
                assert isinstance(kept, FastTrunk)
                output = engine.recognise(kept)
            return self._predictions(output, kept.grid, vocabulary, loaded)
        with self._busy:  # what one thread looks up in the cache another might throw out
            trunk = self._trunk(pixels, "plain", lambda fresh: self.ram.trunk(self._normalised(torch.stack(fresh))))
        assert isinstance(trunk, Trunk)
        whole = self._recognise(trunk, vocabulary, matcher)
        return self._predictions(whole, whole.grid, vocabulary, loaded, whole if maps else None)

    def _engine_for(self, vocabulary: Vocabulary, count: int) -> FastRAM:
        """The engine, made at its first use, with this vocabulary and room for so many images."""
        if self._engine is None:
            best = self.calibrator is not None
            self._engine = FastRAM(
                self.ram, batch_size=count, dtype=self.ram.backbone.dtype, best=best, patience=PATIENCE
            )
        self._engine.batch_size = max(self._engine.batch_size, count)
        if self._engine_labels is not vocabulary:
            self._engine.set_labels(vocabulary)
            self._engine_labels = vocabulary
        return self._engine

    def _recognise(self, trunk: Trunk, vocabulary: Vocabulary, matcher: str | None) -> Output:
        own = self.ram.config
        try:
            if matcher is not None:
                self.ram.config = own.replace(matcher=matcher)
            return self.ram.recognise(trunk, vocabulary)
        finally:
            self.ram.config = own

    def _load(self, image: Any) -> Loaded:
        """Pixels uint8 (3, H, W), the source's name, the original (width, height)."""
        picture = load_image(image)
        return self.ram.preprocess.resize(picture), _source(image), picture.size

    def _trunk(
        self, pixels: list[Tensor], kind: str, make: Callable[[list[Tensor]], Trunk | FastTrunk]
    ) -> Trunk | FastTrunk:
        """Trunks of a batch, of one kind, from the cache where the same pixels were seen before."""
        if not self._cache:
            return make(pixels)
        keys = [f"{kind} {_key(p)}" for p in pixels]
        fresh = {key: p for key, p in zip(keys, pixels, strict=True) if key not in self._trunks}
        for key in keys:
            if key in self._trunks:
                self._trunks.move_to_end(key)  # the least recently used goes first
        found: dict[str, Any] = {}
        if fresh:
            new = make(list(fresh.values()))
            found = {key: new[i : i + 1] for i, key in enumerate(fresh)}
        if list(fresh) == keys:  # the usual case: nothing to put together
            batch = new
        else:
            parts: list[Any] = [found[key] if key in found else self._trunks[key] for key in keys]
            batch = parts[0].cat(parts)
        self._keep(found)
        return batch

    def _keep(self, trunks: dict[str, Trunk | FastTrunk]) -> None:
        for key, trunk in list(trunks.items())[-self._cache :]:
            self._trunks[key] = trunk.clone()  # a slice would hold the whole batch in memory
        while len(self._trunks) > self._cache:
            self._trunks.popitem(last=False)

    def _normalised(self, pixels: Tensor) -> Tensor:
        return self.ram.preprocess.normalise(pixels.to(self.device)).to(self.ram.backbone.dtype)

    def _relative(self, output: Output | FastOutput) -> Tensor:
        """The paper's normalised mean ½ (softmax(s_G / τ_G) + softmax(s_R / τ_R)) over the vocabulary, (B, N)."""
        region, image = output.region / self.ram.tau_region, output.image / self.ram.tau_global
        return (region.softmax(-1) + image.softmax(-1)) / 2

    def _predictions(
        self,
        output: Output | FastOutput,
        grid: tuple[int, int],
        vocabulary: Vocabulary,
        loaded: list[Loaded],
        whole: Output | None = None,
    ) -> list[Prediction]:
        """`whole`: what maps are made of, if they are wanted."""
        if self.calibrator is not None:
            assert output.best is not None
            features = torch.stack([output.image, output.region, output.best], dim=-1).cpu()
            probabilities = np.asarray(self.calibrator(features, vocabulary.names))
            ranking = probabilities
        else:
            probabilities = self._relative(output).float().cpu().numpy()
            ranking = self.ram.score(output).float().cpu().numpy()
        plan = similarities = marginal = None
        if whole is not None:
            plan = (whole.match.plan / whole.mass).float().cpu().numpy()
            similarities = whole.sim.float().cpu().numpy()
            marginal = whole.match.marginal.float().cpu().numpy()
        return [
            Prediction(
                labels=vocabulary.names,
                probabilities=probabilities[i],
                scores=ranking[i],
                calibrated=self.calibrated,
                grid=grid,
                similarities=None if similarities is None else similarities[i],
                plan=None if plan is None else plan[i],
                marginal=None if marginal is None else marginal[i],
                source=source,
                size=size,
            )
            for i, (_, source, size) in enumerate(loaded)
        ]


def zero_shot(config: RAMConfig, backbone: Backbone) -> RAMConfig:
    """Settings for a frozen model without any learned part."""
    layers = backbone.vision.config.layers
    return config.replace(
        tss=False, visual_prompts=0, prompts="none", adapted_layers=min(config.adapted_layers, layers),
        saa_layers=min(config.saa_layers, layers),
    )  # fmt: skip


def cpu_has_bfloat16() -> bool:
    """Whether this CPU multiplies bf16 matrices natively (AVX512-BF16 or AMX); False where torch cannot tell."""
    checks = (getattr(torch.cpu, name, None) for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"))
    return any(check() for check in checks if check is not None)


def is_single(images: Any) -> bool:
    """Whether this is one image rather than a collection of them."""
    if isinstance(images, (*SINGLE, np.ndarray, Tensor)):
        return not (isinstance(images, (np.ndarray, Tensor)) and images.ndim == 4)
    return hasattr(images, "read") or hasattr(images, "convert")


def predict_files(
    recognizer: Recognizer,
    paths: Sequence[str | Path],
    *,
    maps: bool = False,
    matcher: str | None = None,
    batch_size: int = 16,
    failed: list[tuple[str, str]] | None = None,
    progress: bool = False,
) -> Iterator[Prediction]:
    """Predictions of many files, in order, while the next ones are decoded in the background; memory does not grow.

    A file that cannot be read is added to `failed` as (path, reason) and skipped; without that list it is an error.
    """
    from tqdm import tqdm  # comes with transformers

    def decode(path: str | Path) -> Any:
        try:
            return recognizer._load(path)
        except RamatchError as error:
            if failed is None:
                raise
            return ImageError(str(error), name=str(path), reason=getattr(error, "reason", None))

    ahead: deque[Future] = deque()
    waiting = iter(paths)
    bar = tqdm(total=len(paths), unit="img", disable=not progress, leave=False)
    with ThreadPoolExecutor(max_workers=2) as pool:
        try:
            for path in islice(waiting, 2 * batch_size):
                ahead.append(pool.submit(decode, path))
            while ahead:
                batch: list[Loaded] = []
                while ahead and len(batch) < batch_size:
                    item = ahead.popleft().result()
                    if (following := next(waiting, None)) is not None:
                        ahead.append(pool.submit(decode, following))
                    bar.update()
                    if isinstance(item, ImageError):
                        assert failed is not None
                        failed.append((str(item.name), item.reason))
                    else:
                        batch.append(item)
                if batch:
                    yield from recognizer.predict_loaded(batch, matcher=matcher, maps=maps)
        finally:
            for future in ahead:
                future.cancel()
            bar.close()


def _chunks(items: Iterable, size: int) -> Iterable[list]:
    chunk: list = []
    for item in items:
        chunk.append(item)
        if len(chunk) == size:
            yield chunk
            chunk = []
    if chunk:
        yield chunk


def _device(name: str | torch.device | None) -> torch.device:
    """The device asked for, or CUDA where there is one."""
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError:
        raise RamatchError(f"there is no device '{name}'; use cpu, cuda, cuda:1, …") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise RamatchError("device 'cuda' was asked for, but torch sees no CUDA GPU; use cpu")
    return device


def _source(image: Any) -> str | None:
    """What to call this image: its path, or the name a file object or PIL image carries."""
    if isinstance(image, (str, os.PathLike)):
        return str(image)
    name = getattr(image, "filename", None) or getattr(image, "name", None)
    return name if isinstance(name, str) and name else None


def _key(pixels: Tensor) -> str:
    return hashlib.blake2b(pixels.cpu().contiguous().numpy().tobytes(), digest_size=16).hexdigest()
