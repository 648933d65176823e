"""Policy versions and polar.policies.v1."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from schemas.base import Event, WireModel
from schemas.columns import FloatColumn, TokenColumn


class PolicyVersion(WireModel):
    """One set of weights: (lineage, step). Each trainer start claims a new lineage."""

    lineage: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]+$")]
    """Names one run of the trainer process; never used twice."""
    step: Annotated[int, Field(ge=0)]
    """Optimizer steps since the base model (no-op steps count)."""

    def __str__(self) -> str:
        return f"{self.lineage}:{self.step}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Inverse of str(). Raises ValueError on any other text."""
        lineage, separator, step = text.rpartition(":")
        if not separator or not step.isdigit():
            raise ValueError(f"policy version {text!r} is not lineage:step")
        return cls(lineage=lineage, step=int(step))


BASE_VERSION = PolicyVersion(lineage="base", step=0)
"""The weights that an engine was started with; vLLM calls them `default`. Trainers never claim `base`."""


class PolicyInterval(WireModel):
    """The versions that a call may have been sampled under; never too narrow."""

    first: PolicyVersion
    """Version in use when the call was dispatched."""
    last: PolicyVersion
    """Newest version that may have been in use at the last token."""


class Canary(WireModel):
    """A fixed prompt and completion with the trainer's log-probs, to check a weight load."""

    prompt_ids: TokenColumn
    """[p] token ids."""
    completion_ids: TokenColumn
    """[c] token ids."""
    logprobs: FloatColumn
    """[c] natural log-probs at temperature 1 under the published weights."""
    tolerance: float
    """Largest allowed absolute difference to the engine's log-probs."""

    @model_validator(mode="after")
    def _equal_lengths(self) -> Self:
        if len(self.completion_ids) != len(self.logprobs):
            raise ValueError("canary: completion_ids and logprobs differ in length")
        return self


class PolicyPublished(Event):
    """New weights lie ready to be loaded by the engines."""

    type: Literal["PolicyPublished"] = "PolicyPublished"
    policy: str
    """Name of the policy (topic key), e.g. `policy`."""
    version: PolicyVersion
    parent: PolicyVersion | None = None
    """Version that this one was trained or restarted from; none for a base model."""
    weights_path: str
    """Folder with Hugging Face config, tokenizer and *.safetensors, readable by the engines."""
    weights_sha256: str
    """Digest over the safetensors files in name order (`schemas.base.digest` of their bytes)."""
    batch_number: int = -1
    """Last batch trained into these weights; -1 before the first."""
    canary: Canary | None = None
    metrics: dict[str, float] = {}
    """Numbers of the step that made it (loss, grad_norm, reward, logprob_gap …)."""
