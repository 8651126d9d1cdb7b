"""What a run over very many images takes: a model of a few rates, each of which is measured (docs/scale.md)."""

from __future__ import annotations

from dataclasses import dataclass

from .inputs import PART

HOUR = 3600.0


@dataclass(frozen=True)
class Rates:
    """gpu: images per second of the model on one GPU; decode, cpu: of one core that decodes, or that also runs the
    model; host: seconds of one core for the rows of an image's answer, beside the GPU; share: of its rate that a GPU
    keeps in an actor; bytes of an encoded image, and of its row."""

    gpu: float = 9509.0
    decode: float = 329.9
    cpu: float = 17.9
    host: float = 41.8e-6
    share: float = 0.85
    image_bytes: float = 64_700.0
    row_bytes: float = 127.0


FEW_LABELS = Rates()
GENERAL_WORDS = Rates(gpu=3832.0, decode=304.1, cpu=16.1, host=658.3e-6, row_bytes=134.0)


@dataclass(frozen=True)
class Machine:
    """One of several alike. actors: processes with a model on each GPU."""

    gpus: int = 1
    cores: int = 16
    actors: int = 1


@dataclass(frozen=True)
class Cost:
    """rate: images per second of all machines; bound: by what, "model", "answers", "decoding" or "cores"; read: bytes
    per second that each machine reads; read_bytes and written_bytes: of the whole run."""

    rate: float
    bound: str
    hours: float
    gpu_hours: float
    core_hours: float
    read: float
    read_bytes: float
    written_bytes: float
    parts: int


def estimate(
    images: int, machines: int = 1, machine: Machine | None = None, rates: Rates = FEW_LABELS, part: int = PART
) -> Cost:
    """A run without the time that it takes to begin, from stores that are fast enough: `read` says how fast."""
    machine = machine or Machine()
    if machine.gpus:
        actor = 1 / (1 / rates.gpu + rates.host)
        bounds = {
            "decoding": machine.cores * rates.decode,
            "model": machine.gpus * rates.gpu * rates.share,
            "answers": machine.gpus * machine.actors * actor * rates.share,
        }
    else:
        bounds = {"cores": machine.cores * rates.share / (1 / rates.cpu + 1 / rates.decode)}
    bound = min(bounds, key=lambda name: bounds[name])
    rate = machines * bounds[bound]
    hours = images / rate / HOUR
    return Cost(
        rate=rate,
        bound=bound,
        hours=hours,
        gpu_hours=hours * machines * machine.gpus,
        core_hours=hours * machines * machine.cores,
        read=rate / machines * rates.image_bytes,
        read_bytes=images * rates.image_bytes,
        written_bytes=images * rates.row_bytes,
        parts=-(-images // part),
    )
