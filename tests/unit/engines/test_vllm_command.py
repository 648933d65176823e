"""The server is started so that what the records claim is true."""

import json
from pathlib import Path

import pytest

from polar.engines.vllm_command import launch_command, launch_environment
from polar.errors import SettingsError
from polar.settings import EngineSettings


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def options(command: list[str]) -> dict[str, str]:
    return {
        name: value for name, value in zip(command, [*command[1:], ""], strict=True) if name.startswith("--")
    }


def test_flags_that_the_records_rely_on(model: Path) -> None:
    given = options(launch_command(EngineSettings(model_path=model, port=8600), seed=5))
    assert given["--generation-config"] == "vllm"
    assert given["--logprobs-mode"] == "processed_logprobs"
    assert given["--dtype"] == "float32"
    assert given["--model"] == str(model)
    assert given["--served-model-name"] == "policy"
    assert given["--host"] == "127.0.0.1"
    assert given["--seed"] == "5"
    assert {"--enforce-eager", "--enable-scale-out", "--enable-prompt-tokens-details"} <= given.keys()
    assert given["--worker-extension-cls"] == "polar.engines.vllm_extension.PolarWorkerExtension"
    assert json.loads(given["--weight-transfer-config"]) == {"backend": "file"}


def test_every_setting_reaches_the_command(model: Path) -> None:
    settings = EngineSettings(
        model_path=model, host="0.0.0.0", port=9, served_model="other", dtype="bfloat16", max_model_len=77,
        chat_template=Path("t.jinja"), tool_parser="qwen", extra_args="--seed 7 --swap 'a b'",
    )  # fmt: skip
    command = launch_command(settings, seed=5)
    given = options(command)
    assert (given["--host"], given["--port"], given["--served-model-name"]) == ("0.0.0.0", "9", "other")
    assert (given["--dtype"], given["--max-model-len"]) == ("bfloat16", "77")
    assert (given["--chat-template"], given["--tool-call-parser"]) == ("t.jinja", "qwen")
    assert command[-4:] == ["--seed", "7", "--swap", "a b"]


def test_a_missing_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="POLAR_ENGINE_MODEL_PATH is not set"):
        launch_command(EngineSettings(model_path=None), seed=5)
    with pytest.raises(SettingsError, match=r"holds no config\.json"):
        launch_command(EngineSettings(model_path=tmp_path), seed=5)


def test_environment_on_a_cpu(model: Path) -> None:
    settings = EngineSettings(model_path=model, cpu_kvcache_gib=3)
    made = launch_environment(settings, {"PATH": "/bin"}, has_gpu=False, num_cpus=2)
    assert made["VLLM_SERVER_DEV_MODE"] == "1"
    assert made["VLLM_NO_USAGE_STATS"] == "1"
    assert made["HF_HUB_OFFLINE"] == "1"
    assert made["VLLM_CPU_KVCACHE_SPACE"] == "3"
    assert made["OMP_NUM_THREADS"] == "2"
    assert made["PATH"] == "/bin"


def test_environment_on_a_gpu_has_nothing_of_the_cpu_backend(model: Path) -> None:
    made = launch_environment(EngineSettings(model_path=model), {}, has_gpu=True, num_cpus=64)
    assert made["VLLM_SERVER_DEV_MODE"] == "1"
    assert not [name for name in made if "CPU" in name or "OMP" in name or "MULTIPROCESSING" in name]


def test_what_the_user_set_stays(model: Path) -> None:
    made = launch_environment(
        EngineSettings(model_path=model), {"OMP_NUM_THREADS": "9"}, has_gpu=False, num_cpus=2
    )
    assert made["OMP_NUM_THREADS"] == "9"
