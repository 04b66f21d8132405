"""Generation engines as destinations: one folder an engine, which a function imports when it first needs it."""
