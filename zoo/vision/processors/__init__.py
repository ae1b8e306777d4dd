"""Image processors, one file a family: what its vision tower sees of an image, and what stands for it in the prompt."""
