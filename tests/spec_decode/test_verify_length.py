import torch

from specdec.spec_decode.verify_length import fixed


def lengths(num_drafts: int, cap: int, room: int) -> int:
    return int(fixed(*(torch.tensor([x]) for x in (num_drafts, cap, room)))[0])


def test_every_draft_up_to_the_cap() -> None:
    assert lengths(7, 7, 100) == 7
    assert lengths(7, 3, 100) == 3
    assert lengths(7, 0, 100) == 0
    assert lengths(0, 7, 100) == 0  # nobody drafted in the step before


def test_a_step_emits_one_more_than_it_accepts() -> None:
    assert [lengths(4, 4, room) for room in range(1, 8)] == [0, 1, 2, 3, 4, 4, 4]


def test_never_negative() -> None:
    assert lengths(4, 4, 0) == 0  # a request that ended in a step that the host has not read


def test_each_request_has_its_own() -> None:
    found = fixed(torch.tensor([4, 4, 0, 4]), torch.tensor([4, 1, 4, 4]), torch.tensor([9, 9, 9, 3]))
    assert found.tolist() == [4, 1, 0, 2]
