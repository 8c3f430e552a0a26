"""llm-compressor's model_free_ptq on SRC, into DST: SRC DST SCHEME WORKERS. Answers the seconds of the call alone."""

from __future__ import annotations

import contextlib
import json
import sys
import time

from llmcompressor import model_free_ptq


def main() -> None:
    src, dst, scheme, workers = sys.argv[1:]
    started = time.perf_counter()
    with contextlib.redirect_stdout(sys.stderr):
        model_free_ptq(
            src,
            dst,
            scheme=scheme,
            ignore=["lm_head", "model.embed_tokens"],
            max_workers=int(workers),
            device="cpu",
        )
    print(json.dumps({"seconds": time.perf_counter() - started}))


if __name__ == "__main__":
    main()
