"""Tensor parallelism: one model over several processes, each of which holds a part of every layer's weights.

plan.py      which layers are cut, and how, or why a model cannot be; from transformers' own plans
layers.py    the layers that need the other ranks, and ops.py the operators they are made of
weights.py   each rank's part of the weights, read or made
group.py     the ranks: what they compute together
link.py      what rank 0 tells the others
follower.py  what the others do
"""
