"""Bodies of requests in JSON. Fields that would change the result and are not supported are errors."""

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, Field, ValidationError
from starlette.requests import Request

from qerl.serve.app import read_body
from qerl.serve.fields import ApiError

Body = TypeVar("Body", bound=BaseModel)
_Count = Annotated[int, Field(ge=0, lt=2**31)]


class _Body(BaseModel, extra="forbid", allow_inf_nan=False):
    type: str | None = None


class CreateSession(BaseModel):
    """Tags, names and versions of the client are not needed."""


class OfSession(_Body):
    session_id: str


class LoraSettings(_Body):
    rank: Annotated[int, Field(gt=0)]
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class CreateModel(_Body):
    session_id: str
    model_seq_id: _Count
    base_model: str
    user_metadata: dict[str, Any] | None = None
    lora_config: LoraSettings
    optimizer_config: dict[str, Any] = Field(default_factory=lambda: {"type": "adamw"})


class OfModel(_Body):
    model_id: str


class OptimStep(OfModel):
    seq_id: _Count | None = None
    adam_params: dict[str, float]


class _Save(OfModel):
    path: str | None = None
    seq_id: _Count | None = None
    ttl_seconds: Annotated[int, Field(gt=0, lt=2**31)] | None = None
    user_metadata: dict[str, str] | None = None


class SaveWeights(_Save):
    overwrite: bool = False


class SaveForSampler(_Save):
    sampling_session_seq_id: _Count | None = None
    kind: Literal["snapshot", "inflight"] = "snapshot"


class SaveExternal(OfModel):
    path: str
    seq_id: _Count | None = None
    ttl_seconds: Annotated[int, Field(gt=0, lt=2**31)] | None = None
    age_encryption_recipients: list[str] | None = None


class Ttl(_Body):
    ttl_seconds: Annotated[int, Field(gt=0, lt=2**31)] | None


class LoadWeights(_Body):
    model_id: str | None = None
    seq_id: _Count | None = None
    session_id: str | None = None
    model_seq_id: _Count | None = None
    base_model: str | None = None
    user_metadata: dict[str, Any] | None = None
    path: str
    optimizer: bool
    optimizer_config: dict[str, Any] | None = None
    weights_access_token: None = None


class CreateSampler(_Body):
    session_id: str
    sampling_session_seq_id: _Count
    base_model: str | None = None
    model_path: str | None = None


class Chunk(BaseModel):
    type: str = "encoded_text"
    tokens: list[_Count] = Field(default_factory=list)


class ModelInput(BaseModel):
    chunks: list[Chunk]


class SamplingSettings(_Body):
    max_tokens: Annotated[int, Field(gt=0)] | None = None
    seed: int | None = None
    stop: str | list[str] | list[int] | None = None
    temperature: Annotated[float, Field(ge=0)] = 1.0
    top_k: Annotated[int, Field(ge=-1)] = -1
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0


class SampleBody(_Body):
    num_samples: Annotated[int, Field(gt=0)] = 1
    prompt: ModelInput
    sampling_params: SamplingSettings
    sampling_session_id: str
    seq_id: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: Annotated[int, Field(ge=0, le=20)] = 0
    topk_sample_logprobs: Annotated[int, Field(ge=0, le=20)] = 0
    target_prompt_logprobs: None = None
    prompt_alt_tokens_k: Literal[0] = 0
    prompt_logprobs_last_n: None = None
    record_stability_info: Literal[False] | None = None
    base_model: None = None
    model_path: None = None


class RetrieveFuture(_Body):
    request_id: str
    allow_metadata_only: bool = False


class OfRequest(_Body):
    request_id: str


class OfPath(_Body):
    tinker_path: str


async def read(request: Request, kind: type[Body], max_bytes: int) -> Body:
    """Return the request's body. Raise ApiError for one that is wrong or too long."""
    try:
        return kind.model_validate_json(await content(request, max_bytes))
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "body"
        raise ApiError(422, f"{place[:200]}: {first['msg'][:200]}") from None


async def content(request: Request, max_bytes: int) -> bytes:
    if (encoding := request.headers.get("content-encoding")) is not None:
        raise ApiError(415, f"the body must not be compressed, got content-encoding {encoding[:50]}")
    return await read_body(request, max_bytes)
