"""Requests from messages: every field is honoured or refused; the service covers its contract."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from serving.request import Grammar, RequestError, SamplingParams
from serving.rpc import convert, edge, protocol, service
from serving.rpc.convert import GENERATE_FIELDS, SAMPLING_FIELDS, TOKENIZED_FIELDS
from serving.rpc.protocol import common, messages
from serving.tokenizer import Tokenizer

METHODS = [m.name for m in messages.DESCRIPTOR.services_by_name["VllmEngine"].methods]


@pytest.mark.parametrize(
    ("message", "rules"),
    [
        (messages.GenerateRequest, GENERATE_FIELDS),
        (messages.TokenizedInput, TOKENIZED_FIELDS),
        (messages.SamplingParams, SAMPLING_FIELDS),
    ],
    ids=["GenerateRequest", "TokenizedInput", "SamplingParams"],
)
def test_kf_v22_every_field_is_honoured_or_refused(message: Any, rules: dict[str, Any]):
    assert set(rules) == set(message.DESCRIPTOR.fields_by_name)


@pytest.mark.parametrize("method", METHODS)
def test_every_method_of_the_contract_is_a_guarded_coroutine(method: str):
    handler = getattr(service.EngineService, method)
    assert inspect.iscoroutinefunction(handler)
    assert handler.__code__ is edge.at_edge(handler).__code__


def test_service_name_is_what_gateways_probe():
    assert protocol.SERVICE_NAME == "vllm.grpc.engine.VllmEngine"


def test_refusal_names_field_value_and_expectation_but_no_text_of_the_client():
    with pytest.raises(RequestError) as error:
        convert.check_profile_fields(common.StartProfileRequest(profile_by_stage=True))
    assert error.value.message == (
        "profile_by_stage is not supported: got True; expected none or False; leave it out"
    )
    with pytest.raises(RequestError) as error:
        convert.check_fields(messages.GenerateRequest(kv_transfer_params_json="my secret"))
    assert "secret" not in error.value.message


def test_field_of_a_newer_contract_is_refused_inside_sampling_params_too():
    request = sampling_request()
    request.sampling_params.MergeFromString(bytes([0xF8, 0x06, 0x01]))  # field 111, varint 1
    with pytest.raises(RequestError, match="SamplingParams field number 111") as error:
        convert.check_fields(request)
    assert error.value.status == "UNIMPLEMENTED"


def test_text_that_cannot_fit_is_refused_before_it_is_tokenized():
    def encode(text: str) -> list[int]:
        raise AssertionError("tokenized")

    tokenizer = Tokenizer(
        vocab=(), control_tokens={}, eos_token_id=None, encode=encode, max_token_chars=3
    )
    request = messages.GenerateRequest(text="x" * 31)
    with pytest.raises(RequestError, match="got at least 11 tokens; expected at most 10"):
        convert.prompt_ids(request, tokenizer=tokenizer, max_tokens=10)


def test_sampling_params_are_read_as_they_are():
    got = sampling_params(
        temperature=0.5, top_p=0.25, top_k=3, seed=9, max_tokens=7, stop_token_ids=[1, 2],
        ignore_eos=True, min_p=0.125, presence_penalty=0.5, frequency_penalty=-0.5,
        repetition_penalty=1.5, logit_bias={7: 1.5, 3: -2.0}, min_tokens=4, stop=["a", "bc"],
        skip_special_tokens=True, logprobs=0, prompt_logprobs=5,
    )  # fmt: skip
    assert got == SamplingParams(
        temperature=0.5, top_p=0.25, top_k=3, seed=9, max_tokens=7, stop_token_ids=(1, 2),
        ignore_eos=True, min_p=0.125, presence_penalty=0.5, frequency_penalty=-0.5,
        repetition_penalty=1.5, logit_bias=((3, -2.0), (7, 1.5)), min_tokens=4, stop=("a", "bc"),
        skip_special_tokens=True, logprobs=0, prompt_logprobs=5,
    )  # fmt: skip
    assert not got.is_plain


def test_unset_sampling_params_take_the_servers_choice():
    got = sampling_params()
    assert got == SamplingParams(temperature=0.8, seed=4242, max_tokens=30)
    assert got.is_plain


def test_a_grammar_can_be_told_to_begin_at_once():
    got = sampling_params(regex="a", grammar_from_first_token=True)
    assert got.grammar == Grammar("regex", "a")
    assert got.grammar_from_first_token
    assert not sampling_params(regex="a").grammar_from_first_token


def test_prompt_without_room_leaves_the_refusal_to_the_engine():
    params = messages.SamplingParams()
    got = convert.sampling_params(
        params, default_temperature=1.0, vocab_size=100, max_new_tokens=0, draw_seed=lambda: 1,
        has_tokenizer=False,
    )  # fmt: skip
    assert got.max_tokens == 1


@pytest.mark.parametrize(
    ("kept", "max_tokens", "prompt"),
    [(None, 4, (1, 2, 3, 4, 5)), (2, 4, (4, 5)), (9, 4, (1, 2, 3, 4, 5)), (-1, 4, (3, 4, 5))],
)
def test_truncation_keeps_the_end_of_the_prompt(
    kept: int | None, max_tokens: int, prompt: tuple[int, ...]
):
    request = sampling_request(truncate_prompt_tokens=kept, max_tokens=max_tokens)
    request.tokenized.input_ids[:] = (1, 2, 3, 4, 5)
    num_kept = convert.num_kept(request.sampling_params, max_request_tokens=7)
    got = convert.prompt_ids(request, tokenizer=None, max_tokens=6, num_kept=num_kept)
    assert got == prompt


def test_siblings_have_a_seed_each_and_the_first_alone_scores_the_prompt():
    one, two, three = convert.siblings(sampling_params(seed=-2, prompt_logprobs=1, min_p=0.5), 3)
    assert [s.seed for s in (one, two, three)] == [2**32 - 2, 2**32 - 1, 0]
    assert [s.prompt_logprobs for s in (one, two, three)] == [1, None, None]
    assert two.min_p == 0.5


def sampling_request(**fields: Any) -> messages.GenerateRequest:
    return messages.GenerateRequest(
        request_id="a", sampling_params=messages.SamplingParams(**fields)
    )


def sampling_params(**fields: Any):
    return convert.sampling_params(
        messages.SamplingParams(**fields),
        default_temperature=0.8,
        vocab_size=100,
        max_new_tokens=30,
        draw_seed=lambda: 4242,
        has_tokenizer=True,
    )
