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


def main(options: argparse.Namespace) -> dict[str, Any]:
    from vllm import LLM, SamplingParams

    if options.shim:
        import missing_ops

        missing_ops.fill()
    if options.kernel:
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
    sampling = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, logprobs=1, ignore_eos=True)
    outputs = [
        request.outputs[0] for request in llm.generate(list(PROMPTS), sampling, use_tqdm=False)
    ]
    return {
        "tokens": [list(output.token_ids) for output in outputs],
        "logprobs": [
            [next(iter(step.values())).logprob for step in output.logprobs] for output in outputs
        ],
    }


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("checkpoint")
    arguments.add_argument(
        "--quantization", help="quantize online, as the engine's flag of that name does"
    )
    arguments.add_argument(
        "--shim", action="store_true", help="supply the FP8 operators that the CPU build lacks"
    )
    arguments.add_argument("--kernel", help="emulate a CUDA kernel class of vLLM (cuda_kernels.py)")
    reporting.run_and_report(main, arguments)
