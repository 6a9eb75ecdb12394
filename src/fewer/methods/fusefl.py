"""FuseFL: clients train a net block by block, each on the fused features of all clients' earlier blocks.

Tang, Zhang, Dong, Cheung, Zhou, Han, Chu: FuseFL: One-Shot Federated Learning through the Lens of Causality with
Progressive Model Fusion, NeurIPS 2024. The net is cut into K blocks. Round k = 1 … K:

- Clients receive the blocks 1 … k − 1 of all clients. These are fused and frozen: block j of client m takes
  A_m(h_1, …, h_M), the outputs h of all blocks j − 1 fused by m's adaptor.
- A client trains its adaptor, its block k and its later blocks, and sends the adaptor and block k. It keeps the later
  blocks for the next round. With the last block, it sends the head.

The prediction is the mean of the logits of the last blocks. All rounds together upload one model per client, and the
adaptors. K = 1 is the one-shot ensemble.

Departures:

- The adaptor is one linear map over channels (a 1×1 convolution of concatenated features) that starts as their mean.
  `adaptor = mean` keeps it there. The mean has no parameters, and fits any number of clients.
- All clients start from the same model.
- A fixed number of local steps per round, as in FedAvg.
- Blocks have their full width. The paper makes them narrower, so that the fused net is as large as one original net.
- The net must be an encoder of layers in sequence, and a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from pydantic import PositiveInt
from torch import Tensor, nn

from fewer.data import Data
from fewer.errors import SettingError
from fewer.learning.aggregate import stack_models, unstack_models
from fewer.methods import Client, Context, Group, Scores, State
from fewer.methods.fedavg import LocalTraining, model_schema
from fewer.models import Task, Weights, get_weights, load_weights, split_net
from fewer.registry import METHODS
from fewer.runtime import Clients, on_client

WEIGHTED = (nn.Linear, nn.Conv1d, nn.Conv2d)
"""A block starts with one of these layers."""


@dataclass(frozen=True)
class FuseFLState(State):
    """The fused blocks so far."""

    initial: list[Weights]
    """The form of each block, without its adaptor."""
    channels: list[int]
    """The number of channels that each block takes."""
    cohort: list[int] = field(default_factory=list)
    """The clients that train."""
    blocks: list[Weights] = field(default_factory=list)
    """For each block so far, those of all clients, stacked along a new first dimension."""

    @property
    def shared(self) -> Weights:
        """All blocks, by number and name."""
        return {
            f"{number}.{name}": tensor for number, block in enumerate(self.blocks) for name, tensor in block.items()
        }


class NetBlock(nn.Module):
    """One client's block: an adaptor that fuses the features of all clients, then layers."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)
        self.register_parameter("adaptor", None)

    def forward(self, features: list[Tensor]) -> Tensor:
        """The output for the features of all clients. Without an adaptor, their mean is taken."""
        fused = torch.stack(features).mean(0) if self.adaptor is None else fuse(features, self.adaptor)
        output: Tensor = self.layers(fused)
        return output

    def load(self, weights: Weights) -> NetBlock:
        """Loads weights, and adds an adaptor if they have one."""
        if "adaptor" in weights:
            self.adaptor = nn.Parameter(weights["adaptor"].clone())
        load_weights(self, weights)
        return self


def fuse(features: list[Tensor], adaptor: Tensor) -> Tensor:
    """A linear map of the concatenated channels of all features."""
    return torch.einsum("oc,nc...->no...", adaptor, torch.cat(features, 1))


def mean_adaptor(channels: int, members: int) -> Tensor:
    """The adaptor that takes the mean."""
    return torch.eye(channels).repeat(1, members) / members


class FusedNet(nn.Module):
    """Levels of blocks: each takes the outputs of all blocks of the level below. The last outputs are averaged."""

    def __init__(self, levels: Sequence[Sequence[NetBlock]], frozen: int = 0) -> None:
        super().__init__()
        self.levels = nn.ModuleList(nn.ModuleList(level) for level in levels)
        self.frozen = frozen
        """Levels that do not train, from the first one on."""
        self.levels[:frozen].requires_grad_(False)

    def train(self, mode: bool = True) -> FusedNet:
        """Sets the mode of all levels that train."""
        super().train(mode)
        self.levels[: self.frozen].eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        """Class scores of a batch."""
        features = [x]
        for level in self.levels:
            assert isinstance(level, nn.ModuleList)
            features = [block(features) for block in level]
        return torch.stack(features).mean(0)


@METHODS.register("fusefl")
class FuseFL(LocalTraining[FuseFLState]):
    """Clients train block by block on fused features of all clients; their last blocks predict together."""

    group: ClassVar[Group] = "one-shot"

    rounds: PositiveInt = 2
    """Number of rounds. Those after the last block change nothing."""
    local_steps: PositiveInt = 400
    """Local steps per round."""
    blocks: PositiveInt = 2
    """Blocks of the net, each trained in one round (K)."""
    adaptor: Literal["linear", "mean"] = "linear"
    """How features of clients are fused: by a linear map that each client learns, or by their mean."""

    def init(self, task: Task, seed: int) -> FuseFLState:
        """Cuts the net into K blocks."""
        if self.rounds < self.blocks:
            raise SettingError(f"fusefl trains one block per round: rounds must be >= blocks = {self.blocks}")
        net = task.net()
        load_weights(net, task.initial_weights(seed))
        return FuseFLState([get_weights(block) for block in self.cut_net(net)], self.count_channels(task))

    def why_not_extend(self, done: int, planned: int, unscheduled: bool) -> str:
        """The rounds so far do not depend on their number."""
        return ""

    def round(self, state: FuseFLState, clients: Clients) -> FuseFLState:
        """Trains block k on the fused blocks before it."""
        level = len(state.blocks)
        if level == self.blocks:
            return state
        form = state.initial[level]
        if level and self.adaptor == "linear":
            form = {"adaptor": mean_adaptor(state.channels[level], len(state.cohort)), **form}
        cohort = state.cohort or self.sample_cohort(clients)
        answers = clients.ask(cohort, self.train_block, fused=state.shared, returns=model_schema(form))
        blocks = [*state.blocks, stack_models([answer["model"] for answer in answers])]
        return FuseFLState(state.initial, state.channels, [answer.client for answer in answers], blocks)

    @on_client(stream="train")
    def train_block(self, client: Client, fused: Weights) -> dict[str, Any]:
        """Trains adaptor, block k and later blocks, with all earlier blocks frozen; returns adaptor and block k."""
        levels = self.build_levels(client, fused)
        level = len(levels)
        own = self.cut_net(client.net(client.initial_weights()))[level:]
        for block, weights in zip(own, client.store.get("blocks") or [], strict=False):
            load_weights(block, weights)
        if level and self.adaptor == "linear":
            own[0].adaptor = nn.Parameter(mean_adaptor(self.count_channels(client.task)[level], len(levels[-1])))
        self.fit(FusedNet([*levels, *([block] for block in own)], frozen=level), client)
        client.store.put("blocks", [get_weights(block) for block in own[1:]])
        return {"model": get_weights(own[0]), "size": len(client.train)}

    def evaluate(self, state: FuseFLState, clients: Clients, data: Data) -> Scores:
        """The scores of the fused net. There are none before the last block."""
        return Scores({}) if len(state.blocks) < self.blocks else super().evaluate(state, clients, data)

    def build_predictor(self, shared: Weights, context: Context) -> nn.Module:
        """The fused net."""
        levels = self.build_levels(context, shared)
        if len(levels) < self.blocks:
            raise SettingError(f"fusefl has no model before round {self.blocks}, when it trains the last block")
        return FusedNet(levels)

    # --- blocks ---

    def build_levels(self, context: Context, shared: Weights) -> list[list[NetBlock]]:
        """The blocks of all clients, by number."""
        levels: dict[int, Weights] = {}
        for name, tensor in shared.items():
            number, _, rest = name.partition(".")
            levels.setdefault(int(number), {})[rest] = tensor
        members = [unstack_models(stacked) for stacked in levels.values()]
        initial = context.task.initial_weights(context.seed)
        nets = [self.cut_net(context.net(initial)) for _ in range(max(map(len, members), default=0))]
        return [
            [nets[client][level].load(weights) for client, weights in enumerate(blocks)]
            for level, blocks in enumerate(members)
        ]

    @torch.no_grad()
    def count_channels(self, task: Task) -> list[int]:
        """The number of channels that each block takes."""
        features, channels = torch.zeros(1, *task.shape, device=task.device), []
        for block in self.cut_net(task.net().eval()):
            channels.append(features.shape[1])
            features = block([features])
        return channels

    def cut_net(self, net: nn.Module) -> list[NetBlock]:
        """Cuts a net into K blocks with about the same number of linear and convolutional layers."""
        encoder, head = split_net(net)
        if not isinstance(encoder, nn.Sequential):
            raise SettingError(f"fusefl needs an encoder of layers in sequence, got {type(encoder).__name__}")
        layers = [*encoder.children(), head]
        starts = [number for number, layer in enumerate(layers) if isinstance(layer, WEIGHTED)]
        if self.blocks > len(starts):
            raise SettingError(f"blocks = {self.blocks}, but the net has {len(starts)} linear and convolutional layers")
        cuts = [starts[len(starts) * k // self.blocks] for k in range(1, self.blocks)]
        cuts = [cut - isinstance(layers[cut - 1], nn.Flatten) for cut in cuts]  # features keep their channels
        return [NetBlock(layers[a:b]) for a, b in zip([0, *cuts], [*cuts, len(layers)], strict=True)]
