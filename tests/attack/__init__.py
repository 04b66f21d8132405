"""The attack: plans and sessions that are damaged on purpose, and what becomes of each."""
