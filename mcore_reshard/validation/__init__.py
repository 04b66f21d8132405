"""Golden against real: refit a real model between real processes, and compare every byte with golden.

Imports everything but `cli`.
"""
