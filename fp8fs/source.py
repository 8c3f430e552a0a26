"""SRC, read-only: what is there, the bytes of it, and whether it is still what it was."""
# class Source:
#   Source.open(path: Path, *, hints=None) -> Source      resolves SRC (an HF cache repository folder -> its snapshot), scans it (os.scandir), reads
#       headers and JSONs, fingerprints each shard (size, mtime_ns, header hash, sampled pages; the blob hash in an HF cache)
#   .root: Path; .bind_root: Path, .bind_prefix: str     the directory to bind for large files (HF cache: the repository folder) and SRC's path inside it
#   .checkpoint: core.checkpoint.Checkpoint
#   .hints() -> data for the store
#   pread_into(shard_path, buffer, file_offset)           raises SourceChangedError on a short read or when the file is not the planned one
#   check(shard_path)                                     fstat against the plan's facts: SourceChangedError with object, was, is
#   open_file(path) -> fd for a passthrough file, checked; drop(shard_path, offset, length)   posix_fadvise DONTNEED
#   changes() -> list[str]                                which files are not what they were (for status)
