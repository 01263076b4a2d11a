"""The embedded model and its draft: the shape of K3, the released layout, whole and small."""

import base64
import json
from pathlib import Path

import jax
import numpy as np
import pytest

from k3jax.params import a_log_stored
from k3jax.weights import (
    EMBEDDED_DRAFT,
    EMBEDDED_MODEL,
    load_params,
    read_draft_config,
    read_model_config,
)
from k3jax.weights.folder import open_checkpoint
from sharding.axes import ParallelConfig
from sharding.mesh import make_mesh

CFG = read_model_config(EMBEDDED_MODEL)


def test_both_are_small():
    def size(folder: Path) -> int:
        return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())

    assert size(EMBEDDED_MODEL) < 12e6
    assert size(EMBEDDED_DRAFT) < 4e6
    assert size(EMBEDDED_MODEL.parent) < 16e6


def test_it_says_what_it_was_trained_on_and_how_good_it_is():
    record = json.loads((EMBEDDED_MODEL.parent / "training.json").read_bytes())
    assert (EMBEDDED_MODEL.parent / "PSF-LICENSE.txt").is_file()
    assert record["data"]["licence"].startswith("PSF License Agreement")
    assert {file["held_out"] for file in record["data"]["files"]} == {True, False}
    assert record["held_out_nats"] < 1.5
    taken = record["draft_taken_by_place"]
    assert len(taken) == read_draft_config(EMBEDDED_DRAFT).num_drafts
    assert taken[0] > 0.5
    for name, schedule in record["schedules"].items():
        assert record["curves"][name][-1]["step"] == schedule["steps"]


def test_it_has_the_shape_of_k3():
    assert CFG.family == "kimi_k3"
    assert CFG.expert_format == "mxfp4"
    assert CFG.mla_layers[-2:] == (CFG.num_layers - 2, CFG.num_layers - 1)
    assert CFG.dense_layers == (0,)
    assert CFG.attn_res_block_layers is not None
    assert -(-CFG.num_layers // CFG.attn_res_block_layers) == 3
    assert a_log_stored(CFG) > CFG.kda_num_heads
    assert len({CFG.kda_head_dim, CFG.qk_head_dim, CFG.kv_lora_rank, CFG.q_lora_rank}) == 4


def test_it_has_the_released_layout():
    entries = open_checkpoint(EMBEDDED_MODEL)
    prefix = "language_model.model.layers."
    found = {
        name.removeprefix(prefix): (entry.dtype, entry.shape) for name, entry in entries.items()
    }
    assert found["language_model.lm_head.weight"] == ("BF16", (512, 192))
    assert found["0.self_attn.A_log"] == ("F32", (32,))
    assert found["0.self_attn.q_conv1d.weight"] == ("F32", (256, 1, 4))
    assert found["1.block_sparse_moe.experts.3.w2.weight_packed"] == ("U8", (96, 64))
    assert found["1.block_sparse_moe.experts.3.w2.weight_scale"] == ("U8", (96, 4))
    assert found["5.self_attention_res_proj.weight"] == ("BF16", (1, 192))


@pytest.mark.multi
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_every_mesh_divides_both(tp: int):
    parallel = ParallelConfig(tp=tp)
    mesh = make_mesh(parallel)
    draft = read_draft_config(EMBEDDED_DRAFT)
    draft.check_target(CFG)
    params = load_params(EMBEDDED_MODEL, CFG, parallel, mesh, "bfloat16")
    own = load_params(EMBEDDED_DRAFT, draft, parallel, mesh, "bfloat16")
    for leaf in jax.tree.leaves((params, own)):
        assert np.isfinite(np.asarray(leaf).astype(np.float32)).all()


def test_its_vocabulary_is_bytes_and_reserved_ids():
    lines = (EMBEDDED_MODEL / "tiktoken.model").read_text().splitlines()
    ranks = {base64.b64decode(line.split()[0]): int(line.split()[1]) for line in lines}
    assert ranks == {bytes([byte]): byte for byte in range(256)}
    assert CFG.vocab_size == 256 + 256
    config = json.loads((EMBEDDED_MODEL / "tokenizer_config.json").read_bytes())
    added = config["added_tokens_decoder"]
    # The same offsets behind the ranks as in K3 (k3-model.md section 8).
    released = {
        163584: "[BOS]",
        163585: "[EOS]",
        163586: "<|end_of_msg|>",
        163587: "<|open|>",
        163588: "<|close|>",
        163589: "<|sep|>",
        163590: "[start_header_id]",
        163591: "[end_header_id]",
        163593: "[EOT]",
        163602: "<|media_begin|>",
        163603: "<|media_content|>",
        163604: "<|media_end|>",
        163605: "<|media_pad|>",
        163838: "[UNK]",
        163839: "[PAD]",
    }
    assert {int(key): value["content"] for key, value in added.items()} == {
        key - 163584 + 256: content for key, content in released.items()
    }


def test_its_token_ids_agree_between_files():
    generation = json.loads((EMBEDDED_MODEL / "generation_config.json").read_bytes())
    assert (CFG.bos_token_id, CFG.eos_token_ids, CFG.pad_token_id) == (256, (258,), 511)
    assert generation["eos_token_id"] == [258, 257]
    assert generation["temperature"] == 1.0
