"""An engine process for benchmarks and tests: vLLM, JSON lines on stdin, answers on a descriptor of its own.

usage: vllm_commands.py ANSWERS_FD OPTIONS_JSON        options: arguments of ``vllm.LLM``
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest


def run(llm: Any, command: dict[str, Any]) -> list[dict[str, Any]]:
    """Computes all prompts together; those in `abort` are aborted after so many steps."""
    engine = llm.llm_engine
    abort: dict[str, int] = command.get("abort", {})
    finished: dict[str, Any] = {}
    started = time.perf_counter()
    adapter = LoRARequest(*command["lora"]) if "lora" in command else None
    for number, prompt in enumerate(command["prompts"]):
        extra = {"kv_transfer_params": command["hints"]} if "hints" in command else None
        params = SamplingParams(
            temperature=0.0, max_tokens=command.get("max_tokens", 16), ignore_eos=True, extra_args=extra
        )
        asked = {"prompt_token_ids": prompt}
        if "salt" in command:
            asked["cache_salt"] = command["salt"]
        engine.add_request(str(number), asked, params, lora_request=adapter)
    steps = 0
    first: dict[str, float] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            first.setdefault(output.request_id, time.perf_counter() - started)
            if output.finished:
                finished[output.request_id] = (output, time.perf_counter() - started)
        steps += 1
        for name in [name for name, at in abort.items() if at <= steps and name not in finished]:
            engine.abort_request([name])
            abort.pop(name)
    answers = []
    for number in range(len(command["prompts"])):
        output, seconds = finished.get(str(number), (None, 0.0))
        if output is None:
            answers.append({"aborted": True})
            continue
        answers.append(
            {
                "tokens": list(output.outputs[0].token_ids),
                "reason": output.outputs[0].finish_reason,
                "cached": output.num_cached_tokens,
                "params": output.kv_transfer_params,
                "ttft": first[str(number)],
                "seconds": seconds,
            }
        )
    return answers


def main() -> None:
    answers = os.fdopen(int(sys.argv[1]), "w", buffering=1)
    llm = LLM(**json.loads(sys.argv[2]))
    print(json.dumps({"ready": True}), file=answers)
    for line in sys.stdin:
        command = json.loads(line)
        if command.get("reset"):
            result: Any = llm.llm_engine.reset_prefix_cache(reset_connector=command["reset"] == "connector")
        else:
            result = run(llm, command)
        print(json.dumps(result), file=answers)


if __name__ == "__main__":
    main()
