"""A prefix tree gets a node with a small index tensor for every request and never evicts."""

import random

import torch
from small import make

random.seed(0)


class Node:
    def __init__(self, value):
        self.children = {}
        self.value = value


class Tree:
    def __init__(self):
        self.root = Node(None)

    def insert(self, tokens):
        node = self.root
        for token in tokens:
            if token not in node.children:
                fresh = Node(torch.arange(3))  # ALLOCATES
                node.children[token] = fresh  # KEEPS
            node = node.children[token]


tree = Tree()
model = make()
for request in range(150):
    with torch.no_grad():
        model(torch.randn(4, 16))
    tree.insert([random.randrange(4), random.randrange(4), request])
