"""Random streams depend on their key alone."""

import torch

import fewer
from fewer import FedAvg
from fewer.data import Data
from fewer.runtime import seed_of, stream


def test_the_global_random_state_is_unchanged(digits: Data) -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    threads = torch.get_num_threads()
    fewer.run(FedAvg(rounds=1, cohort=2), digits)
    assert torch.equal(torch.rand(3), expected)
    assert torch.get_num_threads() == threads


def test_streams_depend_on_every_part_of_the_key() -> None:
    keys = [(0, 1, 2, "a"), (1, 1, 2, "a"), (0, 2, 2, "a"), (0, 1, 3, "a"), (0, 1, 2, "b"), (0, 12, "a"), (0, 1, 2)]
    assert len({seed_of(*key) for key in keys}) == len(keys)
    assert torch.equal(torch.rand(4, generator=stream(1, "x")), torch.rand(4, generator=stream(1, "x")))
