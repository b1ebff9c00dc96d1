"""Where a run stands, when it saves, what it does with numbers that are not finite, and signals."""

import os
import signal
from types import SimpleNamespace

import pytest

from solotune.errors import ConfigError, TrainingError
from solotune.training import Progress, check_finite, is_due, stop_on_signals


def test_progress_counts_steps_over_all_epochs_and_micro_batches_of_one() -> None:
    progress = Progress()
    group = [SimpleNamespace(num_tokens=10), SimpleNamespace(num_tokens=7)]
    progress.start_epoch(0)
    progress.advance(group)
    progress.advance(group[:1])
    assert (progress.step, progress.batch, progress.num_tokens) == (2, 3, 27)
    progress.start_epoch(0)  # resumed in the middle: the position stays
    assert progress.batch == 3
    progress.start_epoch(1)
    assert (progress.epoch, progress.batch, progress.step) == (1, 0, 2)
    assert Progress(**progress.to_dict()) == progress


def test_a_run_does_not_go_on_with_other_data() -> None:
    progress = Progress(data="abc 2x512 42")
    progress.check_data("abc 2x512 42")
    with pytest.raises(ConfigError, match="resume_from_checkpoint"):
        progress.check_data("abc 4x512 42")


def test_the_best_validation_loss_is_the_lowest() -> None:
    progress = Progress()
    assert [progress.improves(loss) for loss in (2.0, 2.5, 2.0, 1.9)] == [True, False, False, True]
    assert progress.best_val_loss == 1.9
    assert not progress.improves(float("nan"))
    assert progress.best_val_loss == 1.9


def test_due_each_n_steps_or_at_epoch_ends() -> None:
    assert [step for step in range(1, 11) if is_due(step, 4, epoch_ends=step == 10)] == [4, 8]
    assert [step for step in range(1, 11) if is_due(step, None, epoch_ends=step == 10)] == [10]


@pytest.mark.parametrize(
    ("loss", "norm", "named"),
    [
        (float("nan"), 1.0, "loss is nan"),
        (2.0, float("inf"), "gradient norm is inf"),
        (float("inf"), None, "loss is inf"),
    ],
)
def test_numbers_that_are_not_finite_stop_the_run_or_are_printed(
    loss: float, norm: float | None, named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(TrainingError, match=f"step 7: {named}.*on_nonfinite=skip"):
        check_finite(7, loss, norm, on_nonfinite="stop")
    check_finite(7, loss, norm, on_nonfinite="skip")
    assert f"step 7 skipped: {named}" in capsys.readouterr().out


def test_finite_numbers_pass_without_a_word(capsys: pytest.CaptureFixture[str]) -> None:
    for policy in ("stop", "skip"):
        check_finite(1, 2.0, None, on_nonfinite=policy)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_sets_a_flag_and_the_second_stops_at_once(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with stop_on_signals() as stop:
        assert not stop
        os.kill(os.getpid(), number)
        assert stop
        assert stop.signal_name == number.name
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)
    assert signal.getsignal(number) == before


def test_handlers_are_put_back_after_an_error() -> None:
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(ZeroDivisionError), stop_on_signals():
        raise ZeroDivisionError
    assert signal.getsignal(signal.SIGINT) == before
