"""The way of KV pages from a prefill worker to a decode worker: one interface, several transports.

direct.py    shm and cuda_ipc: prefill writes into the decode worker's own pages
sender.py    gloo and nccl, prefill side: own pages, whose content is sent
receiver.py  gloo and nccl, decode side
channel.py   what the two sides say to each other, over torch's process groups
choose.py    which transport it is
"""
