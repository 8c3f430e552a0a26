"""Parts of the vLLM-Omni plugin that need no engine."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from fp8fs.integrations import vllm_omni


def test_without_the_engine_it_says_so_and_does_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """An environment without vLLM-Omni gets one line, and no exception."""
    with caplog.at_level(logging.WARNING):
        vllm_omni.register()
    assert [record.getMessage() for record in caplog.records] == [
        "fp8fs plugin is not active: vllm-omni missing, vllm missing (tested with vllm-omni 0.30.0, vllm 0.30.0)"
    ]


def test_switched_off_it_is_silent(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FP8FS_VLLM_OMNI=0 means that nothing is even looked at."""
    monkeypatch.setenv("FP8FS_VLLM_OMNI", "0")
    vllm_omni.register()
    assert caplog.records == []


def test_a_view_is_known_by_its_manifest(tmp_path: Path) -> None:
    """The model folder and its component folders count as a view exactly if the manifest is there."""
    component = tmp_path / "transformer"
    component.mkdir()
    assert not vllm_omni.is_view(tmp_path)
    assert not vllm_omni.is_view(component)
    (tmp_path / ".fp8fs").mkdir()
    (tmp_path / ".fp8fs" / "manifest.json").write_text("{}")
    assert vllm_omni.is_view(tmp_path)
    assert vllm_omni.is_view(component)


def test_requantizing_keeps_a_shared_scale() -> None:
    """Shards under one scale keep their bytes; shards under a smaller one are brought under the largest."""
    weight = torch.arange(64, dtype=torch.float32).reshape(4, 16).sub(32).to(torch.float8_e4m3fn)
    same = vllm_omni._requantize(weight, scales=torch.tensor([0.5, 0.5]), widths=[2, 2])
    assert torch.equal(same.view(torch.uint8), weight.view(torch.uint8))
    halved = vllm_omni._requantize(weight, scales=torch.tensor([0.25, 0.5]), widths=[2, 2])
    assert torch.equal(halved[2:].view(torch.uint8), weight[2:].view(torch.uint8))
    assert torch.equal(halved[:2].float(), (weight[:2].float() / 2).to(torch.float8_e4m3fn).float())


def test_one_scale_fills_every_slot() -> None:
    """A stored scale of shape [] or [1] stands for all shards; one per shard is left as it is."""
    for stored in (torch.tensor(0.5), torch.tensor([0.5])):
        assert vllm_omni._fill_scale_slots(stored, slots=3).tolist() == [0.5, 0.5, 0.5]
    assert vllm_omni._fill_scale_slots(torch.tensor([1.0, 2.0]), slots=2).tolist() == [1.0, 2.0]
