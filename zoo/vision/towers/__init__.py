"""Vision towers, which turn an image's patches into features. Each is a part of the families whose models have it."""
