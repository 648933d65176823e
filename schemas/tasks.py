"""polar.tasks.v1: what the rollout API accepts. Requests are validated with extra="forbid"."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from schemas.base import Event, WireModel
from schemas.ids import TASK_ID_PATTERN

Estimator = Literal["group_mean_std", "group_mean", "leave_one_out", "leave_one_out_std", "max_rl"]
"""How the scores of a group become advantages; polar.core.advantages has the formulas."""


class SamplingSpec(WireModel):
    """The sampling distribution of a trainable session; the gateway forces it."""

    temperature: Annotated[float, Field(gt=0, le=10)] = 1.0
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    """Upper limit of tokens a call; none leaves the harness's own limit."""


class RuntimeSpec(WireModel):
    """The box in which a harness runs."""

    kind: Literal["local"] = "local"
    """`local`: own process group and own directory on the node."""
    prepare: tuple[str, ...] = ()
    """Shell commands run once in the fresh runtime, before it counts as READY."""
    env: dict[str, str] = {}
    files: dict[str, str] = {}
    """Relative path → text, written into the runtime's directory first."""

    @model_validator(mode="after")
    def _files_stay_inside(self) -> Self:
        for path in self.files:
            if not path or path.startswith("/") or "\0" in path or ".." in path.split("/"):
                raise ValueError(f"files: {path!r} must be a relative path inside the runtime's directory")
        return self


class HarnessSpec(WireModel):
    """The agent program."""

    kind: Literal["shell"] = "shell"
    command: Annotated[str, Field(min_length=1)]
    """Run by `sh -c`; OPENAI_BASE_URL, OPENAI_API_KEY, POLAR_PROMPT and others are set."""
    env: dict[str, str] = {}


class EvaluatorSpec(WireModel):
    """What scores a finished session on its node."""

    kind: Literal["command", "none"] = "none"
    """`none`: rewards come from outside programs only."""
    command: str = ""
    """Run by `sh -c` in the runtime. Last stdout line as JSON gives the scores, else the exit status."""
    reward: str = "outcome"
    """Reward name of a bare score or exit status (0 → 1.0, else 0.0)."""
    timeout_seconds: Annotated[float, Field(gt=0)] = 60.0

    @model_validator(mode="after")
    def _command_given(self) -> Self:
        if self.kind == "command" and not self.command:
            raise ValueError("evaluator.command is empty: give the command to run, or kind 'none'")
        return self


class RewardSpec(WireModel):
    """How the rewards of a session become its score: sum of weight × value."""

    required: tuple[str, ...] = ("outcome",)
    """Reward names without which a completed session has no score."""
    optional: tuple[str, ...] = ()
    """Names that count when they arrive before `timeout_seconds`."""
    per_call: tuple[str, ...] = ()
    """Names of rewards for single calls. They are no part of the score: each adds to the advantage
    of its own calls, against the mean of its name in the group."""
    weights: dict[str, Annotated[float, Field(allow_inf_nan=False)]] = {}
    """Weight of a name; 1.0 where none is given."""
    estimator: Estimator | None = None
    """How scores become advantages; none: as the grouper is set (POLAR_STREAM_ESTIMATOR)."""
    timeout_seconds: Annotated[float, Field(gt=0)] = 300.0
    """Wait for rewards from the moment the group's members are fixed."""
    timed_out_score: Annotated[float, Field(allow_inf_nan=False)] | None = None
    """Score of a member that ran out of time; none excludes it from the group."""

    @model_validator(mode="after")
    def _one_meaning_a_name(self) -> Self:
        names = (*self.required, *self.optional, *self.per_call)
        twice = {name for name in names if names.count(name) > 1}
        if twice:
            raise ValueError(
                f"reward: {', '.join(sorted(twice))} stands twice: a name is required, optional or per_call"
            )
        unknown = set(self.weights) - set(names)
        if unknown:
            raise ValueError(
                f"reward.weights: {', '.join(sorted(unknown))} is neither required, optional nor per_call"
            )
        return self


class TimeoutSpec(WireModel):
    """Budgets in seconds; waiting in a queue is free."""

    init_seconds: Annotated[float, Field(gt=0)] = 120.0
    run_seconds: Annotated[float, Field(gt=0)] = 600.0
    group_seconds: Annotated[float, Field(gt=0)] = 3600.0
    """From GroupOpened; then the members are fixed as they are."""


class LimitSpec(WireModel):
    """What a session may use up at its gateway. A call beyond it is refused so that harnesses stop."""

    max_calls: Annotated[int, Field(ge=1)] | None = None
    """Model calls; each of several choices of one request counts."""
    max_sampled_tokens: Annotated[int, Field(ge=1)] | None = None
    """Sampled tokens of all calls; the last call is cut to what is left."""
    max_seconds: Annotated[float, Field(gt=0)] | None = None
    """From the session's opening. Unlike `timeouts.run_seconds` it does not kill the harness."""


class TaskRequest(WireModel):
    """Body of POST /tasks."""

    task_id: Annotated[str, Field(pattern=TASK_ID_PATTERN)] | None = None
    """Given: submitting it twice is one task. None: the API makes one."""
    policy: str = "policy"
    prompt: str = ""
    """Handed to the harness as POLAR_PROMPT."""
    harness: HarnessSpec
    num_samples: Annotated[int, Field(ge=1, le=1024)] = 1
    """Size of the group: sessions of the same task."""
    runtime: RuntimeSpec = RuntimeSpec()
    evaluator: EvaluatorSpec = EvaluatorSpec()
    reward: RewardSpec = RewardSpec()
    sampling: SamplingSpec = SamplingSpec()
    timeouts: TimeoutSpec = TimeoutSpec()
    limits: LimitSpec = LimitSpec()
    max_attempts: Annotated[int, Field(ge=1, le=10)] = 3
    """Sessions a member may use up through infrastructure errors."""
    metadata: dict[str, Any] = {}
    """Copied to the harness as POLAR_METADATA (JSON) and kept with the task."""


class RolloutTask(Event):
    """A task as accepted."""

    type: Literal["RolloutTask"] = "RolloutTask"
    task_id: Annotated[str, Field(pattern=TASK_ID_PATTERN)]
    spec: TaskRequest


class TaskCancelled(Event):
    """Stop the sessions of a task; what was recorded stays."""

    type: Literal["TaskCancelled"] = "TaskCancelled"
    task_id: str
    reason: str
