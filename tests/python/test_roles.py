"""Which optimizers are in use, and the names of modules."""

import weakref

import torch
from strandline import _roles
from strandline._hooks import Stepping
from torch import nn


def stepping(optimizer, first, last, made=0):
    record = Stepping(weakref.ref(optimizer), first, made)
    record.last = last
    return record


def sgd(*sizes):
    return torch.optim.SGD([nn.Parameter(torch.zeros(size)) for size in sizes], 0.1)


def in_use(*records):
    return _roles.in_use(list(records))


def test_a_gan_s_two_optimizers_are_both_in_use():
    g, d = sgd(4), sgd(4)
    assert in_use(stepping(g, 1, 99), stepping(d, 0, 98)) == {id(g), id(d)}


def test_one_that_was_made_anew_replaces_the_one_before():
    trials = [sgd(4, 2) for _ in range(3)]
    known = [stepping(trial, n * 12, n * 12 + 11, n * 12) for n, trial in enumerate(trials)]
    assert in_use(*known) == {id(trials[2])}


def test_an_ensemble_that_was_made_beforehand_is_in_use():
    members = [sgd(4, 2) for _ in range(5)]
    known = [stepping(member, n * 50, n * 50 + 49) for n, member in enumerate(members)]
    assert in_use(*known) == {id(member) for member in members}


def test_another_model_s_optimizer_may_rest_for_a_while():
    small, large = sgd(4), sgd(400)
    assert in_use(stepping(small, 0, 20), stepping(large, 21, 50, 21)) == {id(small), id(large)}
    assert in_use(stepping(small, 0, 20), stepping(large, 21, 90, 21)) == {id(large)}


def test_a_rare_step_does_not_make_it_old():
    often, rarely = sgd(4), sgd(8)
    assert in_use(stepping(often, 0, 500), stepping(rarely, 99, 399)) == {id(often), id(rarely)}


def test_dead_optimizers_are_left_out():
    gone = stepping(sgd(4), 0, 5)
    here = sgd(4)
    assert in_use(gone, stepping(here, 0, 5)) == {id(here)}


def test_module_names():
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2)), nn.ReLU())
    modules = [model, *model.modules()]
    assert _roles.module_path(modules, model[0][0]) == "Sequential.0.0"
    assert _roles.module_path(modules, model) == ""
