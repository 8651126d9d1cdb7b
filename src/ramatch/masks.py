"""Which pixel shows which label: masks of one picture, how they are made of scores, and how to hand
them on: PNG, COCO's RLE, polygons, an overlay."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from .data.images import load_image
from .errors import RamatchError
from .files import write_atomic, write_json

VOID = 255  # of a PNG with one byte a pixel: what VOC leaves open, so no label may have it
SURE, DOUBT = 0.35, 0.1  # a label less probable than SURE loses DOUBT · log of the ratio, in cosine
LONGEST = 640  # side of the picture that masks are drawn on before they are enlarged
OWN, STEEP, SHARES = 0.4, 0.2, 40.0  # see FineScores; chosen on half of VOC's images
TINT = 0.55  # how much of a label's color an overlay has


@dataclass(frozen=True, eq=False)
class Masks(Mapping[str, np.ndarray]):
    """Masks that share the pixels of one picture out: label → (H, W) bool, the most probable label first.

    names: K labels. certainty (K,): their probabilities, or relative scores. ids (H, W): 0 where none of
    them is, else 1 + the label's place in `names`.
    """

    names: tuple[str, ...]
    certainty: np.ndarray
    ids: np.ndarray

    def __post_init__(self) -> None:
        if len(self.names) >= VOID:
            raise RamatchError(f"{len(self.names)} labels in one picture; masks tell at most {VOID - 1} apart")

    def __getitem__(self, label: str) -> np.ndarray:
        if label not in self.names:
            raise KeyError(label)
        return self.ids == 1 + self.names.index(label)

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def __repr__(self) -> str:
        height, width = self.ids.shape
        shares = ", ".join(f"{label} {100 * mask.mean():.0f} %" for label, mask in self.items())
        return f"Masks({width} × {height}: {shares or 'no label'})"

    def to_dict(self, *, polygons: bool = True) -> dict[str, Any]:
        """Plain data for JSON: of each label value, area in pixels, box [x, y, w, h], RLE and polygons, as COCO has
        them. Polygons are the outlines of its parts; holes are in the RLE alone."""
        entries: list[dict[str, Any]] = []
        for label, value in zip(self.names, self.certainty.tolist(), strict=True):
            mask = self[label]
            entry = {
                "label": label,
                "id": 1 + len(entries),
                "value": round(value, 4),
                "area": int(mask.sum()),
                "box": box_of(mask),
            }
            entry["rle"] = encode_rle(mask)
            if polygons:
                entry["polygons"] = outlines(mask)
            entries.append(entry)
        return {"width": self.ids.shape[1], "height": self.ids.shape[0], "masks": entries}

    def image(self) -> Image.Image:
        """The ids as a picture with VOC's palette: pixel values are the ids."""
        picture = Image.fromarray(self.ids.astype(np.uint8), mode="P")
        picture.putpalette(palette().flatten().tolist())
        return picture

    def overlay(self, photo: Image.Image) -> Image.Image:
        """The photograph with each mask tinted and outlined in its color, and named."""
        photo = photo.convert("RGB").resize(self.ids.shape[::-1])
        pixels, colors = np.asarray(photo, dtype=np.float32), palette()[1:]
        tinted = np.where(self.ids[..., None] > 0, (1 - TINT) * pixels + TINT * palette()[self.ids], pixels)
        tinted[_edges(self.ids)] = 255
        picture = Image.fromarray(tinted.astype(np.uint8))
        draw, size = ImageDraw.Draw(picture), max(10, min(picture.size) // 22)
        font = ImageFont.load_default(size=size)
        for (name, mask), color in zip(self.items(), colors.tolist(), strict=False):
            if mask.any():
                dark = tuple(part // 2 for part in color)
                draw.text(_middle(mask), name, "white", font, anchor="mm", stroke_width=2, stroke_fill=dark)
        return picture

    def save(self, path: str | Path) -> None:
        """Write the ids as PNG."""
        write_atomic(path, lambda temporary: self.image().save(temporary, "PNG"))


@dataclass(frozen=True, eq=False)
class FineScores:
    """Of one picture: scores (h, w, N) of its labels on a fine grid; rest (h, w) of what surrounds them, if there are
    words for it; alike (M, M): for each of the M = h · w cells the weights of those that look like it, to smooth by."""

    scores: np.ndarray
    rest: np.ndarray | None = None
    alike: np.ndarray | None = None

    def masks(
        self,
        names: Sequence[str],
        certainty: np.ndarray,
        columns: Sequence[int],
        size: tuple[int, int],
        *,
        background: bool = True,
        doubted: bool = True,
    ) -> Masks:
        """Each pixel of a picture of size (W, H) to the best of some labels, or with `background` to none of them.
        `doubted`: improbable labels must look better for it. Labels that get no pixel are left out."""
        chosen = np.array(sorted(columns, key=lambda column: -certainty[column]), dtype=int)[: VOID - 1]
        if not len(chosen):
            return Masks((), certainty[chosen], np.zeros(size[::-1], dtype=np.uint8))
        scores = self.scores[..., chosen]
        if doubted:
            sure = max(min(SURE, float(certainty.max())), 1e-12)
            scores = scores + DOUBT * np.log(np.clip(certainty[chosen] / sure, 1e-4, 1)).astype(np.float32)
        layers = np.concatenate([self._rest(scores)[..., None], scores], axis=-1) if background else scores
        scale = min(1.0, LONGEST / max(size))  # a cell has many pixels even then, and it is several times as fast
        middle = (max(1, round(scale * size[0])), max(1, round(scale * size[1])))
        best = resized(self._smooth(layers), middle).argmax(-1) + (not background)
        kept = np.unique(best[best > 0])
        places = np.zeros(len(chosen) + 1, dtype=np.uint8)
        places[kept] = 1 + np.arange(len(kept))
        kept = chosen[kept - 1]
        return Masks(
            tuple(names[column] for column in kept),
            certainty[kept],
            np.asarray(Image.fromarray(places[best]).resize(size, Image.Resampling.NEAREST)),
        )

    def _rest(self, scores: np.ndarray) -> np.ndarray:
        """(h, w): what a label must beat. Partly the words for surroundings, partly the best label itself, where it is
        not above the middle between its mean and its largest value: words do not name everything."""
        flat = scores.reshape(-1, scores.shape[-1])
        best = flat.argmax(1)
        value = flat[np.arange(len(flat)), best]
        mean, most = flat.mean(0)[best], flat.max(0)[best]
        height = (value - mean) / np.maximum(most - mean, 1e-12)
        own = (value - STEEP * (height - 0.5)).reshape(scores.shape[:2])
        return own if self.rest is None else OWN * own + (1 - OWN) * self.rest

    def _smooth(self, layers: np.ndarray) -> np.ndarray:
        """The logarithm of shares (softmax over layers), averaged over cells that look alike."""
        if self.alike is None:
            return layers
        shares = np.exp(SHARES * (layers - layers.max(-1, keepdims=True))).reshape(-1, layers.shape[-1])
        shares = self.alike @ (shares / shares.sum(-1, keepdims=True))
        return np.log(np.maximum(shares, 1e-12)).reshape(layers.shape)


def write_masks(masks: Masks, image: str | Path, folder: Path) -> list[Path]:
    """NAME-masks.png, NAME-masks.json and NAME-overlay.png of an image file, in a folder that is made if need be."""
    name = Path(image).stem
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{name}-{what}" for what in ("masks.png", "masks.json", "overlay.png")]
    masks.save(paths[0])
    write_json(paths[1], {"image": str(image), **masks.to_dict()})
    overlay = masks.overlay(load_image(image, shrink=True))
    write_atomic(paths[2], lambda temporary: overlay.save(temporary, "PNG"))
    return paths


def encode_rle(mask: np.ndarray) -> dict[str, Any]:
    """COCO's uncompressed RLE: lengths of runs down the columns, the first of zeros."""
    flat = np.concatenate([[False], np.asarray(mask, dtype=bool).flatten(order="F")])
    changes = np.flatnonzero(flat[1:] != flat[:-1])
    counts = np.diff(np.concatenate([[0], changes, [flat.size - 1]]))
    return {"size": list(mask.shape), "counts": counts.tolist()}


def decode_rle(rle: Mapping[str, Any]) -> np.ndarray:
    """(H, W) bool of an uncompressed RLE."""
    counts = rle["counts"]
    flat = np.repeat(np.arange(len(counts)) % 2 == 1, counts)
    return flat.reshape(rle["size"], order="F")


def box_of(mask: np.ndarray) -> list[int]:
    """[x, y, w, h] of the pixels of a mask; zeros where it has none."""
    rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
    if not len(rows):
        return [0, 0, 0, 0]
    return [int(columns[0]), int(rows[0]), int(np.ptp(columns)) + 1, int(np.ptp(rows)) + 1]


def outlines(mask: np.ndarray) -> list[list[int]]:
    """Outer edges of a mask's parts as polygons [x0, y0, x1, y1, ...] along the pixels' borders, exact; parts that
    touch at a corner only are two."""
    follow = _border(mask)
    found = []
    while follow:
        start = next(iter(follow))
        corners, (y, x), heading = [], start, (0, 0)
        while (y, x) in follow:
            ways = follow[y, x]
            # where two parts meet at a corner two ways lead on: the right turn stays with the part
            step = (heading[1], -heading[0])
            way = step if step in ways else ways[0]
            ways.remove(way)
            if not ways:
                del follow[y, x]
            if way != heading:
                corners.append((x, y))
            heading, (y, x) = way, (y + way[0], x + way[1])
        points = np.array(corners)
        ahead = np.roll(points, -1, axis=0)
        if (points[:, 0] * ahead[:, 1] - ahead[:, 0] * points[:, 1]).sum() > 0:  # clockwise in a picture: not a hole
            found.append(points.flatten().tolist())
    return found


def palette() -> np.ndarray:
    """(256, 3): VOC's colors, of which neighbors differ much; 0 is black."""
    numbers, colors = np.arange(256), np.zeros((256, 3), dtype=np.uint8)
    for bit in range(8):
        for channel in range(3):
            colors[:, channel] |= (((numbers >> (3 * bit + channel)) & 1) << (7 - bit)).astype(np.uint8)
    return colors


def _border(mask: np.ndarray) -> dict[tuple[int, int], list[tuple[int, int]]]:
    """Corner (y, x) → steps (dy, dx) that lead from it along the border, the mask on their right."""
    inside = np.pad(np.asarray(mask, dtype=bool), 1)
    follow: dict[tuple[int, int], list[tuple[int, int]]] = {}
    here = inside[1:-1, 1:-1]
    sides = {  # step: (pixels beyond which nothing is, where the step starts)
        (0, 1): (here & ~inside[:-2, 1:-1], (0, 0)),
        (1, 0): (here & ~inside[1:-1, 2:], (0, 1)),
        (0, -1): (here & ~inside[2:, 1:-1], (1, 1)),
        (-1, 0): (here & ~inside[1:-1, :-2], (1, 0)),
    }
    for step, (edge, (dy, dx)) in sides.items():
        for y, x in np.argwhere(edge).tolist():
            follow.setdefault((y + dy, x + dx), []).append(step)
    return follow


def _edges(ids: np.ndarray) -> np.ndarray:
    """Pixels of masks that have another id to their right or below."""
    edge = np.zeros(ids.shape, dtype=bool)
    edge[:, :-1] |= ids[:, :-1] != ids[:, 1:]
    edge[:-1] |= ids[:-1] != ids[1:]
    return edge


def _middle(mask: np.ndarray) -> tuple[float, float]:
    """(x, y) of the mask's pixel nearest to its center of mass."""
    rows, columns = np.nonzero(mask)
    nearest = np.argmin((rows - rows.mean()) ** 2 + (columns - columns.mean()) ** 2)
    return float(columns[nearest]), float(rows[nearest])


def resized(layers: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Layers (h, w, K) bilinearly on another grid (W, H)."""
    planes = [Image.fromarray(np.ascontiguousarray(plane)) for plane in np.moveaxis(layers.astype(np.float32), -1, 0)]
    return np.stack([np.asarray(plane.resize(size, Image.Resampling.BILINEAR)) for plane in planes], axis=-1)
