"""Graphs that grow with the steps are noticed, and only those."""

import time

import torch
from strandline import _autograd, _graphs


class Holder:
    total = None


def run(library, of, looks=(30, 60)):
    """A loop in this file, as the user's; `of(total, loss)` is what is kept."""
    graphs = _graphs.Graphs(library)
    weight = torch.ones(4, requires_grad=True)
    kept = torch.zeros(())
    for step in range(1, looks[-1] + 2 * _graphs.SOON + 1):
        loss = (weight * step).sum()
        loss.backward(retain_graph=False)
        kept = of(kept, loss)
        if step in looks or (graphs.doubtful and step % _graphs.SOON == 0):
            graphs.look(step)
    return [remark["what"] for remark in library.remarks]


def test_a_sum_of_losses(library):
    said = run(library, lambda total, loss: total + loss, (30, 60, 120))
    assert len(said) == 1 and "run(): kept carries an autograd graph" in said[0], said


def test_a_sum_of_numbers(library):
    assert run(library, lambda total, loss: total + loss.item()) == []
    assert run(library, lambda total, loss: total + loss.detach()) == []


def test_the_graph_of_each_step(library):
    assert run(library, lambda total, loss: loss) == []


def test_the_graph_of_a_model_that_is_unfrozen_layer_by_layer(library):
    """Each step has a graph of its own, twice as large at the second look."""

    def loss_of(step):
        loss = torch.ones((), requires_grad=True)
        for _ in range(step // 10 * 10):
            loss = loss * 2
        return loss

    steps = iter(range(1, 100))
    assert run(library, lambda total, loss: loss_of(next(steps))) == []


def test_the_graph_of_a_rollout_that_gets_longer(library):
    """Each step has a graph of its own, with more nodes than the one before: nothing is kept."""

    def loss_of(step):
        loss = torch.ones((), requires_grad=True)
        for _ in range(5 + step):
            loss = loss * 2
        return loss

    steps = iter(range(1, 100))
    assert run(library, lambda total, loss: loss_of(next(steps))) == []


def test_one_graph_is_said_once(library):
    """Two names for one graph, and what is computed from it: the attribute that stays is named."""
    holder, graphs, weight = Holder(), _graphs.Graphs(library), torch.ones(4, requires_grad=True)
    holder.total = torch.zeros(())
    for step in range(1, 140):
        holder.total = holder.total + (weight * 2).sum()
        total = holder.total
        mean = total / step  # noqa: F841
        if step in (30, 60, 120) or (graphs.doubtful and step % _graphs.SOON == 0):
            graphs.look(step)
    said = [remark["what"] for remark in library.remarks]
    assert len(said) == 1 and "holder.total" in said[0], said


def test_two_graphs_are_two(library):
    graphs, weight = _graphs.Graphs(library), torch.ones(4, requires_grad=True)
    one, other = torch.zeros(()), torch.zeros(())
    for step in range(1, 80):
        loss = (weight * step).sum()
        one, other = one + loss, other + loss * 2
        if step in (30, 60) or (graphs.doubtful and step % _graphs.SOON == 0):
            graphs.look(step)
    said = [remark["what"] for remark in library.remarks]
    assert len(said) == 2 and any("one" in each for each in said) and any("other" in each for each in said)


def test_what_a_finding_speaks_of_is_not_said_again(library):
    graphs, weight = _graphs.Graphs(library), torch.ones(4, requires_grad=True)
    total = torch.zeros(())
    for step in range(1, 80):
        total = total + (weight * step).sum()
        if step == 20:
            _graphs.explained.add(_autograd.measure(total, time.thread_time() + 1).root)
        if step in (30, 60) or (graphs.doubtful and step % _graphs.SOON == 0):
            graphs.look(step)
    assert library.remarks == []


def test_an_attribute(library):
    holder = Holder()
    graphs = _graphs.Graphs(library)
    weight = torch.ones(4, requires_grad=True)
    holder.total = torch.zeros(())
    for step in range(1, 69):
        holder.total = holder.total + (weight * 2).sum()
        if step in (30, 60, 64, 68):
            graphs.look(step)
    assert len(library.remarks) == 1 and "holder.total" in library.remarks[0]["what"]
