"""The base layer of train/: processes and their signals, clocks, chips, FLOPs, the files of a run."""
