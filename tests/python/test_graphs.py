"""Graphs that grow with the steps are noticed, and only those."""

import torch
from strandline import _graphs


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
