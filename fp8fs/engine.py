"""Materialize each unit once: source bytes, then an injected quantizer, then the store."""
# class Engine:
#   Engine(plan, source, store: Store | None, quantizer: Callable[[], Quantizer], *, workers: int, run_ahead: int = 2, memory_bytes: int)
#   ensure_sealed(shard: int, poll: Callable[[], None]) -> Path        blocks until the view shard is published (fills it, then run-ahead); poll() is called
#                                                                      at least every 0.1 s while waiting and may raise InterruptedWaitError
#   sealed(shard: int) -> Path | None                                  without waiting: the published object's path (memory, then one stat)
#   open(shard: int) -> ShardReader                                    for inline serving; never blocks
#   ShardReader.pread(offset, length, poll) -> bytes                   makes the units it covers (grain tensor), or waits for the shard's fill (grain shard)
#   ShardReader.close()
#   fill(progress: Callable[[EngineStats], None]) -> None              build: everything, in order
#   scan(...) -> list of non-finite findings
#   stats() -> EngineStats                                             shards/units made, reused; bytes in/out; GB/s; last errors; degraded reason
#   close(timeout_s)                                                   stops workers after the tile in work
