"""The encoder of sets against torch's attention."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from fewer.models.sets import SetEncoder
from tests.methods.f2l_harness import FEATURES, random_tensor, set_encoder


def test_the_initial_client_model_is_layer_norm() -> None:
    x = random_tensor(7, FEATURES).float()
    assert torch.allclose(SetEncoder(FEATURES, context=5, dropout=0.0)(x), F.layer_norm(x, (FEATURES,)), atol=1e-4)


def test_queries_attend_to_the_support_and_themselves_in_any_order() -> None:
    encoder = set_encoder(6)
    support, queries = random_tensor(6, FEATURES), random_tensor(4, FEATURES, seed=1)
    together = encoder(torch.cat([support, queries]))
    assert torch.allclose(together[:6], encoder(support))  # the support does not see queries
    for number, query in enumerate(queries):
        alone = encoder(torch.cat([support, query[None]]))[6]
        assert torch.allclose(together[6 + number], alone)
    order = torch.randperm(6)
    assert torch.allclose(encoder(torch.cat([support[order], queries]))[6:], together[6:])
    other = encoder(torch.cat([support + 1, queries]))
    assert not torch.allclose(other[6:], together[6:], atol=1e-3)
    transductive = set_encoder(6, transductive=True)
    assert not torch.allclose(transductive(torch.cat([support, queries]))[6:], together[6:], atol=1e-3)


def test_attention_matches_torch() -> None:
    encoder = set_encoder(3, heads=2)
    reference = nn.TransformerEncoderLayer(FEATURES, 2, 2 * FEATURES, 0.0, batch_first=True, dtype=torch.float64)
    weights = encoder.state_dict()
    names = {
        "self_attn.in_proj_weight": "in_proj.weight",
        "self_attn.in_proj_bias": "in_proj.bias",
        "self_attn.out_proj.weight": "out_proj.weight",
        "self_attn.out_proj.bias": "out_proj.bias",
        "linear1.weight": "feed_forward.0.weight",
        "linear1.bias": "feed_forward.0.bias",
        "linear2.weight": "feed_forward.3.weight",
        "linear2.bias": "feed_forward.3.bias",
        "norm1.weight": "norm1.weight",
        "norm1.bias": "norm1.bias",
        "norm2.weight": "norm2.weight",
        "norm2.bias": "norm2.bias",
    }
    reference.load_state_dict({name: weights[source] for name, source in names.items()})
    x = random_tensor(5, FEATURES)
    mask = torch.tensor([[False] * 3 + [row != 3, row != 4] for row in range(5)])
    assert torch.allclose(encoder(x), reference(x[None], src_mask=mask)[0], atol=1e-10)
