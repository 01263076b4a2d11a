"""From outputs of the engine to the messages of `Generate`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from k3jax.results import TokenLogprobs
from serving.plan import Output
from serving.request import Request, RequestError
from serving.rpc.protocol import messages

# Gateways take no larger message. Only log probabilities make one so large.
MAX_REPLY_BYTES = 4 << 20


@dataclasses.dataclass(slots=True)
class Choice:
    """One answer of a call, on its way out.

    Attributes:
      index: among the answers to one prompt.
      num_tokens: sent or collected.
    """

    index: int
    request: Request
    is_streamed: bool
    num_tokens: int = 0
    _token_ids: list[int] = dataclasses.field(default_factory=list[int])
    _logprobs: list[TokenLogprobs] = dataclasses.field(default_factory=list[TokenLogprobs])
    _prompt: messages.InputLogProbs | None = None

    def replies(self, output: Output) -> Iterator[messages.GenerateResponse]:
        """What the client is sent for an output: increments as they come and a last message
        without tokens, or one message with everything."""
        is_first = not self.num_tokens and bool(output.token_ids)
        if is_first and self.request.sampling.prompt_logprobs is not None:
            self._prompt = _input_logprobs(self.request.prompt, output.prompt_logprobs)
        self.num_tokens += len(output.token_ids)
        self._token_ids += output.token_ids
        self._logprobs += output.logprobs
        if self.is_streamed and self._token_ids:
            yield messages.GenerateResponse(chunk=self._chunk(output))
            self._token_ids.clear()
            self._logprobs.clear()
            self._prompt = None
        if output.finish_reason is not None:
            yield messages.GenerateResponse(complete=self._complete(output))

    def _chunk(self, output: Output) -> messages.GenerateStreamChunk:
        """New tokens. `completion_tokens` counts those of this chunk, not a total."""
        return messages.GenerateStreamChunk(
            token_ids=self._token_ids,
            prompt_tokens=output.prompt_tokens,
            completion_tokens=len(self._token_ids),
            cached_tokens=output.cached_tokens,
            output_logprobs=self._output_logprobs(),
            input_logprobs=self._prompt,
            index=self.index,
        )

    def _complete(self, output: Output) -> messages.GenerateComplete:
        """The last message, with all that was not sent before."""
        complete = messages.GenerateComplete(
            output_ids=self._token_ids,
            finish_reason=output.finish_reason or "",
            prompt_tokens=output.prompt_tokens,
            completion_tokens=len(self._token_ids),
            cached_tokens=output.cached_tokens,
            output_logprobs=self._output_logprobs(),
            input_logprobs=self._prompt,
            index=self.index,
        )
        if output.matched_token_id is not None:
            complete.matched_token_id = output.matched_token_id
        if output.matched_stop is not None:
            complete.matched_stop_str = output.matched_stop
        return complete

    def _output_logprobs(self) -> messages.OutputLogProbs | None:
        if not self._logprobs:
            return None
        return messages.OutputLogProbs(
            token_logprobs=[one.chosen for one in self._logprobs],
            token_ids=self._token_ids,
            top_logprobs=_top_logprobs(self._logprobs) if self._logprobs[0].top else (),
        )


def check_size(request: Request, *, is_streamed: bool, vocab_size: int) -> None:
    """Refuse a request whose log probabilities would make a message that is too large.

    Those of a prompt travel in one message, and an answer that is not streamed does.

    Raises:
      RequestError: INVALID_ARGUMENT, naming the numbers.
    """
    sampling = request.sampling
    parts = [("prompt_logprobs", "prompt tokens", len(request.prompt), sampling.prompt_logprobs)]
    if not is_streamed:
        parts.append(("logprobs", "max_tokens", sampling.max_tokens, sampling.logprobs))
    parts = [part for part in parts if part[-1] is not None]
    num_bytes = sum(places * _place_bytes(top or 0, vocab_size) for _, _, places, top in parts)
    if num_bytes > MAX_REPLY_BYTES:
        said = " and ".join(f"{name} {top} with {count} {of}" for name, of, count, top in parts)
        raise RequestError(
            "INVALID_ARGUMENT",
            f"the reply would be too large: got {said}, up to {num_bytes} bytes; expected at most "
            f"{MAX_REPLY_BYTES} in one message; ask for fewer, or stream",
        )


def _place_bytes(num_top: int, vocab_size: int) -> int:
    """Bytes of one token with its log probabilities in a message, at most."""
    id_bytes = -(-(vocab_size - 1).bit_length() // 7) or 1
    header_bytes = 4
    own = 2 * id_bytes + 4 + 2 * header_bytes
    return own + (2 * header_bytes + num_top * (4 + id_bytes) if num_top else 0)


def _input_logprobs(
    prompt: tuple[int, ...], told: Sequence[TokenLogprobs]
) -> messages.InputLogProbs:
    """Log probabilities of a prompt; its first token has none."""
    first = [messages.InputTokenLogProb()]
    return messages.InputLogProbs(
        token_logprobs=first + [messages.InputTokenLogProb(value=one.chosen) for one in told],
        token_ids=prompt,
        top_logprobs=[messages.TopLogProbs(), *_top_logprobs(told)],
    )


def _top_logprobs(told: Sequence[TokenLogprobs]) -> list[messages.TopLogProbs]:
    return [messages.TopLogProbs(values=one.top, token_ids=one.top_ids) for one in told]
