"""Encoders of other libraries, with a linear head: `timm:NAME` and `hf:NAME_OR_DIR` (transformers).

Weights come from a file, a directory or the library's cache. Nothing is fetched unless the option `download` is set.
Resizing and normalization are those of the model (`Preprocess`). A text model gets the words of the data's vocabulary,
split into its own tokens: words outside the vocabulary become its unknown token, and all words are in lower case.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fewer.errors import SettingError
from fewer.models.preprocess import Preprocess
from fewer.models.split import EncoderHead
from fewer.registry import MODEL_SOURCES

MAX_PARTS = 8
"""Tokens of the model that one word may have; the others are cut off."""
PADDING = "<pad>"
"""The first token of the vocabulary of a text."""
CAUTIONS = {"timm": "; first install the torchvision that fits your torch, or pip replaces torch"}
"""What to know before an extra is installed."""


@MODEL_SOURCES.register("timm")
class TimmNet(EncoderHead):
    """A linear head on an image encoder of timm."""

    def __init__(
        self,
        source: str,
        shape: tuple[int, ...],
        classes: int,
        size: int | None = None,
        weights: str | None = None,
        download: bool = False,
    ) -> None:
        """`size` is the side of resized images, by default the encoder's. `weights` is a file."""
        _check_images(f"timm:{source}", shape)
        encoder, config = _load_timm(source, weights, download)
        mean, std, side = config["mean"], config["std"], size or config["input_size"][-1]
        preprocess = Preprocess(side, mean, std, _mode(config.get("interpolation")))
        super().__init__(nn.Sequential(preprocess, copy.deepcopy(encoder)), encoder.num_features, classes)  # type: ignore[arg-type]


@cache
def _load_timm(source: str, weights: str | None, download: bool) -> tuple[nn.Module, dict[str, Any]]:
    """The encoder without its classifier, and its configuration."""
    timm = import_extra("timm", "timm")
    if not timm.is_model(source.partition(".")[0]):
        raise SettingError(f"timm has no model '{source}'; timm.list_models() lists them")
    if weights is not None and not Path(weights).is_file():
        raise SettingError(f"no file of weights {weights} for model timm:{source}")
    file = weights or (None if download else _cached_timm_weights(timm, source))
    overlay = {"pretrained_cfg_overlay": {"file": str(file)}} if file else {}
    try:
        net = timm.create_model(source, pretrained=True, num_classes=0, **overlay)
    except Exception as error:  # a file of another model, no network, …
        raise SettingError(f"cannot load model timm:{source}: {_first_line(error)}") from error
    return net.eval(), dict(net.pretrained_cfg)


def _cached_timm_weights(timm: Any, source: str) -> str:
    """The file of weights in the cache. SettingError if it is not there."""
    config = timm.get_pretrained_cfg(source)
    repository = config and config.hf_hub_id
    hub = import_extra("huggingface_hub", "timm")
    file = hub.try_to_load_from_cache(repository, "model.safetensors") if repository else None
    if not isinstance(file, str):
        advice = "pass --model-option weights=FILE, or download=true to fetch them"
        raise SettingError(f"the weights of model timm:{source} are not in the cache: {advice}")
    return file


@MODEL_SOURCES.register("hf")
class TransformersNet(EncoderHead):
    """A linear head on an encoder of transformers, for images or texts."""

    def __init__(
        self,
        source: str,
        shape: tuple[int, ...],
        classes: int,
        tokens: Sequence[str] = (),
        size: int | None = None,
        pooling: Literal["mean", "first"] = "mean",
        download: bool = False,
    ) -> None:
        """`pooling` makes one vector of the encoder's outputs: their mean, or the first one (of a class token)."""
        if pooling not in ("mean", "first"):
            raise SettingError(f"pooling must be 'mean' or 'first', got {pooling!r}")
        template = _load_transformer(source, download)
        config, is_text = template.config, hasattr(template.config, "vocab_size")
        prepare: nn.Module
        if is_text:
            _check_text(f"hf:{source}", shape, tokens)
            prepare = SplitWords(*_split_words(source, download, tuple(tokens)))
        else:
            _check_images(f"hf:{source}", shape)
            prepare = _build_preprocess(source, download, config, size)
        encoder = PooledEncoder(prepare, copy.deepcopy(template), pooling)
        super().__init__(encoder, _feature_width(config), classes)


class PooledEncoder(nn.Module):
    """Prepares inputs, encodes them, and pools the outputs to one vector per sample."""

    def __init__(self, prepare: nn.Module, net: nn.Module, pooling: str) -> None:
        super().__init__()
        self.prepare, self.net, self.pooling = prepare, net, pooling

    def extra_repr(self) -> str:
        """The pooling, which is part of the key of cached features."""
        return f"pooling={self.pooling}"

    def forward(self, x: Tensor) -> Tensor:
        """One vector per sample."""
        if isinstance(self.prepare, SplitWords):
            ids, mask = self.prepare(x)
            hidden: Tensor = self.net(input_ids=ids, attention_mask=mask).last_hidden_state
        else:
            hidden = self.net(pixel_values=self.prepare(x)).last_hidden_state
            hidden = hidden.flatten(2).transpose(1, 2) if hidden.ndim == 4 else hidden
            mask = torch.ones(hidden.shape[:2], device=hidden.device)
        if self.pooling == "first":
            return hidden[:, 0]
        weights = mask.unsqueeze(2).to(hidden.dtype)
        mean: Tensor = (hidden * weights).sum(1) / weights.sum(1).clamp(min=1)  # a text may have no token
        return mean


class SplitWords(nn.Module):
    """Maps the words of a text to the tokens of a model, and returns them with a mask. Word 0 is padding.

    `table` has the tokens of each word, padded with -1. `start` and `end` are put around each text.
    """

    table: Tensor
    start: Tensor
    end: Tensor

    def __init__(self, table: Tensor, start: Tensor, end: Tensor, max_length: int) -> None:
        super().__init__()
        self.max_length = max_length
        for name, tensor in (("table", table), ("start", start), ("end", end)):
            self.register_buffer(name, tensor, persistent=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Token ids and a mask, as wide as the longest text."""
        tokens = self.table[x].flatten(1)
        is_token = tokens >= 0
        longest = max(1, int(is_token.sum(1).max()))  # models reject texts without tokens
        length = min(longest, self.max_length - len(self.start) - len(self.end))
        order = (~is_token).to(torch.int8).argsort(dim=1, stable=True)[:, :length]  # padding goes to the end
        tokens, is_token = tokens.gather(1, order), is_token.gather(1, order)
        rows = len(x)
        start, end = self.start.expand(rows, -1), self.end.expand(rows, -1)
        ids = torch.cat([start, tokens.clamp(min=0), torch.zeros_like(end)], 1)
        mask = torch.cat(
            [torch.ones_like(start, dtype=torch.bool), is_token, torch.zeros_like(end, dtype=torch.bool)], 1
        )
        position = mask.sum(1, keepdim=True) + torch.arange(len(self.end), device=x.device)
        return ids.scatter(1, position, end), mask.scatter(1, position, True).long()


@cache
def _load_transformer(source: str, download: bool) -> Any:
    """The encoder with its weights. All random weights, of layers that the weights lack, are the same everywhere."""
    transformers = import_extra("transformers", "hf")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    options = {"local_files_only": not download, "attn_implementation": "eager", "use_safetensors": True}
    try:
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(0)
            net, loading = transformers.AutoModel.from_pretrained(
                source, trust_remote_code=False, output_loading_info=True, **options
            )
    except Exception as error:  # no such file, no network, a damaged file, an unknown kind of model …
        raise _missing_model(source, download, error) from error
    missing, tensors = len(loading["missing_keys"]), len(net.state_dict())
    if 2 * missing > tensors:
        raise SettingError(f"cannot load model hf:{source}: its file of weights lacks {missing} of {tensors} tensors")
    if _has_weights(getattr(net, "pooler", None)):
        net.pooler = None  # its outputs are not used
    return net.float().eval()


def _has_weights(module: nn.Module | None) -> bool:
    return module is not None and next(module.parameters(), None) is not None


def _missing_model(source: str, download: bool, error: Exception) -> SettingError:
    """Says why a model cannot be loaded, and what to do."""
    if Path(source).is_dir() or download:
        return SettingError(f"cannot load model hf:{source}: {_first_line(error)}")
    where = "it is neither a directory nor in the cache of transformers"
    return SettingError(f"no model hf:{source}: {where}; --model-option download=true fetches it")


def _build_preprocess(source: str, download: bool, config: Any, size: int | None) -> Preprocess:
    """Resizing and normalization as in preprocessor_config.json; without this file, pixels from -1 to 1."""
    transformers = import_extra("transformers", "hf")
    try:
        file = transformers.utils.cached_file(source, "preprocessor_config.json", local_files_only=not download)
        declared = json.loads(Path(file).read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError):
        declared = {}
    channels = getattr(config, "num_channels", 3)
    sides = declared.get("size", getattr(config, "image_size", 224))
    side = size or (sides if isinstance(sides, int) else sides.get("height") or sides.get("shortest_edge"))
    mean, std = (declared.get(name) or [0.5] * channels for name in ("image_mean", "image_std"))
    return Preprocess(int(side), mean, std, _mode({3: "bicubic"}.get(declared.get("resample"))))


@cache
def _split_words(source: str, download: bool, words: tuple[str, ...]) -> tuple[Tensor, Tensor, Tensor, int]:
    """The tokens of each word, those before and after a text, and the largest number of tokens of a text."""
    transformers, config = import_extra("transformers", "hf"), _load_transformer(source, download).config
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(source, local_files_only=not download)
    except Exception as error:
        raise SettingError(f"cannot load the tokenizer of model hf:{source}: {_first_line(error)}") from error
    spaced = [f" {word}" if word[0].isalnum() else word for word in words[2:]]
    parts = tokenizer(spaced, add_special_tokens=False)["input_ids"] if spaced else []
    unknown = [] if tokenizer.unk_token_id is None else [tokenizer.unk_token_id]
    if parts and all(token in unknown for row in parts for token in row):
        problem = f"the tokenizer of model hf:{source} knows no word of the data"
        raise SettingError(f"{problem}: use one for its language, and check that the tokenizer is saved with the model")
    rows = [[], unknown, *parts]
    width = min(MAX_PARTS, max(1, *map(len, rows)))
    table = torch.tensor([[*row[:width], *[-1] * (width - len(row[:width]))] for row in rows])
    ends = [[] if token is None else [token] for token in (tokenizer.cls_token_id, tokenizer.sep_token_id)]
    if int(table.max()) >= config.vocab_size:
        raise SettingError(f"the tokenizer of model hf:{source} has more tokens than the model ({config.vocab_size})")
    start, end = (torch.tensor(tokens, dtype=torch.int64) for tokens in ends)
    return table, start, end, getattr(config, "max_position_embeddings", 512) - 2


def _feature_width(config: Any) -> int:
    """The number of features: the last of `hidden_sizes`, or the hidden size."""
    sizes = getattr(config, "hidden_sizes", None)
    return int(sizes[-1] if sizes else config.hidden_size)


def _check_images(model: str, shape: tuple[int, ...]) -> None:
    if len(shape) != 3 or shape[0] not in (1, 3):
        raise SettingError(f"model {model} takes images with 1 or 3 channels, but inputs have shape {shape}")


def _check_text(model: str, shape: tuple[int, ...], tokens: Sequence[str]) -> None:
    if not tokens or tokens[0] != PADDING:
        raise SettingError(f"model {model} takes texts of words, but inputs have shape {shape}")


def _mode(name: str | None) -> str:
    return name if name in ("bilinear", "bicubic") else "bilinear"


def import_extra(library: str, extra: str) -> Any:
    """Imports a library of an extra. SettingError if it is not installed, or does not work."""
    try:
        return import_module(library)
    except ImportError as error:
        missing = f"pip install 'fewer[{extra}]'"
        problem = f"models of {extra} need {library}: {missing}"
        reason = "" if (getattr(error, "name", None) or library) == library else f" ({error})"
        raise SettingError(problem + reason + CAUTIONS.get(extra, "")) from error


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
