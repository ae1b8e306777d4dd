"""From a model to text: `generate` and `stream` over the engine, and what it compiles."""
