"""One folder per question: `python -m benchmarks.NAME [--out DIR]` prints its table and writes its results."""
