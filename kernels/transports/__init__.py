"""How bytes travel: gloo, nccl, direct, golden broadcast, relays, and the mix that `auto` chooses."""
