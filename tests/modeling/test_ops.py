"""Attention to labels, norms and quick-GELU against their definitions, values and gradients."""

from __future__ import annotations

import importlib.util
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tiny_models import close

import ramatch
from ramatch.modeling.kernels import ops as _ops
from ramatch.modeling.kernels.ops import add_norm, label_attention, layer_norm, quick_gelu, smooth_max


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
        return _ops._attend(query.flatten(0, 1), F.pad(labels, (0, 0, 0, 3 if padded else 0)), bias, learning=True)

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


def test_smooth_max_lies_between_mean_and_maximum() -> None:
    cosines = torch.rand(3, 7, 5, dtype=torch.float64, requires_grad=True)
    for beta in (0.1, 5.0, 20.0):
        pooled = smooth_max(cosines, beta)
        assert (pooled <= cosines.amax(1) + 1e-9).all()
        assert (pooled >= cosines.mean(1) - 1e-9).all()
        naive = [[math.log(sum(math.exp(beta * v) for v in x) / 7) / beta for x in y.T.tolist()] for y in cosines]
        close(pooled, torch.tensor(naive, dtype=torch.float64), 1e-9)
    close(smooth_max(cosines, 1e-6), cosines.mean(1), 1e-6)
    assert torch.autograd.gradcheck(lambda x: smooth_max(x, 20.0), (cosines,))


def test_norms_without_triton() -> None:
    x, y = torch.randn(2, 3, 4, 8, requires_grad=True)
    w, b = torch.randn(2, 8)
    total, out = add_norm(x, y, w, b, 1e-5)
    assert torch.equal(total, x + y)
    assert torch.equal(out, F.layer_norm(x + y, (8,), w, b, 1e-5))
    assert torch.equal(layer_norm(x, w, b, 1e-5), F.layer_norm(x, (8,), w, b, 1e-5))
    wide, narrow = add_norm(x, y.bfloat16(), w, b, 1e-5)  # autocast's mixture
    assert wide.dtype == narrow.dtype == torch.float32


CASES = """
import math
import torch
import torch.nn.functional as F
from ramatch.modeling.kernels import ops as _ops
device = "cuda" if torch.cuda.is_available() else "cpu"
g = torch.Generator().manual_seed(0)
for shape in ((3, 5), (2, 4099), (0, 4)):
    for dtype, bound in ((torch.float32, 1e-6), (torch.bfloat16, 2e-2)):
        x = (torch.randn(shape, generator=g) * 4).to(device, dtype)
        grad = torch.randn(shape, generator=g).to(device, dtype)
        assert _ops.triton_kernels("gelu", x) is not None
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

def leaves(*tensors):
    return [None if t is None else t.detach().clone().requires_grad_() for t in tensors]
for rows, width in (((3, 5), 48), ((4099,), 20), ((0, 2), 8)):
    for dtype, bound in ((torch.float32, 1e-5), (torch.bfloat16, 4e-2)):
        x, y, g1, g2 = ((torch.randn(*rows, width, generator=g) * 2 + 1).to(device, dtype) for _ in range(4))
        w, b = (torch.randn(width, generator=g).to(device) for _ in range(2))
        assert _ops.triton_kernels("norm", x) is not None
        def check(ours, plain, what):
            for a, b in zip(ours, plain, strict=True):
                gap = (a.double() - b.double()).abs()
                assert (gap <= bound * b.double().abs().clamp(min=1)).all(), (what, rows, dtype, gap.max())
        # alone, with weights that learn (their gradients sum over rows)
        mine, wanted = leaves(x, w, b), leaves(x.double(), w.double(), b.double())
        out = _ops.layer_norm(*mine, 1e-5)
        assert out.dtype == dtype
        exact = F.layer_norm(wanted[0], (width,), *wanted[1:], 1e-5)
        out.backward(g1); exact.backward(g1.double())
        check([out, mine[0].grad], [exact, wanted[0].grad], "norm")
        scale = max(1, x.numel() // width) ** 0.5
        check([m.grad / scale for m in mine[1:]], [m.grad / scale for m in wanted[1:]], "weights")
        # after a sum, with weights that learn
        mine, wanted = leaves(x, y, w, b), leaves(*(t.double() for t in (x, y, w, b)))
        found, total = _ops.add_norm(*mine, 1e-5), wanted[0] + wanted[1]
        exact = (total, F.layer_norm(total, (width,), *wanted[2:], 1e-5))
        torch.autograd.backward(found, (g1, g2)); torch.autograd.backward(exact, (g1.double(), g2.double()))
        check([*found, mine[0].grad, mine[1].grad], [*exact, wanted[0].grad, wanted[1].grad], "sum that learns")
        check([m.grad / scale for m in mine[2:]], [m.grad / scale for m in wanted[2:]], "weights after a sum")
        # after a sum, with frozen weights; one of the two results may have no gradient
        for used in ((True, True), (True, False), (False, True)):
            mine, wanted = leaves(x, y), leaves(x.double(), y.double())
            found = _ops.add_norm(*mine, w, b, 1e-5)
            total = wanted[0] + wanted[1]
            exact = (total, F.layer_norm(total, (width,), w.double(), b.double(), 1e-5))
            sum((f * h).sum() for f, h, u in zip(found, (g1, g2), used) if u).backward()
            sum((f * h.double()).sum() for f, h, u in zip(exact, (g1, g2), used) if u).backward()
            check([*found, mine[0].grad, mine[1].grad], [*exact, wanted[0].grad, wanted[1].grad], "sum")
            with torch.no_grad():
                check(_ops.add_norm(*mine, w, b, 1e-5), exact, "sum, nothing kept")
# the end of TSS, against the plain path in float64
for (b, grid, width), groups in (((2, (3, 4), 24), 1), ((3, (2, 2), 20), 2), ((0, (2, 2), 8), 1)):
    for dtype, bound in ((torch.float32, 1e-5), (torch.bfloat16, 5e-2)):
        m = grid[0] * grid[1]
        streams = [torch.randn(b, m, width, generator=g).to(device, dtype) for _ in range(4)]
        weight = torch.randn(2, 2 // groups, 3, 3, generator=g).to(device)
        grad = torch.randn(b, m, width, generator=g).to(device, dtype)
        if dtype == torch.float32 and b:
            streams[0][0, 0, :2], streams[1][0, 0, :2] = 9, 1  # two equal maxima
        mine, wanted = leaves(*streams, weight), leaves(*(t.double() for t in streams), weight.double())
        out, exact = (_ops.spatial_selection(tuple(t[:4]), t[4], groups, grid) for t in (mine, wanted))
        assert out.dtype == dtype and exact.dtype == torch.float64
        out.backward(grad); exact.backward(grad.double())
        ours, theirs = [out, *(t.grad for t in mine)], [exact, *(t.grad for t in wanted)]
        for i, (a, e) in enumerate(zip(ours, theirs, strict=True)):
            gap = (a.double() - e).abs()
            # where rounding to bfloat16 moves a maximum to another channel, its gradient goes along
            share = 0.98 if dtype == torch.bfloat16 else 1.0
            if i == 5 and dtype == torch.bfloat16:  # the mask's weights gather over all positions, moved maxima too
                assert gap.norm() <= bound * e.norm().clamp(min=1), (i, dtype, gap.norm() / e.norm())
                continue
            right = (gap <= bound * e.abs().clamp(min=1)).double()
            assert not gap.numel() or right.mean() >= share, (i, dtype, gap.max())
# pooling of regions
for shape in ((2, 5, 700), (1, 196, 3), (0, 4, 4)):
    for dtype, bound in ((torch.float32, 1e-5), (torch.bfloat16, 1e-2)):
        x = (torch.rand(shape, generator=g) * 2 - 1).to(device, dtype)
        grad = torch.randn(shape[0], shape[2], generator=g).to(device)
        mine, wanted = leaves(x, x.double())
        out, exact = _ops.smooth_max(mine, 20.0), (torch.logsumexp(20 * wanted, 1) - math.log(shape[1])) / 20
        assert out.dtype == torch.float32
        out.backward(grad); exact.backward(grad.double())
        for a, e in ((out, exact), (mine.grad, wanted.grad)):
            assert ((a.double() - e).abs() <= bound * e.abs().clamp(min=1)).all(), (shape, dtype)
extreme = torch.tensor([-1e4, -200.0, 200.0, 1e4], device=device, requires_grad=True)
y = _ops.quick_gelu(extreme)
y.sum().backward()
assert torch.equal(y.detach().cpu(), torch.tensor([0.0, 0.0, 200.0, 1e4]))
assert torch.equal(extreme.grad.cpu(), torch.tensor([0.0, 0.0, 1.0, 1.0]))
print("all kernels agree")
"""


def test_kernels() -> None:
    """On the GPU, or in Triton's interpreter, which must be switched on before Triton is imported: in a new process."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    env = dict(os.environ, OMP_NUM_THREADS="1")
    if not torch.cuda.is_available():
        env["TRITON_INTERPRET"] = "1"
    source = str(Path(next(iter(ramatch.__path__))).parent)
    env["PYTHONPATH"] = os.pathsep.join([source, env.get("PYTHONPATH", "")])
    run = subprocess.run([sys.executable, "-c", CASES], env=env, capture_output=True, text=True, timeout=200)
    assert "all kernels agree" in run.stdout, run.stdout[-2000:] + run.stderr[-4000:]
