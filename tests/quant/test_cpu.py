"""The CPU quantizer's footprint: what it imports, what it keeps on disk, how much memory it takes."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest

from fp8fs.quant import kernel_cache, kernels, machine_code, reference
from fp8fs.quant.cpu import CpuQuantizer
from tests.quant.weights import normal


def in_process(code: str, **environment: str) -> dict[str, object]:
    """The JSON object that *code* prints, run in a fresh interpreter."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
    )
    answer: dict[str, object] = json.loads(done.stdout)
    return answer


def test_imports_are_late() -> None:
    """Importing the package or making the CPU quantizer loads no numba, no torch and no numpy."""
    found = in_process(
        "import json, sys\n"
        "seen = lambda: [m for m in ('numpy', 'numba', 'torch') if m in sys.modules]\n"
        "import fp8fs.quant\n"
        "fp8fs.quant.quantizer_factory('cpu')\n"
        "package = seen()\n"
        "quantizer = fp8fs.quant.make_quantizer('cpu')\n"
        "print(json.dumps({'package': package, 'made': seen()}))\n"
    )
    assert found == {"package": [], "made": []}


def test_cold_start_is_small(tmp_path: Path) -> None:
    """Compiling every kernel for every dtype, nothing cached, stays under 300 MB and loads no torch."""
    # VmHWM: ru_maxrss would be the larger of this and what the process that starts it has.
    found = in_process(
        "import json, re, sys\n"
        "from fp8fs.quant.cpu import CpuQuantizer\n"
        "CpuQuantizer().warm(('BF16', 'F16', 'F32'))\n"
        "peak = re.search(r'VmHWM:\\s+(\\d+) kB', open('/proc/self/status').read())[1]\n"
        "print(json.dumps({'peak_kib': int(peak), 'torch': 'torch' in sys.modules}))\n",
        XDG_CACHE_HOME=str(tmp_path),
    )
    assert found["torch"] is False
    assert 20_000 < int(str(found["peak_kib"])) < 300 * 1024
    assert len(list((tmp_path / "fp8fs" / "kernels").rglob("*.code"))) == 18


@pytest.mark.parametrize("name", sorted(kernels.KERNELS))
def test_kernels_are_plain_ieee_code(name: str) -> None:
    """No kernel lets the compiler reorder or contract arithmetic, and none allocates memory."""
    ir, symbol = kernels.compile_ir(name, "BF16")
    assert symbol in ir
    relaxed = r"\b(fast|reassoc|contract|arcp|afn|nnan|ninf|nsz)\b"
    assert not re.search(rf" = (f\w+|call) .*{relaxed} ", ir)
    assert "NRT_Allocate" not in ir


def test_kernels_release_the_gil() -> None:
    """A thread of Python gets on while another one is in a kernel."""
    quantizer = CpuQuantizer()
    source = bytes(64 << 20)
    quantizer.amax(source[:64], "BF16")
    before = sys.getswitchinterval()
    sys.setswitchinterval(60)  # so that nobody gets the GIL unless it is given away
    entered, counted = threading.Event(), []

    def count() -> None:
        entered.wait()
        counted.append(True)

    counter = threading.Thread(target=count)
    try:
        counter.start()
        entered.set()
        for _ in range(50):
            quantizer.amax(source, "BF16")
            if counted:
                break
        assert counted
    finally:
        sys.setswitchinterval(before)
        counter.join()


def quantized(quantizer: CpuQuantizer) -> bytes:
    weight = normal(1, "BF16", 4, 64)
    data, scale = bytearray(weight.size), bytearray(16)
    quantizer.quantize_rows(weight.tobytes(), "BF16", 4, data, scale)
    assert bytes(data) == reference.per_channel(weight).data.tobytes()
    return bytes(data)


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def test_cache_is_used(tmp_path: Path) -> None:
    """A second quantizer loads what the first compiled, and writes nothing."""
    quantized(CpuQuantizer(tmp_path / "kernels"))
    before = [(path, path.stat().st_mtime_ns) for path in files(tmp_path)]
    assert [path.suffix for path, _ in before] == [".code"]
    quantized(CpuQuantizer(tmp_path / "kernels"))
    assert [(path, path.stat().st_mtime_ns) for path in files(tmp_path)] == before


def test_a_kept_kernel_is_loaded_any_number_of_times(tmp_path: Path) -> None:
    """Builds one after the other, in one process, each link the kept kernel anew when the one before has gone."""
    quantized(CpuQuantizer(tmp_path))
    for _ in range(50):
        code = kernel_cache.read(tmp_path, "quantize_rows", "BF16")
        assert code is not None
        machine_code.load(code)  # RuntimeError if LLVM knows the name already


def test_kept_kernels_need_no_numba(tmp_path: Path) -> None:
    """Once a kernel is kept, a process that runs it imports LLVM, and neither numba nor numpy."""
    quantized(CpuQuantizer(tmp_path))
    found = in_process(
        "import json, sys\n"
        "from pathlib import Path\n"
        "from fp8fs.quant.cpu import CpuQuantizer\n"
        f"quantizer = CpuQuantizer(Path({str(tmp_path)!r}))\n"
        "quantizer.quantize_rows(bytes(8), 'BF16', 2, bytearray(4), bytearray(8))\n"
        "print(json.dumps({m: m in sys.modules for m in ('numba', 'numpy', 'llvmlite')}))\n"
    )
    assert found == {"numba": False, "numpy": False, "llvmlite": True}


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda whole: b"",
    "cut": lambda whole: whole[: len(whole) // 2],
    "scribbled": lambda whole: b"?" * len(whole),
    "one bit": lambda whole: whole[:-1] + bytes([whole[-1] ^ 1]),
    "another kernel": lambda whole: machine_code.encode(
        msgspec.structs.replace(decoded(whole), name="amax")
    ),
    "no object": lambda whole: machine_code.encode(
        msgspec.structs.replace(decoded(whole), object=b"?" * 64)
    ),
    "another symbol": lambda whole: machine_code.encode(
        msgspec.structs.replace(decoded(whole), symbol="f")
    ),
    "something missing": lambda whole: machine_code.encode(
        msgspec.structs.replace(decoded(whole), unused=())
    ),
}


def decoded(whole: bytes) -> machine_code.MachineCode:
    code = machine_code.decode(whole)
    assert code is not None
    return code


@pytest.mark.parametrize("damage", sorted(DAMAGES))
def test_damaged_cache_is_compiled_again(tmp_path: Path, damage: str) -> None:
    """A kept kernel that is empty, short, overwritten or does not link costs a compilation, and is kept anew."""
    quantized(CpuQuantizer(tmp_path / "kernels"))
    (path,) = files(tmp_path)
    whole = path.read_bytes()
    path.write_bytes(DAMAGES[damage](whole))
    quantized(CpuQuantizer(tmp_path / "kernels"))
    assert files(tmp_path) == [path]
    repaired = path.read_bytes()
    assert decoded(repaired).name == "quantize_rows"
    quantized(CpuQuantizer(tmp_path / "kernels"))
    assert path.read_bytes() == repaired


def test_kept_kernels_that_are_not_ours_are_not_run(tmp_path: Path) -> None:
    """A kept kernel that others could have written, or that is a link, is compiled again and replaced."""
    quantized(CpuQuantizer(tmp_path / "kernels"))
    (path,) = files(tmp_path)
    path.chmod(0o666)
    quantized(CpuQuantizer(tmp_path / "kernels"))
    assert path.stat().st_mode & 0o777 == 0o600
    elsewhere = tmp_path / "elsewhere"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)
    quantized(CpuQuantizer(tmp_path / "kernels"))
    assert not path.is_symlink()
    assert decoded(path.read_bytes()).name == "quantize_rows"


def test_kernels_of_another_compiler_or_processor_are_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What another processor or compiler release made is neither loaded nor lost."""
    quantized(CpuQuantizer(tmp_path))
    first = set(files(tmp_path))
    for number, seam in enumerate(("processor", "release"), 2):
        kernel_cache._toolchain.cache_clear()
        if seam == "processor":
            monkeypatch.setattr(machine_code, "processor", lambda: "another one")
        else:
            monkeypatch.setattr(kernel_cache, "_version", lambda package: f"{package} 99")
        quantized(CpuQuantizer(tmp_path))
        assert len(files(tmp_path)) == number
        assert first < set(files(tmp_path))
    monkeypatch.undo()
    kernel_cache._toolchain.cache_clear()


def test_tensor_scales_are_the_reference_s() -> None:
    """For any float32 amax, tiny and huge ones too, the scale has the reference's bits."""
    bits = np.random.default_rng(5).integers(0, 0x7F80_0000, size=200_000, dtype=np.uint32)
    amaxes = np.concatenate([bits, np.arange(3000, dtype=np.uint32)]).view(np.float32)
    quantizer = CpuQuantizer()
    found = np.array([quantizer.tensor_scale(float(amax)) for amax in amaxes], dtype=np.float32)
    expected = np.array([reference.tensor_scale(float(amax)) for amax in amaxes], dtype=np.float32)
    np.testing.assert_array_equal(found.view(np.uint32), expected.view(np.uint32))


def test_cache_that_others_can_write_is_not_used(tmp_path: Path) -> None:
    """Kernels work without a cache where the directory or a parent of it is writable by others."""
    open_to_all = tmp_path / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    quantized(CpuQuantizer(open_to_all))
    quantized(CpuQuantizer(open_to_all / "below"))
    assert not files(open_to_all)


def test_private_directory(tmp_path: Path) -> None:
    """Made with mode 0700; a link resolves; a file, a foreign owner or a lax mode is refused."""
    made = kernel_cache.private_directory(tmp_path / "a" / "b")
    assert made is not None
    assert made.stat().st_mode & 0o777 == 0o700
    link = tmp_path / "link"
    link.symlink_to(made)
    assert kernel_cache.private_directory(link) == made
    (tmp_path / "file").write_bytes(b"")
    assert kernel_cache.private_directory(tmp_path / "file") is None
    made.chmod(0o770)
    assert kernel_cache.private_directory(made) is None


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_foreign_directory_is_not_private(tmp_path: Path) -> None:
    """A directory of another user is refused, and so is ours below it."""
    theirs = tmp_path / "theirs"
    ours = theirs / "ours"
    ours.mkdir(parents=True, mode=0o700)
    assert kernel_cache.private_directory(ours) is not None
    os.chown(theirs, 12345, -1)
    assert kernel_cache.private_directory(theirs) is None
    assert kernel_cache.private_directory(ours) is None
    shutil.rmtree(theirs)


def test_default_directory_follows_the_source(monkeypatch: pytest.MonkeyPatch) -> None:
    """The default directory lies in the user's cache and differs when the kernels' source does."""
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    first = kernel_cache.default_directory()
    assert first.parent == Path("/somewhere/fp8fs/kernels")
    monkeypatch.setattr(kernel_cache, "__file__", str(Path(__file__).parent / "x.py"))
    monkeypatch.setattr(Path, "read_bytes", lambda self: b"other source")
    assert kernel_cache.default_directory() != first


MISFITS = {
    "half an element": lambda q: q.amax(bytes(3), "BF16"),
    "no source dtype": lambda q: q.amax(bytes(8), "F64"),
    "data too small": lambda q: q.cast_tensor(bytes(8), "BF16", 1.0, bytearray(3)),
    "data read-only": lambda q: q.cast_tensor(bytes(8), "BF16", 1.0, bytes(4)),
    "scale zero": lambda q: q.cast_tensor(bytes(8), "BF16", 0.0, bytearray(4)),
    "scale NaN": lambda q: q.cast_tensor(bytes(8), "BF16", float("nan"), bytearray(4)),
    "ragged rows": lambda q: q.amax_rows(bytes(8), "BF16", 3, bytearray(12)),
    "scales too small": lambda q: q.quantize_rows(bytes(8), "BF16", 2, bytearray(4), bytearray(4)),
    "infinite maximum": lambda q: q.cast_rows(
        bytes(8), "BF16", 1, np.float32(np.inf).tobytes(), bytearray(4), bytearray(4)
    ),
    "other shape": lambda q: q.quantize_blocks(
        bytes(8), "BF16", 2, 3, bytearray(4), bytearray(4), pow2=True
    ),
    "scales too large": lambda q: q.quantize_blocks(
        bytes(8), "BF16", 2, 2, bytearray(4), bytearray(8), pow2=True
    ),
}


@pytest.mark.parametrize("misfit", sorted(MISFITS))
def test_wrong_buffers_are_refused(misfit: str) -> None:
    """Sizes, dtypes and scales that do not fit are a ValueError before any memory is touched."""
    with pytest.raises(ValueError, match=r".+"):
        MISFITS[misfit](CpuQuantizer())
