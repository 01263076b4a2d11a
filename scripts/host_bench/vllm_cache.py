"""Carries out cache calls on vLLM's own `KVCacheManager`, for `scripts/bench_host.py`.

Runs in an interpreter that has vLLM and needs nothing of this project: requests come as JSON lines
on stdin, answers go out as JSON lines on stdout. vLLM's scheduler is not used: what it does between
the manager calls of a step is done here (vLLM 0.33.0: `v1/core/sched/scheduler.py`).

Only manager calls are timed, with the clock that the argument names. Prefix keys are made before,
as vLLM makes them when tokens arrive. The format of the calls is that of `calls.py`.
"""

from __future__ import annotations

import contextlib
import gc
import io
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

Json = dict[str, Any]

NOW = {"wall": time.perf_counter_ns, "cpu": time.thread_time_ns}[sys.argv[1]]


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # nothing that vLLM prints may reach the answers
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    with contextlib.redirect_stdout(io.StringIO()):
        import vllm

        init_hashing()
    print(json.dumps({"vllm": vllm.__version__, "python": sys.version.split()[0]}), file=answers)
    answers.flush()
    script: Json = {}
    for line in sys.stdin:
        order = json.loads(line)
        answer: Json = {}
        match order["do"]:
            case "load":
                script = json.loads(Path(order["path"]).read_text())
            case "run":
                answer = Replay(script).run()
            case "hash":
                answer = {"ns": time_hashing(order["tokens"], order["unit_tokens"])}
        print(json.dumps(answer), file=answers)
        answers.flush()


def init_hashing() -> None:
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import init_none_hash

    init_none_hash(sha256)


def make_request(name: str, tokens: list[int], salt: str, unit: int, lookahead: int) -> Any:
    """A request with its prefix keys, by the hash that is vLLM's default."""
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher
    from vllm.v1.request import Request

    return Request(
        request_id=name,
        prompt_token_ids=tokens,
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
        cache_salt=salt or None,
        block_hasher=get_request_block_hasher(unit, sha256, lookahead),
    )


def time_hashing(num_tokens: int, unit: int) -> int:
    """Nanoseconds of the keys of one prompt."""
    request = make_request("a", [i * 7919 % 50021 for i in range(num_tokens)], "", unit, 0)
    request.block_hashes.clear()
    start = NOW()
    request.update_block_hashes()
    return NOW() - start


def make_manager(config: Json) -> Any:
    import torch
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        KVCacheConfig,
        KVCacheGroupSpec,
        MambaSpec,
    )

    page = config["page_tokens"]
    attention = FullAttentionSpec(
        block_size=page, num_kv_heads=1, head_size=1, dtype=torch.bfloat16
    )
    state = MambaSpec(
        block_size=page,
        shapes=((1,),),
        dtypes=(torch.float32,),
        mamba_cache_mode="align",
        num_speculative_blocks=config["num_slots"],
        num_prefill_checkpoint_blocks=int(config["export_tokens"] is not None),
        prefill_checkpoint_alignment=config["export_tokens"],
    )
    specs = [attention, *[state] * config["num_state_groups"]]
    cache = KVCacheConfig(
        num_blocks=config["num_pages"],
        kv_cache_tensors=[],
        kv_cache_groups=[
            KVCacheGroupSpec([f"group_{i}"], spec, is_eagle_group=config["tail_drop"] and i == 0)
            for i, spec in enumerate(specs)
        ],
        prefix_cache_retention_interval=config["retention_tokens"],
        hash_block_size=config["unit_tokens"],
    )
    return KVCacheManager(
        cache,
        max_model_len=config["max_model_tokens"],
        scheduler_block_size=page,
        hash_block_size=config["unit_tokens"],
        max_in_flight_tokens=config["max_step_tokens"],
        enable_caching=True,
        use_eagle=config["tail_drop"],
        num_hash_lookahead_tokens=config["lookahead_tokens"],
        watermark=config["watermark"],
        enable_mamba_shared_prefix_checkpoint=config["checkpoint_junctions"],
    )


class Replay:
    """One run of a script: `ns` and `answers` of every call."""

    def __init__(self, script: Json):
        from vllm.v1.request import RequestStatus

        self._status = RequestStatus
        self._config = script["config"]
        self._calls = script["calls"]
        self._manager = make_manager(self._config)
        self._tokens = {name: one["tokens"] for name, one in script["requests"].items()}
        self._hits: dict[str, tuple[Any, int]] = {}
        self._requests = {
            name: make_request(
                name,
                one["tokens"][: one["prompt_tokens"]],
                one["salt"],
                self._config["unit_tokens"],
                self._config["lookahead_tokens"],
            )
            for name, one in script["requests"].items()
        }

    def run(self) -> Json:
        overhead = int(statistics.median(-NOW() + NOW() for _ in range(1001)))
        gc.collect()
        gc.freeze()
        ns: list[int] = []
        answers: list[Any] = []
        for kind, *args in self._calls:
            taken, answer = getattr(self, kind)(*args)
            ns.append(max(0, taken - overhead))
            answers.append(answer)
        gc.unfreeze()
        return {"ns": ns, "answers": answers, "free": self._num_free()}

    def _num_free(self) -> int:
        return self._manager.block_pool.get_num_free_blocks()

    def _grow(self, name: str, known: int) -> Any:
        request = self._requests[name]
        if known > request.num_tokens:
            request.append_output_token_ids(self._tokens[name][request.num_tokens : known])
        return request

    def plan(self) -> tuple[int, None]:
        start = NOW()
        self._manager.new_step_starts()
        return NOW() - start, None

    def lookup(self, name: str, known: int) -> tuple[int, Any]:
        request = self._grow(name, known)
        start = NOW()
        blocks, hit, junction = self._manager.get_computed_blocks(request)
        taken = NOW() - start
        request.shared_prefix_boundary = junction
        self._hits[name] = blocks, hit
        return taken, [hit, junction]

    def admit(self, name: str, end: int, has_others: bool) -> tuple[int, Any]:
        request = self._requests[name]
        blocks, hit = self._hits[name]
        start = NOW()
        done = self._manager.allocate_slots(
            request,
            end - hit,
            num_new_computed_tokens=hit,
            new_computed_blocks=blocks,
            num_lookahead_tokens=self._config["lookahead_slots"],
            full_sequence_must_fit=self._config["reserve_full_prompt"],
            has_scheduled_reqs=has_others,
        )
        taken = NOW() - start
        if done is not None:
            request.status = self._status.RUNNING
            request.num_computed_tokens = end
        return taken, done is not None

    def extend(
        self, name: str, first: int, end: int, known: int, processed: int, num_drafts: int
    ) -> tuple[int, Any]:
        request = self._grow(name, known)
        request.num_computed_tokens = first
        request.num_in_flight_tokens = first - processed
        start = NOW()
        done = self._manager.allocate_slots(
            request, end - first, num_lookahead_tokens=self._config["lookahead_slots"]
        )
        return NOW() - start, done is not None

    def launch(self) -> tuple[int, None]:
        """What follows the planning of a step: copies, and pages to clear."""
        start = NOW()
        manager = self._manager
        manager.take_boundary_state_offloads()
        _, retained = manager.take_kv_cache_block_copies()
        manager.block_pool.free_blocks(retained)
        manager.take_new_block_ids()
        return NOW() - start, None

    def complete(self) -> tuple[int, None]:
        return 0, None  # vLLM has published at once

    def publish(self, name: str, known: int, computed: int, sampled: int) -> tuple[int, None]:
        """Only with drafts or with steps in flight: otherwise all is published already."""
        request = self._grow(name, known)
        request.num_computed_tokens, request.num_in_flight_tokens = computed, 0
        if not sampled or not self._config["publishes_late"]:
            return 0, None
        start = NOW()
        self._manager.cache_blocks(request, computed)
        return NOW() - start, None

    def release(self, name: str, is_preempted: bool, computed: int) -> tuple[int, None]:
        request = self._requests[name]
        start = NOW()
        self._manager.free(request)
        taken = NOW() - start
        if is_preempted:
            request.status = self._status.PREEMPTED
            request.num_computed_tokens = 0
        return taken, None

    def reset(self) -> tuple[int, Any]:
        start = NOW()
        done = self._manager.reset_prefix_cache()
        return NOW() - start, done


if __name__ == "__main__":
    main()
