"""Processes side by side, and how SIGINT and SIGTERM end a command: with how to go on."""

import operator
import os
import shlex
import signal

import pytest
import torch

from diffusion_mp_experiments.train import NodeClassifier, exit_code, load_checkpoint
from diffusion_mp_experiments.train.many_runs import each
from training_runs import CONFIG, TINY


def test_two_processes_give_the_results_of_one():
    runs = [("a", 3), ("b", 2), ("c", 1)]
    together = dict(each(operator.mul, runs, 2))
    assert (
        together
        == dict(each(operator.mul, runs, 1))
        == {("a", 3): "aaa", ("b", 2): "bb", ("c", 1): "c"}
    )


@pytest.mark.parametrize("jobs", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_every_run_has_one_thread_and_an_error_of_a_run_is_raised(jobs):
    threads = torch.get_num_threads()
    assert [count for _, count in each(torch.get_num_threads, [(), ()], jobs)] == [1, 1]
    assert torch.get_num_threads() == threads
    with pytest.raises(ZeroDivisionError):
        list(each(operator.truediv, [(1, 1), (1, 0)], jobs))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_fit_says_the_command_that_goes_on(number, monkeypatch, typed):
    """In the third epoch of five; what is printed is run as it stands."""
    before = signal.getsignal(number)
    line = f"fit --config {CONFIG} --trainer.max_epochs=5 --out='a folder' --ckpt_path=null"

    def stop(module):
        return module.current_epoch == 2 and os.kill(os.getpid(), number)

    with monkeypatch.context() as patch:
        patch.setattr(NodeClassifier, "on_train_epoch_start", stop)
        message = typed(line, *TINY, code=128 + number)
    assert f"Stopped by {number.name}." in message
    name, *resuming = shlex.split(message.splitlines()[-1])
    assert name == "diffusion-mp"
    typed("", *resuming)
    last = load_checkpoint(resuming[-1])
    assert (last["epoch"], last["global_step"]) == (4, 5)
    assert signal.getsignal(number) == before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_table_says_to_start_again(number, monkeypatch, typed):
    monkeypatch.setattr(
        NodeClassifier, "training_step", lambda *_: os.kill(os.getpid(), number)
    )
    line = "--splits=1 --jobs=1 --only mlp"
    message = typed(line, code=128 + number)
    again = f"Nothing is lost; start again with\n  diffusion-mp {line}\n"
    assert f"Stopped by {number.name}.\n{again}" in message


def test_exit_codes(capsys):
    def fail(error):
        error.add_note("A way out.")
        raise error

    assert exit_code(lambda: 7, "") == 7
    assert exit_code(lambda: fail(OSError("Full.")), "") == 2
    assert capsys.readouterr().err == "Full.\nA way out.\n"
    with pytest.raises(KeyError):  # a fault of ours keeps its traceback
        exit_code(lambda: fail(KeyError("x")), "")
