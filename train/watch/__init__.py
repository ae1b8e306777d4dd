"""Records of a run for people: metrics, samples, memory, plots, the page report.html, trackers."""
