"""What the store promises, on a real directory and on tmpfs."""

from __future__ import annotations

import errno
import itertools
import logging
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ClassVar

import msgspec
import pytest
import xxhash

from fp8fs.errors import (
    StoreBusyError,
    StoreDamagedError,
    StoreError,
    StoreFullError,
)
from fp8fs.store.fsio import FsIo, StrPath
from fp8fs.store.holder import holder_text
from fp8fs.store.journal import scan_journal
from fp8fs.store.store import Published, Store, UnitRecord
from fp8fs.store.types import PREAMBLE
from tests.storing import Toy, snapshot

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as somebody else")
NOBODY = 65534


@pytest.fixture(params=["disk", "tmpfs"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """Where a store may be made."""
    if request.param == "disk":
        yield tmp_path / "store"
        return
    if not os.access("/dev/shm", os.W_OK):
        pytest.skip("no /dev/shm to write to")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder) / "store"


@pytest.fixture
def store(root: Path) -> Store:
    return Store.open(root)


def object_of(store: Store, toy: Toy) -> Path:
    path, _ = toy.build(store)
    return path


# -- making ------------------------------------------------------------------------------


def test_a_sealed_object_has_the_planned_bytes_and_attributes(store: Store) -> None:
    """Bytes, size, mode (without write bits), owner and mtime are the spec's; nothing of the partial is left."""
    toy = Toy()
    path, made = toy.build(store)
    info = path.stat()
    assert made == [0, 1, 2, 3, 4]
    assert path == store.object_path(toy.spec.object_id) == store.find_object(toy.spec)
    assert path.read_bytes() == toy.whole()
    assert (stat.S_IMODE(info.st_mode), info.st_mtime_ns) == (0o440, toy.spec.mtime_ns)
    assert (info.st_uid, info.st_gid) == (os.getuid(), os.getgid())
    assert store.list_partials() == []
    assert os.listdir(store.root / "v1" / "tmp") == []


@needs_root
def test_a_sealed_object_belongs_to_the_owner_of_its_sources(store: Store) -> None:
    """Owner and group are those that the plan names, not ours; lost in a copy of the store, they are given back."""
    toy = Toy()
    toy.spec = msgspec.structs.replace(toy.spec, uid=NOBODY, gid=NOBODY - 1)
    path, _ = toy.build(store)
    for _ in range(2):
        info = path.stat()
        assert (info.st_uid, info.st_gid) == (NOBODY, NOBODY - 1)
        os.chown(path, 0, 0)
        assert store.find_object(toy.spec) == path


def test_the_record_tells_units_digest_and_facts(store: Store) -> None:
    """The record beside an object holds every unit's record, the caller's facts and the shard digest of FORMAT.md."""
    toy = Toy(count=2)
    object_of(store, toy)
    record = store.record(toy.spec.object_id)
    assert record is not None
    assert list(record.records) == [toy.record(0), toy.record(1)]
    assert bytes(record.facts) == b'{"toy":true}'
    digests = [xxhash.xxh3_128(toy.spec.preamble).hexdigest()]
    for unit in range(2):
        digests += [toy.record(unit).data_digest, toy.record(unit).scale_digest]
    raw = b"".join(bytes.fromhex(digest) for digest in digests)
    assert record.shard_digest == xxhash.xxh3_128(raw).hexdigest()


def test_a_shard_without_units_is_only_its_preamble(store: Store) -> None:
    """Empty tensors live in the header: such a shard can be sealed at once."""
    toy = Toy(count=0)
    assert object_of(store, toy).read_bytes() == toy.spec.preamble


def test_finished_units_outlive_their_maker(store: Store) -> None:
    """What was committed is not made again by the next one, in the same store object or in a new one."""
    toy = Toy()
    toy.finished(store, [0, 3])
    again = Store.open(store.root)
    path, made = toy.build(again)
    assert made == [1, 2, 4]
    assert path.read_bytes() == toy.whole()


def test_sealing_needs_every_unit(store: Store) -> None:
    """A shard with a missing unit is not published, and goes on being filled."""
    toy = Toy()
    with toy.open(store) as partial:
        toy.make(partial, 1)
        assert partial.missing() == [0, 2, 3, 4]
        with pytest.raises(StoreError, match="4 of 5 units are not made"):
            partial.seal({})
    assert store.find_object(toy.spec) is None
    assert toy.build(store)[1] == [0, 2, 3, 4]


def test_sealing_twice_gives_the_same_object(store: Store) -> None:
    """seal() is repeatable, by the same partial and by another one that was open meanwhile."""
    toy = Toy()
    with toy.open(store) as first, toy.open(store) as second:
        for unit in range(5):
            toy.make(first, unit)
        path = first.seal({})
        inode = path.stat().st_ino
        assert first.seal({}) == second.seal({}) == path
        assert path.stat().st_ino == inode


def test_a_published_shard_is_no_longer_worked_on(store: Store) -> None:
    """claim, commit, pwrite and partial() say Published afterwards; the data descriptor still reads."""
    toy = Toy()
    with toy.open(store) as first, toy.open(store) as second:
        for unit in range(5):
            toy.make(first, unit)
        first.seal({})
        for partial in (first, second):
            with pytest.raises(Published), partial.claim(0):
                pass
        with pytest.raises(Published):
            first.pwrite(b"x", 4096)
        with pytest.raises(Published):
            first.commit(toy.record(0))
        assert os.pread(second.fd, toy.spec.size, 0) == toy.whole()
    with pytest.raises(Published):
        toy.open(store)


def test_a_unit_that_was_written_but_not_committed_does_not_count(store: Store) -> None:
    """Bytes without a record mean nothing."""
    toy = Toy()
    with toy.open(store) as partial, partial.claim(2):
        toy.write(partial, 2)
    with toy.open(store) as partial:
        assert partial.records == {}


# -- recovery ----------------------------------------------------------------------------


def journal_of(store: Store, toy: Toy) -> Path:
    return store.root / "v1" / "partial" / toy.spec.object_id / "journal"


def damage(path: Path, file_offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(file_offset)
        file.write(data)


def test_units_behind_the_last_barrier_are_checked(store: Store) -> None:
    """After an unclean stop, a record whose data or scale did not reach the disk is dropped, and only that one."""
    toy = Toy()
    with toy.open(store) as partial:
        for unit in range(5):
            toy.make(partial, unit)
        files = snapshot(store.root)
    # What a power loss may leave: no barrier, one unit's data torn, another one's scale lost.
    folder = journal_of(store, toy).parent
    lines = bytes(files[f"v1/partial/{toy.spec.object_id}/journal"]).split(b"\n")
    journal_of(store, toy).write_bytes(b"\n".join(x for x in lines if b"barrier" not in x))
    damage(folder / "data", toy.spans[0].start + 5, b"\0\0\0\0")
    damage(folder / "data", toy.spans[3].scale_start, b"\xff")
    with toy.open(store) as partial:
        assert sorted(partial.records) == [1, 2, 4]
    assert toy.build(store)[1] == [0, 3]


def test_units_before_the_last_barrier_are_trusted(store: Store) -> None:
    """A clean stop leaves a barrier, so the next opening reads no data back."""
    toy = Toy()
    toy.finished(store, range(5))
    reads: list[int] = []

    class Watching(FsIo):
        def pread_once(self, fd: int, length: int, file_offset: int) -> bytes:
            reads.append(file_offset)
            return super().pread_once(fd, length, file_offset)

    with toy.open(Store.open(store.root, io=Watching())) as partial:
        assert sorted(partial.records) == [0, 1, 2, 3, 4]
    assert max(reads) < toy.spans[0].start


@pytest.mark.parametrize("cut", [0, 1, 9, 60, 130])
def test_a_torn_journal_keeps_what_is_whole(store: Store, cut: int) -> None:
    """A journal that lost its end, or all of it, gives the units that it still names; the rest is made again."""
    toy = Toy()
    toy.finished(store, range(5))
    journal = journal_of(store, toy)
    size = journal.stat().st_size
    os.truncate(journal, min(size, size * cut // 130))
    named = [unit for unit in range(5) if b"[%d," % unit in journal.read_bytes()]
    path, made = toy.build(store)
    assert len(made) >= 5 - len(named)
    assert not set(made) & set(named[:-1])
    assert path.read_bytes() == toy.whole()


@pytest.mark.parametrize(
    "harm",
    [
        "data shorter",
        "data longer",
        "no journal",
        "no lock",
        "no data",
        "other preamble",
        "foreign",
    ],
)
def test_a_damaged_partial_is_recovered(store: Store, harm: str) -> None:
    """Whatever is missing or wrong in a partial's directory costs units at most, never the shard's bytes."""
    toy = Toy()
    toy.finished(store, range(4))
    folder = journal_of(store, toy).parent
    if harm == "data shorter":
        os.truncate(folder / "data", toy.spans[2].start + 1)
    elif harm == "data longer":
        os.truncate(folder / "data", toy.spec.size + 1)
    elif harm == "other preamble":
        damage(folder / "data", 9, b"X")
    elif harm == "foreign":
        damage(folder / "journal", 20, b"X")
    else:
        (folder / harm[3:]).unlink()
    path, made = toy.build(store)
    assert path.read_bytes() == toy.whole()
    assert 4 in made
    if harm in ("data longer", "no lock", "other preamble", "foreign"):
        assert made == [4]


def test_one_bit_of_a_journal_invents_nothing(store: Store) -> None:
    """Whichever bit is flipped, in a line that a barrier covers, too: no unit and no barrier but the true ones is read."""
    toy = Toy()
    toy.finished(store, [0, 1, 2])
    journal = journal_of(store, toy)
    whole = journal.read_bytes()
    true = [toy.record(unit) for unit in (0, 1, 2)]
    covered = scan_journal(whole, 0, 5).covered
    assert covered > whole.rindex(b"[2,")
    for bit in range(8 * len(whole)):
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        scan = scan_journal(bytes(flipped), 0, 5)
        assert all(record in true for _, record in scan.units)
        assert scan.covered in (0, covered)
    journal.write_bytes(whole.replace(b"[1,", b"[4,"))
    with toy.open(store) as partial:
        assert sorted(partial.records) == [0, 2]


def test_a_journal_of_another_shard_is_not_believed(store: Store) -> None:
    """Whole, covered by a barrier, and of somebody else: its units are read back, and none of them is kept."""
    toy, other = Toy(), Toy("ffff")
    toy.finished(store, range(4))
    other.finished(store, range(4))
    journal_of(store, toy).write_bytes(
        (store.root / "v1" / "partial" / "ffff" / "journal").read_bytes()
    )
    path, made = toy.build(store)
    assert made == [0, 1, 2, 3, 4]
    assert path.read_bytes() == toy.whole()
    assert store.verify_object(toy.spec.object_id, toy.spans) == []


def test_a_sealer_that_died_before_the_rename_costs_nothing(store: Store) -> None:
    """Attributes set (no write bits) but not renamed: the partial opens again, and nothing is made twice."""
    toy = Toy()
    toy.finished(store, range(5))
    (journal_of(store, toy).parent / "data").chmod(0o000)
    path, made = toy.build(store)
    assert (made, path.read_bytes()) == ([], toy.whole())


def test_a_sealer_that_died_after_the_rename_leaves_nothing(store: Store) -> None:
    """The leftover directory of a published object disappears when the object is used."""
    toy = Toy()
    object_of(store, toy)
    left = store.root / "v1" / "partial" / toy.spec.object_id
    left.mkdir()
    (left / "lock").touch()
    assert store.find_object(toy.spec) is not None
    assert not left.exists()
    left.mkdir()
    (left / "lock").touch()
    with pytest.raises(Published):
        toy.open(store)
    assert not left.exists()


# -- damage of what is published ---------------------------------------------------------


@pytest.mark.parametrize(
    "harm",
    [
        "shorter",
        "longer",
        "preamble",
        "no record",
        "torn record",
        "flipped record",
        "link",
        "dir",
        "fifo",
    ],
)
def test_a_damaged_object_is_a_miss_and_is_set_aside(store: Store, harm: str) -> None:
    """The cheap check never serves an object of the wrong size, preamble, kind or record; it is made again."""
    toy = Toy()
    path = object_of(store, toy)
    record = path.with_suffix(".json")
    path.chmod(0o600)
    if harm in ("shorter", "longer"):
        os.truncate(path, toy.spec.size + (1 if harm == "longer" else -1))
    elif harm == "preamble":
        damage(path, 8, b"?")
    elif harm == "no record":
        record.unlink()
    elif harm == "torn record":
        os.truncate(record, record.stat().st_size // 2)
    elif harm == "flipped record":
        damage(record, record.stat().st_size // 2, b"#")
    else:
        path.unlink()
        if harm == "link":
            path.symlink_to("/etc/passwd")
        elif harm == "dir":
            path.mkdir()
        else:
            os.mkfifo(path)
    assert store.find_object(toy.spec) is None
    assert not os.path.lexists(path)
    path, made = toy.build(store)
    assert (made, path.read_bytes()) == ([0, 1, 2, 3, 4], toy.whole())


def test_an_object_that_cannot_be_opened_is_no_miss(store: Store) -> None:
    """A disk that fails to open an object, or the record beside it, is an error: nothing is made again over it or set aside."""
    toy = Toy()
    path = object_of(store, toy)

    class Failing(FsIo):
        suffix = ""

        def open(self, path: StrPath, flags: int, mode: int = 0o600, **where: int | None) -> int:
            if str(path).endswith(self.suffix):
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return super().open(path, flags, mode, **where)

    for suffix in (".safetensors", ".json"):
        io = Failing()
        io.suffix = f"/{toy.spec.object_id}{suffix}"
        with pytest.raises(StoreError, match="Input/output error"):
            Store.open(store.root, io=io).find_object(toy.spec)
        assert path.exists()
        assert store.record(toy.spec.object_id) is not None


def test_a_record_that_contradicts_itself_is_a_miss(store: Store) -> None:
    """Units and shard digest belong together: a record whose checksum is right and whose digests are not is no record."""
    toy = Toy()
    path = object_of(store, toy)
    record = path.with_suffix(".json")
    units = [toy.record(unit).data_digest for unit in (0, 2)]
    swapped = record.read_bytes().replace(units[0].encode(), units[1].encode())
    value = swapped.partition(b'"value":')[2].removesuffix(b"}\n")
    record.write_bytes(b'{"crc32":"%08x","value":%b}\n' % (zlib.crc32(value), value))
    assert store.record(toy.spec.object_id) is not None
    assert store.find_object(toy.spec) is None
    assert toy.build(store)[1] == [0, 1, 2, 3, 4]


def test_a_record_without_an_object_is_a_miss(store: Store) -> None:
    """A sealer that died between record and rename leaves a miss, not an error."""
    toy = Toy()
    object_of(store, toy).unlink()
    assert store.find_object(toy.spec) is None
    assert toy.build(store)[0].read_bytes() == toy.whole()


def test_verify_names_the_damaged_units(store: Store) -> None:
    """A flipped byte in data, scale or preamble is found, and named."""
    toy = Toy()
    path = object_of(store, toy)
    assert store.verify_object(toy.spec.object_id, toy.spans) == []
    path.chmod(0o600)
    damage(path, toy.spans[1].scale_start, b"\xff")
    damage(path, toy.spans[4].start + 2099, b"\xff")
    assert store.verify_object(toy.spec.object_id, toy.spans) == [1, 4]
    damage(path, 100, b"\xff")
    assert store.verify_object(toy.spec.object_id, toy.spans) == [PREAMBLE, 1, 4]
    path.with_suffix(".json").unlink()
    with pytest.raises(StoreDamagedError):
        store.verify_object(toy.spec.object_id, toy.spans)


def test_verify_cuts_a_wide_unit_into_tiles(store: Store) -> None:
    """A unit of several tiles, wider than one: its digest is over the tiles' digests, row-major, left to right."""
    rows, cols = 130, 70_000  # BF16: at most 65,536 columns and at least 128 rows to a tile
    toy = Toy(count=1, rows=rows, cols=cols)
    data = toy.data(0)
    outer = b""
    for first_row, last_row in ((0, 128), (128, 130)):
        for first_col, last_col in ((0, 65_536), (65_536, cols)):
            cut = [
                data[r * cols + first_col : r * cols + last_col] for r in range(first_row, last_row)
            ]
            outer += xxhash.xxh3_128(b"".join(cut)).digest()
    record = UnitRecord(0, 0.0, "0" * 32, xxhash.xxh3_128(outer).hexdigest(), "")
    with toy.open(store) as partial:
        with partial.claim(0):
            toy.write(partial, 0)
            partial.commit(record)
        path = partial.seal({})
    assert store.verify_object(toy.spec.object_id, toy.spans) == []
    path.chmod(0o600)
    damage(path, toy.spec.size - 1, b"\xfe")
    assert store.verify_object(toy.spec.object_id, toy.spans) == [0]


def test_set_aside_makes_an_object_a_miss(store: Store) -> None:
    """What verify found can be taken out of service; doing so twice is no error."""
    toy = Toy()
    object_of(store, toy)
    store.set_aside(toy.spec.object_id, "test")
    store.set_aside(toy.spec.object_id, "test")
    assert store.find_object(toy.spec) is None
    assert store.usage().damaged_bytes > 0


def test_what_replaced_a_damaged_object_is_not_set_aside(root: Path) -> None:
    """Two find the damage, one makes the object again before the other acts: what goes is what was judged, not the new one."""
    toy = Toy()
    path, _ = toy.build(Store.open(root))

    class Late(FsIo):
        """Before it sets anything aside, somebody else has done so and made the object again."""

        late = True

        def try_flock(self, fd: int, *, exclusive: bool) -> bool:
            if self.late and os.readlink(f"/proc/self/fd/{fd}").endswith("/damaged/lock"):
                self.late = False
                assert toy.build(Store.open(root))[1] == [0, 1, 2, 3, 4]
            return super().try_flock(fd, exclusive=exclusive)

    damage(path, 20, b"X")
    io = Late()
    assert Store.open(root, io=io).find_object(toy.spec) is None
    assert not io.late
    assert Store.open(root).find_object(toy.spec) == path
    assert path.read_bytes() == toy.whole()


def test_lost_attributes_are_given_back(store: Store) -> None:
    """A store that was copied without them gets mode and mtime back before an object is served."""
    toy = Toy()
    path = object_of(store, toy)
    path.chmod(0o644)
    os.utime(path, ns=(1, 1))
    assert store.find_object(toy.spec) == path
    assert (stat.S_IMODE(path.stat().st_mode), path.stat().st_mtime_ns) == (
        0o440,
        toy.spec.mtime_ns,
    )


# -- sharing -----------------------------------------------------------------------------


@pytest.mark.parametrize("shared", [True, False], ids=["one partial", "a partial each"])
def test_threads_make_each_unit_once(store: Store, shared: bool) -> None:
    """Eight threads at one shard, with one Partial or with one each: every unit is made exactly once."""
    toy = Toy(count=24)
    made: list[int] = []
    common = toy.open(store)

    def work(first: int) -> None:
        partial = common if shared else toy.open(store)
        for step in range(24):
            unit = (first + step) % 24
            if toy.make(partial, unit):
                made.append(unit)
        if not shared:
            partial.close()

    threads = [threading.Thread(target=work, args=(3 * n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(made) == list(range(24))
    with common:
        assert common.seal({}).read_bytes() == toy.whole()


CHILD = """
import sys
from pathlib import Path
from fp8fs.store.store import Store
from tests.storing import Toy
print("ready", flush=True)
sys.stdin.readline()
print(*Toy(count=int(sys.argv[2])).build(Store.open(Path(sys.argv[1])))[1])
"""


def test_processes_make_each_unit_once(store: Store) -> None:
    """Two processes build one shard at the same moment: one object, every unit made exactly once."""
    toy = Toy(count=40)
    command = [sys.executable, "-c", CHILD, str(store.root), "40"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    children = [subprocess.Popen(command, **pipes) for _ in range(2)]
    for child in children:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
    outputs = []
    for child in children:
        assert child.stdin is not None
        child.stdin.write("\n")
        child.stdin.flush()
    for child in children:
        outputs.append(child.communicate(timeout=60)[0])
        assert child.returncode == 0
    assert sorted(int(word) for text in outputs for word in text.split()) == list(range(40))
    path = store.find_object(toy.spec)
    assert path is not None
    assert path.read_bytes() == toy.whole()


def test_a_claim_is_exclusive_and_names_its_holder(store: Store) -> None:
    """While one holds a claim, another waits (polling often), and gives up at its deadline with the holder's name."""
    toy = Toy()
    with toy.open(store) as first, toy.open(store) as second, first.claim(2):
        polls: list[float] = []
        with (
            pytest.raises(StoreBusyError, match=f"pid {os.getpid()} on "),
            second.claim(2, poll=lambda: polls.append(time.monotonic()), timeout_s=0.4),
        ):
            pass
        gaps = [b - a for a, b in itertools.pairwise(polls)]
        assert len(polls) >= 5
        assert max(gaps) < 0.2
        with pytest.raises(StoreBusyError), first.claim(2, timeout_s=0.1):
            pass
        with second.claim(1, timeout_s=1):
            pass


def test_waiting_ends_when_poll_raises(store: Store) -> None:
    """A waiter whose poll raises leaves at once and holds nothing, in front of threads and of other partials."""

    class StopError(Exception):
        pass

    def stop() -> None:
        raise StopError

    toy = Toy()
    with toy.open(store) as first, toy.open(store) as second:
        with first.claim(0):
            for partial in (first, second):
                with pytest.raises(StopError), partial.claim(0, poll=stop):
                    pass
                with pytest.raises(StopError):
                    partial.seal({}, poll=stop)
        with second.claim(0, timeout_s=1):
            pass


def test_what_others_commit_is_seen_on_claim(store: Store) -> None:
    """claim() brings the records of another partial; refresh() does too."""
    toy = Toy()
    with toy.open(store) as first, toy.open(store) as second:
        toy.make(first, 0)
        assert toy.make(second, 0) is False
        toy.make(first, 1)
        second.refresh()
        assert sorted(second.records) == [0, 1]


class Lockless(FsIo):
    """A filesystem on which nothing can be locked."""

    def try_lock_range(self, fd: int, start: int, length: int, *, exclusive: bool) -> bool:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    def try_flock(self, fd: int, *, exclusive: bool) -> bool:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))


def test_without_locks_everybody_works_in_private(root: Path) -> None:
    """Where the filesystem has no locks, two builders make the same bytes apart, and neither damages the other's."""

    toy = Toy()
    store = Store.open(root, io=Lockless())
    with toy.open(store) as first, toy.open(store) as second:
        for unit in range(5):
            assert toy.make(first, unit)
            assert toy.make(second, unit)
        path = first.seal({})
        inode = path.stat().st_ino
        assert second.seal({}) == path
        assert path.stat().st_ino == inode
    assert path.read_bytes() == toy.whole()
    assert os.listdir(root / "v1" / "partial") == []
    with Toy("ffff").open(store):
        pass
    assert os.listdir(root / "v1" / "partial") == []
    with store.group_amax("g") as slot:
        slot.put(2.0)
    with store.group_amax("g") as slot:
        assert slot.value == 2.0


def left_behind(root: Path, toy: Toy, holder: str, date_s: float | None) -> None:
    """A private partial with two units whose holder is *holder* and was last heard of at *date_s*."""
    toy.finished(Store.open(root, io=Lockless()), [0, 1])
    (folder,) = root.glob("v1/partial/*")
    (folder / "lock").write_text(holder)
    if date_s is not None:
        for path in folder.iterdir():
            os.utime(path, (date_s, date_s))


def me() -> str:
    return holder_text().decode()


def in_another_life() -> str:
    pid, started, machine = me().split()
    return f"{pid} {int(started) - 1} {machine}"


@pytest.mark.parametrize(
    ("holder", "age_s", "taken"),
    [
        (lambda: "", None, True),
        (me, None, False),
        (me, 10**8, False),
        (in_another_life, None, True),
        (in_another_life, -(10**9), True),
        (lambda: "17 4711 elsewhere/boot/pid", None, False),
        (lambda: "17 4711 elsewhere/boot/pid", -(10**9), False),
        (lambda: "17 4711 elsewhere/boot/pid", 590, False),
        (lambda: "17 4711 elsewhere/boot/pid", 610, True),
        (lambda: "17 4711 elsewhere/boot/pid", 10**9, True),
        (lambda: "\0\0", 610, True),
        (lambda: "\0\0", 0, False),
        (lambda: me().replace(str(os.getpid()), "9" * 5000), None, True),
        (lambda: me().replace(str(os.getpid()), "../1"), None, True),
    ],
    ids=[
        "released", "alive", "alive, odd dates", "dead", "dead, dated in the future", "elsewhere", "elsewhere, dated in the future",
        "elsewhere, quiet", "elsewhere, silent", "elsewhere, silent for ages", "damaged, old", "damaged, new", "no number", "no name of a process",
    ],
)  # fmt: skip
def test_who_is_gone_is_succeeded_without_locks(
    root: Path, holder: Callable[[], str], age_s: float | None, taken: bool
) -> None:
    """Work of a holder that is gone is gone on with; of one that is alive, or was heard of lately, it is left alone."""
    toy = Toy()
    left_behind(root, toy, holder(), None if age_s is None else time.time() - age_s)
    path, made = toy.build(Store.open(root, io=Lockless()))
    assert made == ([2, 3, 4] if taken else [0, 1, 2, 3, 4])
    assert path.read_bytes() == toy.whole()
    assert len(os.listdir(root / "v1" / "partial")) == (0 if taken else 1)


def test_what_a_living_process_closed_is_gone_on_with_without_locks(root: Path) -> None:
    """Closed is released: the next one need not wait for the process to end, nor for its heartbeat to fall silent."""
    toy = Toy()
    store = Store.open(root, io=Lockless())
    with toy.open(store) as partial:
        toy.make(partial, 0)
        toy.make(partial, 1)
        with toy.open(store) as apart:
            assert not apart.records
    assert toy.build(store)[1] == [2, 3, 4]
    assert os.listdir(root / "v1" / "partial") == []


def test_gc_takes_what_nobody_holds_without_locks(root: Path) -> None:
    """A private partial goes as soon as its holder is gone, and not before."""
    toy = Toy()
    store = Store.open(root, io=Lockless())
    left_behind(root, toy, me(), None)
    assert store.collect(grace_s=0) == 0
    (folder,) = root.glob("v1/partial/*")
    (folder / "lock").write_text(in_another_life())
    assert store.collect(grace_s=0) > 0
    assert os.listdir(root / "v1" / "partial") == []


def test_a_live_holder_that_was_succeeded_does_no_damage(root: Path) -> None:
    """Taken for gone while it works: it is told so, and the result is the same."""
    toy = Toy()
    store = Store.open(root, io=Lockless())
    with toy.open(store) as first:
        toy.make(first, 0)
        (folder,) = root.glob("v1/partial/*")
        (folder / "lock").write_text("")
        with toy.open(store) as second:
            assert sorted(second.records) == [0]
            toy.write(first, 1)
            with pytest.raises(Published):
                toy.make(first, 1)
            for unit in range(1, 5):
                toy.make(second, unit)
            path = second.seal({})
    assert path.read_bytes() == toy.whole()
    assert store.verify_object(toy.spec.object_id, toy.spans) == []
    assert os.listdir(root / "v1" / "partial") == []


def test_who_was_succeeded_says_nothing_of_its_successor(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Taken for gone by mistake, it neither beats for its successor nor lets go of what is not its own any more."""
    monkeypatch.setattr("fp8fs.store.holder.BEAT_S", 0.0)
    toy = Toy()
    store = Store.open(root, io=Lockless())
    with toy.open(store) as first:
        toy.make(first, 0)
        (folder,) = root.glob("v1/partial/*")
        (folder / "lock").write_text("")
        with toy.open(store) as second:
            (lock,) = root.glob("v1/partial/*/lock")
            lock.write_text("the successor")
            with pytest.raises(Published):
                first.refresh()
            first.close()
            assert lock.read_text() == "the successor"
            second.refresh()
            with toy.open(store) as third:
                assert not third.records


def test_the_lock_of_a_live_holder_is_never_empty(root: Path) -> None:
    """At no moment of taking a partial over does its lock file say that nobody holds it."""

    class Looking(Lockless):
        seen: ClassVar[list[str]] = []

        def pwrite_once(self, fd: int, data: memoryview, file_offset: int) -> int:
            self.look()
            return super().pwrite_once(fd, data, file_offset)

        def ftruncate(self, fd: int, size: int) -> None:
            super().ftruncate(fd, size)
            self.look()

        def look(self) -> None:
            self.seen.extend(lock.read_text() for lock in root.glob("v1/partial/*/lock"))

    toy = Toy()
    left_behind(root, toy, in_another_life() + "\nwhat a longer text leaves", None)
    partial = toy.open(Store.open(root, io=Looking()))
    assert len(Looking.seen) > 1
    assert "" not in Looking.seen
    assert [lock.read_text() for lock in root.glob("v1/partial/*/lock")] == [me()]
    partial.close()


def test_a_zombie_holds_nothing(root: Path) -> None:
    """A holder that has ended is gone even if nobody asked for its exit code, as in a container without an init."""
    toy = Toy()
    child = subprocess.Popen(["sleep", "60"])
    try:
        started = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[19]
        left_behind(root, toy, f"{child.pid} {started} {me().split()[2]}\n", None)
        with toy.open(Store.open(root, io=Lockless())) as apart:
            assert not apart.records
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        with toy.open(Store.open(root, io=Lockless())) as partial:
            assert sorted(partial.records) == [0, 1]
    finally:
        child.kill()
        child.wait()


def test_a_holder_beats(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever works dates its lock file again, and writes to it no more often than it must."""
    toy = Toy()
    store = Store.open(root, io=Lockless())
    with toy.open(store) as partial:
        (lock,) = root.glob("v1/partial/*/lock")
        os.utime(lock, (0, 0))
        toy.make(partial, 0)
        assert lock.stat().st_mtime == 0
        monkeypatch.setattr("fp8fs.store.holder.BEAT_S", 0.0)
        toy.make(partial, 1)
        assert lock.stat().st_mtime > 0


def test_many_barriers_do_not_lose_a_record(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a barrier at nearly every commit, by several threads, every record is still there afterwards."""
    monkeypatch.setattr("fp8fs.store.partial.BARRIER_S", 0.0)
    toy = Toy(count=30)
    with toy.open(store) as partial:
        threads = [
            threading.Thread(target=lambda n=n: [toy.make(partial, u) for u in range(n, 30, 3)])
            for n in range(3)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    text = journal_of(store, toy).read_text()
    assert text.count("barrier") > 1
    with toy.open(store) as partial:
        assert sorted(partial.records) == list(range(30))


# -- small facts -------------------------------------------------------------------------


def test_group_amax_is_made_once_and_survives(store: Store) -> None:
    """The first holder puts the value, later ones find it; a torn or foreign file counts as none."""
    with store.group_amax("g1") as slot:
        assert slot.value is None
        slot.put(0.1)
        assert slot.value == pytest.approx(0.1, rel=1e-6)
        exact = slot.value
    with Store.open(store.root).group_amax("g1") as slot:
        assert slot.value == exact
    file = store.root / "v1" / "amax" / "g1"
    whole = file.read_bytes()
    for broken in (b"", whole[:-3], whole.replace(b"1", b"2"), b"3.5", b"\xff" * 9):
        file.write_bytes(broken)
        with store.group_amax("g1") as slot:
            assert slot.value is None


def test_group_amax_is_held_exclusively(store: Store) -> None:
    """Eight threads ask for a group's amax at once: one makes it, the others wait for it."""
    makers: list[int] = []

    def work(n: int) -> None:
        with store.group_amax("g") as slot:
            if slot.value is None:
                makers.append(n)
                time.sleep(0.02)
                slot.put(4.0)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(makers) == 1


@pytest.mark.parametrize("kind", ["scan", "hints", "adopted", "plan"])
def test_facts_are_read_back_or_absent(store: Store, kind: str) -> None:
    """A written fact is read back by a new store; damage, or a value of another kind of file, reads as absent."""
    read, write = getattr(store, f"read_{kind}"), getattr(store, f"write_{kind}")
    assert read("k.1") is None
    value = {"keep": ["a/b", "\u00e9"], "n": 3}
    write("k.1", value)
    write("k.1", value)
    assert getattr(Store.open(store.root), f"read_{kind}")("k.1") == value
    (file,) = store.root.glob("v1/*/k.1.json")
    whole = file.read_bytes()
    for broken in (b"", whole[:-4], whole.replace(b"3", b"4"), b"{}", b"[]", b"[" * 9999, b"\xff"):
        file.write_bytes(broken)
        assert read("k.1") is None
    file.unlink()
    file.symlink_to("/etc/passwd")
    assert read("k.1") is None


@pytest.mark.parametrize("key", ["", "..", "a/b", "/etc/passwd", ".hidden", "a\0b", "x" * 300])
def test_keys_cannot_leave_the_store(store: Store, key: str) -> None:
    """A key that is no plain file name is refused before anything is touched."""
    for use in (
        lambda: store.read_scan(key),
        lambda: store.object_path(key),
        lambda: store.tree(key),
        lambda: store.pin(key),
        lambda: store.group_amax(key),
    ):
        with pytest.raises(ValueError, match="not a key"):
            use()


# -- the root ----------------------------------------------------------------------------


def test_the_root_is_made_for_its_owner_only(tmp_path: Path) -> None:
    """A missing root, and what is missing above it, gets mode 0700."""
    Store.open(tmp_path / "a" / "b")
    for path in ("a", "a/b", "a/b/v1", "a/b/v1/objects"):
        assert stat.S_IMODE((tmp_path / path).stat().st_mode) == 0o700


@pytest.mark.parametrize("mode", [0o770, 0o702, 0o1777])
def test_a_root_that_others_can_write_is_refused(tmp_path: Path, mode: int) -> None:
    """A store in a directory that somebody else could fill is not opened, and nothing is made in it."""
    root = tmp_path / "s"
    root.mkdir()
    root.chmod(mode)
    with pytest.raises(StoreError, match="can be written by others") as caught:
        Store.open(root)
    assert "chmod go-w" in caught.value.hint
    assert os.listdir(root) == []


@needs_root
@pytest.mark.parametrize("where", ["root", "v1", "link"])
def test_a_root_of_somebody_else_is_refused(tmp_path: Path, where: str) -> None:
    """A root, a v1 or a link to a root that another user owns is not opened."""
    root = tmp_path / "s"
    Store.open(root)
    if where == "link":
        link = tmp_path / "link"
        link.symlink_to(root)
        os.lchown(link, NOBODY, NOBODY)
        root = link
    else:
        os.chown(root if where == "root" else root / "v1", NOBODY, NOBODY)
    for create in (True, False):
        with pytest.raises(StoreError, match=f"uid {NOBODY}"):
            Store.open(root, create=create)


def test_a_root_that_is_a_file_is_refused(tmp_path: Path) -> None:
    """A file of that name is neither used nor replaced."""
    (tmp_path / "s").write_text("mine")
    with pytest.raises(StoreError):
        Store.open(tmp_path / "s")
    assert (tmp_path / "s").read_text() == "mine"


def test_a_newer_store_beside_ours_is_left_alone(root: Path) -> None:
    """What another version keeps in its own folder is not touched by anything that we do."""
    (root / "v2").mkdir(parents=True)
    root.chmod(0o700)
    (root / "v2" / "objects").write_bytes(b"not ours")
    before = snapshot(root / "v2")
    store = Store.open(root)
    object_of(store, Toy())
    store.collect(grace_s=0)
    assert snapshot(root / "v2") == before


class ReadOnly(FsIo):
    """A filesystem that is mounted read-only: every call that changes something fails."""

    def __getattribute__(self, name: str) -> object:
        changing = {
            "pwrite", "append", "ftruncate", "mkdir", "rename", "link", "symlink", "unlink",
            "rmdir", "fchmod", "chmod", "fchown", "lchown", "futime",
        }  # fmt: skip
        if name in changing:

            def fail(*args: object, **kwargs: object) -> None:
                raise OSError(errno.EROFS, os.strerror(errno.EROFS), "x")

            return fail
        return super().__getattribute__(name)

    def open(
        self,
        path: str | os.PathLike[str],
        flags: int,
        mode: int = 0o600,
        *,
        dir_fd: int | None = None,
    ) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), os.fspath(path))
        return super().open(path, flags, mode, dir_fd=dir_fd)


def test_a_read_only_store_serves_what_is_there(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Objects, records and facts of a store that cannot be written are served; writing says why it cannot."""
    toy = Toy()
    path = object_of(store, toy)
    store.write_scan("k", 1)
    with store.group_amax("g") as slot:
        slot.put(5.0)
    before = snapshot(store.root)
    monkeypatch.setattr(os, "access", lambda *args, **kwargs: False)
    again = Store.open(store.root, io=ReadOnly())
    assert not again.writable
    assert "cannot be written" in again.why_not
    assert again.find_object(toy.spec) == path
    assert again.verify_object(toy.spec.object_id, toy.spans) == []
    assert again.read_scan("k") == 1
    with again.group_amax("g") as slot:
        assert slot.value == 5.0
        slot.put(6.0)
    with again.pin("p"):
        pass
    other = Toy("ffff")
    assert again.find_object(other.spec) is None
    for use in (
        lambda: other.open(again),
        lambda: again.write_scan("k", 2),
        lambda: again.tree("p").ensure_dir("", mode=0o755),
        lambda: again.tree("p").refer(["x"]),
        lambda: again.collect(),
        lambda: again.remove_tree("p"),
        lambda: again.set_aside("ffff", "x"),
    ):
        with pytest.raises(StoreFullError, match="cannot be written"):
            use()
    assert snapshot(store.root) == before


def test_a_read_only_store_gives_nobody_more_than_planned(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An object whose mode grants more than the source's is not served where the mode cannot be set right."""
    toy = Toy()
    path = object_of(store, toy)
    monkeypatch.setattr(os, "access", lambda *args, **kwargs: False)
    path.chmod(0o400)
    assert Store.open(store.root, io=ReadOnly()).find_object(toy.spec) == path
    path.chmod(0o444)
    assert Store.open(store.root, io=ReadOnly()).find_object(toy.spec) is None


def test_a_root_that_cannot_be_made_is_an_empty_read_only_store(tmp_path: Path) -> None:
    """No right to make the root: everything is a miss, nothing is an error."""
    store = Store.open(tmp_path / "s", io=ReadOnly())
    assert (store.writable, store.find_object(Toy().spec), store.read_scan("k")) == (
        False,
        None,
        None,
    )
    assert store.list_objects() == store.list_partials() == store.list_trees() == []
    assert "Read-only" in store.why_not


def test_opening_to_look_makes_nothing(tmp_path: Path) -> None:
    """create=False leaves a missing store missing."""
    store = Store.open(tmp_path / "s", create=False)
    assert not store.writable
    assert "there is no store" in store.why_not
    assert os.listdir(tmp_path) == []


def test_a_store_deleted_under_us_is_an_error_not_a_crash(store: Store) -> None:
    """Every use says StoreError or answers "not there"; nothing else escapes."""
    toy = Toy()
    with toy.open(store) as partial:
        toy.make(partial, 0)
        shutil.rmtree(store.root)
        with pytest.raises((StoreError, Published)):
            toy.make(partial, 1)
        with pytest.raises((StoreError, Published)):
            partial.seal({})
    assert store.find_object(toy.spec) is None
    with pytest.raises(StoreError):
        toy.open(store)
    with pytest.raises(StoreError):
        store.write_scan("k", 1)
    with pytest.raises(StoreError):
        store.tree("p").refer(["x"])
    assert store.free_bytes() is None


def test_no_descriptor_is_left_open(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A round through the whole store leaves as many descriptors open as before."""
    caplog.set_level(logging.CRITICAL)
    before = len(os.listdir("/proc/self/fd"))
    store = Store.open(root)
    toy = Toy()
    toy.finished(store, [1, 2])
    path = object_of(store, toy)
    with pytest.raises(Published):
        toy.open(store)
    with store.pin("p"):
        tree = store.tree("p")
        tree.ensure_dir("", mode=0o755)
        tree.link_object("a", path)
        tree.complete()
    with store.group_amax("g") as slot:
        slot.put(1.0)
    path.chmod(0o600)
    os.truncate(path, 5)
    assert store.find_object(toy.spec) is None
    store.remove_tree("p")
    store.collect(grace_s=0)
    assert len(os.listdir("/proc/self/fd")) == before
