"""Processes side by side."""

import operator

import pytest
import torch

from diffusion_mp_experiments.train.many_runs import each


def test_two_processes_give_the_results_of_one():
    runs = [("a", 3), ("b", 2), ("c", 1)]
    together = dict(each(operator.mul, runs, 2))
    assert together == dict(each(operator.mul, runs, 1)) == {("a", 3): "aaa", ("b", 2): "bb", ("c", 1): "c"}


@pytest.mark.parametrize("jobs", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_every_run_has_one_thread_and_an_error_of_a_run_is_raised(jobs):
    threads = torch.get_num_threads()
    assert [count for _, count in each(torch.get_num_threads, [(), ()], jobs)] == [1, 1]
    assert torch.get_num_threads() == threads
    with pytest.raises(ZeroDivisionError):
        list(each(operator.truediv, [(1, 1), (1, 0)], jobs))
