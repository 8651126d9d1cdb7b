"""Attention to labels and quick-GELU against their definitions, values and gradients."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tiny_models import close

import ramatch
from ramatch.model import _ops
from ramatch.model._ops import label_attention, quick_gelu


def definition(query, labels):
    return torch.softmax(query @ labels.T * query.shape[-1] ** -0.5, dim=-1) @ labels


def features(dtype=torch.float32, labels=5):
    g = torch.Generator().manual_seed(2)
    return torch.randn(2, 7, 16, generator=g, dtype=dtype), torch.randn(labels, 16, generator=g, dtype=dtype)


def test_label_attention_is_attention() -> None:
    query, labels = features()
    close(label_attention(query, labels), definition(query, labels))
    wide = labels.expand(2, -1, -1)
    close(label_attention(query, labels), F.scaled_dot_product_attention(query, wide, wide))


@pytest.mark.parametrize("padded", [False, True])
def test_label_attention_gradients(padded: bool) -> None:
    query, labels = (t.requires_grad_() for t in features(torch.float64))
    bias = torch.cat([torch.zeros(5), torch.full((3,), -torch.inf)]).double() if padded else None

    def call(query, labels):
        return _ops._LabelAttention.apply(query.flatten(0, 1), F.pad(labels, (0, 0, 0, 3 if padded else 0)), bias)

    close(call(query, labels), definition(query, labels).flatten(0, 1), 1e-12)
    assert torch.autograd.gradcheck(call, (query, labels))


def test_label_attention_takes_autocasts_type() -> None:
    query, labels = (t.requires_grad_() for t in features())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = label_attention(query, labels)
    assert found.dtype == torch.bfloat16
    close(found.float(), definition(query, labels), 0.03)
    found.float().sum().backward()
    assert query.grad is not None
    assert query.grad.dtype == torch.float32
    with torch.no_grad():
        assert label_attention(query, labels).dtype == torch.float32


def test_quick_gelu() -> None:
    x = torch.linspace(-9, 9, 101, dtype=torch.float64, requires_grad=True)
    close(quick_gelu(x), x * torch.sigmoid(1.702 * x), 1e-12)
    assert torch.autograd.gradcheck(quick_gelu, (x,))


CASES = """
import torch
from ramatch.model import _ops
device = "cuda" if torch.cuda.is_available() else "cpu"
g = torch.Generator().manual_seed(0)
for shape in ((3, 5), (2, 4099), (0, 4)):
    for dtype, bound in ((torch.float32, 1e-6), (torch.bfloat16, 2e-2)):
        x = (torch.randn(shape, generator=g) * 4).to(device, dtype)
        grad = torch.randn(shape, generator=g).to(device, dtype)
        assert _ops._kernels(x) is not None
        ours, plain = x.clone().requires_grad_(), x.double().requires_grad_()
        y, wanted = _ops.quick_gelu(ours), plain * torch.sigmoid(1.702 * plain)
        y.backward(grad)
        wanted.backward(grad.double())
        for a, b in ((y, wanted), (ours.grad, plain.grad)):
            assert a.dtype == dtype
            gap = (a.double() - b).abs()
            assert (gap <= bound * b.abs().clamp(min=1)).all(), (shape, dtype, gap.max())
        with torch.no_grad():
            assert torch.equal(_ops.quick_gelu(ours), y)
extreme = torch.tensor([-1e4, -200.0, 200.0, 1e4], device=device, requires_grad=True)
y = _ops.quick_gelu(extreme)
y.sum().backward()
assert torch.equal(y.detach().cpu(), torch.tensor([0.0, 0.0, 200.0, 1e4]))
assert torch.equal(extreme.grad.cpu(), torch.tensor([0.0, 0.0, 1.0, 1.0]))
print("all kernels agree")
"""


def test_quick_gelu_kernels() -> None:
    """On the GPU, or in Triton's interpreter, which must be switched on before Triton is imported: a process of its own."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    env = dict(os.environ, OMP_NUM_THREADS="1")
    if not torch.cuda.is_available():
        env["TRITON_INTERPRET"] = "1"
    source = str(Path(next(iter(ramatch.__path__))).parent)
    env["PYTHONPATH"] = os.pathsep.join([source, env.get("PYTHONPATH", "")])
    run = subprocess.run([sys.executable, "-c", CASES], env=env, capture_output=True, text=True, timeout=200)
    assert "all kernels agree" in run.stdout, run.stdout[-2000:] + run.stderr[-4000:]
