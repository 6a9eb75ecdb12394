"""Episodes: splits of classes and clients, supports and queries."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from fewer.data import RawDataset, Samples, federate
from fewer.data.episodes import (
    apply_class_split,
    sample_episode,
    select_classes,
    split_classes,
    split_clients,
    split_support_query,
)
from fewer.errors import DataError, SettingError
from tests.methods.f2l_harness import BASE, NOVEL, VALIDATION, make_clusters, make_data

# --- data -------------------------------------------------------------------------------------------------------


def test_each_client_has_base_validation_and_novel_classes() -> None:
    data = make_data()
    assert data.novel and data.classes == BASE and len(data.test) == NOVEL * 48
    groups = (0, BASE), (BASE, BASE + VALIDATION), (BASE + VALIDATION, BASE + VALIDATION + NOVEL)
    seen: list[float] = []
    for client in range(4):
        for samples, (low, high) in zip(data.client(client), groups, strict=True):
            assert len(samples) and low <= int(samples.labels.min()) and int(samples.labels.max()) < high
            seen += samples.slice(0, len(samples))[0][:, 0].tolist()
    raw = make_clusters()
    assert sorted(seen) == sorted(np.asarray(raw.x)[:, 0].tolist())  # every sample once


def test_a_class_split_by_counts_or_names_pools_and_renumbers() -> None:
    x = np.arange(12, dtype=np.float32)[:, None]
    names = ("b.one", "a.one", "b.two", "c.one")
    raw = RawDataset(x[:8], np.arange(8) % 4, (x[8:], np.arange(4)), class_names=names)
    split = apply_class_split(raw, "b/c/a", "toy")
    assert split.class_names == ("b.one", "b.two", "c.one", "a.one") and split.split == (2, 1, 1) and split.test is None
    assert split.y.tolist() == [0, 3, 1, 2] * 3 and np.asarray(split.x).ravel().tolist() == list(range(12))
    by_counts = apply_class_split(raw, "1/1/1", "toy")  # the last class is dropped
    assert by_counts.y.tolist() == [0, 1, 2] * 3 and by_counts.class_names == names[:3]
    texts = apply_class_split(RawDataset([f"text {n}" for n in range(4)], np.arange(4)), "2/1/1", "toy")
    assert texts.x == ["text 0", "text 1", "text 2", "text 3"]
    for wrong, reason in (
        ("3/1/1", "must sum to at most 4"),
        ("0/2/2", "at least 1 base class"),
        ("2/2", "must be BASE/VALIDATION/NOVEL"),
        ("b/b/a", "two parts share a class"),
        ("b/x/a", "a part matches no class"),
    ):
        with pytest.raises(SettingError, match=reason):
            apply_class_split(raw, wrong, "toy")


def test_the_vocabulary_comes_from_base_classes_only() -> None:
    texts = [f"common base{c}" if c < 2 else f"common secret{c}" for c in range(4) for _ in range(12)]
    raw = RawDataset(texts, np.repeat(np.arange(4), 12), split=(2, 1, 1))
    data = federate(raw, clients=2, partition="iid", max_length=4)
    assert set(data.tokens) == {"<pad>", "<unknown>", "common", "base0", "base1"}


def test_fc100_is_cifar100_by_superclass(tmp_path: Path) -> None:
    import pickle

    order = np.random.default_rng(0).permutation(100)  # fine class f is in coarse class order[f] // 5
    for part in ("train", "test"):
        labels = list(range(100))
        batch = {
            b"data": np.zeros((100, 3072), np.uint8) + np.arange(100, dtype=np.uint8)[:, None],
            b"fine_labels": labels,
            b"coarse_labels": [int(order[f]) // 5 for f in labels],
        }
        (tmp_path / part).write_bytes(pickle.dumps(batch, protocol=2))
    meta = {b"fine_label_names": [f"f{n}".encode() for n in range(100)], b"coarse_label_names": [b"c"] * 20}
    (tmp_path / "meta").write_bytes(pickle.dumps(meta, protocol=2))
    from fewer.data.sources import read

    (tmp_path / "cifar100").mkdir()
    for part in ("train", "test", "meta"):
        (tmp_path / part).rename(tmp_path / "cifar100" / part)
    raw = read("fc100", tmp_path)
    assert raw.split == (60, 20, 20) and raw.test is None and len(raw.y) == 200
    coarse = [int(order[int(name[1:])]) // 5 for name in raw.class_names]
    assert set(coarse[:60]) == {1, 2, 3, 4, 5, 6, 9, 10, 15, 17, 18, 19}
    assert set(coarse[60:80]) == {8, 11, 13, 16} and set(coarse[80:]) == {0, 7, 12, 14}
    assert all(raw.class_names[label] == f"f{int(image[0, 0, 0])}" for image, label in zip(raw.x, raw.y, strict=True))


# --- episodes ---------------------------------------------------------------------------------------------------


def samples(count: int = 200, classes: int = 8) -> Samples:
    return Samples(torch.arange(count).float()[:, None], torch.arange(count) % classes)


def test_clients_and_classes_are_disjoint() -> None:
    groups = split_clients(50, seed=1)
    assert [len(group) for group in groups] == [40, 5, 5]
    assert sorted([*groups[0], *groups[1], *groups[2]]) == list(range(50))
    assert groups != split_clients(50, seed=2)
    with pytest.raises(SettingError, match="a group is empty"):
        split_clients(4)
    base, validation, novel = split_classes(41, 20, 5, 16, seed=0)
    assert len(set(base) | set(validation) | set(novel)) == 41
    assert split_classes(20, 8, 5, 7).test == list(range(13, 20))
    with pytest.raises(SettingError, match="must sum to at most 10"):
        split_classes(10, 8, 2, 1)


@pytest.mark.parametrize("support", [0.05, 0.2, 0.5, 0.9])
def test_support_and_query_are_disjoint(support: float) -> None:
    for by_class in (False, True):
        support_set, query_set = split_support_query(samples(), support, torch.Generator().manual_seed(0), by_class)
        a, b = (set(part.slice(0, 999)[0][:, 0].tolist()) for part in (support_set, query_set))
        assert not a & b and len(a | b) == 200 and abs(len(a) - 200 * support) <= 8
        if by_class:
            assert set(support_set.slice(0, 999)[1].tolist()) == set(range(8))
    first, last = split_support_query(samples(), support)  # in time order
    assert first.slice(0, 999)[0].max() < last.slice(0, 999)[0].min()
    tiny = split_support_query(samples(2), support)
    assert [len(part) for part in tiny] == [1, 1]


def test_an_episode_has_renumbered_labels_and_disjoint_queries() -> None:
    novel = select_classes(samples(), [1, 3, 4, 5, 6])
    episode = sample_episode(novel, 5, 3, 4, torch.Generator().manual_seed(0))
    assert episode.support_x.shape == (15, 1) and episode.query_x.shape == (20, 1)
    assert sorted(episode.classes.tolist()) == [1, 3, 4, 5, 6]
    for x, y in ((episode.support_x, episode.support_y), (episode.query_x, episode.query_y)):
        assert torch.equal(x[:, 0].long() % 8, episode.classes[y])  # labels are those of the samples, renumbered
    assert not set(episode.support_x[:, 0].tolist()) & set(episode.query_x[:, 0].tolist())
    other = sample_episode(novel, 5, 3, 4, torch.Generator().manual_seed(1))
    assert not torch.equal(other.support_x, episode.support_x)
    with pytest.raises(DataError, match="6-way 3-shot needs 6 classes with 3 \\+ 4 samples each, got 5"):
        sample_episode(novel, 6, 3, 4, torch.Generator())
    with pytest.raises(DataError, match="needs 2 classes with 20 \\+ 10 samples each, got 0"):
        sample_episode(novel, 2, 20, 10, torch.Generator())
