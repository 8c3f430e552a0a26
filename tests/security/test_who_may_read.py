"""Nobody reads through a mount, its binds or the store what it could not read in SRC; what it could, it can."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from fp8fs.errors import NotMountedError
from fp8fs.fuse import session
from tests.builders import llama_like

NOBODY = 65534
PRIVATE, PUBLIC = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"

pytestmark = [
    pytest.mark.fuse,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become somebody else"),
]


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder that everybody can enter, with a checkpoint whose first shard is its owner's alone."""
    folder = Path(tempfile.mkdtemp(prefix="fp8fs-readers-"))
    folder.chmod(0o755)
    src = folder / "src"
    llama_like(src, shards=2)
    src.chmod(0o755)
    for path in src.iterdir():
        path.chmod(0o644)
    (src / PRIVATE).chmod(0o600)
    (src / "big.bin").write_bytes(b"s" * (2 << 20))
    (src / "big.bin").chmod(0o600)
    yield folder
    with contextlib.suppress(NotMountedError):
        session.unmount(str(folder / "mnt"), lazy=True)
    shutil.rmtree(folder)


def mount(place: Path, **options: object) -> Path:
    fields = {"src": "src", "dst": "mnt", "store": "store", "log_path": "log"}
    paths = {name: str(place / below) for name, below in fields.items()}
    return Path(session.mount(session.MountSpec(**paths, **options)).dst)  # type: ignore[arg-type]


def nobody_reads(path: Path) -> bytes | None:
    """The first bytes of a file as nobody gets them, None if it is refused them."""
    done = subprocess.run(
        ["head", "-c", "64", path],
        user=NOBODY,
        group=NOBODY,
        extra_groups=[],
        capture_output=True,
        cwd="/",
        timeout=60,
        check=False,
    )
    return done.stdout if done.returncode == 0 else None


def nobody_lists(path: Path) -> bool:
    done = subprocess.run(
        ["ls", path], user=NOBODY, group=NOBODY, extra_groups=[], capture_output=True, check=False
    )
    return done.returncode == 0


@pytest.mark.parametrize("serve", ["handoff", "inline"])
def test_without_allow_other_nobody_gets_in(place: Path, serve: str) -> None:
    """A mount is for whoever made it: others cannot even list it, cold or sealed."""
    dst = mount(place, serve=serve)
    for _ in ("cold", "sealed"):
        assert not nobody_lists(dst)
        for name in (
            PRIVATE,
            PUBLIC,
            "config.json",
            f".fp8fs/tree/{PUBLIC}",
            f".fp8fs/src/{PUBLIC}",
        ):
            assert nobody_reads(dst / name) is None
        assert (dst / PRIVATE).read_bytes()
        assert (dst / PUBLIC).read_bytes()


@pytest.mark.parametrize("serve", ["handoff", "inline"])
def test_allow_other_follows_the_source(place: Path, serve: str) -> None:
    """With --allow-other nobody reads the shard whose source it can read, and no byte of the 0600 one, by whatever way."""
    dst = mount(place, serve=serve, allow_other=True)
    ways = ["", ".fp8fs/tree", ".fp8fs/src"]
    for state in ("cold", "sealed"):
        assert nobody_lists(dst)
        for way in ways:
            for name in (PRIVATE, "big.bin"):
                assert nobody_reads(dst / way / name) is None, (state, way, name)
        if state == "cold":
            assert (dst / PRIVATE).read_bytes()[:64]
        seen = nobody_reads(dst / PUBLIC)
        assert seen is not None
        assert seen == (dst / PUBLIC).read_bytes()[:64]
        assert nobody_reads(dst / "config.json") == (dst / "config.json").read_bytes()[:64]


def test_the_store_is_closed(place: Path) -> None:
    """The store's root is 0700, so that nobody reads an object, a tree, a partial or a fact in it, sealed or not."""
    dst = mount(place, allow_other=True)
    (dst / PRIVATE).read_bytes()
    (dst / PUBLIC).read_bytes()
    store = place / "store"
    assert store.stat().st_mode & 0o7777 == 0o700
    objects = list(store.rglob("*.safetensors"))
    assert objects
    for path in objects:
        assert nobody_reads(path) is None
    assert not nobody_lists(store)


def test_sealed_modes_are_the_strictest_of_their_sources(place: Path) -> None:
    """A sealed file has no write bits, the owner of its sources, and none of the bits that one of them lacks."""
    os.chown(place / "src" / PUBLIC, NOBODY, NOBODY)
    dst = mount(place)
    for name in (PRIVATE, PUBLIC):
        (dst / name).read_bytes()
        source, sealed = (place / "src" / name).stat(), (dst / name).stat()
        assert sealed.st_mode & 0o222 == 0
        assert sealed.st_mode & 0o777 & ~source.st_mode == 0
        assert sealed.st_uid in (source.st_uid, 0)


def test_a_private_link_target_stays_private(place: Path) -> None:
    """A link in SRC to a public file in a closed folder gives nobody nothing: in SRC it could not follow it either."""
    vault = place / "vault"
    vault.mkdir(mode=0o700)
    (vault / "note.txt").write_bytes(b"secret")
    (vault / "note.txt").chmod(0o644)
    (place / "src" / "note.txt").symlink_to(vault / "note.txt")
    assert nobody_reads(place / "src" / "note.txt") is None
    for serve in ("inline", "handoff"):
        dst = mount(place, serve=serve, allow_other=True)
        assert (dst / "note.txt").read_bytes() == b"secret"
        assert nobody_reads(dst / "note.txt") is None
        assert nobody_reads(dst / ".fp8fs" / "tree" / "note.txt") is None
        session.unmount(str(dst))


def test_a_closed_src_stays_closed(place: Path) -> None:
    """Where nobody may not enter SRC's own folder it may not enter the mount, the tree or the bind of SRC."""
    (place / "src").chmod(0o700)
    dst = mount(place, allow_other=True)
    (dst / PUBLIC).read_bytes()
    for way in (dst, dst / ".fp8fs", dst / ".fp8fs" / "tree", dst / ".fp8fs" / "src"):
        assert not nobody_lists(way)
        assert nobody_reads(way / PUBLIC) is None


def test_status_and_plan_are_as_private_as_src(place: Path) -> None:
    """status.json names paths and errors: whoever may not read SRC's folder may not read it."""
    (place / "src").chmod(0o711)
    dst = mount(place, allow_other=True)
    for name in ("status.json", "plan.json", "manifest.json"):
        assert nobody_reads(dst / ".fp8fs" / name) is None
        assert (dst / ".fp8fs" / name).read_bytes()
    assert nobody_reads(dst / "config.json") is not None  # as in SRC: who knows the name


@pytest.mark.parametrize("trick", ["symlink", "owner", "writable"])
def test_a_store_that_others_could_have_prepared_is_refused(place: Path, trick: str) -> None:
    """A store root that is another user's symlink or folder, or that others can write to, gets no byte and gives none."""
    shared = place / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    store = shared / "store"
    elsewhere = place / "elsewhere"
    elsewhere.mkdir()
    if trick == "symlink":
        store.symlink_to(elsewhere)
        os.lchown(store, NOBODY, NOBODY)
    else:
        store.mkdir(mode=0o700)
        if trick == "owner":
            os.chown(store, NOBODY, NOBODY)
        else:
            store.chmod(0o777)
    spec = session.MountSpec(
        src=str(place / "src"),
        dst=str(place / "mnt"),
        store=str(store),
        log_path=str(place / "log"),
    )
    mounted = session.mount(spec)
    Path(mounted.dst, PUBLIC).read_bytes()
    assert session.read_status(mounted.dst)["serve"] == "inline"
    assert list(elsewhere.iterdir()) == []
    assert trick == "symlink" or list(store.iterdir()) == []
