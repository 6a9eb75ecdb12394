"""Adapters: only some parameters of a net are trained. Only these are sent, averaged and stored.

All other parameters and buffers become non-persistent buffers, which a state dict leaves out. So `get_weights` and
`load_weights` see the trained ones alone, and methods need not know. LoRA (Hu et al., ICLR 2022) adds B A to a weight
matrix, with B = 0 at first, and trains A and B. The library peft adds them to models of transformers.
"""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from fewer.errors import SettingError
from fewer.models.frozen import HEAD
from fewer.models.pretrained import import_extra
from fewer.models.task import Task
from fewer.models.weights import Weights, get_weights, load_weights, norm_weight_names

LORA = re.compile(r"lora(?::rank=([1-9]\d*))?")
DEFAULT_RANK = 8
PARTS = {"bias": "bias", "norm": "normalization layer"}
"""What `train` may name besides LoRA and the head."""
OTHER_PARTS = "a regular expression of parameter names"
ALLOWED = f"lora:rank=N with N ≥ 1, bias, norm, head, or {OTHER_PARTS}"
MATRICES: dict[type[nn.Module], str] = {nn.Linear: "weight", nn.MultiheadAttention: "in_proj_weight"}
"""The weight matrix of a layer that LoRA changes. Queries, keys and values share one in torch's attention."""


class LowRank(nn.Module):
    """W + B A: a weight with a trained change of low rank. The paper scales B A by alpha / rank; here alpha = rank."""

    def __init__(self, weight: Tensor, rank: int) -> None:
        super().__init__()
        rows, columns = weight.flatten(1).shape
        self.a = nn.Parameter(torch.randn(rank, columns, dtype=weight.dtype, device=weight.device) / columns**0.5)
        self.b = nn.Parameter(torch.zeros(rows, rank, dtype=weight.dtype, device=weight.device))

    def forward(self, weight: Tensor) -> Tensor:
        """The weight with its change."""
        return weight + (self.b @ self.a).view_as(weight)


def train_only(task: Task, trained: str, seed: int) -> Task:
    """The same task with these parameters trained: lora:rank=N, bias, norm, head, or a regular expression of names.

    All others keep the weights that training would start from with this seed.
    """
    full = task.initial_weights(seed)
    build_net = partial(_build, task.build_net, trained, full)
    net = build_net()
    if not any(parameter.requires_grad for parameter in net.parameters()):
        raise SettingError(f"train = {trained} matches no parameter of the model ({_describe_parameters(task.net())})")
    part = "linear layer" if LORA.fullmatch(trained) else PARTS.get(trained)
    if part and all(name.startswith(HEAD) for name in net.state_dict()):
        advice = "norm, bias" if LORA.fullmatch(trained) else "head"
        raise SettingError(f"train = {trained} finds no {part} before the head: use {advice} or {OTHER_PARTS}")
    initial = None if task.pretrained is None else get_weights(net)
    return replace(task, build_net=build_net, pretrained=initial, partial=True)


def _describe_parameters(net: nn.Module, shown: int = 5) -> str:
    """The first names of a net's parameters, and all values of `train`."""
    names = [name for name, _ in net.named_parameters()]
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return f"it has {', '.join(names[:shown])}{more}; allowed: {ALLOWED}"


def _build(build_net: Callable[[], nn.Module], trained: str, full: Weights) -> nn.Module:
    """A net whose frozen tensors are buffers with the values in `full`."""
    net = build_net()
    fresh = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    names = _trained_names(net, trained)
    load_weights(net, {name: (fresh[name] if name in names else full[name]).cpu() for name in fresh})
    lora = LORA.fullmatch(trained)
    rank = int(lora[1] or DEFAULT_RANK) if lora else 0
    if rank:
        names |= _add_peft_lora(net, rank)
    for prefix, module in list(net.named_modules()):
        tensors = {**module._parameters, **module._buffers}
        frozen = [
            name
            for name, tensor in tensors.items()
            if tensor is not None and (f"{prefix}.{name}" if prefix else name) not in names
        ]
        for name in frozen:
            _to_buffer(module, name)
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and "running_mean" in frozen:
            module.eval().train = lambda mode=True, module=module: module  # type: ignore[method-assign, misc]
        matrix = next((name for kind, name in MATRICES.items() if isinstance(module, kind)), "")
        if rank and matrix in frozen and ".base_layer" not in prefix:
            parametrize.register_parametrization(module, matrix, LowRank(getattr(module, matrix), rank), unsafe=True)
            module.get_submodule(f"parametrizations.{matrix}")._non_persistent_buffers_set.add("original")
    return net


def _add_peft_lora(net: nn.Module, rank: int) -> set[str]:
    """Adds LoRA to all models of transformers in the net, and returns the names of its matrices."""
    transformers = sys.modules.get("transformers")  # without it, the net contains none of its models
    models = [module for module in net.modules() if transformers and isinstance(module, transformers.PreTrainedModel)]
    for model in models:
        peft = import_extra("peft", "hf")
        config = peft.LoraConfig(r=rank, lora_alpha=rank, target_modules="all-linear")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # peft warns about each transposed layer, which it handles
            try:
                peft.inject_adapter_in_model(config, model)
            except ValueError as error:
                problem = f"train = lora finds no linear layer in {type(model).__name__}"
                raise SettingError(f"{problem}: use norm, bias or {OTHER_PARTS}") from error
    return {name for name in net.state_dict() if ".lora_" in name} if models else set()


def _to_buffer(module: nn.Module, name: str) -> None:
    """Makes a parameter or buffer one that a state dict leaves out."""
    tensor = getattr(module, name).detach()
    delattr(module, name)
    module.register_buffer(name, tensor, persistent=False)


def _trained_names(net: nn.Module, trained: str) -> set[str]:
    """The names in the state dict that are trained and sent."""
    names = set(net.state_dict())
    head = {name for name in names if name.startswith(HEAD)}
    if trained == "head" or LORA.fullmatch(trained):
        return head
    if trained == "bias":
        return head | {name for name in names if name.rpartition(".")[2] == "bias"}
    if trained == "norm":
        return head | (names & norm_weight_names(net))
    try:
        return {name for name in names if re.search(trained, name)}
    except re.error as error:
        problem = f"train = {trained} is no regular expression: {error}"
        raise SettingError(f"{problem} (allowed: {ALLOWED})") from error
