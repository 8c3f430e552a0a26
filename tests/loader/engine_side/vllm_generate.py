"""Load one checkpoint with vLLM's ``LLM`` on CPU and report greedy tokens and log probabilities."""

from __future__ import annotations

import argparse
import os
from typing import Any

import reporting

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
PROMPTS = ("Hello world", "The quick brown fox", "0123456789")
NEW_TOKENS = 12


def load_engine() -> None:
    """Import what every run needs."""
    from vllm import LLM, SamplingParams  # noqa: F401
    from vllm.v1.engine import llm_engine  # noqa: F401
    from vllm.v1.worker import cpu_worker  # noqa: F401


def main(options: argparse.Namespace) -> dict[str, Any]:
    from vllm import LLM, SamplingParams

    if options.shim:
        import missing_ops

        missing_ops.fill()
    if options.kernel == "amx-block":
        import amx_kernels

        amx_kernels.emulate()
    elif options.kernel:
        import cuda_kernels

        cuda_kernels.emulate(options.kernel)
    chosen = {"quantization": options.quantization} if options.quantization else {}
    llm = LLM(
        model=options.checkpoint,
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=128,
        max_num_seqs=4,
        disable_log_stats=True,
        **chosen,
    )
    sampling = SamplingParams(
        temperature=0, max_tokens=NEW_TOKENS, logprobs=1, prompt_logprobs=0, ignore_eos=True
    )
    requests = llm.generate(list(PROMPTS), sampling, use_tqdm=False)
    outputs = [request.outputs[0] for request in requests]
    return {
        "tokens": [list(output.token_ids) for output in outputs],
        "logprobs": [
            [next(iter(step.values())).logprob for step in output.logprobs] for output in outputs
        ],
        # The same context for every checkpoint, unlike that of the tokens: to compare what is only near.
        "prompt_logprobs": [
            [step[token].logprob for token, step in zip(prompt, steps, strict=True) if step]
            for prompt, steps in ((r.prompt_token_ids, r.prompt_logprobs) for r in requests)
        ],
    }


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint")
    parser.add_argument(
        "--quantization", help="quantize online, as the engine's flag of that name does"
    )
    parser.add_argument(
        "--shim", action="store_true", help="supply the FP8 operators that the CPU build lacks"
    )
    parser.add_argument(
        "--kernel", help="emulate kernel classes: one of cuda_kernels.KERNELS, or amx-block"
    )
    return parser


if __name__ == "__main__":
    reporting.run_and_report(main, arguments())
