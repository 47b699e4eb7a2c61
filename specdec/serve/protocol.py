"""Request bodies: OpenAI's fields, LMDeploy's, and ours. An unknown field, or one of another type, is an error.

Only types are checked here. What a field does, and at which values it is refused, stands in fields.py.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

MAX_STOPS = 32
MAX_PROMPTS = 256

Number = Annotated[float, Field(allow_inf_nan=False)]
Stop = Annotated[str, StringConstraints(max_length=256)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
TokenIds = list[TokenId]
Count = Annotated[int, Field(ge=0, lt=2**31)]
Whole = Annotated[int, Field(ge=-(2**31), lt=2**31)]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**64)]
Dictionary = dict[str, Any]


class Body(BaseModel):
    """Every field may be null, which means that it is left out."""

    model_config = ConfigDict(extra='forbid', strict=True)


class StreamOptions(Body):
    include_usage: bool | None = Field(None, description='One more chunk before [DONE], with the usage.')
    include_obfuscation: bool | None = Field(None, description='Accepted; chunks are not padded.')


class Sampling(Body):
    """What says how tokens are drawn and where the text ends; of every generating endpoint."""

    temperature: Number | None = Field(None, description='0 is greedy; at most 2.')
    top_p: Number | None = Field(None, description='In (0, 1].')
    top_k: Whole | None = Field(None, description='0: no limit.')
    min_p: Number | None = Field(None, description='In [0, 1].')
    n: Whole | None = Field(None, description='Number of choices; choice i has seed + i.')
    seed: Seed | None = Field(None, description='Makes the answer repeatable.')
    stop: Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS)] | None = Field(
        None, description='Text that ends the answer and is not part of it.'
    )
    stop_token_ids: TokenIds | None = None
    ignore_eos: bool | None = Field(None, description='Never emit the end-of-text tokens.')
    min_new_tokens: Count | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    repetition_penalty: Number | None = None
    repetition_ngram_size: Whole | None = None
    repetition_ngram_threshold: Whole | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    logit_bias: dict[str, Number] | None = None
    bad_words: list[str] | None = Field(None, description='Texts whose tokens are never emitted.')
    bad_token_ids: TokenIds | None = None
    allowed_token_ids: TokenIds | None = Field(None, description='The only tokens that may be emitted.')
    response_format: Dictionary | None = None
    thinking_budget: Count | None = None
    speculative: bool | None = Field(None, description='False: decode this request without drafts.')
    num_speculative_tokens: Count | None = Field(None, description='At most so many drafted tokens per step.')
    draft_sampling: str | None = None
    return_speculation: bool | None = Field(None, description='Say in each chunk what was drafted and accepted.')
    session_id: Annotated[int, Field(ge=-1, lt=2**63)] | None = Field(
        None, description='A number of your own, for /abort_request.'
    )


class OpenAISampling(Sampling):
    """What both OpenAI endpoints have beside the sampling itself."""

    model: str = Field(description='The served name; see /v1/models.')
    max_tokens: Whole | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    user: str | None = None
    metadata: Dictionary | None = None
    store: bool | None = None
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: Dictionary | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None
    return_logprob: bool | None = None
    return_routed_experts: bool | None = None
    image_data: Any = None
    media_io_kwargs: Dictionary | None = None
    mm_processor_kwargs: Dictionary | None = None


class Message(BaseModel):
    """One turn. Other fields go to the chat template if it reads them (routes.py), and are unknown if it does not."""

    model_config = ConfigDict(extra='allow', strict=True)

    role: Literal['system', 'developer', 'user', 'assistant', 'tool', 'function']
    content: str | list[Dictionary] | None = None
    name: str | None = None
    tool_calls: list[Dictionary] | None = None
    tool_call_id: str | None = None
    refusal: str | None = Field(None, description='As client libraries echo it from an earlier answer; no effect.')
    annotations: list[Dictionary] | None = Field(None, description='Echoed from an earlier answer; no effect.')
    reasoning_content: str | None = Field(None, description='Echoed from an earlier answer; for the chat template.')
    reasoning: str | None = Field(None, description='The same under another name.')


class ChatRequest(OpenAISampling):
    messages: list[Message] | str | None = Field(None, description='The conversation; text alone is one user turn.')
    input_ids: TokenIds | None = Field(None, description='A prompt as token ids, instead of messages.')
    max_completion_tokens: Whole | None = None
    logprobs: bool | None = None
    top_logprobs: Whole | None = Field(None, description='0 to 20.')
    tools: list[Dictionary] | None = None
    tool_choice: str | Dictionary | None = None
    parallel_tool_calls: bool | None = None
    functions: list[Dictionary] | None = None
    function_call: str | Dictionary | None = None
    modalities: list[str] | None = None
    audio: Dictionary | None = None
    prediction: Dictionary | None = None
    moderation: Dictionary | None = None
    verbosity: str | None = None
    web_search_options: Dictionary | None = None
    reasoning_effort: str | None = None
    enable_thinking: bool | None = None
    chat_template_kwargs: Dictionary | None = None


class CompletionRequest(OpenAISampling):
    prompt: (
        str
        | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS)]
        | Annotated[TokenIds, Field(min_length=1)]
        | Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_PROMPTS)]
    ) = Field(description='Text or token ids, or several of either: each gets a choice.')
    logprobs: Whole | None = Field(None, description='0 to 20 alternatives for every token.')
    suffix: str | None = None
    echo: bool | None = None
    best_of: Whole | None = None


class GenerateRequest(Sampling):
    prompt: str | None = None
    input_ids: TokenIds | None = None
    max_tokens: Whole | None = Field(128)
    stream: bool | None = None
    return_logprob: bool | None = None
    top_logprobs_num: Whole | None = None
    logprob_start_len: Whole | None = None
    return_routed_experts: bool | None = None
    image_data: Any = None
    media_io_kwargs: Dictionary | None = None
    mm_processor_kwargs: Dictionary | None = None


class EncodeRequest(Body):
    input: str | Annotated[list[str], Field(max_length=MAX_PROMPTS)]
    do_preprocess: bool | None = Field(None, description='Render the chat template around the text.')
    add_bos: bool | None = Field(None, description='Add what the tokenizer puts around a text; default true.')


class AbortRequest(Body):
    abort_all: bool | None = None
    session_id: int | None = Field(None, description='The session_id that a request was sent with.')
    request_id: str | None = Field(None, description="The 'id' of a streamed answer.")
