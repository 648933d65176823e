"""The command line and the environment under which vLLM does what the records claim.

The gateway records log-probs as those of the distribution that was sampled, token ids as
complete, versions as told by weight-sync; each of these needs the flags below.
"""

import json
import os
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path

from polar.engines.weight_files import TRANSFER_BACKEND
from polar.errors import SettingsError
from polar.settings import EngineSettings

EXTENSION = "polar.engines.vllm_extension.PolarWorkerExtension"


def launch_command(settings: EngineSettings, *, seed: int) -> list[str]:
    """The server's command. Raises SettingsError when no usable model is named.

    `seed` must be another one at each start of each engine: vLLM's default is 0, and two engines
    would sample the same answers to the same prompts.
    """
    model = settings.model_path
    if model is None:
        raise SettingsError("POLAR_ENGINE_MODEL_PATH is not set; name a Hugging Face folder")
    if not (model / "config.json").is_file():
        raise SettingsError(
            f"POLAR_ENGINE_MODEL_PATH {model} holds no config.json; it must be a model folder"
        )
    template = [] if settings.chat_template is None else ["--chat-template", str(settings.chat_template)]
    return [
        sys.executable, "-m", "polar.engines.vllm_main",
        "--model", str(model),
        "--host", settings.host,
        "--port", str(settings.port),
        "--served-model-name", settings.served_model,
        "--dtype", settings.dtype,
        "--max-model-len", str(settings.max_model_len),
        "--seed", str(seed),
        # Sampling defaults come from the gateway alone, never from the model's folder.
        "--generation-config", "vllm",
        # Log-probs of the sampled distribution, temperature included.
        "--logprobs-mode", "processed_logprobs",
        # Compiling takes minutes on a CPU, and its cache does not survive a restart.
        "--enforce-eager",
        # /inference/v1/generate and the render routes answer 403 without it.
        "--enable-scale-out",
        # usage.prompt_tokens_details.cached_tokens
        "--enable-prompt-tokens-details",
        "--enable-auto-tool-choice", "--tool-call-parser", settings.tool_parser,
        "--worker-extension-cls", EXTENSION,
        "--weight-transfer-config", json.dumps({"backend": TRANSFER_BACKEND}),
        "--disable-uvicorn-access-log",
        *template,
        *shlex.split(settings.extra_args),
    ]  # fmt: skip


def launch_environment(
    settings: EngineSettings, base: Mapping[str, str], *, has_gpu: bool, num_cpus: int
) -> dict[str, str]:
    """`base` and what vLLM reads from its environment; a variable already set in `base` stays."""
    wanted = {
        # Pause, weight-update and cache routes exist only in this mode.
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_LOGGING_COLOR": "0",
        "VLLM_DISABLE_LOG_LOGO": "1",
    }
    if not has_gpu:
        wanted |= {
            "VLLM_CPU_KVCACHE_SPACE": str(settings.cpu_kvcache_gib),
            # The worker runs inside the engine core: one process fewer to start.
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            # Trainer and engine share the processors. Threads are not bound to any, and one that
            # waits sleeps: spinning would take the time slice of the thread it waits for.
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": str(num_cpus),
            "OMP_WAIT_POLICY": "PASSIVE",
        }
    return {**wanted, **base}


def has_gpu() -> bool:
    """Whether an NVIDIA device is here and not hidden by CUDA_VISIBLE_DEVICES."""
    return Path("/dev/nvidiactl").exists() and os.environ.get("CUDA_VISIBLE_DEVICES") not in {"", "-1"}
