"""What a client of `Generate` gets."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path

import pytest

from tests.fakes import EOS, VOCAB_SIZE, FakeExecutor, fake_geometry, fake_request, solo_tokens
from tests.server.harness import (
    PROMPT,
    collect,
    fake_load,
    messages,
    request,
    serving,
    write_model_folder,
)


async def test_stream_sends_increments_and_ends_with_a_complete_message():
    async with serving() as harness:
        answer = await collect(harness.stub.Generate(request(max_tokens=6)))
    assert answer.token_ids == solo_tokens(fake_request("a", PROMPT, max_tokens=6))
    assert all(chunk.completion_tokens == len(chunk.token_ids) > 0 for chunk in answer.chunks)
    assert all(chunk.prompt_tokens == len(PROMPT) for chunk in answer.chunks)
    assert answer.complete == messages.GenerateComplete(finish_reason="length", prompt_tokens=3)


async def test_unary_request_gets_one_complete_message_with_all_ids():
    async with serving() as harness:
        answer = await collect(harness.stub.Generate(request(max_tokens=6, stream=False)))
    tokens = solo_tokens(fake_request("a", PROMPT, max_tokens=6))
    assert not answer.chunks
    assert answer.complete == messages.GenerateComplete(
        output_ids=tokens, finish_reason="length", prompt_tokens=3, completion_tokens=6
    )


@pytest.mark.parametrize("sampling", [{}, {"stop_token_ids": [40]}], ids=["end id", "stop id"])
async def test_kf_v19_end_and_stop_ids_end_the_stream_with_the_matched_id(sampling: dict):
    stop = 40 if sampling else EOS
    geometry = fake_geometry()
    executor = FakeExecutor(geometry, scripted={("a", 5): stop})
    async with serving(fake_load(executor)) as harness:
        answer = await collect(harness.stub.Generate(request(max_tokens=9, **sampling)))
    assert answer.token_ids[-1] == stop
    assert len(answer.token_ids) == 3
    assert answer.complete is not None
    assert answer.complete.finish_reason == "stop"
    assert answer.complete.matched_token_id == stop


async def test_ignore_eos_goes_on_after_an_end_id():
    executor = FakeExecutor(fake_geometry(), scripted={("a", 4): EOS})
    async with serving(fake_load(executor)) as harness:
        answer = await collect(harness.stub.Generate(request(max_tokens=5, ignore_eos=True)))
    assert len(answer.token_ids) == 5
    assert answer.token_ids[1] == EOS


async def test_request_without_max_tokens_gets_the_room_that_is_left():
    async with serving(fake_load(max_context_tokens=20)) as harness:
        answer = await collect(harness.stub.Generate(request(max_tokens=None)))
    assert len(answer.token_ids) == 20 - len(PROMPT)
    assert answer.complete is not None
    assert answer.complete.finish_reason == "length"


async def test_kf_v10_one_token_prompt_works():
    async with serving() as harness:
        answer = await collect(harness.stub.Generate(request(prompt=(5,))))
    assert answer.token_ids == solo_tokens(fake_request("a", (5,)))


async def test_kf_v11_last_id_of_the_vocabulary_works():
    async with serving() as harness:
        answer = await collect(harness.stub.Generate(request(prompt=(VOCAB_SIZE - 1,))))
    assert len(answer.token_ids) == 4


async def test_text_is_tokenized_by_the_server(tmp_path: Path):
    message = request()
    message.text = "HI !"
    async with serving(folder=write_model_folder(tmp_path)) as harness:
        answer = await collect(harness.stub.Generate(message))
    assert answer.token_ids == solo_tokens(fake_request("a", b"HI !"))


async def test_long_text_leaves_the_event_loop_and_gives_the_same_ids(tmp_path: Path):
    message = request(max_tokens=1)
    message.text = "A" * 9000
    load = fake_load(num_pages=3000, max_context_tokens=9100)
    async with serving(load, folder=write_model_folder(tmp_path)) as harness:
        answer = await collect(harness.stub.Generate(message))
    assert answer.token_ids == solo_tokens(fake_request("a", b"A" * 9000, max_tokens=1))


async def test_kf_v12_prompt_of_a_full_context_beyond_four_megabytes_is_accepted():
    prompt = (1,) * 1_048_000
    message = request(prompt=prompt)
    message.tokenized.original_text = "x" * (4 << 20)
    geometry = fake_geometry(page_tokens=4096)
    executor = FakeExecutor(geometry, num_pages=300)
    executor.gate.clear()  # one step is enough
    bounds = {"max_context_tokens": 1 << 20}
    load = fake_load(executor, page_tokens=4096, num_pages=300, **bounds)
    async with serving(load) as harness:
        call = harness.stub.Generate(message)
        await harness.until(lambda: harness.counts().prompt_tokens == len(prompt))
        await harness.until(lambda: bool(executor.plans))
        call.cancel()
        executor.gate.set()
        await harness.until_idle()


async def test_kf_v15_seed_decides_the_answer_and_unseeded_requests_differ():
    seeds = itertools.count(7)
    async with serving(draw_seed=seeds.__next__) as harness:
        calls = [request("s1", seed=42), request("s2", seed=42), request("u1", seed=None)]
        calls.append(request("u2", seed=None))
        answers = await asyncio.gather(*(collect(harness.stub.Generate(c)) for c in calls))
    seeded, again, unseeded, other = (answer.token_ids for answer in answers)
    assert seeded == again == solo_tokens(fake_request("s1", PROMPT, seed=42))
    assert len({seeded, unseeded, other}) == 3


async def test_negative_seed_is_the_unsigned_number_of_the_same_bits():
    async with serving() as harness:
        answer = await collect(harness.stub.Generate(request(seed=-1)))
    assert answer.token_ids == solo_tokens(fake_request("a", PROMPT, seed=2**32 - 1))


@pytest.mark.parametrize("top_k", [0, VOCAB_SIZE, 2**32 - 1])
async def test_kf_v17_top_k_without_effect_means_no_limit(top_k: int):
    executor = FakeExecutor(fake_geometry())
    async with serving(fake_load(executor)) as harness:
        await collect(harness.stub.Generate(request(top_k=top_k)))
    assert executor.plans[0].rows[0].sampling.top_k == 0


async def test_temperature_falls_back_to_the_models_and_zero_stays_zero():
    executor = FakeExecutor(fake_geometry())
    async with serving(fake_load(executor)) as harness:
        await collect(harness.stub.Generate(request("a")))
        await collect(harness.stub.Generate(request("b", temperature=0.0, top_p=0.0)))
    sampling = {row.request_id: row.sampling for plan in executor.plans for row in plan.rows}
    assert sampling["a"].temperature == 0.7
    assert sampling["b"].temperature == 0.0
    assert sampling["b"].top_p == 1.0


async def test_request_without_an_id_gets_one_of_its_own():
    async with serving() as harness:
        calls = [harness.stub.Generate(request("")) for _ in range(2)]
        answers = await asyncio.gather(*map(collect, calls))
    assert all(len(answer.token_ids) == 4 for answer in answers)


async def test_sixteen_streams_equal_their_solo_runs():
    prompts = {f"r{i}": tuple(range(1, 2 + i)) for i in range(16)}
    async with serving() as harness:
        calls = [harness.stub.Generate(request(id, prompt, max_tokens=9))
                 for id, prompt in prompts.items()]  # fmt: skip
        answers = await asyncio.gather(*map(collect, calls))
        await harness.until_idle()
    for (id, prompt), answer in zip(prompts.items(), answers, strict=True):
        assert answer.token_ids == solo_tokens(fake_request(id, prompt, max_tokens=9))
