"""Buckets over NCCL, packed and unpacked on the device."""
