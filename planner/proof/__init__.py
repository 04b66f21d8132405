"""Prove a plan before a byte moves: every rule, and what no static rule can see.

Imports all other folders of the planner; nothing in the planner imports it.
"""
