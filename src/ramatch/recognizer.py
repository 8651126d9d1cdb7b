"""Recognizer: set a vocabulary once, predict many images. What most users touch."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, TypeAlias, TypedDict, cast, overload

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from .assets import GENERAL, photo_paths, vocabulary_names
from .assets import vocabulary as bundled_vocabulary
from .config import RAMConfig
from .config import preset as named_preset
from .data.images import ImageError, full_size, load_image, name_of
from .data.kinds import Sought, sought
from .data.lexicon import Lexicon
from .data.prefetch import Loaded, chunks, is_single, prefetch
from .errors import RamatchError
from .evaluation.calibration import Calibrator, Words
from .files import read_json, write_json
from .masks import FineScores
from .methods import build_method, untrained
from .modeling.backbone import Backbone
from .modeling.cache import TrunkCache
from .modeling.checkpoints.folder import is_model_folder, load_ram, save_ram
from .modeling.checkpoints.hashes import write_hashes
from .modeling.checkpoints.loading import BUNDLED, bundled_model
from .modeling.dense import DenseMaps
from .modeling.fuse import fuse
from .modeling.graph import GraphedRAM
from .modeling.matching import MATCHERS
from .modeling.ram import RAM, Labels, Trunk
from .modeling.remembered import REMEMBERED, remembered
from .modeling.runtimes import choose, make_runtime
from .modeling.text import clean_labels
from .modeling.types import Runtime
from .prediction import TRUSTED, Prediction, Unreadable

if TYPE_CHECKING:
    from typing_extensions import Unpack

OneImage: TypeAlias = (
    str | os.PathLike[str] | bytes | bytearray | memoryview | Image.Image | BinaryIO
)  # certainly not many
PATIENCE = 4  # batches of one size before it gets a CUDA graph: one photo is tagged before that would be recorded


@dataclass(frozen=True)
class Vocabulary:
    """Labels as they were asked for, encoded together with what they are also looked for as. `each_once`: tags say each
    thing once, by this lexicon."""

    encoded: Labels
    sought: Sought
    each_once: Lexicon | None = None

    @property
    def names(self) -> tuple[str, ...]:
        return self.sought.labels

    def __len__(self) -> int:
        return len(self.names)

    def __repr__(self) -> str:
        more = ", …" if len(self) > 3 else ""
        return f"Vocabulary({len(self)} labels: {', '.join(self.names[:3])}{more})"


class Options(TypedDict, total=False):
    """What `Recognizer.predict` takes besides the images."""

    vocabulary: Vocabulary | None
    matcher: str | None
    maps: bool
    plan: bool
    masks: bool
    batch_size: int


class Recognizer:
    """Open-vocabulary multi-label recognition. Threads may share one, each with a vocabulary and a matcher of its own.

    >>> recognizer = Recognizer.from_pretrained("ramatch-mini")
    >>> recognizer.set_vocabulary(["dog", "umbrella", "kite"])
    >>> recognizer.predict("photo.jpg").top(3)
    """

    def __init__(
        self,
        ram: RAM,
        *,
        calibrator: Calibrator | None = None,
        name: str = "model",
        cache: int = 64,
        fast: bool | None = None,
        kinds: bool = True,
        runtime: str = "auto",
    ) -> None:
        """`cache`: how many images' trunks are kept, so that a new vocabulary does not run the image tower again.

        `fast`: predict with a fused copy of the weights (see `fuse`), as CUDA graphs on a GPU; by default there.

        `kinds`: look for "animal" as dog, cat, … too, and for "automobile" as car, by the built-in lexicon (see
        `ramatch.data.kinds`); it needs probabilities of a calibration, not a checkpoint's own (SigLIP).

        `runtime`: what runs the image part on a CPU, one of `ramatch.config.RUNTIMES`; `auto` is
        $RAMATCH_RUNTIME, or torch (see docs/performance.md).
        """
        self.ram, self.calibrator, self.name = ram.eval(), calibrator, name
        self.vocabulary: Vocabulary | None = None
        self.kinds = kinds
        self.fast = ram.backbone.device.type == "cuda" if fast is None else fast
        self.runtime = choose(runtime, ram)
        self.trunks = TrunkCache(cache)
        self._compiled: Runtime | None = None
        self._engine: GraphedRAM | None = None
        self._dense: DenseMaps | None = None
        self._making = Lock()

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
        **options: Any,
    ) -> Recognizer:
        """From a bundled model's name, a folder written by `save_pretrained` (or the run folder around it), or any CLIP
        or SigLIP (hub id, folder, state dict; docs/backbones.md lists them).

        A plain CLIP is used zero-shot: frozen, with self-aware attention, without learned parts; `preset` and
        `image_size` set how. A SigLIP's own sigmoid gives its probabilities, by the global feature alone. `dtype` of
        the frozen part: by default bfloat16 on a GPU, and on CPUs that compute in it for models that say it is fine
        (`cpu_dtype` in their config.json, as ramatch-mini does); float32 elsewhere. `options`: `cache`, `fast`,
        `kinds` and `runtime`; `method`: another system (see `ramatch.methods`) that a plain CLIP, or the backbone in a
        model folder, is used in.
        """
        method = options.pop("method", None)
        device = pick_device(device)
        folder = bundled_model(str(name)) or Path(name).expanduser()
        if is_model_folder(folder / "model"):  # a training run
            folder = folder / "model"
        calibrator, half = None, device.type == "cuda"
        saved = read_json(folder / "config.json") if is_model_folder(folder) else {}
        # a model may say that bf16 is fine for it; on CPUs that compute in it, it is twice as fast
        half = half or (saved.get("cpu_dtype") == "bfloat16" and cpu_has_bfloat16())
        dtype = dtype or (torch.bfloat16 if half else torch.float32)
        if saved and method in (None, trained := (saved.get("method") or {}).get("name", "ram")):
            parts: dict[str, Any] = {"backbone": backbone, "label_features": label_features, "dtype": dtype}
            ram = load_ram(folder, build=build_method, **parts)
            if (folder / "calibration.json").is_file():
                calibrator = Calibrator.from_dict(read_json(folder / "calibration.json"))
        elif str(name) in BUNDLED:
            raise RamatchError(f"the model '{name}' is missing from this installation; reinstall ramatch")
        else:
            if saved and not (folder / "backbone" / "config.json").is_file():
                raise RamatchError(f"{folder} is a trained '{trained}' without its backbone; for {method} name that")
            where = str(folder) if folder.exists() else str(name)
            config = named_preset(preset) if isinstance(preset, str) else preset
            config, method = RAMConfig.from_dict(saved["ram"]) if saved else config, untrained(method or "ram")
            own = Backbone.from_pretrained(where, image_size=image_size, label_features=label_features)
            ram = build_method(own, config.frozen(own.vision.config.layers), {"name": method})
            if own.logit_bias is not None and method == "ram":
                calibrator = Calibrator.of_sigmoid(own.logit_scale, own.logit_bias)
        dtype = dtype or (torch.bfloat16 if half else torch.float32)
        ram.to(device)
        ram.backbone.to(dtype)
        ram.region_set.to(dtype)
        return cls(ram, calibrator=calibrator, name=str(name), **options)

    def save_pretrained(self, folder: str | Path, *, with_backbone: bool = False, weights: str = "fp32") -> None:
        """Write adapters (a few MB), settings and calibration; the backbone too if the folder shall stand alone.
        `weights`: fp32, fp16, or int8 for a quarter of the bytes."""
        save_ram(self.ram, folder, with_backbone=with_backbone, weights=weights)
        if self.calibrator is not None:
            write_json(Path(folder) / "calibration.json", self.calibrator.to_dict())
            write_hashes(folder)

    def __repr__(self) -> str:
        kind = "calibrated" if self.calibrated else "not calibrated"
        if self.calibrator is not None and self.calibrator.own:
            kind = "probabilities of its own sigmoid"
        labels = "no vocabulary yet" if self.vocabulary is None else f"{len(self.labels)} labels"
        where = self.device if self.runtime == "torch" else f"{self.device} by {self.runtime}"
        return f"Recognizer({self.name} on {where}: {kind}, {labels})"

    @property
    def device(self) -> torch.device:
        return self.ram.backbone.device

    @property
    def labels(self) -> tuple[str, ...]:
        return self.vocabulary.names if self.vocabulary is not None else ()

    @property
    def calibrated(self) -> bool:
        """Whether it gives probabilities, each label's own; otherwise relative scores."""
        return self.calibrator is not None

    @property
    def engine(self) -> GraphedRAM:
        """What runs the model, made at its first use."""
        runtime = self.compiled
        with self._making:
            if self._engine is None:
                ram, best = fuse(self.ram) if self.fast else self.ram, self.calibrator is not None
                self._engine = GraphedRAM(ram, best=best, batch_size=1, patience=PATIENCE, runtime=runtime)
            return self._engine

    def run_by(self, runtime: str) -> None:
        """Change what runs the image part (see `runtime` above)."""
        self.runtime = choose(runtime, self.ram)
        self._compiled = self._engine = self._dense = None
        self.trunks = TrunkCache(self.trunks.size)  # the old ones' numbers differ

    @property
    def compiled(self) -> Runtime | None:
        """What runs the image part where torch does not, made at its first use."""
        with self._making:
            if self._compiled is None:
                self._compiled = make_runtime(self.runtime, self.ram, self._photos)
            return self._compiled

    def _photos(self) -> Tensor:
        """The bundled photographs: ordinary pictures, uint8 (B, 3, H, W)."""
        return torch.stack([self.ram.preprocess.resize(load_image(path)) for path in photo_paths()])

    @property
    def dense(self) -> DenseMaps:
        """What makes fine maps, made at its first use."""
        engine = self.engine
        with self._making:
            if self._dense is None:
                self._dense = DenseMaps(self.ram, engine, list(self._photos()))
            return self._dense

    def set_vocabulary(self, labels: Sequence[str] | str, *, templates: Sequence[str] | None = None) -> None:
        """Encode the labels once; every later `predict` uses them. A text is the name of a bundled vocabulary."""
        self.vocabulary = self.encode_vocabulary(labels, templates=templates)

    @torch.inference_mode()
    def encode_vocabulary(self, labels: Sequence[str] | str, *, templates: Sequence[str] | None = None) -> Vocabulary:
        """An encoded vocabulary for `predict(vocabulary=…)`, when several are in use."""
        if isinstance(labels, str) and labels == GENERAL:
            names = bundled_vocabulary(GENERAL)
            return Vocabulary(self._encode(names, templates), sought(names), Lexicon.built_in())
        if isinstance(labels, str) and labels in vocabulary_names():
            labels = bundled_vocabulary(labels)
        found = self.sought(clean_labels(labels))
        encoded = self._encode(found.words, templates)
        return Vocabulary(encoded, self.trusting(found, Words.of(encoded)))

    def sought(self, labels: Sequence[str]) -> Sought:
        """Labels with what they are also looked for as. Relative probabilities cannot be joined, those of its
        checkpoint's own sigmoid are left as they are, and a model without a text tower knows no other words."""
        fitted = self.calibrator is not None and not self.calibrator.own
        able = self.kinds and fitted and self.ram.backbone.text is not None
        return sought(labels, Lexicon.built_in() if able else None)

    def trusting(self, found: Sought, words: Words) -> Sought:
        """What is also looked for, without words that the calibrator doubts or the model does not know; of labels that
        the model was taught, nothing."""
        if self.calibrator is None:
            return found
        trusted = found.among(self.calibrator.trust(words) >= TRUSTED)
        return trusted if words.learned is None else trusted.alone(words.learned.numpy()[: len(found.labels)])

    def _encode(self, names: Sequence[str], templates: Sequence[str] | None) -> Labels:
        if len(names) < REMEMBERED or self.ram.method is not None:  # which encodes labels in a way of its own
            return self.ram.encode_labels(names, templates)
        return remembered(self.ram, names, templates)

    @overload
    def predict(  # type: ignore[overload-overlap]
        self, images: OneImage, *, strict: bool = False, **options: Unpack[Options]
    ) -> Prediction: ...
    @overload
    def predict(self, images: np.ndarray | Tensor, *, strict: bool = False, **options: Unpack[Options]) -> Any: ...
    @overload
    def predict(
        self, images: Iterable[Any], *, strict: Literal[True], **options: Unpack[Options]
    ) -> list[Prediction]: ...
    @overload
    def predict(
        self, images: Iterable[Any], *, strict: bool = False, **options: Unpack[Options]
    ) -> list[Prediction | Unreadable]: ...

    def predict(
        self,
        images: Any,
        *,
        vocabulary: Vocabulary | None = None,
        matcher: str | None = None,
        maps: bool = False,
        plan: bool = False,
        masks: bool = False,
        batch_size: int = 32,
        strict: bool = False,
    ) -> Any:
        """One image → one `Prediction`; a list or other iterable → a list of them. Without any vocabulary, the built-in
        `general` one of some 4,000 words is used.

        Images may be paths, PIL images, arrays, tensors, bytes or file objects. `matcher` overrides the model's own;
        `maps` (or `plan`) keeps what heat maps and pictures need; `masks` also looks twice, for `Prediction.masks`.

        An image that cannot be read is an `ImageError`; among several it has an `Unreadable` in its place, which is
        false, and the others are answered. `strict`: there too it is an error.

        `Prediction.calibrated` says what one has. Calibrated: a probability for each label, whatever else was asked
        for; 0.5 means even odds. Not calibrated: relative scores, the mean of two softmaxes over the vocabulary as in
        the paper; they sum to 1, so they only compare the labels of this vocabulary (a single label always gets 1).
        """
        if batch_size < 1:
            raise RamatchError(f"batch_size must be at least 1, got {batch_size}")
        vocabulary, single = self._checked(vocabulary, matcher), is_single(images)

        def load(image: Any) -> tuple[Loaded, Image.Image | None] | Unreadable:
            try:
                picture = load_image(image, shrink=True)
            except ImageError as error:
                if single or strict:
                    raise
                return Unreadable(error.name, error.reason)
            # without masks no picture is held longer than it takes to resize it
            return self._resized(picture, image), picture if masks else None

        out: list[Prediction | Unreadable] = []
        for chunk in chunks([images] if single else images, batch_size):
            found = [load(image) for image in chunk]
            read = [item for item in found if not isinstance(item, Unreadable)]
            pictures = [picture for _, picture in read] if masks else None
            options: dict[str, Any] = {"maps": maps or plan, "pictures": pictures}
            loaded = [item for item, _ in read]
            answers = iter(self.predict_loaded(loaded, vocabulary=vocabulary, matcher=matcher, **options))
            out += [item if isinstance(item, Unreadable) else next(answers) for item in found]
        return out[0] if single else out

    def load(self, image: Any) -> Loaded:
        """Decode and resize one image: pixels uint8 (3, H, W), the source's name, the original (width, height)."""
        return self._resized(load_image(image, shrink=True), image)

    def _resized(self, picture: Image.Image, source: Any) -> Loaded:
        return self.ram.preprocess.resize(picture), name_of(source), full_size(picture)

    @torch.inference_mode()
    def predict_loaded(
        self,
        loaded: Sequence[Loaded],
        *,
        vocabulary: Vocabulary | None = None,
        matcher: str | None = None,
        maps: bool = False,
        pictures: Sequence[Image.Image] | None = None,
    ) -> list[Prediction]:
        """Predictions of one batch of images that `load` has decoded and resized; with the `pictures` themselves, also
        what masks need."""
        vocabulary = self._checked(vocabulary, matcher)
        if not loaded:
            return []
        engine, usual = self.engine, self.ram.config.matcher if self.ram.method is None else None
        matcher = None if matcher == usual else matcher
        engine.make_room(len(loaded))
        trunk = self.trunks.get([pixels for pixels, _, _ in loaded], engine.trunk)
        encoded, found = vocabulary.encoded, vocabulary.sought
        output = engine.recognize(trunk, encoded, plan=maps, matcher=matcher)
        shown: dict[str, Any] = {}
        columns: list[Any] = [slice(len(vocabulary))] * len(loaded)  # of each image, the words whose maps are shown
        if self.calibrator is not None:
            features = [output.image, output.region, output.best]
            words = Words.of(encoded)
            each = np.asarray(self.calibrator(torch.stack(features, dim=-1).cpu(), words))
            values = scores = found.combine(each)
            best = found.winners(each)
            shown["trust"] = self.calibrator.trust(words)[best]
            columns = columns if found.plain else list(best)
        else:  # the paper's normalized mean of s_G and s_R
            values, scores = _array(self.ram.score(output, "softmax")), _array(cast(Tensor, output.scores))
        if output.sim is not None and output.match is not None:
            maps_of = {"similarities": output.sim, "plan": output.match.plan / output.mass}
            for name, value in maps_of.items():
                shown[name] = [row[:, chosen] for row, chosen in zip(_array(value), columns, strict=True)]
            shown["marginal"] = _array(output.match.marginal)
        if pictures is not None:
            shown["fine"] = self._fine(trunk, pictures, encoded, columns)
        common: dict[str, Any] = {"labels": vocabulary.names, "calibrated": self.calibrated, "grid": output.grid}
        known = None if encoded.familiarity is None else encoded.familiarity[: len(vocabulary)]
        common |= {"familiarity": known, "lexicon": vocabulary.each_once}
        rows = {"values": values, "scores": scores} | shown
        out = []
        for i, (_, source, size) in enumerate(loaded):
            own: dict[str, Any] = {name: value[i] for name, value in rows.items()}
            out.append(Prediction(**common, source=source, size=size, **own))
        return out

    def _fine(
        self, trunk: Trunk, pictures: Sequence[Image.Image], labels: Labels, columns: Sequence[Any]
    ) -> list[FineScores]:
        """Of each image, fine scores of the words (`columns`) that its labels were found as."""
        found = self.dense(trunk, self.dense.pixels(pictures), labels)
        rest = [None] * len(pictures) if found.rest is None else _array(found.rest)
        rows = zip(_array(found.scores), rest, _array(found.alike), columns, strict=True)
        return [FineScores(scores[..., chosen], *others) for scores, *others, chosen in rows]

    def _checked(self, vocabulary: Vocabulary | None, matcher: str | None) -> Vocabulary:
        vocabulary = vocabulary or self.vocabulary
        if vocabulary is None:
            if self.ram.backbone.text is None:
                raise RamatchError("no vocabulary is set; call set_vocabulary([...]) first")
            self.set_vocabulary(GENERAL)
            vocabulary = cast(Vocabulary, self.vocabulary)
        if matcher is not None and matcher not in MATCHERS:
            raise RamatchError(f"unknown matcher '{matcher}'; known: {', '.join(MATCHERS)}")
        return vocabulary


def predict_files(
    recognizer: Recognizer,
    paths: Sequence[str | Path],
    *,
    batch_size: int = 16,
    failed: list[tuple[str, str]] | None = None,
    progress: bool = False,
    **options: Any,
) -> Iterator[Prediction]:
    """Predictions of many files, in order (see `prefetch`). `options`: those of `Recognizer.predict_loaded`."""
    for batch in prefetch(paths, recognizer.load, batch_size, failed, progress):
        yield from recognizer.predict_loaded(batch, **options)


def cpu_has_bfloat16() -> bool:
    """Whether this CPU multiplies bf16 matrices natively (AVX512-BF16 or AMX); False where torch cannot tell."""
    checks = (getattr(torch.cpu, name, None) for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"))
    return any(check() for check in checks if check is not None)


def _array(tensor: Tensor) -> np.ndarray:
    return tensor.float().cpu().numpy()


def pick_device(name: str | torch.device | None) -> torch.device:
    """The device asked for, or CUDA where there is one."""
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError:
        raise RamatchError(f"there is no device '{name}'; use cpu, cuda, cuda:1, …") from None
    if device.type != "cuda":
        return device
    if not torch.cuda.is_available():
        raise RamatchError("device 'cuda' was asked for, but torch sees no CUDA GPU; use cpu")
    if (index := device.index or 0) >= torch.cuda.device_count():
        raise RamatchError(f"there is no GPU {index}: torch sees {torch.cuda.device_count()}")
    return torch.device("cuda", index)
