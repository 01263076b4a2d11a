"""Messages of the engine contract to requests.

Every field of a request is in one of the tables below: honoured, or refused by name unless it has a
value that asks for nothing (KF-V22). A field that is in no table is refused too.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from typing import Any

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from serving.request import MAX_UINT32, Grammar, RequestError, SamplingParams
from serving.rpc.protocol import common, messages
from serving.tokenizer import Tokenizer

MAX_REQUEST_ID_CHARS = 512
MAX_CHOICES = 128


@dataclasses.dataclass(frozen=True, slots=True)
class Honoured:
    """The field is read, or does not concern a server that returns token ids (`note`)."""

    note: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Refused:
    """The field is not implemented.

    Attributes:
      neutral: values that ask for nothing, besides not being set. Where the field has no presence,
        zero is not set.
    """

    neutral: tuple[object, ...] = ()


type Rule = Honoured | Refused

GENERATE_FIELDS: Mapping[str, Rule] = {
    "request_id": Honoured(),
    "tokenized": Honoured(),
    "text": Honoured(),
    "sampling_params": Honoured(),
    "stream": Honoured(),
    "kv_transfer_params": Refused(),
    "kv_transfer_params_json": Refused(),
    "mm_inputs": Refused(),
    "extra_mm_inputs": Refused(),
    "media_refs": Refused(),
    "data_parallel_rank": Honoured(),
}
TOKENIZED_FIELDS: Mapping[str, Rule] = {
    "input_ids": Honoured(),
    "original_text": Honoured("for people who debug; the ids are the prompt"),
}
SAMPLING_FIELDS: Mapping[str, Rule] = {
    "temperature": Honoured(),
    "top_p": Honoured(),
    "top_k": Honoured(),
    "max_tokens": Honoured(),
    "stop_token_ids": Honoured(),
    "ignore_eos": Honoured(),
    "seed": Honoured(),
    "skip_special_tokens": Honoured("we return ids; says what text `stop` is looked for in"),
    "spaces_between_special_tokens": Honoured("concerns text; we return ids"),
    "n": Honoured(),
    "min_p": Honoured(),
    "frequency_penalty": Honoured(),
    "presence_penalty": Honoured(),
    "repetition_penalty": Honoured(),
    "logit_bias": Honoured(),
    "min_tokens": Honoured(),
    "stop": Honoured(),
    "include_stop_str_in_output": Honoured("concerns text; we return its ids in any case"),
    "logprobs": Honoured(),
    "prompt_logprobs": Honoured(),
    "truncate_prompt_tokens": Honoured(),
    "json_schema": Honoured(),
    "regex": Honoured(),
    "grammar": Honoured(),
    "structural_tag": Honoured(),
    "json_object": Honoured(),
    "choice": Honoured(),
    "grammar_from_first_token": Honoured(),
}
PROFILE_FIELDS: Mapping[str, Rule] = {
    "output_dir": Honoured(),
    "start_step": Honoured(),
    "num_steps": Honoured(),
    "activities": Honoured("a trace has the host and all devices"),
    "with_stack": Honoured(),
    "record_shapes": Honoured("shapes are part of every trace"),
    "profile_by_stage": Refused(neutral=(False,)),
}


def check_profile_fields(request: common.StartProfileRequest) -> None:
    """Refuse what the profiler does not do.

    Raises:
      RequestError: UNIMPLEMENTED, naming the field.
    """
    _check_message(request, PROFILE_FIELDS)


def check_fields(request: messages.GenerateRequest) -> None:
    """Refuse what the server does not implement.

    Raises:
      RequestError: UNIMPLEMENTED, naming the field.
    """
    _check_message(request, GENERATE_FIELDS)
    _check_message(request.tokenized, TOKENIZED_FIELDS)
    _check_message(request.sampling_params, SAMPLING_FIELDS)
    if len(request.request_id) > MAX_REQUEST_ID_CHARS:
        raise _invalid(
            f"request_id is too long: got {len(request.request_id)} characters; "
            f"expected at most {MAX_REQUEST_ID_CHARS}"
        )


def num_choices(params: messages.SamplingParams, *, most: int) -> int:
    """How many answers a request wants.

    Raises:
      RequestError: INVALID_ARGUMENT, more than `most`.
    """
    most = min(most, MAX_CHOICES)
    if params.n > most:
        raise _invalid(f"n is out of range: got {params.n}; expected 1..{most}")
    return params.n or 1


def num_kept(params: messages.SamplingParams, *, max_request_tokens: int) -> int | None:
    """How many of the prompt's last tokens are kept; None for all.

    Args:
      max_request_tokens: of prompt and answer together. -1 keeps what leaves room for the answer.

    Raises:
      RequestError: INVALID_ARGUMENT, `truncate_prompt_tokens` is neither -1 nor positive.
    """
    if not params.HasField("truncate_prompt_tokens"):
        return None
    kept = params.truncate_prompt_tokens
    if kept == -1:
        return max(1, max_request_tokens - (params.max_tokens or 1))
    if kept < 1:
        raise _invalid(
            f"truncate_prompt_tokens is out of range: got {kept}; expected at least 1, or -1 for "
            "as many as fit"
        )
    return kept


def prompt_ids(
    request: messages.GenerateRequest,
    *,
    tokenizer: Tokenizer | None,
    max_tokens: int,
    num_kept: int | None = None,
) -> tuple[int, ...]:
    """Return the prompt of a request, tokenized if it came as text.

    Args:
      max_tokens: of a prompt. A longer one is refused before it is copied or tokenized; whether the
        rest of the request fits is the engine's to check.
      num_kept: of longer prompts only so many of the last tokens are taken.

    Raises:
      RequestError: there is no prompt, it is too long, or it is text and there is no tokenizer.
    """
    match request.WhichOneof("input"):
        case "tokenized":
            ids = request.tokenized.input_ids
            start = max(0, len(ids) - num_kept) if num_kept else 0
            _check_length(len(ids) - start, max_tokens, "")
            return tuple(ids[start:])
        case "text":
            if tokenizer is None:
                raise RequestError(
                    "UNIMPLEMENTED",
                    "text is not supported: the served model has no tokenizer; "
                    "send tokenized.input_ids",
                )
            if tokenizer.max_token_chars is not None and num_kept is None:
                least = -(-len(request.text) // tokenizer.max_token_chars)
                _check_length(least, max_tokens, "at least ")
            return tuple(tokenizer.encode(request.text)[-num_kept if num_kept else 0 :])
        case _:
            raise _invalid(
                "prompt is missing: got neither tokenized nor text; expected one of them"
            )


def sampling_params(
    params: messages.SamplingParams,
    *,
    default_temperature: float,
    vocab_size: int,
    max_new_tokens: int,
    draw_seed: Callable[[], int],
    has_tokenizer: bool,
) -> SamplingParams:
    """Read sampling parameters. Where a field has no presence, zero means that it was not set.

    Args:
      max_new_tokens: for a request that does not say: the room left after its prompt.
      draw_seed: returns the uint32 seed of a request that brings none.
      has_tokenizer: whether stop strings can be found.

    Raises:
      RequestError: a value is out of range, or a field needs a tokenizer.
    """
    if params.stop and not has_tokenizer:
        raise RequestError(
            "UNIMPLEMENTED",
            "stop is not supported: the served model has no tokenizer; use stop_token_ids",
        )
    grammar = _grammar(params)
    if grammar is not None and not has_tokenizer:
        raise RequestError(
            "UNIMPLEMENTED",
            f"{grammar.kind} is not supported: the served model has no tokenizer; leave it out",
        )
    # Nothing is masked by a limit that is no limit, and the device takes 32-bit signed numbers.
    top_k = params.top_k if params.top_k < vocab_size else 0
    # Negative seeds are as good as others: the device takes their bits.
    seed = params.seed & MAX_UINT32 if params.HasField("seed") else draw_seed()
    # A prompt that leaves no room is refused for its length, by the engine.
    max_tokens = params.max_tokens if params.HasField("max_tokens") else max(1, max_new_tokens)
    has_temperature = params.HasField("temperature")
    return SamplingParams(
        temperature=params.temperature if has_temperature else default_temperature,
        top_k=top_k,
        top_p=params.top_p or 1.0,
        min_p=params.min_p,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty or 1.0,
        logit_bias=tuple(sorted(params.logit_bias.items())),
        seed=seed,
        max_tokens=max_tokens,
        min_tokens=params.min_tokens,
        stop_token_ids=tuple(params.stop_token_ids),
        stop=tuple(params.stop),
        skip_special_tokens=params.skip_special_tokens,
        ignore_eos=params.ignore_eos,
        logprobs=params.logprobs if params.HasField("logprobs") else None,
        prompt_logprobs=params.prompt_logprobs if params.HasField("prompt_logprobs") else None,
        grammar=grammar,
        grammar_from_first_token=params.grammar_from_first_token,
    )


def _grammar(params: messages.SamplingParams) -> Grammar | None:
    """What the answer has to be, if anything.

    Raises:
      RequestError: INVALID_ARGUMENT, there are no choices.
    """
    match params.WhichOneof("constraint"):
        case None:
            return None
        case "json_object":
            return Grammar("json_object", "") if params.json_object else None
        case "choice":
            choices = list(params.choice.choices)
            if not all(choices) or not choices:
                raise _invalid("choice is wrong: got none, or an empty one; expected strings")
            return Grammar("choice", json.dumps(choices))
        case kind:
            return Grammar(kind, getattr(params, kind))


def siblings(sampling: SamplingParams, count: int) -> list[SamplingParams]:
    """The parameters of each answer to one prompt.

    Answer `i` is the one that a request with a seed larger by `i` gets. Only the first tells the
    log probabilities of the prompt.
    """
    others = [
        dataclasses.replace(
            sampling, seed=(sampling.seed + index) & MAX_UINT32, prompt_logprobs=None
        )
        for index in range(1, count)
    ]
    return [sampling, *others]


def _check_message(message: Message, rules: Mapping[str, Rule]) -> None:
    for field, value in message.ListFields():
        rule = rules.get(field.name, Refused())
        if isinstance(rule, Refused) and value not in rule.neutral:
            raise RequestError(
                "UNIMPLEMENTED",
                f"{field.name} is not supported: got {_shown(value)}; "
                f"expected {_expected(rule)}; leave it out",
            )
    unknown = UnknownFieldSet(message)
    if len(unknown):
        name = f"{message.DESCRIPTOR.name} field number {unknown[0].field_number}"
        raise RequestError(
            "UNIMPLEMENTED", f"{name} is not supported: newer than this server; leave it out"
        )


def _shown(value: Any) -> str:
    """A value without the client's text in it."""
    return str(value) if isinstance(value, bool | int | float) else "a value"


def _expected(rule: Refused) -> str:
    return " or ".join(["none", *map(str, rule.neutral)])


def _check_length(got: int, limit: int, qualifier: str) -> None:
    if got > limit:
        raise _invalid(
            f"prompt is too long: got {qualifier}{got} tokens; expected at most {limit}, one less "
            f"than the context of {limit + 1}"
        )


def _invalid(message: str) -> RequestError:
    return RequestError("INVALID_ARGUMENT", message)
