"""Schedules bound to live tensors: checks, buckets, tables of strided copies, casts. Needs no device, no other rank."""
