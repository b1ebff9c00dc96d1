"""Out of memory: what was held, and keys that would have saved enough, by plans of the run."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from solotune.errors import UserError
from solotune.memory import MEMORY_KEYS
from solotune.memory.out_of_memory import advice, choices, explain_out_of_memory

from .one_step import NOTHING_ON, OneStep

CPU, CARD = torch.device("cpu"), torch.device("cuda")
GIB = 2**30
# What each key takes off a run of 40 GiB.
SAVES = {
    "optimizer_in_bwd": 12, "batch_size": 2, "enable_activation_checkpointing": 5,
    "enable_activation_offloading": 1, "optimizer_state": 8, "resident_layers": 7, "optimizer": 6,
}  # fmt: skip


def peak_with(change: Mapping[str, Any]) -> int:
    return (40 - sum(SAVES.get(key, 0) for key in change)) * GIB


def explained(one_step: OneStep, plan: Any = peak_with):
    return explain_out_of_memory(
        one_step.model, stepper=one_step.stepper, on=one_step.on, peak_with=plan
    )


def test_the_allocators_failure_on_cpu_becomes_one_user_error() -> None:
    one_step = OneStep()
    one_step()
    with pytest.raises(UserError) as caught, explained(one_step):
        torch.empty(2**55)
    message = str(caught.value)
    weights = sum(p.nbytes for p in one_step.model.parameters()) / GIB
    assert f"weights {weights:.2f} GiB" in message
    assert "gradients 0.00 GiB, optimizer state" in message
    assert "optimizer_in_bwd=True  saves about 12.00 GiB" in message
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_a_cards_failure_names_what_was_asked_for() -> None:
    text = "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 7 GiB"
    with pytest.raises(UserError, match=r"asked for 2\.50 GiB more"), explained(OneStep()):
        raise torch.OutOfMemoryError(text)


def test_before_the_first_step_the_missing_state_is_named() -> None:
    with pytest.raises(UserError, match="made at the end of the first step"), explained(OneStep()):
        torch.empty(2**55)


def test_a_run_without_a_plan_is_told_where_to_get_one() -> None:
    with pytest.raises(UserError, match="tune plan"), explained(OneStep(), None):
        torch.empty(2**55)


def test_other_errors_pass_unchanged() -> None:
    error = RuntimeError("mat1 and mat2 shapes cannot be multiplied")
    with pytest.raises(RuntimeError) as caught, explained(OneStep()):
        raise error
    assert caught.value is error


def test_each_of_three_keys_alone_saves_enough_and_the_cheapest_comes_first() -> None:
    opening, found = advice(NOTHING_ON, needed=4 * GIB, device=CARD, peak_with=peak_with)
    assert opening.startswith("each of these alone")
    assert len(found) == 3
    order = [change for change, _ in choices(NOTHING_ON, device=CARD)]
    places = [order.index(change) for change, _, _ in found]
    assert places == sorted(places)
    for change, saves, _ in found:
        assert 40 * GIB - peak_with(change) == saves >= 4 * GIB


def test_where_none_alone_is_enough_the_fewest_of_the_cheapest_are_named_together() -> None:
    needed = 25 * GIB
    opening, found = advice(NOTHING_ON, needed=needed, device=CARD, peak_with=peak_with)
    assert "together" in opening
    together = {k: v for change, _, _ in found for k, v in change.items()}
    assert 40 * GIB - peak_with(together) >= needed
    fewer = {k: v for change, _, _ in found[:-1] for k, v in change.items()}
    assert 40 * GIB - peak_with(fewer) < needed


def test_where_nothing_is_enough_it_says_so() -> None:
    opening, _ = advice(NOTHING_ON, needed=1000 * GIB, device=CARD, peak_with=peak_with)
    assert "take a smaller model" in opening


def test_a_change_that_is_not_valid_is_not_named() -> None:
    def refuses(change: Mapping[str, Any]) -> int | None:
        return None if "optimizer_in_bwd" in change else peak_with(change)

    _, found = advice(NOTHING_ON, needed=GIB, device=CARD, peak_with=refuses)
    assert found
    assert not any("optimizer_in_bwd" in change for change, _, _ in found)


def test_keys_that_are_set_are_not_named_and_no_host_where_there_is_none() -> None:
    everything = NOTHING_ON | {
        "batch_size": 1, "optimizer_in_bwd": True, "enable_activation_checkpointing": True,
        "enable_activation_offloading": True, "optimizer_state": "disk",
    }  # fmt: skip
    named = {key for change, _ in choices(everything, device=CPU) for key in change}
    assert named == {"optimizer"}
    assert {"resident_layers": 0} in [change for change, _ in choices(everything, device=CARD)]
    on_cpu = [change for change, _ in choices(NOTHING_ON, device=CPU)]
    assert {"optimizer_state": "host"} not in on_cpu
    assert not any("enable_activation_offloading" in change for change in on_cpu)


def test_the_keys_are_the_recipes() -> None:
    assert set(NOTHING_ON) == set(MEMORY_KEYS)
