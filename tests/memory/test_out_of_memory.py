"""Out of memory: what was held, and keys that would have saved enough, by tracked numbers."""

from typing import Any

import pytest
import torch

from solotune.errors import UserError
from solotune.memory import MEMORY_KEYS
from solotune.memory.out_of_memory import (
    Sizes,
    advice,
    choices,
    estimate_peak,
    explain_out_of_memory,
    measure,
)
from solotune.memory.tracker import MemoryTracker

from .one_step import (
    CHECKPOINTING,
    IN_BACKWARD,
    LAYER_MAJOR,
    NOTHING_ON,
    OFFLOADING,
    OneStep,
)

CPU, CARD = torch.device("cpu"), torch.device("cuda")
GIB = 2**30


def explained(one_step: OneStep):
    return explain_out_of_memory(
        one_step.model, stepper=one_step.stepper, group=one_step.group, on=one_step.on
    )


def sizes(**changes: Any) -> Sizes:
    """An 8B model, roughly: 16 GiB of weights, 32 blocks, 2 rows."""
    fields = {
        "weights": 16 * GIB, "block_weights": 3 * GIB // 8,
        "gradients_now": 0, "state_now": 16 * GIB, "state": 16 * GIB,
        "numbers": 8 * GIB, "gradients": 16 * GIB, "block_gradients": GIB // 2, "embedding": GIB,
        "blocks": 32, "rows": 2, "row_input": GIB // 64, "row_activations": GIB // 4,
    }  # fmt: skip
    return Sizes(**(fields | changes))


def test_the_allocators_failure_on_cpu_becomes_one_user_error() -> None:
    one_step = OneStep()
    one_step()
    with pytest.raises(UserError) as caught, explained(one_step):
        torch.empty(2**55)
    message = str(caught.value)
    weights = sum(p.nbytes for p in one_step.model.parameters()) / GIB
    assert f"weights {weights:.2f} GiB" in message
    assert "gradients 0.00 GiB, optimizer state" in message
    assert "optimizer_in_bwd=True" in message
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_a_cards_failure_names_what_was_asked_for() -> None:
    text = "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 7 GiB"
    with pytest.raises(UserError, match=r"asked for 2\.50 GiB more"), explained(OneStep()):
        raise torch.OutOfMemoryError(text)


def test_before_the_first_step_the_missing_state_is_named() -> None:
    with pytest.raises(UserError, match="made at the end of the first step"), explained(OneStep()):
        torch.empty(2**55)


def test_other_errors_pass_unchanged() -> None:
    error = RuntimeError("mat1 and mat2 shapes cannot be multiplied")
    with pytest.raises(RuntimeError) as caught, explained(OneStep()):
        raise error
    assert caught.value is error


@pytest.mark.parametrize(
    "on",
    [
        {},
        {"gradient_accumulation_steps": 2},
        CHECKPOINTING,
        CHECKPOINTING | {"ac_mode": "selective", "ac_option": 2},
        CHECKPOINTING | {"ac_mode": "selective", "ac_option": "op"},
        OFFLOADING,
        CHECKPOINTING | IN_BACKWARD,
        LAYER_MAJOR,
        LAYER_MAJOR | {"resident_layers": 0},
    ],
    ids=str,
)
def test_the_estimate_is_the_tracked_peak_within_ten_percent(on: dict[str, Any]) -> None:
    one_step = OneStep(dtype=torch.bfloat16, rows=((300, 200), (500,)), **on)
    one_step()
    tracker = MemoryTracker(
        one_step.model, loss_fn=one_step.loss_fn, stepper=one_step.stepper, host=one_step.host
    )
    with tracker:
        one_step()
    found = tracker.timeline().peak().num_bytes
    expected = estimate_peak(measure(one_step.model, one_step.stepper, one_step.group), one_step.on)
    print(f"{on}: estimate {expected:,}, tracked {found:,}")
    assert expected == pytest.approx(found, rel=0.1)


def test_each_of_three_keys_alone_saves_enough_and_the_cheapest_comes_first() -> None:
    opening, found = advice(sizes(), NOTHING_ON, needed=4 * GIB, device=CARD)
    assert opening.startswith("each of these alone")
    assert len(found) == 3
    peak = estimate_peak(sizes(), NOTHING_ON)
    order = [change for change, _ in choices(NOTHING_ON, device=CARD)]
    places = [order.index(change) for change, _, _ in found]
    assert places == sorted(places)
    for change, saves, _ in found:
        assert peak - estimate_peak(sizes(), NOTHING_ON | change) == saves >= 4 * GIB


def test_where_none_alone_is_enough_the_fewest_of_the_cheapest_are_named_together() -> None:
    needed = 30 * GIB
    opening, found = advice(sizes(), NOTHING_ON, needed=needed, device=CARD)
    assert "together" in opening
    peak = estimate_peak(sizes(), NOTHING_ON)
    together = NOTHING_ON | {k: v for change, _, _ in found for k, v in change.items()}
    assert peak - estimate_peak(sizes(), together) >= needed
    fewer = NOTHING_ON | {k: v for change, _, _ in found[:-1] for k, v in change.items()}
    assert peak - estimate_peak(sizes(), fewer) < needed


def test_where_nothing_is_enough_it_says_so() -> None:
    opening, _ = advice(sizes(), NOTHING_ON, needed=1000 * GIB, device=CARD)
    assert "take a smaller model" in opening


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
