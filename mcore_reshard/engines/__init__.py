"""Generation engines as refit destinations: one module an engine, named after it, importing the engine lazily."""
