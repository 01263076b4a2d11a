"""Requests from messages: every field is honoured or refused; the service covers its contract."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from serving.request import RequestError
from serving.rpc import convert, edge, protocol, service
from serving.rpc.convert import GENERATE_FIELDS, SAMPLING_FIELDS, TOKENIZED_FIELDS
from serving.rpc.protocol import messages
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
        convert.check_fields(sampling_request(repetition_penalty=1.5))
    assert error.value.message == (
        "repetition_penalty is not supported: got 1.5; expected none or 1.0; leave it out"
    )
    with pytest.raises(RequestError) as error:
        convert.check_fields(sampling_request(stop=["my secret"]))
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
        ignore_eos=True,
    )  # fmt: skip
    assert (got.temperature, got.top_p, got.top_k, got.seed) == (0.5, 0.25, 3, 9)
    assert (got.max_tokens, got.stop_token_ids, got.ignore_eos) == (7, (1, 2), True)


def test_unset_sampling_params_take_the_servers_choice():
    got = sampling_params()
    assert (got.temperature, got.top_p, got.top_k, got.seed) == (0.8, 1.0, 0, 4242)
    assert (got.max_tokens, got.stop_token_ids, got.ignore_eos) == (30, (), False)


def test_prompt_without_room_leaves_the_refusal_to_the_engine():
    params = messages.SamplingParams()
    got = convert.sampling_params(
        params, default_temperature=1.0, vocab_size=100, max_new_tokens=0, draw_seed=lambda: 1
    )
    assert got.max_tokens == 1


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
    )
