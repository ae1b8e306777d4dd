"""The checkpoint `tiny` in Hub layout, which `python -m train.tiny` made: `zoo.load("tiny")`."""
