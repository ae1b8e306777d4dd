"""What models see with: image processing, and towers, which turn an image's patches into features. Each tower is a part
of the families whose models have it."""
