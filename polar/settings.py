"""All settings, read from the environment once, here and nowhere else.

Every field is an environment variable: prefix of the class + field name in capitals, e.g.
`POLAR_BOOTSTRAP_SERVERS`, `POLAR_GATEWAY_PORT`. Command-line options override them.
"""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from schemas.tasks import Estimator
from schemas.trajectories import HIGHEST_VOCABULARY, CallKind


def _config(prefix: str) -> SettingsConfigDict:
    return SettingsConfigDict(env_prefix=prefix, extra="ignore", frozen=True, use_attribute_docstrings=True)


def engine_urls(text: str) -> dict[str, str]:
    """Engine id → base URL of an `engines` setting, in order; the i-th unnamed one is `engine-i`.

    Raises ValueError when an id occurs twice or an entry is no http URL.
    """
    urls: dict[str, str] = {}
    for index, entry in enumerate(part.strip() for part in text.split(",") if part.strip()):
        name, separator, url = entry.partition("=")
        if not separator or "://" in name:
            name, url = f"engine-{index}", entry
        if name in urls or not url.startswith(("http://", "https://")):
            raise ValueError(f"engines: {entry!r} is not id=http://HOST:PORT with an id of its own")
        urls[name] = url.rstrip("/")
    return urls


class LogSettings(BaseSettings):
    """How to reach the log; shared by every service."""

    model_config = _config("POLAR_")

    bootstrap_servers: str = ""
    """host:port list of a Kafka broker; empty outside `polar up` is an error that says so."""
    topic_prefix: str = "polar"
    """First word of every topic name; another one separates runs on one broker."""
    session_partitions: int = 4
    group_partitions: int = 4
    send_timeout_seconds: float = 30.0
    """Every send has this time-out of its own."""
    fetch_max_wait_ms: int = 500
    """Long poll near the end of a topic. The embedded broker does not wake it: `polar up` sets 200."""
    member_id: str = ""
    """Names this replica among those of a stage, the same at each start. With it a replica that was
    killed takes its partitions back as soon as it is started again, not after the session time-out.
    Two running replicas of a stage must not share one."""
    data_dir: Path = Path("polar-data")
    """Spools, checkpoints, secrets, runtimes of this machine."""
    secret_file: Path | None = None
    """Secret shared by nodes and gateways; default DATA_DIR/secret, made when missing."""


class ProcessSettings(BaseSettings):
    """What every process of this machine obeys, with or without a log."""

    model_config = _config("POLAR_")

    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    cache_dir: Path | None = None
    """Prepared models; default: `polar` in the user's cache directory."""
    metrics_host: str = "127.0.0.1"
    metrics_port: int = 0
    """GET /metrics for Prometheus; 0: none. `polar up` counts up from it, one port a service."""


BrokerKind = Literal["embedded", "kafka-home", "external"]


class BrokerSettings(BaseSettings):
    """The broker that `polar up` or `polar broker` runs."""

    model_config = _config("POLAR_BROKER_")

    kind: BrokerKind = "embedded"
    port: int = 9092
    """On 127.0.0.1; an Apache Kafka node takes the port after it too."""
    kafka_home: Path | None = None
    """Folder of an unpacked Apache Kafka, for kind `kafka-home`; needs Java 17."""


class GatewaySettings(BaseSettings):
    """The proxy between harnesses and engines."""

    model_config = _config("POLAR_GATEWAY_")

    id: str = "gateway-0"
    host: str = "127.0.0.1"
    port: int = 8700
    public_url: str = ""
    """URL that nodes and harnesses use; default http://HOST:PORT."""
    engines: str = "http://127.0.0.1:8600"
    """Comma-separated base URLs of vLLM engines (without /v1); `id=url` names one."""
    engine_kind: Literal["vllm", "openai"] = "vllm"
    """`openai`: servers that prove no token ids; their calls are recorded and never trained."""
    engine_key_file: Path | None = None
    """File with the Bearer token that the engines want; none sends none. A file, because the
    environment of a deployment is kept in its data directory and in archives."""
    engine_wait_seconds: Annotated[float, Field(ge=0)] = 30.0
    """A call waits so long for an engine with the current weights; then it takes one that is behind."""
    model: str = "policy"
    """Served model name that the engines must offer."""
    model_path: Path | None = None
    """Folder with the tokenizer and chat template that the engines use. With it a prompt that
    continues an earlier call is made of that call's own ids; without it engines render every prompt."""
    chat_template: Path | None = None
    """A template in place of the folder's; must be what the engines were given."""
    reasoning_field: Literal["reasoning", "reasoning_content"] = "reasoning"
    """What the engines call the reasoning of earlier answers: older ones read only the second. Their own
    answers may have it under either name."""
    system_anywhere: bool = True
    """The template takes system messages at any place. False: those in front become one, later ones
    a user's, in their place."""
    thinking: Literal["template", "preserve"] = "template"
    """Reasoning of finished turns that the template would take back: `template` renders anew as it
    says, `preserve` keeps what was sampled."""
    protect_special_tokens: bool = True
    """Text of users and tools never becomes a special token: a tool result that spells the end of
    its turn would else end it, and whatever follows would be an instruction."""
    always_stream: bool = False
    """Engines stream to the gateway even where the harness wants the whole answer at once: engines
    parse tool calls differently in the two ways, and a harness may use both."""
    keep_alive_seconds: Annotated[float, Field(gt=0, le=20)] = 15.0
    """After so long without a byte a stream gets a sign of life: some harnesses give up at 60 s."""
    retry_seconds: Annotated[float, Field(ge=0)] = 120.0
    """A request that comes again so soon after the answer to it was lost gets that answer. 0: every
    request is a call of its own, also beside an equal one that is under way."""
    retry_max_bytes: Annotated[int, Field(ge=0)] = 64 << 20
    """Memory for answers that may be asked for again; the oldest go first."""
    durable_on: Literal["disk_or_log", "log"] = "disk_or_log"
    """An answer ends when its record is fsynced in the spool or on the log, whichever is first.
    `log`: on the log, for spools on disks that do not outlive their machine."""
    broker_grace_ms: int = 100
    """An answer that waits for the log alone waits so long, then for the spool's fsync, too."""
    spool_max_bytes: int = 1 << 30
    """At this size new calls get 503 with Retry-After; nothing is dropped."""
    max_in_flight: int = 256
    """Calls at once; one more gets 429 with Retry-After."""
    max_request_bytes: int = 32 << 20
    history_max_bytes: int = 256 << 20
    """Memory for what records are delta-encoded against; sessions idle longest lose theirs."""
    seal_wait_seconds: float = 5.0
    """Calls in flight at a seal may take so long; then they are cancelled and recorded so."""
    shutdown_wait_seconds: float = 20.0
    """The same at SIGTERM, and again for the spool to reach the broker."""
    probe_seconds: float = 2.0
    """Pause between two looks at an engine."""


class NodeSettings(BaseSettings):
    """A machine that runs harnesses."""

    model_config = _config("POLAR_NODE_")

    id: str = "node-0"
    init_workers: int = 2
    max_running: int = 8
    """Harnesses at once."""
    max_ready: int = 8
    """Warm runtimes held at most."""
    postrun_workers: int = 4
    heartbeat_seconds: float = 1.0
    gateway_wait_seconds: float = 30.0
    """A gateway that does not open a session for so long makes it an infrastructure error."""
    seal_wait_seconds: float = 60.0
    """The same for the seal; then the scheduler abandons the session."""
    keep_runtimes: int = 20
    """Directories of finished sessions that stay for inspection, the newest."""


class SchedulerSettings(BaseSettings):
    """Placement and the READY buffer; also serves the rollout API."""

    model_config = _config("POLAR_SCHEDULER_")

    host: str = "127.0.0.1"
    port: int = 8710
    ready_target: int = 4
    """Warm runtimes to keep over all nodes while tasks of that runtime are in sight."""
    node_timeout_seconds: float = 10.0
    """A node without a heartbeat for so long is lost."""
    gateway_timeout_seconds: float = 60.0
    """A gateway that does not come back for so long has its open sessions abandoned."""
    max_open_tasks: int = 10000


class StreamSettings(BaseSettings):
    """Stitcher, grouper and packer."""

    model_config = _config("POLAR_STREAM_")

    max_open_sessions: int = 20000
    max_open_groups: int = 5000
    session_idle_seconds: float = 3600.0
    """A session without a record for so long is given up."""
    train_kinds: tuple[CallKind, ...] = ("agent", "subagent", "compaction")
    """Kinds of calls that are trained, as a JSON list; `auxiliary` (titles, routing) may be added."""
    vocabulary: Annotated[int, Field(gt=0, le=HIGHEST_VOCABULARY)] = HIGHEST_VOCABULARY
    """Size of the model's vocabulary; a call with an id outside of it is not trained."""
    estimator: Estimator = "group_mean_std"
    """How scores of a group become advantages, where its task does not say (`reward.estimator`)."""


class PackerSettings(BaseSettings):
    """How groups become batches."""

    model_config = _config("POLAR_PACKER_")

    policy: str = "policy"
    groups_per_batch: int = 3
    row_tokens: int = 4096
    builder: Literal["per_request", "prefix_merging", "prefix_tree"] = "prefix_tree"
    """How calls become rows; a trainer without attention to ancestors needs one of the others."""
    max_staleness: int = 8
    """In versions; older groups are excluded with reason `stale`."""


class TrainerSettings(BaseSettings):
    """The Megatron-Core GRPO trainer."""

    model_config = _config("POLAR_TRAINER_")

    policy: str = "policy"
    model_path: Path | None = None
    """Hugging Face folder of the base model."""
    output_dir: Path | None = None
    """Checkpoints and published weights; default DATA_DIR/trainer."""
    learning_rate: float = 1e-5
    warmup_steps: int = 2
    clip_low: float = 0.2
    clip_high: float = 0.28
    is_cap: float = 2.0
    """C of the truncated importance weight min(exp(old - engine), C)."""
    grad_clip: Annotated[float, Field(gt=0)] = 1.0
    """Largest norm of a step's gradient."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    max_steps: int | None = None
    """Steps since the base model after which the trainer ends; none trains for ever."""
    keep_checkpoints: int = 2
    num_threads: int | None = None
    """CPU threads of torch; none uses all processors."""
    pass_tokens: int = 3072
    """Tokens in one pass through the model; bounds memory, changes no result."""


class WeightSyncSettings(BaseSettings):
    """Loads published weights into the engines."""

    model_config = _config("POLAR_WEIGHT_SYNC_")

    policy: str = "policy"
    engines: str = "http://127.0.0.1:8600"
    """Comma-separated base URLs; `id=url` names one. Same form as the gateway's."""
    gateways: str = ""
    """Gateways to tell about version changes, besides those that send heartbeats."""
    timeout_seconds: float = 120.0


class EngineSettings(BaseSettings):
    """The vLLM server that `polar up` or `polar engine` starts."""

    model_config = _config("POLAR_ENGINE_")

    id: str = "engine-0"
    host: str = "127.0.0.1"
    port: int = 8600
    model_path: Path | None = None
    served_model: str = "policy"
    dtype: Literal["float32", "bfloat16", "auto"] = "float32"
    max_model_len: int = 4096
    cpu_kvcache_gib: int = 1
    chat_template: Path | None = None
    tool_parser: str = "hermes"
    extra_args: str = ""
