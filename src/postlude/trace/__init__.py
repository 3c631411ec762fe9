"""When ranks computed and when rows were on their way: `spans.py` is the data, `recorder.py` takes it from a run."""
