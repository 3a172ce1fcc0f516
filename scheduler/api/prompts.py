"""From the body of a request to token ids: chat template, tokenizer, truncation, and the limits around them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from scheduler.api.chat_protocol import ChatPrompt, ChatRequest
from scheduler.api.chat_template import ChatTemplate
from scheduler.api.completion_protocol import CompletionRequest
from scheduler.api.output import Prompt, token_offsets
from scheduler.api.params import GenerationParams
from scheduler.api.reported import check_reported
from scheduler.api.tokenizer import Detokenizer, NoDetokenizer, Tokenizer
from scheduler.errors import InvalidRequestError
from scheduler.messages import ModelInfo

GenerationRequest = CompletionRequest | ChatRequest

_MAX_CUT_CHARS = 2**20
"""What takes about a second to tokenise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSize:
    """How much there is to tokenise, before that is done."""

    num_prompts: int
    num_chars: int
    num_tokens: int
    """Of prompts that came as tokens."""


class PromptEncoder:
    """Makes prompts. Knows the model, its tokenizer and its chat template; keeps nothing of a request."""

    def __init__(
        self, model: ModelInfo, tokenizer: Tokenizer | None, chat_template: ChatTemplate | None
    ) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._chat_template = chat_template
        self._max_chars = tokenizer.max_token_chars * model.max_model_len if tokenizer else 0

    def size(self, body: GenerationRequest) -> PromptSize:
        """Return how much there is to tokenise."""
        if isinstance(body, ChatRequest):
            return PromptSize(num_prompts=1, num_chars=body.num_chars, num_tokens=0)
        return PromptSize(
            num_prompts=len(body.prompt),
            num_chars=sum(len(prompt) for prompt in body.prompt if isinstance(prompt, str)),
            num_tokens=sum(len(prompt) for prompt in body.prompt if not isinstance(prompt, str)),
        )

    async def encode(self, body: GenerationRequest) -> list[Prompt]:
        """Return the prompts of a request. Raises InvalidRequestError if one is not one that the model can take."""
        if isinstance(body, ChatRequest):
            encoded = [await self.encode_chat(body, may_be_cut=body.truncate_prompt_tokens is not None)]
        else:
            encoded = await self._encode_texts(body)
        check_reported(body, [len(token_ids) for token_ids in encoded], self._model.max_model_len)
        prompts = []
        for i, token_ids in enumerate(encoded):
            where = (
                "messages"
                if isinstance(body, ChatRequest)
                else f"prompt {i}"
                if len(encoded) > 1
                else "prompt"
            )
            kept = self._truncated(token_ids, body)
            self._check(kept, where)
            prompts.append(
                await self._with_text(kept, body, i) if body.wants_echo else Prompt(token_ids=kept)
            )
        return prompts

    async def encode_chat(self, body: ChatPrompt, *, may_be_cut: bool = False) -> tuple[int, ...]:
        """Return the tokens of a conversation. Raises InvalidRequestError."""
        if self._chat_template is None:
            raise InvalidRequestError("the served model has no chat template", param="messages")
        variables = dict(body.chat_template_kwargs)
        if body.reasoning_effort is not None:
            variables["reasoning_effort"] = body.reasoning_effort
        text = self._chat_template.render(
            [message.variables() for message in body.messages],
            variables,
            add_generation_prompt=body.add_generation_prompt,
        )
        (token_ids,) = await self.encode_texts(
            [text], "messages", add_special_tokens=body.add_special_tokens, may_be_cut=may_be_cut
        )
        return token_ids

    async def encode_texts(
        self, texts: list[str], param: str, *, add_special_tokens: bool, may_be_cut: bool = False
    ) -> list[tuple[int, ...]]:
        """Return the tokens of texts from field `param`. Raises InvalidRequestError.

        Texts that have more characters than the context's tokens can hold are refused before they are tokenised;
        those that may be cut may have more, but not any number.
        """
        if self._tokenizer is None:
            raise InvalidRequestError(
                f"{param} must be token ids: the served model has no tokenizer", param=param
            )
        longest = max(map(len, texts))
        if longest > self._max_chars and not may_be_cut:
            raise InvalidRequestError(
                f"{param} has {longest} characters, which is longer than the model's context length allows: "
                f"{self._model.max_model_len} tokens have <= {self._max_chars} characters",
                param=param,
            )
        if longest > (most := max(_MAX_CUT_CHARS, self._max_chars)):
            raise InvalidRequestError(
                f"{param} must have at most {most} characters to be cut to truncate_prompt_tokens, got {longest}",
                param=param,
            )
        return await self._tokenizer.encode(texts, add_special_tokens=add_special_tokens)

    def detokenizer(self, body: GenerationParams) -> Detokenizer:
        """Return a detokenizer for one sequence of a request."""
        if self._tokenizer is None:
            return NoDetokenizer()
        return self._tokenizer.detokenizer(skip_special_tokens=body.skip_special_tokens)

    async def _encode_texts(self, body: CompletionRequest) -> list[tuple[int, ...]]:
        texts = [prompt for prompt in body.prompt if isinstance(prompt, str)]
        if not texts:
            return [prompt for prompt in body.prompt if not isinstance(prompt, str)]
        return await self.encode_texts(
            texts,
            "prompt",
            add_special_tokens=body.add_special_tokens,
            may_be_cut=body.truncate_prompt_tokens is not None,
        )

    def _truncated(self, token_ids: tuple[int, ...], body: GenerationParams) -> tuple[int, ...]:
        most = body.truncate_prompt_tokens
        if most is None:
            return token_ids
        if most == -1:
            room = self._model.max_model_len - max(1, body.asked_max_tokens or 1)
            most = max(1, room)
        if body.truncation_side == "right":
            return token_ids[:most]
        return token_ids[max(0, len(token_ids) - most) :]

    def _check(self, token_ids: tuple[int, ...], where: str) -> None:
        param, model = where.split()[0], self._model
        if not token_ids:
            raise InvalidRequestError(f"{where} has no token in it", param=param)
        if len(token_ids) >= model.max_model_len:
            raise InvalidRequestError(
                f"{where} has {len(token_ids)} tokens, which is longer than the model's context length allows: "
                f"prompt and completion together must have <= {model.max_model_len} tokens",
                param=param,
            )
        check_vocabulary(token_ids, model, param, where)

    async def _with_text(self, token_ids: tuple[int, ...], body: GenerationRequest, i: int) -> Prompt:
        """Return a prompt that is to be echoed."""
        given = body.prompt[i] if isinstance(body, CompletionRequest) else ""
        if self._tokenizer is None:
            text = ""
        elif isinstance(given, str) and body.truncate_prompt_tokens is None:
            text = given
        else:
            text = await self._tokenizer.decode(token_ids, skip_special_tokens=body.skip_special_tokens)
        offsets: tuple[int, ...] = ()
        if body.num_top_logprobs is not None:
            detokenizer = self.detokenizer(body)
            num_before = 0
            if self._tokenizer is not None and text is given:
                # Its own special tokens are part of the text, those that the tokenizer put before it are not.
                detokenizer = self._tokenizer.detokenizer(skip_special_tokens=False)
                num_before = self._tokenizer.num_tokens_before if body.add_special_tokens else 0
            own = await asyncio.to_thread(token_offsets, detokenizer, token_ids[num_before:], len(text))
            offsets = (0,) * num_before + own
        return Prompt(token_ids=token_ids, text=text, offsets=offsets)


def check_vocabulary(token_ids: tuple[int, ...], model: ModelInfo, param: str, where: str) -> None:
    """Raise InvalidRequestError if a token id of field `param` is none of the model's."""
    for token_id in (min(token_ids), max(token_ids)) if token_ids else ():
        if not 0 <= token_id < model.vocab_size:
            raise InvalidRequestError(
                f"{where} holds token id {token_id} at position {token_ids.index(token_id)}, out of vocabulary: "
                f"token ids must be >= 0 and < {model.vocab_size}",
                param=param,
            )
