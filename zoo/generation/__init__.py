"""Text generation: `generate` and `stream`, the engine below them, and the functions that it compiles."""
