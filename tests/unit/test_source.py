"""source/: real folders read, nothing written, every change noticed and named."""

from __future__ import annotations

import os
import resource
import shutil
import struct
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fp8fs.core.fingerprint import identity
from fp8fs.errors import SourceChangedError, SourceInvalidError
from fp8fs.source import Source, hints_key
from fp8fs.source import opened as source_module
from fp8fs.source.handles import Handles
from tests.builders import (
    hf_cache,
    llama_like,
    raw_header,
    tensor,
    wan_like,
    write_bytes,
    write_json,
    write_safetensors,
)

SHARD = "model-00001-of-00002.safetensors"


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    folder = tmp_path / "llama"
    llama_like(folder)
    return folder


def refusal(folder: Path) -> str:
    with pytest.raises(SourceInvalidError) as caught:
        Source.open(folder)
    return caught.value.what


def rewrite(path: Path, at: int, data: bytes) -> None:
    """Same size, other bytes, mtime put back."""
    facts = path.stat()
    with path.open("r+b") as file:
        file.seek(at)
        file.write(data)
    os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns))


def open_descriptors() -> set[str]:
    return {os.readlink(f"/proc/self/fd/{n}") for n in os.listdir("/proc/self/fd") if _is_open(n)}


def _is_open(number: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{number}")


# --- what is found


def test_an_opened_source_states_what_is_there(llama):
    """Entries are the folder's names and stat facts; shards have headers; texts are raw bytes."""
    os.chmod(llama / SHARD, 0o640)
    with Source.open(llama) as source:
        found = source.checkpoint
        assert list(found.entries) == sorted(os.listdir(llama))
        facts = (llama / SHARD).stat()
        entry = found.entries[SHARD]
        assert (entry.kind, entry.size, entry.mode) == ("file", facts.st_size, 0o640)
        assert (entry.mtime_ns, entry.ctime_ns) == (facts.st_mtime_ns, facts.st_ctime_ns)
        assert (entry.dev, entry.ino, entry.uid) == (facts.st_dev, facts.st_ino, facts.st_uid)
        assert found.texts["config.json"] == (llama / "config.json").read_bytes()
        assert found.shards[SHARD].entry == entry
        assert set(found.shards) == set(found.components[0].shards)
        assert not found.pipeline
        assert (source.root, source.bind_root, source.bind_prefix) == (llama, llama, "")
        assert source.changes() == []


def test_the_bytes_of_a_tensor_are_those_that_were_written(llama, tmp_path):
    """Header offsets and pread_into give the builder's bytes, at any length."""
    written = llama_like(tmp_path / "again")
    with Source.open(llama) as source:
        for component in source.checkpoint.components:
            for name, shard in component.weight_map.items():
                header = source.checkpoint.shards[shard].header
                begin, end = header.tensors[name].data_offsets
                buffer = bytearray(end - begin)
                source.pread_into(shard, buffer, header.preamble_bytes + begin)
                assert bytes(buffer) == written[name][2]


def test_every_kind_of_name_is_told_and_none_of_them_opened(llama):
    """FIFOs, dangling and looping links, links to folders, undecodable names: listed, never opened."""
    os.mkfifo(llama / "pipe.safetensors.fifo")
    (llama / "dangling").symlink_to("nowhere")
    (llama / "loop").symlink_to("loop")
    (llama / "sub").mkdir()
    (llama / "to_sub").symlink_to("sub")
    (llama / "to_file").symlink_to("config.json")
    (llama / "to_pipe").symlink_to("pipe.safetensors.fifo")
    with open(os.path.join(os.fsencode(llama), b"bad\xff"), "wb"):
        pass
    entries = Source.open(llama).checkpoint.entries
    kinds = {path: (e.kind, e.link) for path, e in entries.items()}
    assert kinds["pipe.safetensors.fifo"] == ("other", "")
    assert kinds["dangling"] == ("link", "nowhere")
    assert kinds["loop"] == ("link", "loop")
    assert kinds["to_sub"] == ("link", "sub")
    assert kinds["sub"] == ("dir", "")
    assert kinds["to_file"] == ("file", "config.json")
    assert kinds["to_pipe"] == ("other", "pipe.safetensors.fifo")
    assert kinds["bad\udcff"] == ("file", "")
    assert entries["to_file"].size == entries["config.json"].size
    assert list(entries) == sorted(entries)


def test_opening_and_reading_write_nothing(llama):
    """Names, sizes, mtimes, ctimes, modes and bytes below SRC are the same after everything a source can do."""

    def state() -> dict[str, tuple[object, ...]]:
        paths = [llama, *llama.rglob("*")]
        return {
            str(p): (
                s.st_mtime_ns,
                s.st_ctime_ns,
                s.st_mode,
                s.st_size,
                p.is_file() and p.read_bytes(),
            )
            for p in paths
            for s in [p.stat()]
        }

    before = state()
    with Source.open(llama) as source:
        source.pread_into(SHARD, bytearray(100), 0)
        source.check(SHARD)
        source.drop(SHARD, 0, 10_000)
        os.close(source.open_file("config.json"))
        source.changes()
    assert state() == before


def test_a_source_opens_without_any_write_permission(llama):
    """A read-only folder with read-only files is enough (root ignores modes; then the modes still hold)."""
    for path in llama.iterdir():
        path.chmod(0o400)
    llama.chmod(0o500)
    try:
        assert Source.open(llama).checkpoint.entries[SHARD].mode == 0o400
    finally:
        llama.chmod(0o700)


# --- HF cache


def test_a_cache_repository_means_its_main_snapshot(tmp_path):
    """SRC = models--org--name opens the snapshot of refs/main, links followed, blobs bindable."""
    wan_like(tmp_path / "wan")
    repository = hf_cache(tmp_path / "hub", tmp_path / "wan")
    (repository / "snapshots" / "older").mkdir()
    source = Source.open(repository)
    assert source.bind_root == repository
    assert source.bind_prefix.startswith("snapshots/")
    assert source.root == repository / source.bind_prefix
    shard = "transformer/diffusion_pytorch_model-00001-of-00002.safetensors"
    entry = source.checkpoint.entries[shard]
    assert (entry.kind, entry.link) == ("file", os.readlink(source.root / shard))
    assert source.fingerprints[shard].blob == os.path.basename(entry.link)
    assert len(source.fingerprints[shard].blob) == 64
    source.check(shard)
    assert source.checkpoint.pipeline


def test_a_snapshot_or_a_folder_in_it_keeps_its_repository(tmp_path):
    """SRC = snapshots/<rev>, or a component below it, still binds the repository."""
    wan_like(tmp_path / "wan")
    repository = hf_cache(tmp_path / "hub", tmp_path / "wan", revision="abc")
    component = Source.open(repository / "snapshots" / "abc" / "transformer")
    assert (component.bind_root, component.bind_prefix) == (repository, "snapshots/abc/transformer")
    assert Source.open(repository / "snapshots" / "abc").bind_prefix == "snapshots/abc"


def test_without_a_main_ref_only_one_snapshot_will_do(tmp_path, llama):
    """One snapshot is taken, several are named and refused, none is refused."""
    repository = hf_cache(tmp_path / "hub", llama, revision="abc")
    (repository / "refs" / "main").write_text("../../elsewhere")
    assert Source.open(repository).bind_prefix == "snapshots/abc"
    (repository / "snapshots" / "def").mkdir()
    assert "has 2 snapshots and no refs/main among them: abc, def" in refusal(repository)
    shutil.rmtree(repository / "snapshots")
    (repository / "snapshots").mkdir()
    assert "has no snapshot" in refusal(repository)


def test_a_second_download_of_a_blob_keeps_its_identity(tmp_path, llama):
    """In a cache the blob's hash stands instead of the mtime; elsewhere a new mtime is a new identity."""
    first = hf_cache(tmp_path / "one", llama)
    second = hf_cache(tmp_path / "two", llama)
    for blob in (second / "blobs").iterdir():
        os.utime(blob, ns=(1, 1))
    a, b = Source.open(first), Source.open(second, hints=Source.open(first).hints())
    assert a.checkpoint.shards[SHARD].identity == b.checkpoint.shards[SHARD].identity
    plain = Source.open(llama).checkpoint.shards[SHARD].identity
    os.utime(llama / SHARD, ns=(1, 1))
    assert Source.open(llama).checkpoint.shards[SHARD].identity != plain


# --- identity and hints


def test_the_identity_knows_no_place(llama, tmp_path):
    """A copy with its dates, elsewhere, is the same source; another byte in a sampled page is another."""
    shutil.copytree(llama, tmp_path / "copy", copy_function=shutil.copy2)
    original, copy = Source.open(llama), Source.open(tmp_path / "copy")
    same = original.checkpoint.shards[SHARD]
    assert same.identity == copy.checkpoint.shards[SHARD].identity
    assert same.identity == identity(original.fingerprints[SHARD])
    rewrite(tmp_path / "copy" / SHARD, same.entry.size - 1, b"\xaa")
    assert Source.open(tmp_path / "copy").checkpoint.shards[SHARD].identity != same.identity


def test_a_rewrite_that_the_samples_miss_is_told_by_its_hint(tmp_path):
    """Same size, mtime put back, no sampled byte touched: with the last mount's hints it is another identity."""
    path = write_safetensors(
        tmp_path / "src" / "model.safetensors", {"w": tensor(1, "F32", 1000, 1000)}
    )
    name = "model.safetensors"
    before = Source.open(path.parent)
    page = next(
        at
        for at in range(1_000_000, 2_000_000, 4096)
        if all(abs(at - o) > 8192 for o in _sampled(before, name))
    )
    rewrite(path, page, b"\x01\x02\x03")
    blind = Source.open(path.parent)
    assert blind.checkpoint.shards[name].identity == before.checkpoint.shards[name].identity
    told = Source.open(path.parent, hints=before.hints())
    assert told.checkpoint.shards[name].identity != before.checkpoint.shards[name].identity
    again = Source.open(path.parent, hints=told.hints())
    assert again.checkpoint.shards[name].identity == told.checkpoint.shards[name].identity


def _sampled(source: Source, name: str) -> tuple[int, ...]:
    from fp8fs.core.fingerprint import sample_offsets

    shard = source.checkpoint.shards[name]
    return sample_offsets(shard.entry.size, shard.header.preamble_bytes)


def test_adopted_identities_are_used(llama):
    """What was proved equal before is known under its older identity."""
    now = Source.open(llama).checkpoint.shards[SHARD].identity
    adopted = Source.open(llama, adopted={now: "older"})
    assert adopted.checkpoint.shards[SHARD].identity == "older"


def test_adopted_identities_may_be_looked_up_when_asked(llama):
    """A mapping that looks empty but answers is asked."""

    class Lazy(dict[str, str]):
        def get(self, key, default=None):
            return default if key == "older" else "older"

    adopted = Source.open(llama, adopted=Lazy())
    assert adopted.checkpoint.shards[SHARD].identity == "older"


def test_the_hints_key_is_local_to_the_place(llama, tmp_path):
    """Two ways to one folder share the key, two folders do not."""
    (tmp_path / "way").symlink_to(llama)
    assert hints_key(tmp_path / "way") == hints_key(llama)
    assert hints_key(tmp_path) != hints_key(llama)


# --- changes under a mount


def grow(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"x")


def replace(path: Path) -> None:
    copy = path.with_name("copy")
    shutil.copy2(path, copy)
    copy.replace(path)


def to_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


CHANGES: dict[str, Callable[[Path], None]] = {
    "size was": grow,
    "mtime_ns was": lambda path: os.utime(path, ns=(1, 1)),
    "ctime_ns was": lambda path: rewrite(path, 500, b"y"),
    "inode was": replace,
    "was there, ": lambda path: path.unlink(),
    "was a regular file, is none now": to_fifo,
}


@pytest.mark.parametrize("said", CHANGES)
@pytest.mark.parametrize("is_open", [True, False])
def test_a_change_is_named_with_both_values(llama, said, is_open):
    """check, changes and the first open each say which file and what differs, opened before or not."""
    with Source.open(llama) as source:
        if is_open:
            source.pread_into(SHARD, bytearray(8), 0)
        CHANGES[said](llama / SHARD)
        with pytest.raises(SourceChangedError) as caught:
            source.check(SHARD)
        assert caught.value.what.startswith(f"{SHARD}: {said}")
        assert "unmount and mount again" in caught.value.hint
        assert source.changes() == [caught.value.what]
        with pytest.raises(SourceChangedError, match=SHARD):
            os.close(source.open_file(SHARD))
        if not is_open:
            with pytest.raises(SourceChangedError, match=SHARD):
                source.pread_into(SHARD, bytearray(8), 0)


def test_a_read_past_the_end_of_a_cut_file_names_the_sizes(llama):
    """A file cut under an open descriptor gives an error, not short data."""
    with Source.open(llama) as source:
        size = source.checkpoint.entries[SHARD].size
        source.pread_into(SHARD, bytearray(8), 0)
        os.truncate(llama / SHARD, size - 10)
        with pytest.raises(SourceChangedError) as caught:
            source.pread_into(SHARD, bytearray(100), size - 100)
        assert f"{SHARD}: size was {size}, is {size - 10}" in caught.value.what


def test_a_vanished_source_is_one_sentence(llama):
    """Not one for each file."""
    source = Source.open(llama)
    shutil.rmtree(llama)
    assert source.changes() == [f"{llama}: was there, is gone"]


# --- descriptors


def test_few_descriptors_serve_many_shards(tmp_path):
    """200 shards open and read with room for 40 descriptors, and close gives all back."""
    tensors = {f"t{n}": tensor(n, "BF16", 8) for n in range(200)}
    for n, name in enumerate(tensors):
        path = tmp_path / "many" / f"model-{n + 1:05d}-of-00200.safetensors"
        write_safetensors(path, {name: tensors[name]})
    before = len(os.listdir("/proc/self/fd"))
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before + 40, limits[1]))
    try:
        with Source.open(tmp_path / "many", max_open_files=20) as source:
            shards = source.checkpoint.components[0].shards
            with ThreadPoolExecutor(8) as pool:
                list(pool.map(lambda s: source.pread_into(s, bytearray(8), 0), shards * 3))
            held = [n for n in open_descriptors() if str(tmp_path) in n]
            assert 0 < len(held) <= 20
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert not [n for n in open_descriptors() if str(tmp_path) in n]
    with pytest.raises(SourceInvalidError, match="is closed"):
        source.pread_into(shards[0], bytearray(8), 0)


def test_a_descriptor_in_use_is_never_closed(tmp_path):
    """With room for one, a borrowed handle outlives others and even close; each read sees its own file."""
    names = [str(n) for n in range(6)]
    for name in names:
        (tmp_path / name).write_text(name * 4)
    handles = Handles(lambda name: os.open(tmp_path / name, os.O_RDONLY), 1)

    def read(name: str) -> bool:
        with handles.borrow(name) as fd:
            return os.pread(fd, 4, 0) == name.encode() * 4

    with handles.borrow("0") as held:
        with ThreadPoolExecutor(6) as pool:
            assert all(pool.map(read, names * 200))
        assert os.pread(held, 4, 0) == b"0000"
        handles.close()
        assert os.pread(held, 4, 0) == b"0000"
    assert len(handles) == 0
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(held)


def test_two_threads_that_open_at_once_keep_one(tmp_path):
    """The second descriptor is closed, not leaked."""
    (tmp_path / "f").write_text("x")
    both, opened = threading.Barrier(2), list[int]()

    def slow_open(name: str) -> int:
        both.wait(10)
        opened.append(os.open(tmp_path / name, os.O_RDONLY))
        return opened[-1]

    handles = Handles(slow_open, 4)

    def use() -> None:
        with handles.borrow("f"):
            both.wait(10)

    threads = [threading.Thread(target=use) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(opened) == 2
    handles.close()
    assert not [n for n in open_descriptors() if str(tmp_path) in n]


def test_drop_never_fails(llama):
    """Unopened files, ranges of nothing and past the end are all fine; the file's pages leave the cache unharmed."""
    with Source.open(llama) as source:
        size = source.checkpoint.entries[SHARD].size
        source.drop(SHARD, 0, size)
        expected = (llama / SHARD).read_bytes()
        buffer = bytearray(size)
        source.pread_into(SHARD, buffer, 0)
        for file_offset, length in ((0, 0), (1, 1), (0, size), (size - 1, 100), (4095, 4098)):
            source.drop(SHARD, file_offset, length)
        source.pread_into(SHARD, buffer, 0)
        assert bytes(buffer) == expected


# --- refusals


def test_places_that_are_no_checkpoint_are_refused(tmp_path):
    """Missing, a file, empty, only pickled weights: one sentence each."""
    assert refusal(tmp_path / "missing") == f"{tmp_path}/missing: No such file or directory"
    file = write_bytes(tmp_path / "a" / "file.safetensors", b"")
    assert refusal(file) == f"{file}: is not a directory"
    (tmp_path / "empty").mkdir()
    assert refusal(tmp_path / "empty") == "SRC has no safetensors weights: it is empty"
    write_bytes(tmp_path / "pickled" / "pytorch_model.bin", b"x")
    assert refusal(tmp_path / "pickled") == "SRC has no safetensors weights, only pytorch_model.bin"


def test_damaged_shards_are_refused_by_name(llama):
    """Cut short, a header past the end, an absurd header, overlaps, no shard at all."""
    path, whole = llama / SHARD, (llama / SHARD).read_bytes()
    path.write_bytes(whole[:-2])
    assert f"ends at byte {len(whole)}, file has {len(whole) - 2}" in refusal(llama)
    path.write_bytes(struct.pack("<Q", 10_000) + b"{}")
    assert refusal(llama) == f"{SHARD}: the header ends at byte 10008, file has 10"
    path.write_bytes(struct.pack("<Q", 2**60) + b"{}")
    assert "claims a header of" in refusal(llama)
    path.write_bytes(b"123")
    assert "3 bytes are too few" in refusal(llama)
    two = {
        "a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]},
        "b": {"dtype": "U8", "shape": [4], "data_offsets": [2, 6]},
    }
    path.write_bytes(raw_header(two, bytes(6)))
    assert refusal(llama).startswith(f'{SHARD}: tensor "b" begins at data byte 2 and overlaps')
    path.unlink()
    assert refusal(llama) == f"model.safetensors.index.json: names {SHARD}, which is missing"


def test_a_long_header_is_read_whole(tmp_path):
    """Headers longer than the first read are read on."""
    tensors = {f"{'n' * 200}{n}": tensor(n, "U8", 4) for n in range(500)}
    write_safetensors(tmp_path / "model.safetensors", tensors)
    source = Source.open(tmp_path)
    header = source.checkpoint.shards["model.safetensors"].header
    assert header.preamble_bytes > 100_000
    assert list(header.tensors) == list(tensors)


@pytest.mark.parametrize("name", [SHARD, "config.json"])
def test_git_lfs_pointers_are_refused_by_name(llama, name):
    """With the command that fetches the real file."""
    write_bytes(
        llama / name, b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n"
    )
    with pytest.raises(SourceInvalidError) as caught:
        Source.open(llama)
    assert caught.value.what == f"{name}: is a Git LFS pointer, not the file itself"
    assert caught.value.hint == "git lfs pull"


def test_unfinished_downloads_are_refused_by_name(llama, tmp_path):
    """A .incomplete file beside the shards, or behind a shard's link."""
    write_bytes(llama / "x.safetensors.incomplete", b"")
    assert refusal(llama).startswith("x.safetensors.incomplete: the download of it is not finished")
    (llama / "x.safetensors.incomplete").unlink()
    (llama / SHARD).rename(tmp_path / "abc.incomplete")
    (llama / SHARD).symlink_to(tmp_path / "abc.incomplete")
    assert refusal(llama).startswith(f"{SHARD}: the download of it is not finished")


def test_a_fifo_instead_of_a_shard_is_refused_not_opened(llama):
    """Opening it would wait for a writer for ever."""
    to_fifo(llama / SHARD)
    assert (
        refusal(llama)
        == f"model.safetensors.index.json: names {SHARD}, which is not a regular file"
    )


def test_a_json_file_of_absurd_size_is_refused(llama):
    """Bounded before it is read (the file is sparse)."""
    os.truncate(llama / "config.json", 10**9)
    assert refusal(llama).startswith(
        "config.json: has 1000000000 bytes, the limit for a JSON file is"
    )


def test_unlistable_names_and_unknown_paths_are_errors(llama):
    """Reading what is no planned file is an error that names it."""
    write_json(llama / "late.json", {})
    source = Source.open(llama)
    write_json(llama / "later.json", {})
    os.close(source.open_file("late.json"))
    for path in ("later.json", "", "../x", "/etc/passwd"):
        with pytest.raises(SourceInvalidError, match="is no file of SRC"):
            source.open_file(path)


def test_a_shard_that_was_cached_before_stays_cached(llama, monkeypatch):
    """Only what our own reads brought into the page cache is given back."""
    given_back = []
    monkeypatch.setattr(os, "posix_fadvise", lambda *args: given_back.append(args))
    for cached in (True, False):
        monkeypatch.setattr(source_module, "_is_cached", lambda fd, size, cached=cached: cached)
        with Source.open(llama) as source:
            size = source.checkpoint.entries[SHARD].size
            given_back.clear()
            source.pread_into(SHARD, bytearray(size), 0)
            source.drop(SHARD, 0, size)
        assert bool(given_back) is not cached


def test_cached_means_every_probe_answers_at_once(tmp_path, monkeypatch):
    """A file just written is cached; one of which a part would have to be waited for is not."""
    path = tmp_path / "file"
    path.write_bytes(bytes(1 << 20))
    fd = os.open(path, os.O_RDONLY)
    try:
        try:
            os.preadv(fd, [bytearray(1)], 0, os.RWF_NOWAIT)
        except OSError as err:
            pytest.skip(f"the filesystem cannot tell: {err.strerror}")  # a tmpfs
        assert source_module._is_cached(fd, 1 << 20)
        assert not source_module._is_cached(fd, 2 << 20)  # shorter than it says

        def hole(fd, buffers, file_offset, flags):
            assert flags == os.RWF_NOWAIT
            if file_offset > 700_000:
                raise BlockingIOError
            return 1

        monkeypatch.setattr(os, "preadv", hole)
        assert not source_module._is_cached(fd, 1 << 20)
    finally:
        os.close(fd)
