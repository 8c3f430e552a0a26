"""The mounted tree as a plain object: lookup, list, readlink, open, pread. Raises only Fp8fsError. Knows no FUSE."""
# class Attrs(NamedTuple): kind ("dir"|"file"|"link"), mode, size, mtime_ns, uid, gid
# class View:
#   View(plan, engine, source, *, serve: "handoff"|"inline", grain: "shard"|"tensor", link_prefix, status: Callable[[], bytes])
#   lookup(path) -> Attrs; list(path) -> list[tuple[str, Attrs]]; readlink(path) -> str
#   open(path, poll) -> int; pread(handle, offset, length, poll) -> bytes; release(handle)
#   statfs() -> dict; status() -> dict
