"""Trainers as sources of a refit: one folder a framework, which a function imports when it first needs it."""
