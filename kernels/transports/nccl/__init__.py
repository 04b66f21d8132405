"""Buckets over NCCL: packed on the device, sent in rounds, unpacked on the device.

Imports what `kernels.transports` may import; nothing outside of the registry imports it.
"""
