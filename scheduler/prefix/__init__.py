"""The prefix cache: which complete blocks of tokens have their KV in which pages.

hashing.py  a digest for each block of a sequence, which stands for it and for all tokens before it
index.py    the blocks in the pages of one decode worker: found by digest, counted, evicted
"""
