"""How bytes travel: gloo, nccl, direct, golden broadcast, relays, and the mix that `auto` chooses.

Imports `kernels.copies`, `kernels.cuda` and `kernels.rendezvous`.
"""
