"""Tiny models of transformers with random weights, saved as their directories are. Nothing is fetched."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

import torch

WORDS = ("good", "fine", "bad", "poor", "film", "##s", "the")


def save_tiny_text_model(
    folder: Path,
    words: tuple[str, ...] = WORDS,
    width: int = 16,
    kind: Literal["bert", "gpt2"] = "bert",
    ends: bool = True,
) -> Path:
    """Saves a small BERT or GPT-2 and its tokenizer for these words. `ends` puts tokens around each text."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import BertConfig, BertModel, GPT2Config, GPT2Model, PreTrainedTokenizerFast

    special = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")
    vocabulary = {word: index for index, word in enumerate((*special, *words))}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[(name, vocabulary[name]) for name in ("[CLS]", "[SEP]")]
    )
    names = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token")[: 4 if ends else 2], special, strict=False))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(folder)
    torch.manual_seed(0)
    if kind == "gpt2":
        config = GPT2Config(vocab_size=len(vocabulary), n_positions=40, n_embd=width, n_layer=1, n_head=2)
        GPT2Model(config).save_pretrained(folder)
        return folder
    sizes = {"hidden_size": width, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 2 * width}
    BertModel(BertConfig(vocab_size=len(vocabulary), max_position_embeddings=40, **sizes)).save_pretrained(folder)
    return folder


def save_tiny_vision_model(folder: Path) -> Path:
    """Saves a small vision transformer for images of 8 × 8 pixels."""
    from transformers import ViTConfig, ViTModel

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    ViTModel(ViTConfig(image_size=8, patch_size=4, **sizes)).save_pretrained(folder)
    declared = {
        "image_mean": [0.25, 0.5, 0.75],
        "image_std": [0.5] * 3,
        "size": {"height": 8, "width": 8},
        "resample": 3,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(declared))
    return folder
